"""Checks of optimizers, schedules, adapters and algorithms."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.adapter.config import AdapterConfig
from runner.core.auto_choices import Decisions
from runner.core.batch import pack
from runner.core.errors import CheckpointError, RunnerError
from runner.core.signals import StopSignal
from runner.interfaces import LOGPROBS, BaseCallback, StepResult, TrainableModel
from runner.optimizer.config import OptimizerConfig
from runner.run_dir.folder import RunFolder
from runner.schedule.config import ScheduleConfig
from runner.testing.components import as_checkpointed, build_component, build_tiny_model, check_config, require
from runner.tracker.text import MACHINE_METRICS
from runner.trainer.optimizer_state import learner_state, restore_learner_state

SMALL_JOB = (
    *("model=tiny", "model.hidden_size=32", "model.layers=2", "algorithm.batch_size=4"),
    *("evaluation.every=0", "schedule=constant", "tracker=none", "init_from=null"),
)
Parameters = dict[str, nn.Parameter]


def check_schedule(config: ScheduleConfig, *, steps: int = 100) -> list[float]:
    """Check that the factor on the peak learning rate is a function of the step, from 0 to 1; returns it."""
    check_config(config)
    for count in (1, steps):
        factor: Callable[[int], float] = build_component(config, steps=count)
        factors = [factor(step) for step in range(count)]
        wrong = [value for value in factors if not 0 <= value <= 1]
        require(not wrong, f"of {count} steps, factors from 0 to 1 are expected (NaN is none); got {wrong[:3]}")
        require(max(factors) > 0, f"of {count} steps, every factor is 0, so nothing would be trained")
        backwards = [factor(step) for step in reversed(range(count))][::-1]
        require(backwards == factors, "the factor depends on earlier calls; a resumed run starts in the middle")
    return factors


def check_optimizer(config: OptimizerConfig) -> None:
    """Check that the optimizer lowers a loss, obeys the learning rate, and resumes with the same bits.

    Parameters without gradient must not change.
    """
    check_config(config)
    config.preflight()
    parameters = _parameters()
    optimizer = _optimizer(config, parameters)
    start = {name: p.detach().clone() for name, p in parameters.items()}
    first = _step(optimizer, parameters, lr=0.0)
    moved = [name for name, p in parameters.items() if not torch.equal(p, start[name])]
    require(not moved, f"at learning rate 0 the parameters {moved} moved; the loop sets group['lr'] before each step")
    for _ in range(20):
        last = _step(optimizer, parameters, config.learning_rate)
    falls = math.isfinite(last) and last < first
    require(falls, f"20 steps at lr={config.learning_rate} took the loss from {first} to {last}")
    require(torch.equal(parameters["unused"], start["unused"]), "a parameter without gradient moved")
    _check_resume(config, parameters, optimizer)


def _parameters() -> Parameters:
    """Parameters named like a model's."""
    weight = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    return {
        "model.layers.0.weight": nn.Parameter(weight),
        "model.layers.0.bias": nn.Parameter(torch.zeros(4)),
        "unused": nn.Parameter(torch.ones(4)),
    }


def _loss(parameters: Parameters) -> Tensor:
    """The loss of a linear regression on 16 fixed rows."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)
    weight, bias, _ = parameters.values()
    return ((x @ weight + bias - y) ** 2).mean()


def _optimizer(config: OptimizerConfig, parameters: Parameters) -> torch.optim.Optimizer:
    optimizer = build_component(config, parameters=parameters, decide=Decisions())
    require(all("lr" in group for group in optimizer.param_groups), "each group has an lr, which the loop sets")
    return optimizer  # type: ignore[no-any-return]


def _step(optimizer: torch.optim.Optimizer, parameters: Parameters, lr: float) -> float:
    """One step at this rate; the loss before it."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)
    value = _loss(parameters)
    torch.autograd.backward(value)
    optimizer.step()
    return float(value.detach())


def _check_resume(config: OptimizerConfig, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """A further step of this optimizer, and of one that is restored from its state, lead to the same bits."""
    fresh = _parameters()
    twin = _optimizer(config, fresh)
    try:
        restore_learner_state(fresh, twin, as_checkpointed(learner_state(parameters, optimizer)))
    except (RunnerError, TypeError, ValueError) as error:
        raise AssertionError(f"its state cannot be kept in a checkpoint: {error}") from error
    _step(optimizer, parameters, config.learning_rate)
    _step(twin, fresh, config.learning_rate)
    differing = [name for name in parameters if not torch.equal(parameters[name], fresh[name])]
    require(not differing, f"after a resume {differing} differ: what a step needs is kept in optimizer.state")


def check_adapter(config: AdapterConfig) -> None:
    """What the adapter makes of a model learns, and its base is still there with the adapter off."""
    check_config(config)
    base = build_tiny_model()
    batch = pack([[5, 6, 7, 8], [9, 10]], [[1.0] * 4, [1.0] * 2])
    with torch.no_grad():
        before = base.outputs(batch, LOGPROBS)["logprobs"].clone()
    model: TrainableModel = build_component(config, base, decide=Decisions())
    learning = model.trainable()
    own = {id(p) for p in learning.values()}
    loose = [name for name, p in model.module.named_parameters() if p.requires_grad and id(p) not in own]
    require(not loose, f"trainable() leaves out {loose[:3]}, which require a gradient")
    torch.autograd.backward(model.outputs(batch, LOGPROBS)["logprobs"].sum())
    bare = [name for name, p in learning.items() if p.grad is None]
    require(not bare, f"no gradient reaches {bare[:3]}")
    require(any(bool(p.grad.any()) for p in learning.values() if p.grad is not None), "every gradient is 0")
    if not config.trains_base:
        with torch.no_grad(), model.adapter_disabled():
            off = model.outputs(batch, LOGPROBS)["logprobs"]
        require(torch.equal(off, before), "with the adapter off, the model is not its base any more")


def check_algorithm(*words: str, steps: int = 3) -> list[dict[str, float]]:
    """Check that a job of these words, and one resumed from its checkpoint, train the same.

    Returns each step's metrics.

    words: as after `run`, e.g. "+recipe=grpo_demo", "algorithm=mine"; the model is tiny, the batch small unless set
    """
    given = {word.lstrip("+").partition("=")[0] for word in words}
    small = SMALL_JOB if "data" in given else (*SMALL_JOB, "data.items=64", "data.held_out=8")
    own = [word for word in small if word.partition("=")[0] not in given]
    words = (*words, *own, f"steps={steps}")
    whole, states = _run_job(words, None)
    rest, _ = _run_job(words, states[0])
    for step, (one, other) in enumerate(zip(whole[1:], rest, strict=True), 2):
        names = [n for n in sorted(one.keys() | other.keys()) if not n.startswith(MACHINE_METRICS)]
        differing = {n: (one.get(n), other.get(n)) for n in names if repr(one.get(n)) != repr(other.get(n))}  # NaN
        require(not differing, f"step {step} differs after a resume (whole, resumed): {differing}")
    return whole


class _StateRecorder(BaseCallback):
    """Keeps each step's numbers, and a copy of the job's state."""

    def __init__(self, state: Callable[[], Mapping[str, Any]]) -> None:
        self.values: list[dict[str, float]] = []
        self.states: list[dict[str, Any]] = []
        self._state = state

    def on_step(self, end: StepResult) -> None:
        self.values.append(dict(end.values))
        self.states.append({name: as_checkpointed(section) for name, section in self._state().items()})


def _run_job(
    words: Sequence[str], state: Mapping[str, Any] | None
) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """Run a job, from `state` after its first step where given; returns metrics and states of its steps."""
    from runner.build import OutputSinks, build, build_store
    from runner.cli.job_builder import compose_job
    from runner.trainer.loop import run_loop

    spec = compose_job(words).spec
    with tempfile.TemporaryDirectory() as root, chdir(root):
        folder, decide = RunFolder(Path(root) / "outputs" / "run"), Decisions()
        folder.root.mkdir(parents=True)
        made = build(spec, folder, build_store(spec, folder), decide, StopSignal(), OutputSinks())
        keep = _StateRecorder(made.state)
        if state is not None:
            try:
                made.restore(state)
            except CheckpointError as error:
                raise AssertionError(f"its state cannot be restored: {error}") from error
        callbacks = [*made.job.callbacks[:-1], keep]  # the last one writes checkpoints
        run_loop(replace(made.job, callbacks=callbacks), 0 if state is None else 1)
        made.world.close()
    return keep.values, keep.states
