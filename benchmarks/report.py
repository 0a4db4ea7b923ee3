"""Turns measured numbers into tables and checks; pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

Results = Mapping[str, Sequence[Mapping[str, Any]]]  # arm → one result per round
COMPARED_LOSSES = 3
FOUR_DIGITS = 5e-5  # relative


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell; the first is left-aligned, the rest right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in (head, ["-" * w for w in widths], *rows)
    ]
    return "\n".join(lines)


def ratio(results: Results, arm: str, base: str, key: str) -> float:
    """Median over rounds of arm ÷ base, each taken within its round."""
    return median(a[key] / b[key] for a, b in zip(results[arm], results[base], strict=True))


def summary(results: Results, base: str) -> dict[str, dict[str, float]]:
    """Per arm: medians over rounds, and ratios to `base`."""
    keys = ("conversations_per_cpu_s", "tokens_per_cpu_s", "conversations_per_wall_s")
    out = {}
    for arm, rounds in results.items():
        numbers = {key: median(r[key] for r in rounds) for key in keys}
        numbers |= {f"ratio_{key}": ratio(results, arm, base, key) for key in keys}
        numbers["peak_rss_bytes"] = max(r["peak_rss_bytes"] for r in rounds)
        numbers["process_s"] = min(r["process_s"] for r in rounds)
        out[arm] = numbers
    return out


def speed(results: Results, base: str) -> str:
    """The main table."""
    head = ("arm", "conv./cpu-s", "ratio", "tokens/cpu-s", "ratio", "ratio by wall", "peak RSS MB", "process s")
    rows = [
        (
            arm,
            f"{n['conversations_per_cpu_s']:.1f}",
            f"{n['ratio_conversations_per_cpu_s']:.2f}",
            f"{n['tokens_per_cpu_s']:.0f}",
            f"{n['ratio_tokens_per_cpu_s']:.2f}",
            f"{n['ratio_conversations_per_wall_s']:.2f}",
            f"{n['peak_rss_bytes'] / 1e6:.0f}",
            f"{n['process_s']:.1f}",
        )
        for arm, n in summary(results, base).items()
    ]
    return table(head, rows)


def losses(results: Results) -> str:
    """First losses of every arm."""
    rows = [(arm, *(f"{x:.5f}" for x in rounds[0]["losses"][:COMPARED_LOSSES])) for arm, rounds in results.items()]
    return table(("loss at step", *(str(i + 1) for i in range(COMPARED_LOSSES))), rows)


def disagreements(results: Results) -> list[str]:
    """Arms whose first losses differ from the first arm's in the first four digits, in any round."""
    (name, first), *_ = results.items()
    wanted = first[0]["losses"][:COMPARED_LOSSES]
    return [
        f"{arm}, round {number}: losses {got} where {name} has {wanted}"
        for arm, rounds in results.items()
        for number, got in enumerate((r["losses"][:COMPARED_LOSSES] for r in rounds), start=1)
        if len(got) != len(wanted) or not all(map(_same, got, wanted))
    ]


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=FOUR_DIGITS)


def growth(measured: Sequence[Mapping[str, Any]]) -> str:
    """One line per point: what a step costs, and memory above model and optimizer state."""
    head = ("rows x length, vocab", "runner s", "flat s", "padded s", "flat/runner", "[T, vocab] MB", "runner MB", "flat MB", "padded MB")
    rows = []
    for point in measured:
        arms = [point[kind] for kind in ("runner", "flat", "padded")]
        seconds = [a["cpu_s"] for a in arms]
        rows.append(
            (
                "{} x {}, {}".format(*point["point"]),
                *(f"{s:.2f}" for s in seconds),
                f"{seconds[1] / seconds[0]:.2f}",
                f"{arms[0]['logits_bytes'] / 1e6:.0f}",
                *(f"{a['extra_bytes'] / 1e6:.0f}" for a in arms),
            )
        )
    return table(head, rows)


def first_step(results: Results, runner: str, bare: str) -> dict[str, float]:
    """Seconds from the command: the bare loop's imports, and both first steps; least over rounds, cold = round 1."""
    ours, loop = results[runner], results[bare]
    imports = min(r["imported_s"] for r in loop)
    best = min(r["wall_s"][0] for r in ours)
    return {
        "bare imports": imports,
        "bare first step": min(r["wall_s"][0] for r in loop),
        "runner first step, nothing cached": ours[0]["wall_s"][0],
        "runner first step": best,
        "runner first step / bare imports": best / imports,
    }


def seconds(named: Mapping[str, float]) -> str:
    """Name and number."""
    return table(("from command to …", "s"), [(name, f"{value:.2f}") for name, value in named.items()])
