"""Updates whose loss and norm the host reads after the optimizer: as at once, and never saved where not finite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from runner.algorithm.sft import CrossEntropy
from runner.core.errors import TrainingDiverged
from runner.distributed.work_partition import SINGLE_PROCESS, shard_batch
from runner.interfaces import StepResult
from runner.optimizer.fused_step import can_skip
from runner.trainer import learner as trainer
from runner.trainer.callbacks import BaseCallback
from runner.trainer.learner import LocalLearner
from runner.trainer.loop import TrainingJob, run_loop
from tests.toys import Bigram
from tests.trainer.test_learner import batch
from tests.trainer.test_loop import job


class Reads(TorchDispatchMode):
    """Counts what the host reads of losses, gradients and comparisons of them; integers lay out a batch, on the CPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        whole = {torch.int64, torch.int32}
        self.count += func is torch.ops.aten._local_scalar_dense.default and args[0].dtype not in whole
        return func(*args, **(kwargs or {}))


def learner(late: bool, clip: float | None = 0.05) -> LocalLearner:
    model = Bigram()
    optimizer = torch.optim.AdamW(list(model.trainable().values()), lr=0.1, fused=True)
    options: Any = {"factor": lambda step: 1.0, "budget": 5, "seed": 3, "device": torch.device("cpu")}
    subject = LocalLearner(model, optimizer, lr=0.1, clip_norm=clip, **options)
    subject.reads_late = late  # the processor's kernel skips, too
    return subject


def trained(subject: LocalLearner) -> list[dict[str, float]]:
    found = []
    for step in range(4):
        subject.begin_step(step)
        found.append(subject.update(batch(), CrossEntropy())().result())
    return found


@pytest.mark.parametrize("clip", [None, 0.05, 1e6], ids=["unclipped", "clipped", "below"])
def test_updates_that_are_read_late_are_those_that_are_read_at_once(clip: float | None) -> None:
    once, late = learner(False, clip), learner(True, clip)
    for found, wanted in zip(trained(late), trained(once), strict=True):
        assert found == pytest.approx(wanted, rel=1e-6)
    torch.testing.assert_close(late.model.table, once.model.table, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("late", [False, True])
def test_the_host_reads_nothing_until_after_the_optimizer(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, given = learner(late), batch()
    share = shard_batch(given, 5, SINGLE_PROCESS, padded=False)
    monkeypatch.setattr(trainer, "shard_batch", lambda *_, **named: share)  # it reads what is always on the processor
    with Reads() as during:
        read = subject.update(given, CrossEntropy())
    with Reads() as after:
        read().result()
    assert len(share.micro_batches) > 1 and (during.count == 0) is late
    assert after.count > during.count or not late


def poison(subject: LocalLearner) -> None:
    """Let the next gradient have a NaN, where the loss has none."""
    handle = subject.model.table.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), float("nan")))
    subject.optimizer.register_step_post_hook(lambda *_: handle.remove())


def test_a_gradient_that_is_not_finite_is_skipped_and_told_with_its_step() -> None:
    subject = learner(True)
    trained(subject)
    before = {name: value.clone() for name, value in subject.state_dict()["tensors"].items()}
    poison(subject)
    subject.begin_step(4)
    read = subject.update(batch(), CrossEntropy())
    after = subject.state_dict()["tensors"]
    assert all(torch.equal(after[name], value) for name, value in before.items()), "weights, moments, and their count"
    with pytest.raises(TrainingDiverged, match="step 5: the gradient norm is nan; the update was skipped"):
        read()
    subject.update(batch(), CrossEntropy())()
    assert not torch.equal(subject.state_dict()["tensors"]["param/table"], before["param/table"])


def test_a_pass_that_fails_leaves_no_gradients() -> None:
    subject, asked = learner(True), iter([False, True])

    def fail(total: torch.Tensor, is_last: bool, own: Any = subject._backward) -> None:
        own(total, is_last)
        if next(asked):
            raise RuntimeError("out of memory")

    subject._backward = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        subject.update(batch(), CrossEntropy())
    assert subject.model.table.grad is None


class Poisoned(BaseCallback):
    """Notes finished steps, and poisons the gradient of the one after the second."""

    def __init__(self) -> None:
        self.subject: Any = None
        self.ended: list[int] = []

    def on_step(self, end: StepResult) -> None:
        self.ended.append(end.step)
        if end.step == 2:
            poison(self.subject)


def test_no_weights_are_published_or_saved_after_a_step_that_was_not_finite() -> None:
    callback, published = Poisoned(), list[int]()
    made: TrainingJob = job([callback], steps=6)
    callback.subject = learner(True)
    made = replace(made, learners={"policy": callback.subject}, publish=published.append)
    with pytest.raises(TrainingDiverged, match="step 3: the gradient norm is nan"):
        run_loop(made, 0)
    assert callback.ended == [1, 2] and published == [0, 1, 2]


def test_only_a_fused_kernel_on_a_gpu_skips() -> None:
    with FakeTensorMode():
        here, card = torch.ones(1), torch.ones(1, device="cuda")
        assert can_skip(torch.optim.AdamW([card], fused=True))
        assert not can_skip(type("Own", (torch.optim.AdamW,), {})([card], fused=True)), "its step may ignore the scale"
        assert not can_skip(torch.optim.AdamW([card], fused=False)) and not can_skip(torch.optim.SGD([card]))
        assert not can_skip(torch.optim.AdamW([card, here], fused=True)), "its weights may be in host memory"
