"""Two recordings of the same steps: how far apart they are, and where that begins.

refuse_other_job   before anything is built: the job is the recorded one but for what may differ
refuse_other_start before the first step: the same data, the same weights
compare            losses and gradient norms of each step, then outputs and gradients of the first one ─▶ Comparison

A comparison as text: a table of steps, where it begins to differ, and the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from runner.core.errors import CheckpointError, DataError, Problem, SpecError
from runner.core.tolerance import Tolerance, tolerance_of
from runner.spec.base import COMMAND_LINE, iter_leaves
from runner.spec.job import JobSpec
from runner.tools.parity.recording import Recording, TensorSketch

# What a device or machine may have of its own: kernels, data types, where the same files lie.
ALLOWED_DIFFERENCES = (
    "device", "strict", "init_from", "model.dtype", "reward.dtype", "model.gradient_checkpointing",
    "model.activation_offloading", "model.lm_head_chunk_tokens", "model.path", "model.tokenizer",
    "model.trust_remote_code", "data.path", "algorithm.teacher", "algorithm.reference_path",
)  # fmt: skip
SAME_WEIGHTS = {False: 1e-9, True: 2.0**-8}  # largest relative distance; of different data types: bfloat16's rounding
SMALL_GRADIENT = 0.1  # of the root mean square of the gradients' norms: below it a gradient is judged by that


@dataclass(frozen=True, slots=True)
class TensorGap:
    """How far apart two prints are, relative to the recorded one.

    taken: the same of the module's input, if known; shapes: recorded and here, where they differ
    """

    name: str
    distance: float
    taken: float | None = None
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True)
class StepGap:
    """A loss (see `series`) and a gradient norm, recorded and here."""

    loss: tuple[float, float]
    grad_norm: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two recordings have in common.

    series: the number that is compared as the loss; bounds: for the coarsest data type of the two
    outputs: in the order of the forward pass; gradients: in that of the backward pass
    unmatched: modules that were called on one side only; ended: why there are fewer steps here than were recorded
    """

    series: str
    steps: tuple[StepGap, ...]
    bounds: Tolerance
    outputs: tuple[TensorGap, ...]
    gradients: tuple[TensorGap, ...]
    unmatched: int
    ended: str | None

    @property
    def loss_error(self) -> float:
        """Mean over the steps of |here − recorded| / |recorded|; infinite where steps are missing."""
        if self.ended is not None or not self.steps:
            return math.inf
        return math.fsum(relative(*step.loss) for step in self.steps) / len(self.steps)

    @property
    def first_output(self) -> TensorGap | None:
        """The first module of the forward pass whose output is beyond its bound."""
        return next((gap for gap in self.outputs if gap.distance > self.bounds.output), None)

    @property
    def first_gradient(self) -> TensorGap | None:
        """The first parameter of the backward pass whose gradient is beyond its bound."""
        return next((gap for gap in self.gradients if gap.distance > self.bounds.gradient), None)

    def agrees(self, tolerance: float) -> bool:
        """Whether the mean relative loss error is within `tolerance`, and modules and gradients within bounds."""
        return self.loss_error <= tolerance and self.first_output is None and self.first_gradient is None


def relative(recorded: float, here: float) -> float:
    """|here − recorded| / |recorded|; 0 where they are equal, infinite where one is not finite."""
    if recorded == here:
        return 0.0
    found = abs(here - recorded) / abs(recorded) if recorded else math.inf
    return found if math.isfinite(found) else math.inf


def refuse_other_job(recorded: Mapping[str, object], spec: JobSpec) -> None:
    """Raise SpecError naming every option that is not as recorded and may not differ."""
    now, before = dict(iter_leaves(spec.model_dump(mode="json"))), dict(iter_leaves(recorded))
    text = "was recorded as {}, now {}; leave it out, or record again with it"
    problems = [
        Problem(key, text.format(before.get(key), now.get(key)), COMMAND_LINE)
        for key in {**before, **now}
        if now.get(key) != before.get(key) and not {key, key.partition(".")[0]} & set(ALLOWED_DIFFERENCES)
    ]
    if problems:
        raise SpecError(problems)


def refuse_other_start(recorded: Recording, here: Recording) -> None:
    """Raise DataError for other data, CheckpointError for other weights: then no number could be compared."""
    if recorded.made["data"] != here.made["data"]:
        raise DataError("the data (or its tokenizer) differs from the recording; copy it here, or record again")
    for role, origin in here.made["frozen"].items():
        before = recorded.made["frozen"][role]
        if other := [name for name, value in origin.items() if before.get(name, value) != value]:
            raise CheckpointError(f"the {role} differs from the recording: other {', '.join(other)}; copy it here")
    weights, now = recorded.of_kind("weight"), here.of_kind("weight")
    rounded = recorded.spec["model"]["dtype"] != here.spec["model"]["dtype"]  # which frozen weights are stored in
    apart = [
        name
        for name in {**weights, **now}
        if name not in weights or name not in now or _distance(weights[name], now[name]) > SAME_WEIGHTS[rounded]
    ]
    if apart:
        raise CheckpointError(
            f"{len(apart)} of {len(weights)} weights differ from the recording, the first is {apart[0]}: another "
            "model, or another version of it; copy it here, or record again"
        )


def compare(recorded: Recording, here: Recording, *, sampled: bool) -> Comparison:
    """Compare two recordings. sampled: compare likelihoods of the samples instead of losses.

    The policy loss of on-policy samples is about 0 whatever the model is.
    """
    series = "nll" if sampled else "train/loss"
    steps = tuple(
        StepGap((a[series], b[series]), (a["train/grad_norm"], b["train/grad_norm"]))
        for a, b in zip(recorded.steps, here.steps, strict=False)
        if series in a and series in b
    )
    before, now = recorded.of_kind("output"), here.of_kind("output")
    return Comparison(
        series,
        steps,
        tolerance_of(*(one.made["device"]["matmul_precision"] for one in (recorded, here))),  # docs/parity.md
        tuple(_outputs(recorded, here)),
        tuple(_gradients(recorded.of_kind("gradient"), here.of_kind("gradient"), list(before))),
        len(before.keys() ^ now.keys()),
        here.ended,
    )


def _outputs(recorded: Recording, here: Recording) -> Iterator[TensorGap]:
    """Of what both called: a device's fused operators pass over some modules."""
    given, taken = (here.of_kind(kind) for kind in ("output", "input"))
    before = recorded.of_kind("input")
    for name, one in recorded.of_kind("output").items():
        if name in given:
            known = name in before and name in taken
            shapes = None if one.shape == given[name].shape else (one.shape, given[name].shape)
            first = _distance(before[name], taken[name]) if known else None
            yield TensorGap(name, _distance(one, given[name]), first, shapes)


def _gradients(
    before: Mapping[str, TensorSketch], now: Mapping[str, TensorSketch], modules: Sequence[str]
) -> Iterator[TensorGap]:
    """Compare gradients in reverse order of `modules`.

    Some are 0 except for rounding (a key's bias), so small ones are compared with a typical one.
    """
    places = {name: place for place, name in enumerate(modules)}
    usual = math.sqrt(math.fsum(one.norm**2 for one in before.values()) / max(len(before), 1))
    for name in sorted({**before, **now}, key=lambda name: _place(name, places), reverse=True):
        if name in before and name in now:
            apart = before[name].distance(now[name]) / (max(before[name].norm, SMALL_GRADIENT * usual) or 1.0)
            yield TensorGap(name, apart)
        else:  # one side has a gradient where the other has none
            yield TensorGap(name, math.inf)


def _place(parameter: str, places: Mapping[str, int]) -> int:
    """Index of the innermost called module around a parameter; the end for the head, which is not called."""
    owner = parameter
    while owner and owner not in places:
        owner = owner[: max(owner.rfind("."), owner.rfind("/"), 0)]
    return places.get(owner, len(places))


def _distance(one: TensorSketch, other: TensorSketch) -> float:
    """Relative to the norm of the first."""
    apart = one.distance(other)
    return apart / one.norm if one.norm else apart


HEAD = ("step", "recorded", "here", "relative error", "grad_norm recorded", "here", "relative error")


def comparison_lines(comparison: Comparison, recorded: Recording, here: Recording, tolerance: float) -> Iterator[str]:
    """What `run parity --compare` prints."""
    yield f"recorded  {_environment_text(recorded.made)}"
    yield f"here      {_environment_text(here.made)}"
    sampled = comparison.series == "nll"
    series = "mean −log-likelihood of the sampled tokens (nll)" if sampled else comparison.series
    yield f"\n{series}, and the norm of the gradient"
    yield from _table([HEAD, *_rows(comparison)])
    if comparison.ended is not None:
        yield f"stopped early here: {comparison.ended}"
    yield f"\nmean relative error {_percent(comparison.loss_error)} (tolerance {_percent(tolerance)})"
    yield from _sampler(recorded.steps, here.steps)
    gaps = {"output": comparison.outputs, "gradient": comparison.gradients}
    for kind, found in gaps.items():
        bound = getattr(comparison.bounds, kind)
        yield f"{kind}s of step 1: {_summary(found, bound)}"
    if recorded.no_gradient_note:
        yield recorded.no_gradient_note
    if comparison.unmatched:
        yield f"{comparison.unmatched} modules ran on one side only (fused operators) and are not compared"


def disagreement_text(comparison: Comparison, tolerance: float) -> str:
    """Why they disagree, and where to look."""
    said = []
    if comparison.ended is not None:
        said.append("here the steps stopped early, because a value is not finite")
    elif comparison.loss_error > tolerance:
        said.append(f"the mean relative error {_percent(comparison.loss_error)} is above the tolerance")
    if gap := comparison.first_output:
        said.append(f"first in the forward pass: {_gap_text(gap, comparison)}")
    if gap := comparison.first_gradient:
        text = f"first in the backward pass: the gradient of {gap.name} differs by {gap.distance:.2g}"
        said.append(f"{text} (bound {comparison.bounds.gradient:g})")
    if comparison.first_output is None and comparison.first_gradient is None:
        said.append("no module and no gradient of step 1 exceeds its bound: check the optimizer, and the sizes")
    return "the two devices disagree\n  " + "\n  ".join(said)


def _gap_text(gap: TensorGap, comparison: Comparison) -> str:
    bound = comparison.bounds.output
    if gap.shapes is not None:
        recorded, here = gap.shapes
        return f"{gap.name}, whose output is {list(recorded)} recorded and {list(here)} here: see the choices above"
    text = f"{gap.name}, whose output differs by {gap.distance:.2g} (bound {bound:g})"
    if gap.taken is None:
        return text
    if gap.taken <= bound:
        return f"{text} while its input differs by {gap.taken:.2g}"
    owner = gap.name.rpartition(".")[0] or "the model"
    return f"{text}; its input differs as much ({gap.taken:.2g}): the cause is what {owner} computes before it"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _summary(gaps: Sequence[TensorGap], bound: float) -> str:
    if not gaps:
        return "none ran on both sides"
    worst = max(gaps, key=lambda gap: gap.distance)
    beyond = sum(gap.distance > bound for gap in gaps)
    most = "equal bit for bit" if worst.distance == 0 else f"largest difference {worst.distance:.2g} ({worst.name})"
    return f"{len(gaps)} compared, {beyond} beyond the bound {bound:g}; {most}"


def _sampler(recorded: Sequence[Mapping[str, float]], here: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """The recording's sampler beside both trainers, where tokens were sampled."""
    name = "mismatch/logprob_diff"
    measured = [[one[name] for one in steps if not math.isnan(one.get(name, math.nan))] for steps in (recorded, here)]
    if all(measured):
        there, now = (f"{max(values):.2g}" for values in measured)
        yield f"|trainer − recorded sampler| per token, worst step: {there} recorded, {now} here"


def _environment_text(made: Mapping[str, Mapping[str, object]]) -> str:
    return f"{made['device']['name']}  " + " ".join(f"{name} {one}" for name, one in made["versions"].items())


def _rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    for number, step in enumerate(comparison.steps, 1):
        numbers = (f"{value:.6g}" for value in step.loss), (f"{value:.6g}" for value in step.grad_norm)
        errors = (f"{relative(*pair):.1e}" for pair in (step.loss, step.grad_norm))
        yield (str(number), *numbers[0], next(errors), *numbers[1], next(errors))


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
