"""One learner on several ranks against one process: the same losses, gradients and weights, for each family.

float32, five steps. The bounds are on the relative L2 difference over all tensors together: sums over ranks are added
in another order than sums over micro-batches, and nothing else differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.adapter import lora
from runner.adapter.config import LoraConfig, NoAdapterConfig
from runner.adapter.lora import train_all
from runner.algorithm.sft import CrossEntropy
from runner.core.auto_choices import Decisions
from runner.core.batch import Batch, pack, row_sum, with_totals
from runner.core.errors import TrainingDiverged
from runner.core.metrics import Metrics
from runner.distributed.dtensor_utils import full_tensor
from runner.interfaces import Loss as Found
from runner.interfaces import LossFn, Outputs
from runner.parallelism.parallel_context import ParallelContext
from runner.trainer.learner import LocalLearner
from tests.model import zoo
from tests.parallelism.worlds import alone, on_ranks
from tests.toys import Bigram

CPU = torch.device("cpu")
STEPS = 5
GRADIENTS, WEIGHTS, NUMBERS = (
    2e-6,
    2e-5,
    1e-4,
)  # of the first update; after all; of each step. Measured: 7e-7, 6e-6, 1e-5
# packed rows of unequal lengths; a step with fewer units than ranks, and one with a unit above the budget
LENGTHS = [(7, 3, 19, 2, 12, 30, 5, 9), (11,), (4, 44, 6), (5, 5, 5, 5), (16, 2, 9, 1, 3)]


@dataclass(frozen=True)
class Curved:
    """Not linear in the logprobs, and of rows: (Σ logprobs)² over the number of rows, with some entropy."""

    needs: frozenset[str] = frozenset({"logprobs", "entropy"})

    def __call__(self, batch: Batch, outputs: Outputs) -> Found:
        rows = row_sum(batch, batch.tokens["weight"] * outputs["logprobs"])
        total = (0.01 * rows.square().sum() - 0.1 * outputs["entropy"].sum()) / batch.totals["units"]
        metrics = Metrics()
        metrics.add("train/loss", total.detach() * batch.totals["units"], len(rows))
        metrics.peak("train/worst", rows.detach().abs().max())
        return Found(total, metrics)


def given(step: int) -> Batch:
    ids = zoo.rows(LENGTHS[step % len(LENGTHS)], seed=step + 1)
    batch = pack(ids, [[float(i >= len(row) // 3) for i in range(len(row))] for row in ids])
    return with_totals(batch, batch.count())


def made(kind: str, adapter: bool, layout: str) -> Any:
    model: Any = zoo.causal(kind, layout=layout, tie_word_embeddings=kind == "qwen3")
    if not adapter:
        return train_all(NoAdapterConfig(), model, decide=Decisions())
    targets: Any = ("q_proj", "v_proj") if kind == "qwen3_moe" else "all-linear"
    model = lora.attach(LoraConfig(rank=4, targets=targets), model, decide=Decisions())
    for name, parameter in model.trainable().items():  # B = 0 would leave A without a gradient at first
        if "lora_B" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)), std=0.1)
    return model


def learner(model: Any, world: ParallelContext, budget: int = 40) -> LocalLearner:
    return LocalLearner(
        model,
        torch.optim.AdamW(model.trainable().values(), lr=1e-2, eps=1e-6),
        lr=1e-2,
        clip_norm=1.0,
        factor=lambda step: 1.0,
        budget=budget,
        seed=0,
        device=CPU,
        peers=world.peers,
    )


def trained(world: ParallelContext, kind: str, adapter: bool, layout: str) -> dict[str, Any]:
    return learnt(learner(made(kind, adapter, layout), world))


def learnt(subject: LocalLearner) -> dict[str, Any]:
    """What each step measured, the gradients of the first update that are here, weights, and outputs."""
    numbers, gradients, outputs = list[dict[str, float]](), dict[str, Tensor](), list[Tensor]()
    losses: list[LossFn] = [CrossEntropy(), Curved()]

    def note(*_: Any) -> None:
        reached = {name: p.grad for name, p in subject.model.trainable().items() if p.grad is not None}
        gradients.update({name: full_tensor(grad).clone() for name, grad in reached.items() if not numbers})

    subject.optimizer.register_step_pre_hook(note)  # after the sum over ranks, and clipped
    for step in range(STEPS):
        subject.begin_step(step)
        batch, loss = given(step), losses[step % 2]
        metrics, kept = subject.forward_backward(batch, loss, keep=frozenset({"logprobs"}))
        metrics.merge(subject.optim_step())
        numbers.append(metrics.result())
        scored = subject.forward(batch, loss.needs)["logprobs"]
        outputs += [kept["logprobs"], scored, *subject.measure(batch, loss).values()]
    weights = {name: value.clone() for name, value in subject.weights()}
    return {"numbers": numbers, "gradients": gradients, "weights": weights, "outputs": dict(enumerate(outputs))}


def difference(found: dict[Any, Tensor], wanted: dict[Any, Tensor]) -> float:
    assert found.keys() == wanted.keys() and wanted
    assert all(found[name].shape == one.shape for name, one in wanted.items())
    square = sum(float((found[name].double() - one.double()).square().sum()) for name, one in wanted.items())
    return float((square / sum(float(one.double().square().sum()) for one in wanted.values())) ** 0.5)


def compare(size: int, *case: Any) -> None:
    wanted = trained(alone(), *case)
    ranks = on_ranks(size, trained, *case)
    for found in ranks:
        assert all(torch.equal(found["weights"][name], one) for name, one in ranks[0]["weights"].items())
        assert difference(found["gradients"], wanted["gradients"]) < GRADIENTS
        assert difference(found["weights"], wanted["weights"]) < WEIGHTS
        assert difference(found["outputs"], wanted["outputs"]) < WEIGHTS
        for mine, other in zip(found["numbers"], wanted["numbers"], strict=True):
            assert mine == pytest.approx(other, rel=NUMBERS)


@pytest.mark.parametrize(
    ("kind", "adapter", "layout"),
    [("qwen2", True, "packed"), ("qwen3", False, "packed"), ("llama", False, "padded"), ("qwen3_moe", False, "packed")],
)
def test_two_ranks_learn_what_one_does(kind: str, adapter: bool, layout: str) -> None:
    compare(2, kind, adapter, layout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_four_ranks_learn_what_one_does(kind: str, adapter: bool, layout: str) -> None:
    compare(4, kind, adapter, layout)


def diverging(world: ParallelContext) -> tuple[str, bool]:
    """On a batch of which one row, which one rank has, makes the loss infinite."""
    model = Bigram()
    subject = learner(model, world)
    with torch.no_grad():
        model.table[2, 3] = float("inf")
    before = model.table.detach().clone()
    batch = pack([[1, 2, 3], [4, 5, 6, 7], [8, 9]], [[1.0] * 3, [1.0] * 4, [1.0] * 2])
    try:
        subject.forward_backward(with_totals(batch, batch.count()), CrossEntropy())
    except TrainingDiverged as error:
        return str(error), torch.equal(before, model.table)
    return "learnt", False


def test_a_loss_that_is_not_finite_on_one_rank_ends_all() -> None:
    found = on_ranks(2, diverging)
    assert found[0] == found[1] and found[0][0].startswith("step 1: the loss is nan; this update is not saved")
    assert found[0][1]


def noisy(world: ParallelContext) -> list[float]:
    subject = learner(Bigram(dropout=0.5), world)
    batch = pack([[1, 2, 3, 4]] * 4, [[1.0] * 4] * 4)
    batch = with_totals(batch, batch.count())
    subject.begin_step(0)
    found = subject.forward_backward(batch, Curvedless(), keep=frozenset({"logprobs"}))[1]["logprobs"]
    return [float(row.sum()) for row in found.view(4, 4)]


@dataclass(frozen=True)
class Curvedless:
    """Needs the logprobs, by the general path."""

    needs: frozenset[str] = frozenset({"logprobs"})

    def __call__(self, batch: Batch, outputs: Outputs) -> Found:
        return Found(outputs["logprobs"].sum() / batch.totals["tokens"], Metrics())


def test_equal_rows_on_two_ranks_do_not_have_equal_dropout() -> None:
    found = on_ranks(2, noisy)
    assert found[0] == found[1] and len(set(found[0])) == 4


def counted(world: ParallelContext) -> list[int]:
    """Forward passes of a rank; [0]: with gradient, [1]: without, [2]: what a loss reads."""
    model: Any = Bigram()
    passes, outputs = [0], model.outputs

    def counting(batch: Batch, needs: frozenset[str]) -> Any:
        passes[0] += 1
        return outputs(batch, needs)

    model.outputs = counting
    subject, found = learner(model, world, budget=8), []
    batch = pack([[1] * n for n in (8, 8, 8, 2, 2)], [[1.0] * n for n in (8, 8, 8, 2, 2)])
    batch = with_totals(batch, batch.count())
    for work in (
        lambda: subject.forward_backward(batch, Curvedless()),
        lambda: subject.forward(batch, frozenset({"logprobs"})),
        lambda: subject.measure(batch, CrossEntropy()),
    ):
        passes[0] = 0
        work()
        found.append(passes[0])
    return found


def test_every_rank_makes_as_many_passes() -> None:
    assert on_ranks(2, counted) == [[2, 2, 2]] * 2
    assert on_ranks(4, counted) == [[1, 1, 1]] * 4
