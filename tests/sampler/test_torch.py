"""The torch sampler against plain forward passes: what it draws, what it reports, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runner.adapter.config import LoraConfig
from runner.adapter.lora import attach
from runner.core.auto_choices import Decisions
from runner.core.errors import DataError, EnvironmentProblem, SpecError, TrainingDiverged
from runner.interfaces import Request, Rollout
from runner.model import kv_cache
from runner.model.causal_lm import CausalLM
from runner.model.config import TinyConfig
from runner.model.tiny import byte_tokenizer
from runner.sampler.config import TorchSamplerConfig
from runner.sampler.torch import TorchSampler
from tests.model.zoo import ZOO, causal, rows
from tests.sampler.test_sampling import surprise

VOCAB, END = 300, 258
PROMPTS = [tuple(row) for row in rows((3, 1, 9, 17))]


def sampler(model: CausalLM, decisions: Decisions | None = None, **options: Any) -> TorchSampler:
    return TorchSampler(TorchSamplerConfig(**options), model=model, decide=decisions or Decisions())


def requests(prompts: Sequence[tuple[int, ...]] = PROMPTS, each: int = 2, length: int = 8) -> list[Request]:
    """`each` requests per prompt, with lengths that differ."""
    return [
        Request(prompt, seed=100 * group + k, max_new_tokens=length + 5 * k, group=group, raw=True)
        for group, prompt in enumerate(prompts)
        for k in range(each)
    ]


@torch.no_grad()
def next_logits(model: CausalLM, request: Request, rollout: Rollout) -> Tensor:
    """The logits that each new id was drawn from, [n, V], by one pass over the whole row."""
    ids = torch.tensor([(*request.prompt, *rollout.ids)])
    with model._generation_mode():
        logits = model.causal(input_ids=ids, use_cache=False).logits[0].double()
    return logits[len(request.prompt) - 1 : -1]


def picked(logits: Tensor, rollout: Rollout) -> np.ndarray:
    return logits.log_softmax(-1).gather(1, torch.tensor(rollout.ids)[:, None])[:, 0].numpy()


def check_logprobs(
    model: CausalLM, asked: Sequence[Request], got: Sequence[Rollout], atol: float, temperature: float = 1.0
) -> None:
    for request, rollout in zip(asked, got, strict=True):
        raw = picked(next_logits(model, request, rollout) / temperature, rollout)
        np.testing.assert_allclose(rollout.raw_logprobs, raw, atol=atol)
        assert len(rollout.logprobs) == len(rollout.ids)


@pytest.mark.parametrize("kind", ZOO)
def test_logprobs_are_those_of_the_whole_row(kind: str) -> None:
    model, asked, decisions = causal(kind), requests(), Decisions()
    said = len(decisions.entries)
    got = sampler(model, decisions, max_num_seqs=4).sample(asked)
    check_logprobs(model, asked, got, atol=1e-4)
    assert len(decisions.entries) == said and len({tuple(rollout.ids) for rollout in got}) > len(PROMPTS)
    assert all(rollout.logprobs == rollout.raw_logprobs for rollout in got)


class Arriving:
    """A source of which one request arrives at first, and another one whenever it is asked for the third time."""

    def __init__(self, asked: Sequence[Request]) -> None:
        self.coming, self.answers = list(enumerate(asked)), dict[int, Rollout]()
        self.times, self.joined = 0, 0

    def take(self, wait: bool) -> list[tuple[int, Request]]:
        self.times += 1
        if not self.coming or not (wait or self.times % 3 == 0):
            return []
        self.joined += not wait
        return [self.coming.pop(0)]

    def answer(self, number: int, rollout: Rollout) -> None:
        assert number not in self.answers
        self.answers[number] = rollout


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "llama4"])
def test_requests_that_join_the_running_batch_get_their_own_answers(kind: str) -> None:
    model, asked = causal(kind), requests()
    source = Arriving(asked)
    made = sampler(model, max_num_seqs=3)
    made.sample_continuously(source)
    got = [source.answers[at] for at in range(len(asked))]
    check_logprobs(model, asked, got, atol=1e-4)
    assert [one.ids for one in got] == [one.ids for one in made.sample(asked)] and source.joined > 2


def test_scores_are_those_of_the_whole_row() -> None:
    model = causal("qwen3")
    asked = [Request((*prompt, 5), seed=0, max_new_tokens=1, group=at) for at, prompt in enumerate(PROMPTS)]
    [found] = sampler(model).score([one.prompt for one in asked])
    for request, scores in zip(asked, found, strict=True):
        first = replace(request, prompt=request.prompt[:1])
        rest = Rollout(request.prompt[1:], (), None, 0, "stop")
        np.testing.assert_allclose(scores, picked(next_logits(model, first, rest), rest), atol=1e-5)


def test_untruncated_logprobs_are_given_to_who_asks_and_change_nothing() -> None:
    model, asked = causal("qwen2"), requests()
    some = [replace(one, raw=at % 2 == 0) for at, one in enumerate(asked)]
    whole, got = (sampler(model, temperature=0.6).sample(these) for these in (asked, some))
    for one, other, wish in zip(got, whole, some, strict=True):
        assert one.raw_logprobs == (other.raw_logprobs if wish.raw else None)
    assert [one.logprobs for one in got] == [one.logprobs for one in whole]


@pytest.mark.parametrize("options", [{"temperature": 0.6}, {"temperature": 1.7, "top_k": 5}, {"top_p": 0.6}])
def test_logprobs_under_the_rule_add_up_with_it(options: dict[str, Any]) -> None:
    model, asked = causal("qwen2"), requests()
    got = sampler(model, **options).sample(asked)
    check_logprobs(model, asked, got, 1e-4, options.get("temperature", 1.0))
    for request, rollout in zip(asked, got, strict=True):
        p = (next_logits(model, request, rollout) / options.get("temperature", 1.0)).softmax(-1)
        own = p.gather(1, torch.tensor(rollout.ids)[:, None])
        above = (p * (p > own)).sum(-1, keepdim=True)  # mass of the likelier ids
        rank = (p > own).sum(-1)
        assert int(rank.max()) < options.get("top_k", VOCAB) and float(above.max()) < options.get("top_p", 1.0)
        kept = np.exp(np.array(picked(p.log(), rollout)) - np.array(rollout.logprobs))  # the mass that was kept
        assert kept.max() <= 1 + 1e-4 and kept.min() > 0 and kept.min() >= options.get("top_p", 0.0) - 1e-4
        np.testing.assert_allclose(kept if options == {"temperature": 0.6} else 1.0, 1.0, atol=1e-4)


def test_first_and_second_tokens_follow_the_model() -> None:
    model, count = causal("llama", initializer_range=0.1), 2000
    asked = [Request(PROMPTS[0], seed, max_new_tokens=2, group=0) for seed in range(count)]
    got = sampler(model, top_k=4, max_num_seqs=1000).sample(asked)
    pairs: dict[tuple[int, ...], int] = {}
    for rollout in got:
        drawn = tuple(rollout.ids)
        pairs[drawn] = pairs.get(drawn, 0) + 1
    wanted = {}
    for first, p in top(model, PROMPTS[0]).items():
        wanted |= {(first, second): p * q for second, q in top(model, (*PROMPTS[0], first)).items()}
    assert pairs.keys() <= wanted.keys() and len(wanted) == 16
    assert surprise(np.array([pairs.get(pair, 0) for pair in wanted]), np.array(list(wanted.values()))) < 3.7


@torch.no_grad()
def top(model: CausalLM, prompt: tuple[int, ...]) -> dict[int, float]:
    with model._generation_mode():
        logits = model.causal(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1].double()
    values, ids = logits.topk(4)
    return dict(zip(ids.tolist(), values.softmax(-1).tolist(), strict=True))


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "gpt2"])
def test_neighbors_order_and_batch_size_change_nothing(kind: str) -> None:
    model, asked = causal(kind, double=True), requests()
    together = sampler(model).sample(asked)
    backwards = sampler(model, max_num_seqs=4).sample(asked[::-1])[::-1]
    alone = [sampler(model).sample([request])[0] for request in asked]
    for others in (backwards, alone):
        assert [r.ids for r in others] == [r.ids for r in together]
        for one, other in zip(together, others, strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-9)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_rows_that_join_late_are_the_same(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = causal("llama", double=True), requests(each=3)
    wanted = sampler(model, max_num_seqs=64).sample(asked)
    monkeypatch.setattr(kv_cache, "PREFILL_TOKENS", 10)  # so that prompts are computed in several passes
    assert [r.ids for r in sampler(model, max_num_seqs=size).sample(asked)] == [r.ids for r in wanted]


def test_answers_outgrow_the_first_memory() -> None:
    model = causal("mistral")
    asked = [
        Request(p, seed, n, seed, raw=True) for seed, (p, n) in enumerate(zip(PROMPTS, (150, 7, 90, 130), strict=True))
    ]
    check_logprobs(model, asked, sampler(model, max_num_seqs=2).sample(asked), atol=1e-4)


def test_a_prompt_is_computed_once() -> None:
    model = causal("llama")
    draws = sampler(model, max_num_seqs=3)
    seen: list[Tensor] = []
    hook = model.causal.register_forward_pre_hook(
        lambda _, __, keywords: seen.append(keywords["input_ids"]), with_kwargs=True
    )
    draws.sample(requests(each=5))
    hook.remove()
    prefills = [ids for ids in seen if ids.shape[1] > 1]
    assert sum(len(ids) for ids in prefills) == len(PROMPTS) and max(len(ids) for ids in seen) <= len(PROMPTS)


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    model = causal("qwen2")
    first = sampler(model).sample(requests())
    assert sampler(model).sample(requests()) == first
    moved = [Request(r.prompt, r.seed + 1000, r.max_new_tokens, r.group) for r in requests()]
    assert not {tuple(r.ids) for r in sampler(model).sample(moved)} & {tuple(r.ids) for r in first}
    same = [Request(PROMPTS[0], 5, 20, 0)] * 2
    assert len({tuple(r.ids) for r in sampler(model).sample(same)}) == 1


def test_how_answers_end() -> None:
    model, asked = causal("llama"), requests(length=20)
    tokenizer = byte_tokenizer(512)
    free = sampler(model).sample(asked)
    assert all(END not in r.ids[:-1] for r in free)
    assert all((r.finish == "stop") == (r.ids[-1] == END) for r in free)
    assert all(len(r.ids) == q.max_new_tokens for r, q in zip(free, asked, strict=True) if r.finish == "length")
    token, text = free[0].ids[3], tokenizer.decode(free[1].ids[4:6])
    cut = sampler(model, stop_token_ids=[token], stop=[text]).sample(asked)
    assert cut[0].ids == free[0].ids[: free[0].ids.index(token) + 1] and cut[0].finish == "stop"
    assert cut[1].ids == free[1].ids[: len(cut[1].ids)] and text in tokenizer.decode(cut[1].ids)
    assert cut[1].finish == "stop" and len(cut[1].ids) <= 6


def test_the_shorter_limit_holds() -> None:
    got = sampler(causal("llama"), max_new_tokens=6).sample([Request((1, 2), 1, 4, 0), Request((1, 2), 1, 9, 0)])
    assert [(len(r.ids), r.finish) for r in got] == [(4, "length"), (6, "length")]
    assert got[1].ids[:4] == got[0].ids


def test_what_cannot_be_sampled_is_refused() -> None:
    model = causal("llama", max_position_embeddings=16)
    draws = sampler(model, max_new_tokens=8)
    assert draws.sample([]) == []
    with pytest.raises(ValueError, match="at least one token"):
        draws.sample([Request((), 0, 4, 0)])
    with pytest.raises(ValueError, match="at least one token"):
        draws.sample([Request((1,), 0, 0, 0)])
    with pytest.raises(DataError, match="a prompt of 9 tokens and 8 new ones"):
        draws.sample([Request((1,) * 9, 0, 8, 0)])
    assert len(draws.sample([Request((1,) * 8, 0, 8, 0)])[0].ids) == 8
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    with pytest.raises(DataError, match=r"exceed 15: .* dynamic positions depend on"):
        sampler(causal("llama", max_position_embeddings=16, rope_parameters=scaled), max_new_tokens=8).sample(
            [Request((1,) * 8, 0, 8, 0)]
        )
    with pytest.raises(SpecError, match=r"sampler\.stop_token_ids: .* not 300[\s\S]*sampler\.top_k: .* 300 ids"):
        sampler(model, stop_token_ids=[5, VOCAB], top_k=VOCAB + 1)


@pytest.mark.parametrize("training", [True, False])
def test_it_leaves_the_model_as_it_was(training: bool) -> None:
    model = causal("gpt2", attn_pdrop=0.5, embd_pdrop=0.5)
    wanted = sampler(model).sample(requests())
    check_logprobs(model, requests(), wanted, atol=1e-4)  # without dropout
    model.module.train(training)
    draws, attention = sampler(model), model.causal.config._attn_implementation
    model.module.train(training)
    state = torch.random.get_rng_state()
    assert attention == "ragged" and draws.sample(requests()) == wanted
    with torch.no_grad():
        model.causal.lm_head.weight.fill_(float("nan"))
    with pytest.raises(TrainingDiverged, match="not finite"):
        draws.sample(requests())
    assert model.module.training is training and model.causal.config._attn_implementation == attention
    assert torch.equal(torch.random.get_rng_state(), state) and torch.is_grad_enabled()


def test_weights_that_are_loaded_are_sampled_from() -> None:
    trainer, copy = causal("qwen2"), causal("qwen2", seed=1)
    wanted, draws = sampler(trainer).sample(requests()), sampler(copy)
    before = draws.sample(requests())
    assert before[0].version == 0 and [r.ids for r in before] != [r.ids for r in wanted]
    draws.load_weights({name: p.detach() for name, p in trainer.trainable().items()}, version=3)
    got = draws.sample(requests())
    assert [r.ids for r in got] == [r.ids for r in wanted] and {r.version for r in got} == {3}
    with torch.no_grad():
        next(iter(trainer.trainable().values())).zero_()  # the copy is one
    assert draws.sample(requests()) == got


def test_the_trainers_own_weights_are_sampled_from_as_they_are() -> None:
    model = causal("qwen2")
    draws = sampler(model)
    before = draws.sample(requests())
    with torch.no_grad():
        model.causal.lm_head.weight.mul_(0.5)
    draws.load_weights(None, version=1)
    got = draws.sample(requests())
    check_logprobs(model, requests(), got, atol=1e-4)
    assert got[0].version == 1 and got[0].ids != before[0].ids


def test_other_weights_are_refused() -> None:
    model = causal("qwen2")
    tensors = {name: p.detach().clone() for name, p in model.trainable().items()}
    name = next(iter(tensors))
    for wrong in ({**tensors, "more": tensors[name]}, {**tensors, name: tensors[name][:1]}, {name: tensors[name]}):
        with pytest.raises(ValueError, match="do not match the sampler's"):
            sampler(model).load_weights(wrong, version=1)


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"rslora": True, "targets": ["q_proj", "embed_tokens"]}])
def test_an_adapter_takes_part(options: dict[str, Any]) -> None:
    model = attach(LoraConfig(rank=4, **options), causal("qwen2"), decide=Decisions())
    base = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    before = sampler(model).sample(requests())
    for name, p in model.trainable().items():
        torch.nn.init.normal_(p, std=0.2, generator=torch.Generator().manual_seed(len(name)))
    got = sampler(model).sample(requests())
    check_logprobs(model, requests(), got, atol=1e-4)
    assert [r.ids for r in got] != [r.ids for r in before]
    now = dict(model.module.named_parameters())
    assert all(torch.equal(now[name], p) for name, p in base.items() if name not in model.trainable())


def hybrid() -> CausalLM:
    """A model with convolution layers, whose state is no key or value."""
    from transformers.models.lfm2 import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention", "conv"],
        initializer_range=0.3,
        eos_token_id=END,
        pad_token_id=256,
    )
    module = Lfm2ForCausalLM(config).double().eval()
    return CausalLM(module, byte_tokenizer(512), TinyConfig(), seed=0, decide=Decisions())


def test_a_model_with_other_state_is_sampled_in_waves_and_this_is_said() -> None:
    model, asked, decisions = hybrid(), requests(), Decisions()
    got = sampler(model, decisions).sample(asked)
    check_logprobs(model, asked, got, atol=1e-6)
    said = [(d.feature, d.got) for d in decisions.entries]
    assert said == [("sampler", "one batch at a time")] and "LinearAttentionLayer" in decisions.entries[0].reason
    assert [r.ids for r in sampler(model, max_num_seqs=4).sample(asked)] == [r.ids for r in got]
    with pytest.raises(EnvironmentProblem, match="strict"):
        sampler(model, Decisions(strict=True))
