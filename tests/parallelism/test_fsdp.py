"""Sharded models on real ranks against the single process: the same losses, gradients and weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.models.qwen2 import Qwen2Config, Qwen2ForSequenceClassification

from runner.adapter import lora
from runner.adapter.config import LoraConfig
from runner.core.auto_choices import Decisions
from runner.core.batch import Batch, pack
from runner.core.tolerance import tolerance_of
from runner.distributed import dtensor_utils
from runner.distributed.gradient_sums import sum_gradients
from runner.distributed.work_partition import SINGLE_PROCESS
from runner.interfaces import RankCollectives
from runner.model.config import TinyConfig
from runner.model.tiny import byte_tokenizer
from runner.model.value_head import PolicyWithValueHead, ScalarHeadModel
from runner.parallelism.config import FsdpConfig, HsdpConfig
from runner.parallelism.mesh import Mesh
from tests.model import zoo
from tests.parallelism.forked import ranks
from tests.parallelism.worlds import meshed

CPU = torch.device("cpu")
STEPS = 5
LENGTHS = (7, 3, 19, 2, 12, 30, 5, 9)


def made(kind: str, adapter: bool, **options: Any) -> Any:
    model: Any = zoo.causal(kind, **options)
    if adapter:
        targets = ("q_proj", "v_proj") if kind == "qwen3_moe" else "all-linear"
        model = lora.attach(LoraConfig(rank=4, targets=targets), model, decide=Decisions())
        for name, parameter in model.trainable().items():  # or B = 0 and A would have no gradient at first
            if "lora_B" in name:
                parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)), std=0.1)
    return model


def sharded(model: Any, shape: tuple[int, int], reshard: bool = True) -> Any:
    kind = HsdpConfig if shape[0] > 1 else FsdpConfig
    world = meshed(kind(reshard_after_forward=reshard), Mesh(dp_replicate=shape[0], dp_shard=shape[1]))
    world.shard(model, Decisions())
    return model


def part(rank: int, size: int) -> Batch:
    """Every `size`-th row from `rank` on."""
    ids = zoo.rows(LENGTHS)[rank::size]
    return pack(ids, [[float(i >= len(row) // 3) for i in range(len(row))] for row in ids])


def trained(model: Any, batch: Batch, copies: RankCollectives = SINGLE_PROCESS) -> dict[str, Any]:
    """Sums of losses, norms of gradients, and whole weights after some steps; copies: whose gradients add up."""
    parameters = model.trainable()
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, eps=1e-6, fused=True)
    losses, norms = [], []
    model.train()
    for step in range(STEPS):
        if step % 2:
            total, _ = model.linear_loss(batch, -batch.tokens["weight"] / 50)
        else:
            outputs = model.outputs(batch, frozenset({"logprobs", "entropy"}))
            total = -(outputs["logprobs"] * batch.tokens["weight"] + 0.1 * outputs["entropy"]).sum() / 50
        total.backward()
        sum_gradients(list(parameters.values()), copies)
        losses.append(float(total.detach()))
        norm = dtensor_utils.total_norm([p.grad for p in parameters.values() if p.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(parameters.values(), 1.0, norm)
        norms.append(float(norm))
        if step == 0:
            first = {
                name: dtensor_utils.full_tensor(p.grad).clone() for name, p in parameters.items() if p.grad is not None
            }
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.outputs(batch, frozenset({"logprobs"}))
    weights = {name: dtensor_utils.full_tensor(p).clone() for name, p in parameters.items()}
    return {"losses": losses, "norms": norms, "gradients": first, "weights": weights}


def on_rank(rank: int, shape: tuple[int, int], reshard: bool, build: Callable[[], Any]) -> Any:
    model = sharded(build(), shape, reshard)
    assert all(isinstance(p, DTensor) for p in model.whole.parameters())
    found = trained(model, part(rank, shape[0] * shape[1]))
    return found if rank == 0 else found["losses"]


def close(got: dict[str, Tensor], wanted: dict[str, Tensor], limit: float) -> None:
    assert got.keys() == wanted.keys()
    scale = max(float(w.abs().max()) for w in wanted.values())
    worst = {name: float((got[name] - wanted[name]).abs().max()) / scale for name in wanted}
    assert max(worst.values()) < limit, max(worst.items(), key=lambda item: item[1])


def compare(shape: tuple[int, int], build: Callable[[], Any], reshard: bool = True) -> None:
    """Losses, norms, the first gradients, and weights after some steps, in float32."""
    wanted = trained(build(), part(0, 1))
    first, *others = ranks(shape[0] * shape[1], on_rank, shape, reshard, build)
    losses = [sum(values) for values in zip(first["losses"], *others, strict=True)]
    assert losses == pytest.approx(wanted["losses"], rel=2e-5)
    assert first["norms"] == pytest.approx(wanted["norms"], rel=5e-4)  # of the last steps; processors round differently
    close(first["gradients"], wanted["gradients"], 1e-5)
    close(first["weights"], wanted["weights"], 1e-3)


FAMILIES = ["qwen2", "qwen3", "llama", "qwen3_moe"]
BOTH = pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [
        ("qwen2", True),
        pytest.param("qwen3", False, marks=pytest.mark.slow),
        pytest.param("llama", True, marks=pytest.mark.slow),
        ("qwen3_moe", False),
    ],
)
def test_two_shards_learn_as_one_process(kind: str, adapter: bool) -> None:
    compare((1, 2), lambda: made(kind, adapter))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "adapter"), [("qwen2", False), ("qwen3", True), ("llama", False), ("qwen3_moe", True)]
)
def test_two_shards_of_the_other_families(kind: str, adapter: bool) -> None:
    compare((1, 2), lambda: made(kind, adapter))


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("shape", [(1, 4), (2, 2)], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_four_ranks_learn_as_one_process(kind: str, shape: tuple[int, int], adapter: bool) -> None:
    compare(shape, lambda: made(kind, adapter))


@pytest.mark.slow
def test_two_copies_of_two_shards_learn_as_one_process() -> None:
    compare((2, 2), lambda: made("qwen2", True))


@pytest.mark.parametrize("adapter", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["full", "lora"])
def test_tied_weights_stay_tied(adapter: bool) -> None:
    compare((1, 2), lambda: made("llama", adapter, tie_word_embeddings=True))


def test_weights_kept_between_forward_and_backward() -> None:
    compare((1, 2), lambda: made("qwen2", False), reshard=False)


@pytest.mark.parametrize("adapter", [pytest.param(False, marks=pytest.mark.slow), True], ids=["full", "lora"])
def test_gradient_checkpointing(adapter: bool) -> None:
    compare((1, 2), lambda: made("qwen3", adapter, gradient_checkpointing=True))


def test_a_head_that_is_not_cut() -> None:
    compare((1, 2), lambda: made("gemma2", False, layout="padded"))


def test_an_architecture_with_other_names() -> None:
    compare((1, 2), lambda: made("gpt2", False))


def valued() -> Any:
    module = zoo.module("qwen2").requires_grad_(True)
    model = PolicyWithValueHead(module, byte_tokenizer(512), TinyConfig(), seed=0, decide=Decisions())
    model.value_head.data.normal_(generator=torch.Generator().manual_seed(1))
    return model


def scalar(adapter: bool) -> Any:
    torch.manual_seed(0)
    module = Qwen2ForSequenceClassification(Qwen2Config(**zoo.SHAPE, num_labels=1)).requires_grad_(True)
    config = TinyConfig()
    model: Any = ScalarHeadModel(module, byte_tokenizer(512), config, seed=0, decide=Decisions())
    return lora.attach(LoraConfig(rank=4), model, decide=Decisions()) if adapter else model


@pytest.mark.parametrize("build", [valued, lambda: scalar(False), lambda: scalar(True)], ids=["valued", "full", "lora"])
def test_heads_of_one_number(build: Callable[[], Any]) -> None:
    def gradients(model: Any, rank: int, size: int) -> dict[str, Tensor]:
        outputs = model.outputs(part(rank, size), frozenset({"values"}))
        outputs["values"].square().sum().backward()
        return {n: dtensor_utils.full_tensor(p.grad) for n, p in model.trainable().items() if p.grad is not None}

    wanted = gradients(build(), 0, 1)
    got = ranks(2, lambda rank: gradients(sharded(build(), (1, 2)), rank, 2))
    assert {"value_head"} & wanted.keys() or any("score" in name for name in wanted)
    close({name: got[0][name] for name in wanted}, wanted, 1e-5)


def test_a_reference_that_is_asked_first_does_not_stop_the_adapter_from_learning() -> None:
    def work(rank: int) -> tuple[Tensor, bool]:
        model = sharded(made("qwen2", True), (1, 2))
        with model.module.disable_adapter(), torch.no_grad():
            first = model.outputs(part(0, 1), zoo.LOGPROBS)["logprobs"]
        model.linear_loss(part(rank, 2), part(rank, 2).tokens["weight"])[0].backward()
        return first, all(p.grad is not None for p in model.trainable().values())

    plain = zoo.causal("qwen2").outputs(part(0, 1), zoo.LOGPROBS)["logprobs"].detach()
    for first, learns in ranks(2, work):
        assert learns and torch.allclose(first, plain, atol=1e-5)


def test_a_bfloat16_base_beside_a_float32_adapter_stays_as_small_as_it_is() -> None:
    def build() -> Any:
        model: Any = zoo.causal("qwen3")
        model.module.to(torch.bfloat16)
        return lora.attach(LoraConfig(rank=4), model, decide=Decisions())

    def work(rank: int) -> tuple[dict[str, Any], int, int]:
        model = sharded(build(), (1, 2))
        types = {p.dtype for name, p in model.module.named_parameters() if "lora_" not in name}
        model.linear_loss(part(rank, 2), part(rank, 2).tokens["weight"])[0].backward()
        with model.summon_full_params():
            types |= {p.dtype for name, p in model.module.named_parameters() if "lora_" not in name}
        held = sum(dtensor_utils.local_tensor(p).untyped_storage().nbytes() for p in model.whole.parameters())
        return {n: (p.dtype, p.grad.dtype) for n, p in model.trainable().items()}, held, len(types)

    ideal = sum(p.numel() * p.element_size() for p in build().module.parameters()) / 2
    for types, held, kinds in ranks(2, work):
        assert set(types.values()) == {(torch.float32, torch.float32)} and kinds == 1
        assert ideal <= held < 1.02 * ideal


@BOTH
def test_text_is_written_with_the_whole_model_by_ranks_of_different_work(adapter: bool) -> None:
    prompts = zoo.rows((5, 3, 9))

    def work(rank: int) -> tuple[list[list[int]], bool]:
        model = sharded(made("qwen2", adapter), (1, 2))
        found = zoo.greedy(model, prompts[:rank], 4 + rank)  # rank 0 has nothing to do
        with model.summon_full_params():
            found += [] if rank else zoo.greedy(model, prompts[1:], 6)
        for _ in range(2):  # a backward pass that gathered ahead in the order of what was written would never end
            model.linear_loss(part(rank, 2), part(rank, 2).tokens["weight"])[0].backward()
        return found, all(isinstance(p, DTensor) for p in model.whole.parameters())

    model = made("qwen2", adapter)
    wanted = [zoo.greedy(model, prompts[1:], 6), zoo.greedy(model, prompts[:1], 5)]
    assert ranks(2, work) == [(wanted[0], True), (wanted[1], True)]


def test_the_head_of_a_sharded_teacher() -> None:
    def logits(model: Any, batch: Batch) -> Tensor:
        with torch.no_grad():
            hidden = model.outputs(batch, frozenset({"hidden"}))["hidden"]
        return model.lm_head()(hidden)

    wanted = logits(zoo.causal("qwen2"), part(0, 1))
    for got in ranks(2, lambda rank: logits(sharded(zoo.causal("qwen2"), (1, 2)), part(0, 1))):
        assert torch.allclose(got, wanted, atol=1e-4)


def test_weights_are_gathered_in_bfloat16_and_no_cast_of_them_is_kept() -> None:
    """Float32 weights that are cast in the pass are kept for the backward one, whatever is freed of what was gathered:
    as much as resharding frees. The last layer alone is not freed."""

    def work(rank: int) -> tuple[int, int, set[str], dict[str, Any]]:
        model = sharded(made("qwen3", False, dtype="bfloat16", initializer_range=0.05), (1, 2))
        shapes = {tuple(p.shape) for block in model.transformer_blocks() for p in block.parameters() if p.ndim == 2}
        last = sum(2 * p.numel() for p in model.transformer_blocks()[-1].parameters() if p.ndim == 2)
        kept: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            total, _ = model.linear_loss(part(rank, 2), part(rank, 2).tokens["weight"])
        weights = [t for t in kept if tuple(t.shape) in shapes or tuple(t.shape)[::-1] in shapes]
        types = {str(t.dtype) for t in weights}
        held = sum(t.untyped_storage().nbytes() for t in weights)
        kept.clear()
        weights.clear()
        total.backward()
        return (
            held,
            last,
            types,
            {name: dtensor_utils.full_tensor(p.grad) for name, p in model.trainable().items() if p.grad is not None},
        )

    plain = made("qwen3", False, dtype="bfloat16", initializer_range=0.05)
    plain.linear_loss(part(0, 1), part(0, 1).tokens["weight"])[0].backward()
    wanted = {name: p.grad for name, p in plain.trainable().items() if p.grad is not None}
    for held, last, types, gradients in ranks(2, work):
        assert held == last and types == {"torch.bfloat16"}, "what was gathered, and is freed by now"
        assert {g.dtype for g in gradients.values()} == {torch.float32}
        close(gradients, wanted, tolerance_of("bfloat16").gradient)


@pytest.mark.parametrize(("kind", "adapter"), [("qwen2", False), ("qwen3", False), ("qwen3", True)])
def test_a_float32_head_computes_what_it_does_on_one_process(kind: str, adapter: bool) -> None:
    """qwen2's is tied to its embedding. What a bfloat16 head computes differs by more than the tolerance."""

    def work(model: Any, size: int) -> tuple[Tensor, dict[str, Any]]:
        batch = part(0, 1)
        with torch.no_grad():
            logprobs = model.outputs(batch, frozenset({"logprobs"}))["logprobs"]
        model.linear_loss(batch, batch.tokens["weight"] / size)[0].backward()
        gradients = {n: dtensor_utils.full_tensor(p.grad) for n, p in model.trainable().items() if p.grad is not None}
        return logprobs, gradients

    options = {"dtype": "bfloat16", "initializer_range": 0.05}
    wanted, gradients = work(made(kind, adapter, **options, head_dtype="float32"), 1)
    narrow, _ = work(made(kind, adapter, **options), 1)
    assert float((narrow - wanted).abs().max()) > 1e-3
    sizes = (1, 2)
    for got, own in ranks(
        2, lambda rank: work(sharded(made(kind, adapter, **options, head_dtype="float32"), sizes), 2)
    ):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
        close(own, gradients, tolerance_of("bfloat16").gradient)


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_routers_are_gathered_in_float32_where_all_else_is_in_bfloat16(adapter: bool) -> None:
    def work(rank: int) -> set[tuple[bool, str]]:
        model = sharded(made("qwen3_moe", adapter, dtype="bfloat16", initializer_range=0.05), (1, 2))
        found = set()
        for name, module in model.inner.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and "embed" not in name:

                    def note(part: Any, *_: Any, key: str = key, router: bool = name.endswith("mlp.gate")) -> None:
                        found.add((router, str(getattr(part, key).dtype)))

                    module.register_forward_hook(note)
        model.linear_loss(part(rank, 2), part(rank, 2).tokens["weight"])[0].backward()
        return found

    for found in ranks(2, work):
        assert found == {(True, "torch.float32"), (False, "torch.bfloat16")}
