"""Tokens spread over real ranks against the single process: the same losses, gradients, weights and outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.core.auto_choices import Decisions
from runner.core.batch import Batch, pack
from runner.core.errors import SpecError
from runner.core.prefix_tree import Branch, Tree, pack_trees
from runner.model.causal_lm import CausalLM
from runner.model.config import TinyConfig
from runner.model.tiny import byte_tokenizer
from runner.parallelism.config import CpConfig, FsdpConfig, HsdpConfig
from runner.parallelism.mesh import Mesh
from runner.trainer.learner import LocalLearner
from tests.model import zoo
from tests.parallelism.forked import ranks
from tests.parallelism.test_fsdp import BOTH, FAMILIES, close, made, part, scalar, trained, valued
from tests.parallelism.test_tensor_parallel import doubled
from tests.parallelism.worlds import meshed

SLOW = pytest.mark.slow
SOAK = pytest.mark.soak
STYLE = ("ulysses", "ring")
STYLES = pytest.mark.parametrize("style", STYLE)
BOTH_STYLES = pytest.mark.parametrize("style", ["ulysses", pytest.param("ring", marks=SLOW)])


def kind_of(mesh: Mesh) -> Any:
    return CpConfig if mesh.dp_shard == 1 else HsdpConfig if mesh.dp_replicate > 1 else FsdpConfig


def spread(model: Any, ranks: int, style: str | None = None, decisions: Decisions | None = None) -> Any:
    """The model as each of some ranks has it."""
    meshed(CpConfig(cp_backend=style), Mesh(cp=ranks)).shard(model, decisions or Decisions())
    return model


def headed(heads: int) -> CausalLM:
    """A model of so many heads, and two for keys and values."""
    options = {"num_attention_heads": heads, "hidden_size": 8 * heads}
    module = zoo.module("llama", **options).requires_grad_(True)
    return CausalLM(module, byte_tokenizer(512), TinyConfig(), seed=0, decide=Decisions())


def on_rank(rank: int, mesh: Mesh, style: str | None, build: Callable[[], Any]) -> Any:
    world = meshed(kind_of(mesh)(cp_backend=style), mesh)
    model = build()
    world.shard(model, Decisions())
    return trained(model, part(rank // (mesh.cp * mesh.tp), mesh.dp_size), world.replica_peers)


def compare(mesh: Mesh, style: str | None, build: Callable[[], Any], rounding: float = 1e-6) -> None:
    """Losses, norms, the first gradients, and weights after some steps, whose bound is a hundred times the others', as
    Adam amplifies rounding. In float64, but for the norms, whose float32 leaves 1e-8."""
    double = build if rounding > 1e-6 else lambda: doubled(build())
    wanted = trained(double(), part(0, 1))
    found = ranks(mesh.world_size, on_rank, mesh, style, double)
    alike = mesh.cp * mesh.tp
    losses = [sum(values) for values in zip(*(one["losses"] for one in found[::alike]), strict=True)]
    assert losses == pytest.approx(wanted["losses"], rel=10 * rounding)
    assert losses[0] == pytest.approx(wanted["losses"][0], rel=rounding)
    for rank, one in enumerate(found):
        assert one["losses"] == found[rank // alike * alike]["losses"]
        assert one["norms"] == found[rank // mesh.tp * mesh.tp]["norms"]
        assert one["norms"] == pytest.approx(wanted["norms"], rel=100 * rounding)
        close(one["gradients"], wanted["gradients"], rounding)
        close(one["weights"], wanted["weights"], 100 * rounding)


@pytest.mark.parametrize(
    ("kind", "adapter", "style"),
    [("qwen2", False, "ring"), ("qwen3", True, "ulysses"), ("llama", True, "ring"), ("qwen3_moe", False, "ulysses")],
)
def test_two_ranks_learn_as_one_process_in_float32(kind: str, adapter: bool, style: str) -> None:
    compare(Mesh(cp=2), style, lambda: made(kind, adapter), 1e-5)


@SOAK
@STYLES
@BOTH
@pytest.mark.parametrize("kind", FAMILIES)
def test_two_ranks_of_each_family(kind: str, adapter: bool, style: str) -> None:
    compare(Mesh(cp=2), style, lambda: made(kind, adapter), 1e-5 if kind == "qwen3_moe" else 1e-6)


@STYLES
def test_more_ranks_than_key_value_heads(style: str) -> None:
    compare(Mesh(cp=4), style, lambda: made("qwen3", False))


MESHES = {
    "tp": Mesh(cp=2, tp=2),
    "copies": Mesh(dp_replicate=2, cp=2),
    "pieces": Mesh(dp_shard=2, cp=2),
    "hsdp": Mesh(dp_replicate=2, dp_shard=2, cp=2),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "style"), [("tp", "ring"), ("pieces", "ulysses"), *(("copies", style) for style in STYLE)]
)
def test_two_ranks_beside_others(mesh: str, style: str) -> None:
    compare(MESHES[mesh], style, lambda: made("qwen2", True))


@SOAK
@STYLES
@BOTH
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("mesh", MESHES)
def test_meshes_of_each_family(mesh: str, kind: str, adapter: bool, style: str) -> None:
    compare(MESHES[mesh], style, lambda: made(kind, adapter), 1e-5 if kind == "qwen3_moe" else 1e-6)


@SLOW
@STYLES
@pytest.mark.parametrize("size", [3, 5])
def test_sizes_that_divide_neither_tokens_nor_key_value_heads(size: int, style: str) -> None:
    compare(Mesh(cp=size), style, lambda: headed(2 * size))


@BOTH_STYLES
@pytest.mark.parametrize("way", [True, pytest.param("selective", marks=SLOW), pytest.param(2, marks=SLOW)], ids=str)
def test_gradient_checkpointing(way: Any, style: str) -> None:
    compare(Mesh(cp=2), style, lambda: made("qwen3", False, gradient_checkpointing=way))


@SLOW
@STYLES
@pytest.mark.parametrize("kind", ["mistral", "granite"])  # a window; a scale, and a head that is not cut
def test_other_architectures(kind: str, style: str) -> None:
    compare(Mesh(cp=3), style, lambda: made(kind, False, num_attention_heads=6))


def shared_prompts() -> Batch:
    """Of one token, too; with temperatures."""
    rows = iter(zoo.rows((9, 3, 12, 1, 1, 5, 14, 2, 2)))
    batch = pack_trees([Tree(next(rows), [Branch(next(rows)) for _ in range(n)]) for n in (3, 1, 2)])
    return replace(batch, tokens={**batch.tokens, "temperature": torch.linspace(0.5, 2, batch.num_tokens)})


def scored(model: Any, batch: Batch) -> dict[str, Tensor]:
    """All that it gives, and the gradients of something of it."""
    outputs = model.outputs(batch, frozenset(model.supported_outputs) - {"hidden"})
    with torch.no_grad():
        again = model.outputs(batch, frozenset(model.supported_outputs))
    weight = torch.linspace(-1, 1, batch.num_tokens)
    total = sum((one.sin() * weight[: len(one)]).sum() for one in outputs.values())
    total.backward()
    grads = {name: p.grad.clone() for name, p in model.trainable().items() if p.grad is not None}
    return {name: value.detach() for name, value in again.items()} | grads


def alike(size: int, style: str | None, build: Callable[[], Any], batch: Batch) -> None:
    """Outputs, the same on all ranks, and the sums of the ranks' gradients."""
    wanted, names = scored(build(), batch), build().trainable().keys()
    found = ranks(size, lambda rank: scored(spread(build(), size, style), batch))
    parts = [[one[name] for one in found if name in one] for name in names]
    close(dict(zip(names, map(sum, parts), strict=True)), {name: wanted[name] for name in names}, 1e-5)
    for name in wanted.keys() - names:
        assert all(torch.equal(one[name], found[0][name]) for one in found)
        close({name: found[0][name]}, {name: wanted[name]}, 1e-5)


@STYLES
@pytest.mark.parametrize("kind", ["qwen2", pytest.param("mistral", marks=SLOW), pytest.param("granite", marks=SLOW)])
def test_prompts_that_answers_share_and_temperatures(kind: str, style: str) -> None:
    alike(2, style, lambda: made(kind, False), shared_prompts())


@STYLES
@pytest.mark.parametrize(
    "lengths", [(1, 2), pytest.param((2,), marks=SLOW), pytest.param((1, 5, 1), marks=SLOW)], ids=str
)
def test_fewer_tokens_than_runs(lengths: tuple[int, ...], style: str) -> None:
    ids = zoo.rows(lengths)
    alike(4, style, lambda: made("qwen3", False), pack(ids, [[1.0] * len(row) for row in ids]))


@SLOW
@STYLES
@pytest.mark.parametrize("build", [valued, lambda: scalar(False), lambda: scalar(True)], ids=["valued", "full", "lora"])
def test_heads_of_one_number(build: Callable[[], Any], style: str) -> None:
    alike(2, style, build, part(0, 1))


def spread_of(logits: Tensor, tokens: Any) -> dict[str, Tensor]:
    """Something that has to see whole rows of logits."""
    return {"loss": logits.float().var(1) + logits.float().sort(1).values[:, -3], "top": logits.argmax(1)}


@SLOW
@STYLES
@pytest.mark.parametrize("kind", ["qwen2", pytest.param("granite", marks=SLOW)])
def test_terms_of_logits(kind: str, style: str) -> None:
    def work(model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        given = part(0, 1), part(0, 1).tokens["weight"], spread_of
        with torch.no_grad():
            measured = model.linear_loss(*given)[1]["loss"]
        total, terms = model.linear_loss(*given)
        total.backward()
        found = {n: p.grad for n, p in model.trainable().items() if p.grad is not None}
        return {"total": total.detach()[None], "measured": measured, **terms}, found

    (wanted, right), build = (
        work(made(kind, True, lm_head_chunk_tokens=16)),
        lambda: made(kind, True, lm_head_chunk_tokens=16),
    )
    (first, one), (second, other) = ranks(2, lambda rank: work(spread(build(), 2, style)))
    close({name: one[name] + other[name] for name in right}, right, 1e-5)
    for got in (first, second):
        assert torch.equal(got["top"], wanted["top"])
        close(got, wanted, 1e-5)


def test_a_teacher_gives_hidden_states_and_its_head() -> None:
    def logits(model: Any) -> Tensor:
        with torch.no_grad():
            hidden = model.outputs(part(0, 1), frozenset({"hidden"}))["hidden"]
        found: Tensor = model.lm_head()(hidden)
        return found

    wanted = logits(zoo.causal("qwen2"))
    for got in ranks(2, lambda rank: logits(spread(zoo.causal("qwen2"), 2))):
        assert torch.allclose(got, wanted, atol=1e-4)


def test_text_is_written_by_each_rank_alone() -> None:
    def work(rank: int) -> tuple[list[list[int]], bool]:
        model = spread(made("qwen3", True), 2)
        before = model.outputs(part(0, 1), zoo.LOGPROBS)["logprobs"]
        found = zoo.greedy(model, zoo.rows((5, 3))[:rank], 4 + rank)  # rank 0 has nothing to do
        return found, torch.equal(before, model.outputs(part(0, 1), zoo.LOGPROBS)["logprobs"])

    model = made("qwen3", True)
    assert ranks(2, work) == [([], True), (zoo.greedy(model, zoo.rows((5,)), 5), True)]


@SLOW
@STYLES
def test_bfloat16_products_of_float32_weights(style: str) -> None:
    def gradients(model: Any) -> dict[str, Tensor]:
        model.linear_loss(part(0, 1), part(0, 1).tokens["weight"])[0].backward()
        return {name: p.grad.clone() for name, p in model.trainable().items() if p.grad is not None}

    wanted = gradients(made("qwen2", False, dtype="bfloat16"))
    first, second = ranks(2, lambda rank: gradients(spread(made("qwen2", False, dtype="bfloat16"), 2, style)))
    got = {name: first[name] + second[name] for name in wanted}
    away = sum(float((got[n] - w).square().sum()) for n, w in wanted.items())
    assert away < 0.03**2 * sum(float(w.square().sum()) for w in wanted.values())


@pytest.mark.parametrize(
    ("size", "heads", "style"), [(2, 4, "ulysses"), (3, 4, "ring"), pytest.param(3, 6, "ulysses", marks=SLOW)]
)
def test_the_style_follows_from_the_heads(size: int, heads: int, style: str) -> None:
    def work(rank: int) -> list[tuple[str, str]]:
        spread(headed(heads), size, None, decisions := Decisions())
        return [(one.feature, one.got) for one in decisions.entries]

    assert all(("parallelism.cp_backend", style) in found for found in ranks(size, work))


@pytest.mark.parametrize(
    ("kind", "style", "said"),
    [
        ("gpt_oss", None, "GptOssForCausalLM runs padded batches"),
        (
            "llama",
            "ulysses",
            "cp=3 does not divide the 4 heads of a tp rank; type parallelism.cp_backend=ring",
        ),
    ],
)
def test_what_cannot_be_spread_is_refused_on_every_rank(kind: str, style: str | None, said: str) -> None:
    def work(rank: int) -> str:
        with pytest.raises(SpecError, match=said) as error:
            spread(zoo.causal(kind), 3, style)
        return error.value.problems[0].key

    assert ranks(3, work) == ["parallelism.cp"] * 3


def test_a_model_that_mixes_tokens_beside_its_attention_is_refused() -> None:
    def work(rank: int) -> None:
        model = zoo.causal("llama")
        layer: Any = model.inner.model.layers[0].mlp
        layer.register_forward_hook(lambda part, inputs, output: output + output.roll(1, 1))
        with pytest.raises(SpecError, match="computes different values with context parallelism"):
            spread(model, 2)

    ranks(2, work)


def test_each_rank_draws_its_own_dropout() -> None:
    model = made("qwen2", True)
    optimizer = torch.optim.SGD(model.trainable().values(), lr=0.1)
    options: Any = {"lr": 0.1, "clip_norm": None, "factor": float, "budget": 64, "seed": 0, "device": zoo.CPU}
    drawn = []
    for rank in (0, 1):
        mine: Any = SimpleNamespace(rank=rank, size=2)
        learner = LocalLearner(model, optimizer, drawing=mine, **options)
        learner._seed_dropout(0)
        drawn.append(torch.rand(4))
    assert not torch.equal(*drawn)
