"""Callbacks: evaluation, early stopping, checkpoints, records of steps, device statistics, warnings."""

from __future__ import annotations

import faulthandler
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, TextIO

from runner.core.auto_choices import Decisions
from runner.core.errors import RunnerError
from runner.interfaces import BaseCallback, Sample, State, StepResult
from runner.run_dir.manifest import STOPPED_EARLY
from runner.tracker.console import eval_lines
from runner.tracker.text import count_noun
from runner.trainer.config import StopWhenConfig

if TYPE_CHECKING:
    from runner.trainer.evaluator import Report


log = logging.getLogger("runner")


Reading = Callable[[], Mapping[str, float]]


class DeviceStats(BaseCallback):
    """Reads device statistics every `every_s` seconds; the next finished step gets the numbers.

    A reader that fails is reported and not called again: a run does not end because a card cannot be read.
    """

    def __init__(self, readings: Sequence[Reading], every_s: float) -> None:
        self._readings, self._every_s = list(readings), every_s
        self._ended = Event()
        self._newest: Mapping[str, float] = {}
        self._thread = Thread(target=self._watch, name="device activity", daemon=True)

    def on_start(self, step: int) -> None:
        """Begin to watch."""
        self._thread.start()

    def on_step(self, end: StepResult) -> None:
        """Add the samples since the last step."""
        end.values.update({f"device/{name}": value for name, value in self.pop_readings().items()})

    def pop_readings(self) -> Mapping[str, float]:
        """The samples since the last call."""
        newest, self._newest = self._newest, {}
        return newest

    def close(self) -> None:
        """Stop watching; a reading in progress is not waited for."""
        self._ended.set()

    def _watch(self) -> None:
        while self._readings and not self._ended.is_set():
            self._newest = {name: value for read in list(self._readings) for name, value in self._read(read).items()}
            self._ended.wait(self._every_s)

    def _read(self, read: Reading) -> Mapping[str, float]:
        try:
            return read()
        except (RunnerError, RuntimeError, OSError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            log.warning("some device metrics (device/…) are not recorded: %s", reason)
            self._readings.remove(read)
            return {}


WARN_EVERY = 20  # steps without contrast


class ZeroVarianceWarning(BaseCallback):
    """Warns at the first such step, and at every 20th further one."""

    def __init__(self) -> None:
        self._silent = 0

    def on_step(self, end: StepResult) -> None:
        """Count steps with rewards that train on nothing: all equal, none valid, or all completions left out."""
        no_reward = "reward/mean" not in end.values and end.values.get("reward/num_failed", 0) > 0
        if not no_reward and ("reward/mean" not in end.values or end.values["train/tokens"]):
            return
        self._silent += 1
        if self._silent % WARN_EVERY != 1:
            return
        so_far = "" if self._silent == 1 else f", as in {self._silent - 1} steps before"
        if no_reward:
            what = f"no group had a valid reward ({end.values['reward/num_failed']:.0f} samples)"
            check = "see reward.log and samples.jsonl"
        elif end.values.get("reward/zero_variance") == 1.0:
            what = f"in every group all rewards were equal (mean {end.values['reward/mean']:.4g})"
            check = "check samples.jsonl, reward and sampler.temperature"
        else:
            what = f"{end.values.get('rollout/truncated_frac', 1):.0%} of the completions were truncated and left out"
            check = "raise sampler.max_new_tokens, or set algorithm.mask_truncated=false"
        log.warning("step %d: %s, so nothing was trained%s; %s", end.step, what, so_far, check)


@dataclass(frozen=True, slots=True)
class RunEvaluation(BaseCallback):
    """Runs `evaluate` before the first step, every `every` steps and at the end, as metrics of the step.

    evaluate: called with the number of finished steps; record: of samples; log_first: of the numbers before the first
    step, which no step has.
    """

    evaluate: Callable[[int], Report]
    every: int
    record: Callable[[int, Sequence[Mapping[str, Any]]], None]
    log_first: Callable[[int, Mapping[str, float]], None]
    say: Callable[[str], None]
    at_start: bool = True

    def on_start(self, step: int) -> None:
        if step == 0 and self.at_start:
            report = self.evaluate(step)
            self.log_first(0, report.values)
            self.record(0, report.samples)
            self.say("\n".join(eval_lines(0, report.values)))

    def on_step(self, end: StepResult) -> None:
        if end.last or end.step % self.every == 0:
            report = self.evaluate(end.step)
            end.values.update(report.values)
            self.record(end.step, report.samples)


class StopWhen(BaseCallback):
    """Ends a run where a metric stops improving, or reaches its bound."""

    def __init__(
        self, config: StopWhenConfig, *, decide: Decisions, say: Callable[[str], None], **context: object
    ) -> None:
        self._config, self._decide, self._say = config, decide, say
        self._best, self._best_step, self._without = math.nan, 0, 0  # measurements since the best one
        self._ended_early = False  # not so where patience ends at the planned last step

    def on_start(self, step: int) -> None:
        """A run that was ended by its patience, and is resumed, gets that patience again."""
        if self._config.patience is not None and self._without >= self._config.patience:
            head = STOPPED_EARLY if self._ended_early else "callbacks.stop_when"
            self._say(f"{head}: {self._reason()}; counting begins again after step {step}")
            self._without = 0

    def on_step(self, end: StepResult) -> None:
        """Compare the metric of a step that has measured it."""
        if (value := end.values.get(self._config.metric)) is None:
            return
        sign, bound = self._config.sign, self._config.stopping_threshold
        first = math.isnan(self._best) and not math.isnan(value)
        if first or sign * (value - self._best) > self._config.min_delta:
            self._best, self._best_step, self._without = value, end.step, 0
        else:
            self._without += 1
        reached = bound is not None and sign * (value - bound) >= 0
        impatient = self._config.patience is not None and self._without >= self._config.patience
        self._ended_early = not end.last and (reached or impatient)
        if self._ended_early:
            end.last = True
            text = f"{self._config.metric} is {value:.6g}, and callbacks.stop_when.stopping_threshold is {bound}"
            self._decide.record_fact(STOPPED_EARLY, f"after step {end.step}", text if reached else self._reason())

    def _reason(self) -> str:
        """What patience found."""
        best = f"{self._config.metric} was best at step {self._best_step} ({self._best:.6g})"
        times = count_noun(self._without, "measurement")
        return f"{best}; {times} without improvement since, callbacks.stop_when.patience={self._config.patience}"

    def state_dict(self) -> State:
        """The best value, of which metric it is, and what came after it."""
        return {
            "metric": self._config.metric,
            "sign": self._config.sign,
            "best": repr(self._best),
            "best_step": self._best_step,
            "without": self._without,
            "ended_early": self._ended_early,
        }

    def load_state_dict(self, state: State) -> None:
        own = self.state_dict()
        if any(state.get(name, own[name]) != own[name] for name in ("metric", "sign")):  # absent in older checkpoints
            before = f"the checkpoint compares {state['metric']} ({'max' if state['sign'] > 0 else 'min'})"
            self._say(f"callbacks.stop_when: {before}; {self._config.metric} is compared from here on")
            return
        self._best = float(state["best"])
        self._best_step, self._without = state["best_step"], state["without"]
        self._ended_early = state.get("ended_early", False)  # older checkpoints have none


Sink = Callable[[int, Mapping[str, float]], None]


class LogStep(BaseCallback):
    """Sends every step's metrics to each sink."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def on_step(self, end: StepResult) -> None:
        for sink in self._sinks:
            sink(end.step, end.values)


class LogRollouts(BaseCallback):
    """Records the first `keep` samples of each step."""

    def __init__(self, record: Callable[[int, Sequence[Sample]], None], keep: int) -> None:
        self._record, self._keep = record, keep

    def on_step(self, end: StepResult) -> None:
        if kept := end.samples[: self._keep]:
            self._record(end.step, kept)


Save = Callable[[int, Mapping[str, float]], object]


class SaveCheckpoints(BaseCallback):
    """Hangs last, so that every other callback's state is that of the finished step.

    save: commits the state after a step; start: begins to save while training continues; check: raises a failed save
    """

    def __init__(self, save: Save, start: Save, check: Callable[[], None], *, every: int) -> None:
        self._save, self._start, self._check, self._every = save, start, check, every

    def on_step(self, end: StepResult) -> None:
        self._check()
        if end.last or end.stopping:
            self._save(end.step, end.values)
        elif end.saving or (self._every and end.step % self._every == 0):
            self._start(end.step, end.values)


class HangWatch(BaseCallback):
    """A step above `hang_timeout_s` seconds, or up to 1 % more, leaves its stacks in `path`."""

    def __init__(self, path: Path, hang_timeout_s: float) -> None:
        self._path, self._stall_s, self._armed_at = path, hang_timeout_s, 0.0
        self._file: TextIO | None = None

    def on_start(self, step: int) -> None:
        self._file = self._path.open("w")
        self._arm()

    def on_step(self, end: StepResult) -> None:
        if time.monotonic() - self._armed_at > self._stall_s * 0.01:  # a timer is a thread, which costs short steps
            self._arm()

    def close(self) -> None:
        """Stop the timer, also where the run failed."""
        faulthandler.cancel_dump_traceback_later()
        if self._file is not None:
            self._file.close()

    def on_end(self) -> None:
        self.close()
        if self._path.stat().st_size == 0:
            self._path.unlink()

    def _arm(self) -> None:
        assert self._file is not None  # on_start has opened it
        self._armed_at = time.monotonic()
        faulthandler.dump_traceback_later(self._stall_s * 1.01, repeat=True, file=self._file)
