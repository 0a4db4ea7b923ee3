"""CausalLM against the plain model: every architecture, both layouts, both paths, with and without checkpointing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from runner.core.auto_choices import Decisions
from runner.core.batch import pack, with_tokens
from runner.core.errors import EnvironmentProblem, SpecError
from runner.core.micro_batches import micro_batches
from tests.model.zoo import LENGTHS, LOGPROBS, batch, causal, gradients, greedy, module, reference, relative, rows

PACKABLE = ["llama", "qwen2", "qwen3", "mistral", "gpt2"]


FALLBACKS = {  # what the function or the chunked head cannot do, by architecture
    "gemma2": {"lm_head": "changes its logits", "model.batch_layout": "softcap"},
    "granite": {"lm_head": "changes its logits"},
    "gpt_oss": {"model.batch_layout": "s_aux"},
    "llama4": {"lm_head": "does not expose", "model.batch_layout": "does not expose"},
    "bloom": {"model.batch_layout": "does not accept position_ids"},
}


@pytest.mark.parametrize("kind", [*PACKABLE, *FALLBACKS])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_logprobs_equal_the_plain_model(kind: str, layout: str) -> None:
    model = causal(kind, batch_layout=layout)
    wanted = reference(module(kind), rows()).float()
    with torch.no_grad():
        got = model.outputs(batch(), LOGPROBS)["logprobs"]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, wanted.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", PACKABLE)
def test_packed_needs_no_decision(kind: str) -> None:
    decisions = Decisions()
    model = causal(kind, decisions)
    assert (model.layout, model.chunked, decisions.entries) == ("packed", True, [])


@pytest.mark.parametrize("kind", FALLBACKS)
def test_a_model_that_needs_another_way_gets_it_and_says_so(kind: str) -> None:
    decisions = Decisions()
    model = causal(kind, decisions)
    said = {d.feature: d for d in decisions.entries}
    assert said.keys() == FALLBACKS[kind].keys()
    assert all(reason in said[feature].reason for feature, reason in FALLBACKS[kind].items())
    assert (model.layout == "padded", model.chunked) == ("model.batch_layout" in said, "lm_head" not in said)
    with pytest.raises(EnvironmentProblem, match="strict"):
        causal(kind, Decisions(strict=True))


@pytest.mark.parametrize("kind", [*PACKABLE, "gemma2", "granite"])
def test_gradients_equal_the_plain_model(kind: str) -> None:
    data = batch()
    model = causal(kind, double=True)
    plain = module(kind).double()
    c = torch.randn(data.num_tokens, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (reference(plain, rows()) * c * data.tokens["weight"]).sum().backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    limit = 1e-6 if kind == "gemma2" else 1e-12  # whose own attention has a float32 softmax
    for linear in (True, False):
        assert relative(gradients(model, linear, data), wanted) < limit


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "other", [{"batch_layout": "padded"}, {"gradient_checkpointing": True}, {"lm_head_chunk_tokens": 3}]
)
def test_gradients_do_not_depend_on_how_it_is_run(tied: bool, other: dict[str, object]) -> None:
    data = batch()
    wanted = gradients(causal("qwen2", tie_word_embeddings=tied), True, data)
    assert relative(gradients(causal("qwen2", tie_word_embeddings=tied, **other), True, data), wanted) < 2e-6
    assert relative(gradients(causal("qwen2", tie_word_embeddings=tied, **other), False, data), wanted) < 2e-6
    double = gradients(causal("qwen2", double=True, tie_word_embeddings=tied), True, data)
    again = gradients(causal("qwen2", double=True, tie_word_embeddings=tied, **other), True, data)
    assert relative(again, double) < 1e-12


def test_checkpointing_is_really_on() -> None:
    data, counts = batch(), {}
    for on in (False, True):
        model = causal("qwen2", gradient_checkpointing=on)
        calls: list[int] = []
        model.causal.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        gradients(model, True, data)
        counts[on] = len(calls)
    assert counts == {False: 1, True: 2}


def test_gradients_add_up_over_micro_batches() -> None:
    data = batch()
    model = causal("qwen3", double=True)
    c = data.tokens["weight"].double()
    model.linear_loss(data, c)[0].backward()
    whole = {n: p.grad.clone() for n, p in model.trainable().items()}
    for budget in (1, 25):
        model.module.zero_grad()
        for piece in micro_batches(data, budget):
            model.linear_loss(piece, piece.tokens["weight"].double())[0].backward()
        assert relative({n: p.grad for n, p in model.trainable().items()}, whole) < 1e-12


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_row_order_changes_nothing(layout: str) -> None:
    model, ids = causal("mistral", batch_layout=layout), rows()
    order = [3, 5, 0, 2, 4, 1]
    with torch.no_grad():
        one = model.outputs(pack(ids, [[1.0] * len(r) for r in ids]), LOGPROBS)["logprobs"].split(LENGTHS)
        shuffled = [ids[i] for i in order]
        two = model.outputs(pack(shuffled, [[1.0] * len(r) for r in shuffled]), LOGPROBS)["logprobs"]
    torch.testing.assert_close(two, torch.cat([one[i] for i in order]), atol=1e-5, rtol=1e-5)


def test_linear_gives_the_logprobs_where_it_has_coefficients() -> None:
    model, data = causal("llama"), batch()
    c = -data.tokens["weight"] / 7
    total, outputs = model.linear_loss(data, c)
    wanted = model.outputs(data, LOGPROBS)["logprobs"].detach()
    torch.testing.assert_close(outputs["logprobs"], wanted * (c != 0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(total.detach(), (wanted * c).sum())
    assert not outputs["logprobs"].requires_grad


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_batch_without_weight_has_zero_gradients(kind: str, layout: str) -> None:
    model = causal(kind, batch_layout=layout)
    data = pack([[1, 2, 3], [4]], [[0.0] * 3, [0.0]])
    total, outputs = model.linear_loss(data, data.tokens["weight"])
    total.backward()
    assert float(total.detach()) == 0 and not outputs["logprobs"].any()
    assert all(p.grad is not None and not p.grad.any() for p in model.trainable().values())


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_rows_of_one_token_have_nothing_to_predict(layout: str) -> None:
    model = causal("llama", batch_layout=layout)
    got = model.outputs(pack([[1], [2]], [[1.0], [1.0]]), LOGPROBS)["logprobs"]
    assert got.tolist() == [0, 0]
    got.sum().backward()


def test_an_unknown_output_is_named() -> None:
    with pytest.raises(SpecError, match=r"scores.*makes entropy, hidden, logprobs"):
        causal("llama").outputs(batch(), frozenset({"logprobs", "scores"}))


def test_bfloat16_is_near_and_its_gradients_are_in_the_stored_type() -> None:
    wanted = causal("qwen2", initializer_range=0.05).outputs(batch(), LOGPROBS)["logprobs"]
    model = causal("qwen2", dtype="bfloat16", initializer_range=0.05)
    got = model.outputs(batch(), LOGPROBS)["logprobs"]
    assert got.dtype == torch.float32 and not torch.equal(got, wanted)
    torch.testing.assert_close(got, wanted, atol=0.02, rtol=0.02)
    assert all(g.dtype == torch.float32 for g in gradients(model, True, batch()).values())


def test_generate_equals_the_likeliest_token_again_and_again() -> None:
    model, prompts = causal("qwen2"), rows((5, 1, 11))
    got = greedy(model, prompts, 12)
    for prompt, answer in zip(prompts, got, strict=True):
        ids = list(prompt)
        for _ in range(12):
            token = int(module("qwen2")(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            if token == 258:
                break
            ids.append(token)
        assert answer == ids[len(prompt) :]
    assert greedy(model, [], 3) == []


def test_generate_stops_before_the_end_token() -> None:
    model, prompts = causal("qwen2"), rows((5, 3))
    free = greedy(model, prompts, 12)
    model.causal.generation_config.eos_token_id = [free[0][3], 299]
    cut = free[0].index(free[0][3])
    assert greedy(model, prompts, 12)[0] == free[0][:cut]


def test_generate_ignores_sampling_options_of_the_model() -> None:
    model, prompts = causal("qwen2"), rows((5, 3))
    wanted = greedy(model, prompts, 8)
    before = model.causal.generation_config
    before.update(do_sample=True, temperature=3.0, repetition_penalty=5.0, num_beams=2)
    assert greedy(model, prompts, 8) == wanted
    assert model.causal.generation_config is before


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_evaluation_in_between_changes_training_by_no_bit(layout: str, tmp_path: Path) -> None:
    def trained(disturb: bool) -> list[torch.Tensor]:
        model, data = causal("qwen2", batch_layout=layout, attention_dropout=0.3), batch()
        optimizer = torch.optim.SGD(model.trainable().values(), lr=0.01)
        torch.manual_seed(3)
        for step in range(2):
            if disturb:
                with torch.no_grad():
                    model.outputs(data, LOGPROBS)
                greedy(model, rows((4, 2)), 3)
                model.save(tmp_path / f"{step}")
            model.linear_loss(data, data.tokens["weight"])[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.trainable().values()]

    assert all(torch.equal(a, b) for a, b in zip(trained(False), trained(True), strict=True))


def test_dropout_is_on_in_training_passes_alone() -> None:
    model, data = causal("qwen2", attention_dropout=0.5), batch()
    first, second = (model.outputs(data, LOGPROBS)["logprobs"].detach() for _ in range(2))
    assert not torch.equal(first, second)
    with torch.no_grad():
        quiet = model.outputs(data, LOGPROBS)["logprobs"]
    torch.testing.assert_close(quiet, reference(module("qwen2"), rows()).float().detach(), atol=1e-5, rtol=1e-5)
    model.eval()
    torch.testing.assert_close(model.outputs(data, LOGPROBS)["logprobs"].detach(), quiet)
    model.train()
    assert not torch.allclose(model.outputs(data, LOGPROBS)["logprobs"].detach(), quiet)


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_loads_with_transformers(tied: bool, tmp_path: Path) -> None:
    model = causal("qwen2", tie_word_embeddings=tied)
    model.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    wanted = dict(model.causal.named_parameters())
    assert all(torch.equal(p, wanted[name]) for name, p in loaded.named_parameters())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4 ☃"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == model.tokenizer.apply_chat_template(
        chat, tokenize=False
    )
    prompt = rows((6,))[0]
    out = loaded.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False)[0, 6:].tolist()
    assert [i for i in out if i != 258] == greedy(model, [prompt], 5)[0]
    assert not list(tmp_path.glob("*.bin"))


@pytest.mark.parametrize("bias", [False, True])
def test_a_temperature_divides_the_logits_bias_included(bias: bool) -> None:
    model, temperature = causal("qwen2", double=True, tie_word_embeddings=False), 0.6
    if bias:
        model.causal.lm_head = biased(model.causal.lm_head)
    data = batch()
    data = with_tokens(data, temperature=torch.full((data.num_tokens,), temperature, dtype=torch.float64))
    needs = frozenset({"logprobs", "entropy"})
    got = model.outputs(data, needs)
    names, parameters = zip(*model.trainable().items(), strict=True)
    grads = torch.autograd.grad(got["logprobs"].sum() + got["entropy"].sum(), parameters)

    scores, entropies = [], []
    for row in rows():
        with model._own_attention():
            logits = model.causal(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1]
        scaled = (logits / temperature).log_softmax(-1)
        scores += [torch.zeros(1), scaled.gather(1, torch.tensor(row[1:], dtype=torch.int64)[:, None])[:, 0]]
        entropies += [torch.zeros(1), -(scaled.exp() * scaled).sum(1)]
    logprobs, entropy = torch.cat(scores), torch.cat(entropies)
    torch.testing.assert_close(got["logprobs"], logprobs, check_dtype=False)
    torch.testing.assert_close(got["entropy"], entropy, check_dtype=False)
    wanted = torch.autograd.grad(logprobs.sum() + entropy.sum(), parameters)
    assert model.chunked and ("lm_head.bias" in names) == bias
    assert relative(dict(zip(names, grads, strict=True)), dict(zip(names, wanted, strict=True))) < 1e-6


def biased(head: nn.Linear) -> nn.Linear:
    """The same head with a bias large enough to show."""
    made = nn.Linear(head.in_features, head.out_features, dtype=head.weight.dtype)
    with torch.no_grad():
        made.weight.copy_(head.weight)
        made.bias.normal_(generator=torch.Generator().manual_seed(3))
    return made
