"""What FSDP sends in an update, and when: collectives counted on two ranks, results as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from runner.algorithm.sft import CrossEntropy
from runner.core.auto_choices import Decisions
from runner.distributed.dtensor_utils import full_tensor
from runner.parallelism import apply
from runner.parallelism.config import FsdpConfig, HsdpConfig, MeshConfig, TpConfig
from runner.parallelism.fsdp import accumulates_unsharded
from runner.parallelism.mesh import Mesh
from runner.parallelism.parallel_context import ParallelContext
from runner.trainer.learner import LocalLearner
from tests.parallelism.forked import ranks
from tests.parallelism.test_fsdp import CPU, close, made
from tests.parallelism.test_learning import given
from tests.parallelism.worlds import alone, meshed
from tests.trainer.test_learner import Raises

PLENTY = 2**40
FSDP2 = FsdpConfig(), Mesh(dp_shard=2)


def learner(model: Any, world: ParallelContext, budget: int) -> LocalLearner:
    return LocalLearner(
        model,
        torch.optim.SGD(model.trainable().values(), lr=0.1),
        lr=0.1,
        clip_norm=None,
        factor=lambda step: 1.0,
        budget=budget,
        seed=0,
        device=CPU,
        peers=world.peers,
        gradients=world.gradient_reducer(model),
        stage=model.stage,
    )


def spread(model: Any, config: MeshConfig, mesh: Mesh, memory: int, budget: int = 20) -> tuple[LocalLearner, Decisions]:
    """A learner on one of the ranks, whose device has so much memory."""
    apply.device_memory = lambda _: memory  # type: ignore[assignment]  # this process is of this test alone
    world, decide = meshed(config, mesh), Decisions()
    world.shard(model, decide)
    return learner(model, world, budget), decide


class Collectives(TorchDispatchMode):
    """The collectives inside the block, by name, in order, among what else is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.events.append(func._opname)
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        return sum(event == name for event in self.events)


def groups(model: Any) -> list[int]:
    """How many groups of parameters each layer is gathered in."""
    return [sum(isinstance(part, FSDPModule) for part in block.modules()) for block in model.transformer_blocks()]


def gradients(subject: LocalLearner) -> dict[str, Tensor]:
    """Those of one mini-batch, summed over the ranks."""
    subject.forward_backward(given(0), CrossEntropy())
    parameters = subject.model.trainable()
    found = {n: full_tensor(p.grad).clone() for n, p in parameters.items() if p.grad is not None}
    subject.optimizer.zero_grad()
    return found


NARROW = {"dtype": "bfloat16", "initializer_range": 0.05, "num_hidden_layers": 3}


@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_an_update_gathers_and_sums_no_more_than_it_must(kind: str, adapter: bool, reshard: bool) -> None:
    def work(rank: int, memory: int) -> tuple[Any, ...]:
        model = made(kind, adapter, **NARROW)
        subject, decide = spread(model, FsdpConfig(reshard_after_forward=reshard), Mesh(dp_shard=2), memory)
        passes: list[None] = []
        model.whole.register_forward_pre_hook(lambda *_: passes.append(None))
        with Collectives() as seen:
            subject.forward_backward(given(0), CrossEntropy())
        gathers, sums = seen.count("_allgather_base_"), seen.count("_reduce_scatter_base_")
        return gathers, sums, len(passes), groups(model), str(decide.entries)

    sums_per_pass = set()
    for memory, when in ((0, "every"), (PLENTY, "the last")):
        for gathers, sums, passes, layers, said in ranks(2, work, memory):
            assert passes > 2 and layers == ([1, 1, 1] if kind == "qwen2" else [2, 1, 2])
            again = sum(layers[:-1]) if reshard else 0
            assert gathers == passes * (1 + sum(layers) + again), "the last layer is not gathered again"
            sums_per_pass.add(sums if memory else sums / passes)
            assert f"summed over ranks in {when} micro-batch" in said
    learning = 3 if adapter else 1 + sum(layers)
    assert sums_per_pass == {learning}, "one for each group that learns"


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_a_layer_is_gathered_before_its_neighbor_computes(kind: str, checkpointing: bool) -> None:
    def work(rank: int) -> tuple[list[Any], list[int]]:
        model = made(kind, False, **NARROW, gradient_checkpointing=checkpointing)
        subject, _ = spread(model, *FSDP2, 0, budget=1000)
        seen = Collectives()
        for at, block in enumerate(model.transformer_blocks()):

            def note(*_: Any, at: int = at) -> None:
                seen.events.append(at)

            block.register_forward_pre_hook(note)
            block.mlp.register_full_backward_pre_hook(note)
        with seen:
            subject.forward_backward(given(0), CrossEntropy())
        return [event for event in seen.events if event == "_allgather_base_" or isinstance(event, int)], groups(model)

    for events, (first, second, third) in ranks(2, work):
        gather = "_allgather_base_"
        forward = [*[gather] * (1 + first + second), 0, *[gather] * third, 1, 2]
        assert events[: len(forward)] == forward
        backward = events[len(forward) :]
        for layer, gathered in ((2, second), (1, second + first), (0, second + first)):
            assert backward[: backward.index(layer)].count(gather) == gathered


@pytest.mark.parametrize(
    ("config", "mesh"),
    [FSDP2, pytest.param(HsdpConfig(), Mesh(dp_replicate=2, dp_shard=2), marks=pytest.mark.slow)],
    ids=["fsdp", "hsdp"],
)
@pytest.mark.parametrize(("kind", "adapter"), [("qwen2", False), ("qwen3_moe", True)])
def test_gradients_that_wait_for_the_last_micro_batch(config: MeshConfig, mesh: Mesh, kind: str, adapter: bool) -> None:
    def work(rank: int) -> list[dict[str, Tensor]]:
        subject, _ = spread(made(kind, adapter), config, mesh, PLENTY, budget=8)
        once = gradients(subject)
        if mesh.world_size > 2:  # where some ranks have a single micro-batch
            return [once]
        with pytest.raises(RuntimeError, match="the second one"):
            subject.forward_backward(given(0), Raises())
        return [once, gradients(subject)]

    wanted = gradients(learner(made(kind, adapter), alone(), 20))
    for found in ranks(mesh.world_size, work):
        for one in found:
            close(one, wanted, 1e-6)


@pytest.mark.parametrize(("config", "mesh"), [FSDP2, (TpConfig(), Mesh(tp=2))], ids=["fsdp", "tp"])
def test_a_kernel_that_skips_also_takes_shards(config: MeshConfig, mesh: Mesh) -> None:
    def work(rank: int, late: bool) -> list[dict[str, float]]:
        subject, _ = spread(made("qwen2", False), config, mesh, 0)
        weights = list(subject.model.trainable().values())
        subject.optimizer, subject._clip = torch.optim.AdamW(weights, lr=1e-2, fused=True), 0.1
        subject.reads_late = late  # the processor's kernel skips, too
        return [subject.update(given(0), CrossEntropy())().result() for _ in range(3)]

    for wanted, found in zip(ranks(2, work, False)[0], ranks(2, work, True)[0], strict=True):
        assert found == pytest.approx(wanted, rel=2e-6)


def test_gradients_wait_where_they_take_a_small_part_of_the_device() -> None:
    assert accumulates_unsharded(4 * 600_000_000, 80 * 2**30)
    assert not accumulates_unsharded(4 * 8_000_000_000, 141 * 2**30)
    assert not accumulates_unsharded(1, 0), "a device of unknown memory"
