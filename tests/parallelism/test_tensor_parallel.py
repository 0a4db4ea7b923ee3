"""Layers cut over real ranks against the single process: the same losses, gradients, weights and text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from runner.adapter import lora
from runner.adapter.config import LoraConfig
from runner.core.auto_choices import Decisions
from runner.core.batch import Batch
from runner.core.errors import SpecError
from runner.core.tolerance import tolerance_of
from runner.distributed import dtensor_utils
from runner.model.causal_lm import CausalLM
from runner.model.config import TinyConfig
from runner.model.tiny import byte_tokenizer
from runner.parallelism.config import FsdpConfig, TpConfig
from runner.parallelism.mesh import Mesh
from tests.model import zoo
from tests.parallelism.forked import ranks
from tests.parallelism.test_fsdp import BOTH, FAMILIES, close, made, part, scalar, trained, valued
from tests.parallelism.worlds import meshed

SLOW = pytest.mark.slow
SOAK = pytest.mark.soak
FULL = pytest.mark.parametrize("adapter", [False, pytest.param(True, marks=SLOW)], ids=["full", "lora"])
LORA = pytest.mark.parametrize("adapter", [pytest.param(False, marks=SLOW), True], ids=["full", "lora"])


def sliced(model: Any, shape: tuple[int, int, int]) -> Any:
    """The model cut over the last dimension, and in pieces over the second."""
    mesh = Mesh(dp_replicate=shape[0], dp_shard=shape[1], tp=shape[2])
    world = meshed(FsdpConfig() if shape[1] > 1 else TpConfig(), mesh)
    world.shard(model, Decisions())
    return model


def on_rank(rank: int, shape: tuple[int, int, int], build: Callable[[], Any]) -> Any:
    model = sliced(build(), shape)
    assert all(isinstance(p, DTensor) for p in model.whole.parameters())
    return trained(model, part(rank // shape[2], shape[0] * shape[1]))


def compare(shape: tuple[int, int, int], build: Callable[[], Any], rounding: float = 1e-6) -> None:
    """Losses, norms, the first gradients, and weights after some steps, whose bound is ten times the others', as Adam
    amplifies rounding. In float64, but for the norms, whose float32 leaves 1e-8."""
    double = build if rounding > 1e-6 else lambda: doubled(build())
    wanted = trained(double(), part(0, 1))
    found = ranks(shape[0] * shape[1] * shape[2], on_rank, shape, double)
    losses = [sum(values) for values in zip(*(one["losses"] for one in found[:: shape[2]]), strict=True)]
    assert losses == pytest.approx(wanted["losses"], rel=10 * rounding)
    assert losses[0] == pytest.approx(wanted["losses"][0], rel=rounding)
    for rank, one in enumerate(found):
        neighbor = found[rank // shape[2] * shape[2]]
        assert one["losses"] == neighbor["losses"] and one["norms"] == neighbor["norms"]
        assert one["norms"] == pytest.approx(wanted["norms"], rel=100 * rounding)
        close(one["gradients"], wanted["gradients"], rounding)
        close(one["weights"], wanted["weights"], 100 * rounding)


def doubled(model: Any) -> Any:
    model.whole.double()
    return model


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [
        ("qwen2", False),
        ("qwen3", True),
        pytest.param("llama", True, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", False, marks=pytest.mark.slow),
    ],
)
def test_two_slices_learn_as_one_process_in_float32(kind: str, adapter: bool) -> None:
    compare((1, 1, 2), lambda: made(kind, adapter), 1e-5)


@SOAK
@BOTH
@pytest.mark.parametrize("kind", FAMILIES)
def test_two_slices_of_each_family(kind: str, adapter: bool) -> None:
    compare((1, 1, 2), lambda: made(kind, adapter), 1e-5 if kind == "qwen3_moe" else 1e-6)  # has no float64


@pytest.mark.slow
def test_two_slices_of_two_pieces() -> None:
    compare((1, 2, 2), lambda: made("qwen3", True))


@SOAK
@BOTH
@pytest.mark.parametrize("kind", FAMILIES)
def test_slices_of_pieces_of_each_family(kind: str, adapter: bool) -> None:
    compare((1, 2, 2), lambda: made(kind, adapter), 1e-5 if kind == "qwen3_moe" else 1e-6)


@SLOW
def test_two_copies_of_two_pieces_of_two_slices() -> None:
    compare((2, 2, 2), lambda: made("qwen2", True))


@SLOW
@pytest.mark.parametrize("shape", [(1, 3, 2), (1, 1, 3)], ids=str)
def test_three_ranks_that_do_not_divide_everything(shape: tuple[int, int, int]) -> None:
    def build() -> CausalLM:
        module = zoo.module(
            "llama", num_attention_heads=6, num_key_value_heads=6, hidden_size=36, vocab_size=302
        ).requires_grad_(True)
        return CausalLM(module, byte_tokenizer(512), TinyConfig(), seed=0, decide=Decisions())

    compare(shape, build)


@FULL
def test_tied_weights_stay_tied(adapter: bool) -> None:
    compare((1, 1, 2), lambda: made("llama", adapter, tie_word_embeddings=True))


@LORA
def test_biases_of_every_layer(adapter: bool) -> None:
    compare((1, 1, 2), lambda: made("llama", adapter, attention_bias=True, mlp_bias=True))


@FULL
def test_a_vocabulary_that_does_not_divide(adapter: bool) -> None:
    compare((1, 1, 2), lambda: made("qwen3", adapter, vocab_size=301))


@LORA
def test_gradient_checkpointing(adapter: bool) -> None:
    compare((1, 1, 2), lambda: made("qwen3", adapter, gradient_checkpointing=True))


@SLOW
def test_padded_rows() -> None:
    compare((1, 1, 2), lambda: made("qwen2", True, layout="padded"))


@SLOW
def test_heads_in_many_chunks() -> None:
    compare((1, 1, 2), lambda: made("qwen2", False, lm_head_chunk_tokens=7))


@pytest.mark.parametrize("build", [valued, lambda: scalar(False), lambda: scalar(True)], ids=["valued", "full", "lora"])
def test_heads_of_one_number(build: Callable[[], Any]) -> None:
    def gradients(model: Any) -> dict[str, Tensor]:
        found = model.outputs(part(0, 1), frozenset({"values", "scores"} & model.supported_outputs))
        sum((one.square().sum() for one in found.values()), torch.zeros(())).backward()
        return {n: dtensor_utils.full_tensor(p.grad) for n, p in model.trainable().items() if p.grad is not None}

    wanted = gradients(build())
    for got in ranks(2, lambda rank: gradients(sliced(build(), (1, 1, 2)))):
        close(got, wanted, 1e-5)


@LORA
def test_text_is_written_with_the_whole_model_by_ranks_of_different_work(adapter: bool) -> None:
    prompts = zoo.rows((5, 3, 9))

    def work(rank: int, grid: tuple[int, int, int]) -> tuple[list[list[int]], bool, bool]:
        model = sliced(made("qwen3", adapter, tie_word_embeddings=True), grid)
        before = model.outputs(part(0, 1), zoo.LOGPROBS)["logprobs"]
        found = zoo.greedy(model, prompts[:rank], 4 + rank)  # rank 0 has nothing to do
        with model.summon_full_params():
            found += [] if rank else zoo.greedy(model, prompts[1:], 6)
        after = model.outputs(part(0, 1), zoo.LOGPROBS)["logprobs"]
        return found, all(isinstance(p, DTensor) for p in model.whole.parameters()), torch.equal(before, after)

    model = made("qwen3", adapter, tie_word_embeddings=True)
    wanted = [zoo.greedy(model, prompts[1:], 6), zoo.greedy(model, prompts[:1], 5)]
    assert ranks(2, work, (1, 1, 2)) == [(wanted[0], True, True), (wanted[1], True, True)]


@SLOW
def test_text_of_pieces_of_slices() -> None:
    def work(rank: int) -> list[list[int]]:
        return zoo.greedy(sliced(made("llama", True), (1, 2, 2)), zoo.rows((5, 3)), 4 + rank)

    model = made("llama", True)
    assert ranks(4, work) == [zoo.greedy(model, zoo.rows((5, 3)), 4 + rank) for rank in range(4)]


def test_the_head_of_a_teacher_in_slices() -> None:
    def logits(model: Any, batch: Batch) -> Tensor:
        with torch.no_grad():
            hidden = model.outputs(batch, frozenset({"hidden"}))["hidden"]
        return model.lm_head()(hidden)

    wanted = logits(zoo.causal("qwen2"), part(0, 1))
    for got in ranks(2, lambda rank: logits(sliced(zoo.causal("qwen2"), (1, 1, 2)), part(0, 1))):
        assert torch.allclose(got, wanted, atol=1e-4)


def spread_of(logits: Tensor, tokens: Any) -> dict[str, Tensor]:
    """Something that has to see whole rows of logits."""
    return {"loss": logits.float().var(1) + logits.float().sort(1).values[:, -3], "top": logits.argmax(1)}


@FULL
def test_terms_see_whole_rows_of_logits(adapter: bool) -> None:
    def work(build: Callable[[], Any]) -> dict[str, Tensor]:
        model = build()
        given = part(0, 1), part(0, 1).tokens["weight"], spread_of
        with torch.no_grad():
            measured = model.linear_loss(*given)[1]["loss"]
        total, terms = model.linear_loss(*given)
        total.backward()
        found = {n: dtensor_utils.full_tensor(p.grad) for n, p in model.trainable().items() if p.grad is not None}
        return {"total": total.detach()[None], "measured": measured, "loss": terms["loss"]} | found

    build = lambda: made("qwen2", adapter, lm_head_chunk_tokens=16)  # noqa: E731
    wanted = work(build)
    for got in ranks(2, lambda rank: work(lambda: sliced(build(), (1, 1, 2)))):
        close(got, wanted, 1e-5)


def test_temperatures() -> None:
    def work(model: Any) -> dict[str, Tensor]:
        batch = part(0, 1)
        batch.tokens["temperature"] = torch.linspace(0.5, 2, batch.num_tokens)
        outputs = model.outputs(batch, frozenset({"logprobs", "entropy"}))
        (outputs["logprobs"] + outputs["entropy"].square()).sum().backward()
        return {n: v.detach() for n, v in outputs.items()} | {
            n: dtensor_utils.full_tensor(p.grad) for n, p in model.trainable().items() if p.grad is not None
        }

    wanted = work(made("llama", False))
    for got in ranks(2, lambda rank: work(sliced(made("llama", False), (1, 1, 2)))):
        close(got, wanted, 1e-5)


def test_bfloat16_products_of_float32_weights_round_and_are_not_refused() -> None:
    def work(rank: int) -> bool:
        model = sliced(made("qwen2", False, dtype="bfloat16", initializer_range=0.05), (1, 1, 2))
        model.linear_loss(part(0, 1), part(0, 1).tokens["weight"])[0].backward()
        return all(p.grad is not None for p in model.trainable().values())

    assert ranks(2, work) == [True, True]


def test_an_adapter_that_computes_in_bfloat16() -> None:
    """peft reads the type of matrices that are sharded: what goes into them is cast for them."""

    def gradients(model: Any) -> dict[str, Tensor]:
        model.linear_loss(part(0, 1), part(0, 1).tokens["weight"])[0].backward()
        return {name: dtensor_utils.full_tensor(p.grad) for name, p in model.trainable().items() if p.grad is not None}

    def build() -> Any:
        return made("qwen3", True, dtype="bfloat16", initializer_range=0.05)

    wanted = gradients(build())
    for found in ranks(2, lambda rank: gradients(sliced(build(), (1, 1, 2)))):
        # processors differ in how they round products in bfloat16: 0.05 to 0.072 of the largest gradient was seen
        close(found, wanted, 1.5 * tolerance_of("bfloat16").gradient)


def test_a_bfloat16_base_beside_a_float32_adapter_stays_as_small_as_it_is() -> None:
    def work(rank: int) -> tuple[set[Any], set[Any]]:
        model: Any = zoo.causal("qwen3")
        model.module.to(torch.bfloat16)
        model = sliced(lora.attach(LoraConfig(rank=4), model, decide=Decisions()), (1, 1, 2))
        model.linear_loss(part(0, 1), part(0, 1).tokens["weight"])[0].backward()
        frozen = {p.dtype for name, p in model.module.named_parameters() if "lora_" not in name}
        return frozen, {(p.dtype, p.grad.dtype) for p in model.trainable().values()}

    assert ranks(2, work) == [({torch.bfloat16}, {(torch.float32, torch.float32)})] * 2


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("gpt2", "GPT2LMHeadModel has no layers named q_proj"),
        ("gpt_oss", r"GptOssForCausalLM cannot compute with tensor parallelism \(Sizes"),
    ],
)
def test_what_cannot_be_cut_is_refused_on_every_rank(kind: str, said: str) -> None:
    def work(rank: int) -> str:
        with pytest.raises(SpecError, match=said) as error:
            sliced(zoo.causal(kind), (1, 1, 2))
        return error.value.problems[0].key

    assert ranks(2, work) == ["parallelism.tp"] * 2


@SLOW
@pytest.mark.parametrize("kind", ["mistral", "gemma2", "granite"])
def test_other_architectures_with_such_layers(kind: str) -> None:
    compare((1, 1, 2), lambda: made(kind, False))
