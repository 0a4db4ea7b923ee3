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
    return median(float(a[key] / b[key]) for a, b in zip(results[arm], results[base], strict=True))


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
    """One line per point: processor seconds of a step, and MB above model and optimizer state."""
    kinds = list(measured[0]["kinds"])
    head = ("rows x length, vocab", *(f"{k} cpu-s" for k in kinds), "[T, vocab] MB", *(f"{k} MB" for k in kinds))
    rows = []
    for point in measured:
        arms = [point["kinds"][kind] for kind in kinds]
        rows.append(
            (
                "{} x {}, {}".format(*point["point"]),
                *(f"{a['cpu_s']:.2f}" for a in arms),
                f"{arms[0]['logits_bytes'] / 1e6:.0f}",
                *(f"{a['extra_bytes'] / 1e6:.0f}" for a in arms),
            )
        )
    return table(head, rows)


def first_step(results: Results, runner: str, bare: str) -> dict[str, dict[str, float]]:
    """Wall and processor seconds from the command; the least over rounds, each clock by itself.

    Only the first round finds no tokenized data in the runner's cache.
    """
    ours, loop = results[runner], results[bare]
    out = {
        "bare loop: imports": {
            "wall_s": min(r["imported_s"] for r in loop),
            "cpu_s": min(r["imported_cpu_s"] for r in loop),
        },
        "bare loop: first step": _least(loop),
        "runner: first step": _least(ours),
        "runner: first step, nothing cached": _least(ours[:1]),
    }
    return out


def _least(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {clock: min(r[clock][0] for r in rounds) for clock in ("wall_s", "cpu_s")}


def first_steps(named: Mapping[str, Mapping[str, float]]) -> str:
    """Seconds, and their ratio to the first line's."""
    base = next(iter(named.values()))
    rows = [
        (
            name,
            f"{t['wall_s']:.2f}",
            f"{t['wall_s'] / base['wall_s']:.2f}",
            f"{t['cpu_s']:.2f}",
            f"{t['cpu_s'] / base['cpu_s']:.2f}",
        )
        for name, t in named.items()
    ]
    return table(("from command to …", "wall s", "ratio", "cpu s", "ratio"), rows)


def start_up(named: Mapping[str, float]) -> str:
    """Wall seconds of a whole command."""
    return table(("start-up", "wall s"), [(name, f"{value:.2f}") for name, value in named.items()])
