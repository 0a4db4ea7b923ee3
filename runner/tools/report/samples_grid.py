"""Answers to held-out questions, question by step: how each answer changed while the model trained.

samples.jsonl ─▶ the first answer to each question at each evaluation ─▶ a table for each set: a row per question
"""

from __future__ import annotations

import html
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.run_dir.manifest import redact
from runner.tracker.text import format_number

log = logging.getLogger("runner")

MOST_STEPS = 6  # columns: first and last evaluation, and others between
MOST_QUESTIONS = 8  # rows of a set
MOST_CHARACTERS = 400  # of an answer or prompt
Row = Mapping[str, Any]


def sample_row(line: str, path: Path) -> dict[str, Any]:
    """A line of samples.jsonl; empty for a damaged one, which is said."""
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError) as error:
        log.warning("%s: a line is damaged and skipped (%s)", path, error)
        return {}


def evaluated_samples(lines: Sequence[str], path: Path) -> list[Row]:
    """Answers of evaluations; those of training steps have the weight version that sampled them."""
    rows = (sample_row(line, path) for line in lines if '"version"' not in line)
    return [row for row in rows if {"step", "prompt", "answer"} <= row.keys() and not row.get("sample")]


def samples_grid(rows: Sequence[Row]) -> list[str]:
    """HTML of a heading and a table for each set; nothing where nothing was answered."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row.get("set", "")), []).append(row)
    return [part for name, members in found.items() for part in _set_grid(name, members)]


def _set_grid(name: str, rows: Sequence[Row]) -> list[str]:
    by_step: dict[int, dict[str, Row]] = {}
    for row in rows:
        by_step.setdefault(int(row["step"]), {}).setdefault(str(row["prompt"]), row)
    steps = spread(sorted(by_step), MOST_STEPS)
    questions = list(dict.fromkeys(str(row["prompt"]) for row in rows))
    head = ["question", *(f"step {step}" for step in steps)]
    names = "".join(f"<th>{html.escape(one)}</th>" for one in head)
    body = "".join(_question(one, [by_step[step].get(one) for step in steps]) for one in questions[:MOST_QUESTIONS])
    title = f"Held-out completions: {name}" if name else "Held-out completions"
    table = f'<table class="samples"><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>'
    left_out = [
        f"{len(found) - most} of {len(found)} {what} are in samples.jsonl only"
        for found, most, what in ((questions, MOST_QUESTIONS, "questions"), (by_step, MOST_STEPS, "evaluations"))
        if len(found) > most
    ]
    notes = [f'<p class="faint">{html.escape("; ".join(left_out))}</p>'] if left_out else []
    return [f"<h2>{html.escape(title)}</h2>", f'<div class="scroll">{table}</div>', *notes]


def spread(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of the steps, the first and the last among them, evenly spread."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def _question(prompt: str, answers: Sequence[Row | None]) -> str:
    expected = next((str(row["expected"]) for row in answers if row is not None and row.get("expected")), "")
    first = f"{_escape(prompt)}" + (f'<div class="faint">expected {_escape(expected)}</div>' if expected else "")
    return f'<tr><td class="wrap">{first}</td>{"".join(map(_answer, answers))}</tr>'


def _answer(row: Row | None) -> str:
    if row is None:
        return "<td></td>"
    said = [str(turn.get("content", "")) for turn in row.get("turns", ())]
    text = " → ".join([*said, str(row["answer"])])
    reward = row.get("reward")
    note = f"reward {format_number(float(reward))}" if isinstance(reward, int | float) else ""
    kind = "wrap passed" if row.get("exact") else "wrap"
    return f'<td class="{kind}">{_escape(text)}<div class="faint">{html.escape(note)}</div></td>'


def _escape(text: str) -> str:
    """Redacted, shortened with a mark, and escaped."""
    safe = redact(text)
    return html.escape(safe if len(safe) <= MOST_CHARACTERS else f"{safe[:MOST_CHARACTERS]}… ({len(safe)} characters)")
