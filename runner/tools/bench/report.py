"""What was measured, as a table and as JSON, and beside an earlier one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from runner.core.errors import ParityError
from runner.device.cards import GIB
from runner.tools.bench.measure import CaseResult, DeviceSpeed
from runner.tools.bench.suite import FORMAT

HEAD = ("case", "tokens", "step s", "tokens/s", "MFU", "baseline s", "speedup", "peak GiB", "plan GiB")
WIDTHS = (18, 8, 9, 10, 8, 12, 9, 10, 10)
COMPARED = ("case", "tokens/s", "tokens/s before", "ratio", "MFU", "MFU before")
COMPARED_WIDTHS = (18, 10, 17, 8, 8, 12)


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The device, every case on it, and what was decided and found on the way."""

    machine: DeviceSpeed
    cases: Sequence[CaseResult]
    records: Mapping[str, Sequence[Mapping[str, str]]]

    def as_json(self) -> dict[str, Any]:
        """For programs: seconds, bytes, operations."""
        cases = [asdict(one) | {"tokens_per_s": one.tokens_per_s, "speedup": one.ratio} for one in self.cases]
        return {"format": FORMAT, "machine": asdict(self.machine), "cases": cases, **self.records}


def format_header(machine: DeviceSpeed) -> Iterator[str]:
    """What stands above the cases."""
    name = machine.device.get("card", machine.device["name"])
    versions = ", ".join(f"{package} {number}" for package, number in machine.versions.items())
    yield f"device   {name}; {versions}"
    matmul = f"{format_flops(machine.matmul_flops)} in {machine.precision}"
    yield f"measured {matmul} of a square matrix product, {machine.copy_bytes / 1e9:.3g} GB/s for a copy"
    yield f"peak     {format_flops(machine.peak.flops)} ({machine.peak.source}); MFU = achieved / this"
    yield ""
    yield _line(HEAD)


def format_row(one: CaseResult) -> str:
    """A case as a line of the table."""
    if one.step_s is None or one.mfu is None:
        return f"{one.name.ljust(WIDTHS[0])} {one.skip_reason}"
    cells = (
        one.name,
        f"{one.tokens:.0f}",
        f"{one.step_s:.3f}",
        f"{one.tokens_per_s:.0f}",
        f"{one.mfu:.1%}",
        f"{one.baseline_s:.3f}" if one.baseline_s else "-",
        f"{one.ratio:.2f}" if one.ratio else "-",
        "-" if one.peak_bytes is None else f"{one.peak_bytes / GIB:.2f}",
        f"{(one.planned_bytes or 0) / GIB:.2f}",
    )
    return _line(cells) + (f"  {one.skip_reason}" if one.skip_reason else "")


def format_comparison(result: BenchResult, earlier: Mapping[str, Any]) -> Iterator[str]:
    """Each case beside the one of the same name in an earlier JSON."""
    before = {one["name"]: one for one in earlier["cases"]}
    was, now = earlier["machine"]["device"], dict(result.machine.device)
    if (was.get("card"), was["name"]) != (now.get("card"), now["name"]):
        yield f"note     measured on {was.get('card', was['name'])}, and now on {now.get('card', now['name'])}"
    yield _line(COMPARED, COMPARED_WIDTHS)
    for one in result.cases:
        old = before.get(one.name)
        if one.tokens_per_s is None or one.mfu is None or old is None or not old["tokens_per_s"]:
            yield f"{one.name.ljust(WIDTHS[0])} {'in one file only'}"
            continue
        ratio = one.tokens_per_s / old["tokens_per_s"]
        speeds = (f"{one.tokens_per_s:.0f}", f"{old['tokens_per_s']:.0f}", f"{ratio:.2f}")
        yield _line((one.name, *speeds, f"{one.mfu:.1%}", f"{old['mfu']:.1%}"), COMPARED_WIDTHS)


def check_min_mfu(result: BenchResult, least: float) -> None:
    """Raise ParityError where an SFT case has a smaller MFU, or none was measured."""
    sft = [one for one in result.cases if one.name.startswith("sft")]
    low = [f"{one.name} {one.mfu:.1%}" for one in sft if one.mfu is not None and one.mfu < least]
    if low or all(one.mfu is None for one in sft):
        raise ParityError(f"--min-mfu {least:.1%}: {', '.join(low) or 'no SFT case was measured'}")


def format_flops(flops: float) -> str:
    """Operations per second."""
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.3g} GFLOP/s"


def _line(cells: Sequence[str], widths: Sequence[int] = WIDTHS) -> str:
    first, *others = cells
    return first.ljust(widths[0]) + "".join(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
