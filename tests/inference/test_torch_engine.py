"""The torch engine against requests that run alone: open batches, cancelled requests, adapters, weights and scores."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from runner.adapter.config import LoraConfig
from runner.adapter.lora import attach
from runner.core.auto_choices import Decisions
from runner.core.errors import DataError, TrainingDiverged
from runner.inference.engine import GenerationRequest, SamplingParams, TokenEvent
from runner.inference.torch_engine import TorchEngine
from runner.interfaces import Request
from runner.model import decoder_choice
from runner.model.causal_lm import CausalLM
from runner.model.config import TinyConfig
from runner.model.tiny import byte_tokenizer
from runner.sampler.config import TorchSamplerConfig
from runner.sampler.torch import TorchSampler
from tests.model.test_families import FAMILIES, TINY
from tests.model.zoo import ZOO, batch, causal, gradients, greedy, relative, rows

ADAPTERS = {"first": "default", "other": "second"}
GREEDY = SamplingParams(temperature=0, max_new_tokens=12)


def engine(model: CausalLM, **options: Any) -> TorchEngine:
    return TorchEngine(model, decide=Decisions(), **options)


def run(made: TorchEngine, requests: Sequence[GenerationRequest]) -> dict[str, list[TokenEvent]]:
    """The events of requests that are submitted at once."""
    for request in requests:
        made.submit(request)
    found = defaultdict[str, list[TokenEvent]](list)
    while not made.is_idle:
        for event in made.step():
            found[event.request_id].append(event)
    return found


def tokens(events: Sequence[TokenEvent]) -> list[int]:
    return [event.token_id for event in events]


def varied_requests(count: int) -> list[GenerationRequest]:
    """Greedy ones and sampled ones, of many lengths, some with the same prompt."""
    chance, prompts = random.Random(7), rows(tuple(range(1, 33)))
    requests = []
    for at in range(count):
        params = SamplingParams(
            temperature=[0.0, 1.0, 0.7][at % 3],
            top_p=[1.0, 0.9][at % 2],
            top_k=[None, 20][at % 2],
            max_new_tokens=chance.randint(1, 24),
            seed=at,
            logprobs=at % 4,
        )
        requests.append(GenerationRequest(str(at), tuple(chance.choice(prompts)), params))
    return requests


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt2"])
def test_requests_that_arrive_at_random_get_the_tokens_that_they_get_alone(kind: str) -> None:
    model, chance = causal(kind), random.Random(3)
    made, waiting = engine(model, max_num_seqs=9), varied_requests(32)
    found = defaultdict[str, list[TokenEvent]](list)
    while waiting or not made.is_idle:
        for _ in range(min(len(waiting), chance.choice([0, 0, 1, 5]))):
            made.submit(waiting.pop(0))
        for event in made.step():
            found[event.request_id].append(event)
        assert made.num_running <= 9
    for request in varied_requests(32):
        alone = run(engine(model), [request])[request.id]
        assert tokens(found[request.id]) == tokens(alone)
        for event, other in zip(found[request.id], alone, strict=True):
            assert event.raw_logprob == pytest.approx(other.raw_logprob, abs=1e-4)
            assert [token for token, _ in event.top_logprobs] == [token for token, _ in other.top_logprobs]
            assert len(event.top_logprobs) == request.params.logprobs
        assert [event.finish_reason for event in alone[:-1]] == [None] * (len(alone) - 1)
        assert alone[-1].finish_reason == ("stop" if alone[-1].token_id == 258 else "length")


def test_a_model_without_a_growing_cache_serves_in_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = causal("llama"), varied_requests(7)
    wanted = {id: tokens(events) for id, events in run(engine(model), requests).items()}
    monkeypatch.setattr(decoder_choice, "_unsupported_layers", lambda causal: ["MambaLayer"])
    made = engine(model, max_num_seqs=3)
    assert {id: tokens(events) for id, events in run(made, requests).items()} == wanted


def test_sampled_tokens_and_logprobs_are_those_of_the_sampler() -> None:
    model, prompts = causal("qwen2"), rows((3, 9, 17))
    sampler = TorchSampler(TorchSamplerConfig(temperature=1.0, top_p=0.9), model, decide=Decisions())
    asked = [Request(tuple(p), seed=at, max_new_tokens=20, group=at, raw=True) for at, p in enumerate(prompts)]
    params = [SamplingParams(temperature=1.0, top_p=0.9, max_new_tokens=20, seed=at) for at in range(3)]
    requests = [GenerationRequest(str(at), tuple(p), params[at]) for at, p in enumerate(prompts)]
    found = run(engine(model), requests)
    for at, rollout in enumerate(sampler.sample(asked)):
        assert tokens(found[str(at)]) == [*rollout.ids] and found[str(at)][-1].finish_reason == rollout.finish
        assert [e.logprob for e in found[str(at)]] == pytest.approx(rollout.logprobs, abs=1e-5)
        assert [e.raw_logprob for e in found[str(at)]] == pytest.approx(rollout.raw_logprobs, abs=1e-5)


def of_family(family: str) -> CausalLM:
    """A model whose cache cannot be continued by several ids, if it has one."""
    torch.manual_seed(0)
    plain: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TINY | FAMILIES[family]))
    return CausalLM(plain.eval(), byte_tokenizer(512), TinyConfig(), seed=0, decide=Decisions())


@pytest.mark.parametrize("kind", ["gemma2", "qwen3", "jamba", "mamba"])
def test_scores_are_the_log_softmax_of_one_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.inference.torch_engine.SCORE_TOKENS", 4)
    model, [row] = causal(kind) if kind in ZOO else of_family(kind), rows((19,))
    with torch.no_grad(), model._generation_mode():
        wanted = model.causal(input_ids=torch.tensor([row])).logits[0, :-1].log_softmax(-1)
    made = engine(model)
    scores = made.score(row, 3)
    assert [score.logprob for score in scores] == pytest.approx(
        wanted.gather(1, torch.tensor(row[1:])[:, None])[:, 0].tolist(), abs=1e-4
    )
    assert [[i for i, _ in score.top_logprobs] for score in scores] == wanted.topk(3).indices.tolist()
    assert made.score(row[:1], 1) == []


def test_a_cancelled_request_makes_room_and_disturbs_nobody() -> None:
    model = causal("qwen3")
    requests = [GenerationRequest(str(at), tuple(p), GREEDY) for at, p in enumerate(rows((4, 7, 5)))]
    wanted = run(engine(model), requests)
    made = engine(model, max_num_seqs=2)
    for request in requests:
        made.submit(request)
    events = made.step()
    made.cancel("0")
    made.cancel("never seen")
    while not made.is_idle:
        events += made.step()
    assert tokens([e for e in events if e.request_id == "0"]) == tokens(wanted["0"])[:1]
    for id in "12":
        assert tokens([e for e in events if e.request_id == id]) == tokens(wanted[id])


def test_stop_strings_and_ids_end_an_answer() -> None:
    model, [row] = causal("qwen3"), rows((6,))
    free = tokens(run(engine(model), [GenerationRequest("0", tuple(row), GREEDY)])["0"])
    by_id = SamplingParams(temperature=0, max_new_tokens=12, stop_token_ids=(free[3],))
    text = model.tokenizer.decode(free[:3])[-1]
    by_text = SamplingParams(temperature=0, max_new_tokens=12, stop=(text,))
    found = run(engine(model), [GenerationRequest("0", tuple(row), by_id), GenerationRequest("1", tuple(row), by_text)])
    assert tokens(found["0"]) == free[: free.index(free[3]) + 1] and found["0"][-1].finish_reason == "stop"
    assert len(found["1"]) <= 3 and text in model.tokenizer.decode(tokens(found["1"]))
    ends = model.limits().stop_token_ids
    over = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
    assert len(run(engine(model), [GenerationRequest("0", tuple(row), over)])["0"]) == 60 and ends


def test_likeliest_tokens_are_of_the_distribution_that_was_asked_for() -> None:
    """At the temperature, among the three likeliest; beside a request for those of the model itself."""
    params = SamplingParams(temperature=0.5, top_k=3, max_new_tokens=5, seed=3, logprobs=5)
    both = (replace(params, logprobs_mode="processed"), params)
    [row] = rows((6,))
    found = run(engine(causal("qwen3")), [GenerationRequest(str(at), tuple(row), one) for at, one in enumerate(both)])
    for event, raw in zip(found["0"], found["1"], strict=True):
        assert dict(raw.top_logprobs)[raw.token_id] == pytest.approx(raw.raw_logprob, abs=1e-6)
        scaled = torch.tensor([value for _, value in raw.top_logprobs[:3]]) / 0.5
        assert [i for i, _ in event.top_logprobs] == [i for i, _ in raw.top_logprobs[:3]]
        assert [v for _, v in event.top_logprobs] == pytest.approx(scaled.log_softmax(0).tolist(), abs=1e-5)
        assert dict(event.top_logprobs)[event.token_id] == pytest.approx(event.logprob, abs=1e-6)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ((), GREEDY, "prompt is empty"),
        ((1, 300), GREEDY, "token id 300; the model has the ids 0 to 299"),
        ((1,), SamplingParams(max_new_tokens=0), "max_new_tokens=0"),
        ((1,), SamplingParams(adapter="x"), "no adapter is named 'x'"),
        ((1,), SamplingParams(temperature=1e-40), "temperature=1e-40 is too low; set 0"),
        ((1,), SamplingParams(stop_token_ids=(2, 300)), "stop_token_ids has 300; the model has the ids 0 to 299"),
        ((1,) * 60, SamplingParams(max_new_tokens=5), "60 tokens and 5 new ones exceed 64"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused(
    prompt: tuple[int, ...], params: SamplingParams, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        engine(causal("gpt2", n_positions=64)).submit(GenerationRequest("0", prompt, params))


def two_adapters() -> CausalLM:
    """A model with the adapters default and second, which change its answers."""
    model = attach(LoraConfig(rank=4, alpha=64), causal("qwen2"), decide=Decisions())
    model.module.add_adapter("second", model.module.peft_config["default"])
    torch.manual_seed(11)
    for name, p in model.module.named_parameters():
        if "lora_B" in name:
            p.data.normal_()
    return model


def test_adapters_by_name_answer_side_by_side_as_each_alone() -> None:
    model, prompts = two_adapters(), rows((5, 9))
    names: list[str | None] = ["first", "other", None]
    requests = [
        GenerationRequest(f"{name} {at}", tuple(p), SamplingParams(temperature=0, max_new_tokens=10, adapter=name))
        for name in names
        for at, p in enumerate(prompts)
    ]
    together = run(engine(model, adapters=ADAPTERS), requests)
    alone = [run(engine(model, adapters=ADAPTERS), [one])[one.id] for one in requests]
    assert [tokens(together[one.id]) for one in requests] == [tokens(events) for events in alone]
    with model.adapter_disabled():
        base = [greedy(model, [p], 10)[0] for p in prompts]
    assert [tokens(together[f"None {at}"])[: len(ids)] for at, ids in enumerate(base)] == base
    assert tokens(together["first 0"]) != tokens(together["other 0"]) != base[0]
    for name, peft_name in ADAPTERS.items():
        model.module.set_adapter(peft_name)
        assert tokens(together[f"{name} 1"])[:1] == greedy(model, prompts[1:], 1)[0]


def test_logits_that_are_not_finite_are_an_error() -> None:
    model = causal("llama")
    made = engine(model)
    with torch.no_grad():
        model.causal.get_output_embeddings().weight.fill_(float("nan"))
    made.submit(GenerationRequest("0", (1, 2), GREEDY))
    with pytest.raises(TrainingDiverged, match="not finite"):
        made.step()


def test_the_model_is_left_as_it_was() -> None:
    model = attach(LoraConfig(rank=4), causal("qwen2"), decide=Decisions())
    before = {name: p.clone() for name, p in model.module.named_parameters()}
    made = engine(model)
    run(made, [GenerationRequest("0", (5, 6, 7), GREEDY)])
    made.close()
    assert torch.is_grad_enabled()
    after = dict(model.module.named_parameters())
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("adapter", [False, True])
def test_a_model_learns_after_its_engine_is_closed_and_gradients_are_never_left_off(adapter: bool) -> None:
    model = causal("qwen2")
    if adapter:
        model = attach(LoraConfig(rank=4), model, decide=Decisions())
    before = gradients(model, True, batch())
    for work in (
        lambda used: used.score([1, 2, 3], 0),
        lambda used: run(used, [GenerationRequest("a", (1, 2), GREEDY)]),
        lambda used: [used.score([1, 2, 3], 0), used.leave_generation_mode(), used.score([1, 2, 3], 0)],
    ):
        used = engine(model)
        work(used)
        assert torch.is_grad_enabled()
        used.close()
        assert torch.is_grad_enabled() and relative(gradients(model, True, batch()), before) == 0


def test_adapters_join_and_leave_while_others_run() -> None:
    model = attach(LoraConfig(rank=2, alpha=64), causal("qwen2"), decide=Decisions())
    draw_adapters(model, 1)
    alone = engine(model, adapters={"first": "default"})
    request = GenerationRequest("0", (5, 6, 7), replace(GREEDY, adapter="first", ignore_eos=True))
    wanted = tokens(run(alone, [request])["0"])
    alone.close()
    made = engine(model, adapters={"first": "default"})
    made.submit(request)
    found = [event for _ in range(3) for event in made.step()]
    made.leave_generation_mode()
    assert torch.is_grad_enabled()
    settings: Any = model.module.peft_config["default"]
    model.add_adapter("second", settings)
    draw_adapters(model, 2)
    made.add_adapter("other", "second")
    made.submit(GenerationRequest("1", (5, 6, 7), replace(GREEDY, adapter="other", ignore_eos=True)))
    events = run(made, [])
    assert tokens([*found, *events["0"]]) == wanted
    other = tokens(events["1"])
    made.submit(GenerationRequest("2", (5, 6, 7), replace(GREEDY, adapter="other")))
    assert made.remove_adapter("other") == ["2"] and made.is_idle
    model.remove_adapter("second")
    with pytest.raises(DataError, match="no adapter is named 'other'"):
        made.submit(GenerationRequest("3", (5, 6, 7), replace(GREEDY, adapter="other")))
    assert tokens(run(made, [request])["0"]) == wanted != other
    made.close()


def draw_adapters(model: CausalLM, seed: int) -> None:
    """Draw the newest adapter's weights, so that it changes the model."""
    torch.manual_seed(seed)
    name = list(model.module.peft_config)[-1]  # type: ignore[arg-type]
    for key, parameter in model.module.named_parameters():
        if f"lora_B.{name}" in key:
            parameter.data.normal_()
