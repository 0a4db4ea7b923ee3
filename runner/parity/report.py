"""A comparison as text: a table of steps, where it begins to differ, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from runner.parity.compare import Comparison, Gap, relative
from runner.parity.recording import Recording

HEAD = ("step", "recorded", "here", "relative error", "grad_norm recorded", "here", "relative error")


def lines(comparison: Comparison, recorded: Recording, here: Recording, tolerance: float) -> Iterator[str]:
    """What `run parity --compare` prints."""
    yield f"recorded  {_made(recorded.made)}"
    yield f"here      {_made(here.made)}"
    yield f"\n{_called(comparison.series)}, and the norm of the gradient"
    yield from _table([HEAD, *_rows(comparison)])
    if comparison.ended is not None:
        yield f"ended early here: {comparison.ended}"
    yield f"\nmean relative error {_percent(comparison.loss_error)} (tolerance {_percent(tolerance)})"
    yield from _sampler(recorded.steps, here.steps)
    gaps = {"output": comparison.outputs, "gradient": comparison.gradients}
    for kind, found in gaps.items():
        bound = getattr(comparison.bounds, kind)
        yield f"{kind}s of step 1: {_summary(found, bound)}"
    if recorded.idle:
        yield recorded.idle
    if comparison.unmatched:
        yield f"{comparison.unmatched} modules ran on one side only (fused operators) and are not compared"


def verdict(comparison: Comparison, tolerance: float) -> str:
    """Why they disagree, and where to look."""
    said = []
    if comparison.ended is not None:
        said.append("here the steps ended early, with a number that is not finite")
    elif comparison.loss_error > tolerance:
        said.append(f"the mean relative error {_percent(comparison.loss_error)} is above the tolerance")
    if gap := comparison.first_output:
        said.append(f"first in the forward pass: {_place(gap, comparison)}")
    if gap := comparison.first_gradient:
        text = f"first in the backward pass: the gradient of {gap.name} differs by {_ratio(gap.distance)}"
        said.append(f"{text} (bound {comparison.bounds.gradient:g})")
    if comparison.first_output is None and comparison.first_gradient is None:
        said.append("no module and no gradient of step 1 is beyond its bound: look at the optimizer, and at the sizes")
    return "the two disagree\n  " + "\n  ".join(said)


def _place(gap: Gap, comparison: Comparison) -> str:
    bound = comparison.bounds.output
    if gap.shapes is not None:
        recorded, here = gap.shapes
        return (
            f"{gap.name}, whose output is {list(recorded)} recorded and {list(here)} here: see what was decided above"
        )
    text = f"{gap.name}, whose output differs by {_ratio(gap.distance)} (bound {bound:g})"
    if gap.taken is None:
        return text
    if gap.taken <= bound:
        return f"{text} while its input differs by {_ratio(gap.taken)}"
    owner = gap.name.rpartition(".")[0] or "the model"
    return f"{text}; its input differs as much ({_ratio(gap.taken)}): it is what {owner} computes before it"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _ratio(distance: float) -> str:
    return f"{distance:.2g}"


def _summary(gaps: Sequence[Gap], bound: float) -> str:
    if not gaps:
        return "none was seen on both sides"
    worst = max(gaps, key=lambda gap: gap.distance)
    beyond = sum(gap.distance > bound for gap in gaps)
    most = "equal to the bit" if worst.distance == 0 else f"largest difference {worst.distance:.2g} ({worst.name})"
    return f"{len(gaps)} compared, {beyond} beyond the bound {bound:g}; {most}"


def _sampler(recorded: Sequence[Mapping[str, float]], here: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """The recording's sampler beside both trainers, where tokens were sampled."""
    name = "sampler/abs_logprob_diff"
    both = [max(_numbers(steps, name), default=None) for steps in (recorded, here)]
    if None not in both:
        there, now = (f"{value:.2g}" for value in both if value is not None)
        yield f"|trainer − recorded sampler| per token, worst step: {there} recorded, {now} here"


def _numbers(steps: Sequence[Mapping[str, float]], name: str) -> Iterator[float]:
    """Those that there are: a step that learns from no token has none."""
    yield from (step[name] for step in steps if name in step and not math.isnan(step[name]))


def _made(made: Mapping[str, Mapping[str, object]]) -> str:
    return f"{made['device']['name']}  " + " ".join(f"{name} {one}" for name, one in made["versions"].items())


def _called(series: str) -> str:
    return "mean −log-likelihood of the sampled tokens (nll)" if series == "nll" else series


def _rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    for number, step in enumerate(comparison.steps, 1):
        numbers = (f"{value:.6g}" for value in step.loss), (f"{value:.6g}" for value in step.grad_norm)
        errors = (f"{relative(*pair):.1e}" for pair in (step.loss, step.grad_norm))
        yield (str(number), *numbers[0], next(errors), *numbers[1], next(errors))


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
