"""Answers to held-out questions, question by step: how each answer changed while the model trained.

samples.jsonl ─▶ the first answer to each question at each evaluation ─▶ a table for each set: a row per question
"""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.core.errors import DataError
from runner.core.images import decode_image
from runner.run_dir.manifest import redact
from runner.tracker.text import escape_html, format_number

MOST_STEPS = 6  # columns: first and last evaluation, and others between
MOST_QUESTIONS = 8  # rows of a set
MOST_CHARACTERS = 400  # of an answer or prompt
MOST_IMAGES = 4  # of a prompt
THUMBNAIL = 96  # pixels of the longer side
Row = Mapping[str, Any]


def evaluated_samples(rows: Sequence[Row]) -> list[Row]:
    """The first answers of evaluations; those of training steps have the weight version that sampled them."""
    evaluated = (row for row in rows if {"step", "prompt", "answer"} <= row.keys() and "version" not in row)
    return [row for row in evaluated if not row.get("sample")]


def samples_grid(rows: Sequence[Row]) -> list[str]:
    """HTML of a heading and a table for each set; nothing where nothing was answered."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row.get("set", "")), []).append(row)
    return [part for name, members in found.items() for part in _set_grid(name, members)]


def _set_grid(name: str, rows: Sequence[Row]) -> list[str]:
    by_step: dict[int, dict[str, Row]] = {}
    for row in rows:
        by_step.setdefault(int(row["step"]), {}).setdefault(_question_key(row), row)
    steps = spread(sorted(by_step), MOST_STEPS)
    questions = {_question_key(row): str(row["prompt"]) for row in rows}
    first = list(questions.items())[:MOST_QUESTIONS]
    shown = [(prompt, [by_step[step].get(key) for step in steps]) for key, prompt in first]
    title = f"Held-out completions: {name}" if name else "Held-out completions"
    left_out = [
        f"{len(found) - most} of {len(found)} {what} are in samples.jsonl only"
        for found, most, what in ((questions, MOST_QUESTIONS, "questions"), (by_step, MOST_STEPS, "evaluations"))
        if len(found) > most
    ]
    notes = [f'<p class="faint">{html.escape("; ".join(left_out))}</p>'] if left_out else []
    return [f"<h2>{html.escape(title)}</h2>", answers_table([f"step {step}" for step in steps], shown), *notes]


def _question_key(row: Row) -> str:
    """What tells a question from others: its prompt and its images."""
    return json.dumps([row["prompt"], row.get("images")])


def answers_table(columns: Sequence[str], questions: Sequence[tuple[str, Sequence[Row | None]]]) -> str:
    """HTML of a table with a row for each prompt and the answer of each column to it, if there is one."""
    names = "".join(f"<th>{html.escape(one)}</th>" for one in ("question", *columns))
    body = "".join(_question(prompt, answers) for prompt, answers in questions)
    table = f'<table class="samples"><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def spread(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of the steps, the first and the last among them, evenly spread."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def _question(prompt: str, answers: Sequence[Row | None]) -> str:
    expected = next((str(row["expected"]) for row in answers if row is not None and row.get("expected")), "")
    images = next((row["images"] for row in answers if row is not None and row.get("images")), ())
    wanted = f'<div class="faint">expected {_escape(expected)}</div>' if expected else ""
    first = f"{_thumbnails(images)}{_escape(prompt)}{wanted}"
    return f'<tr><td class="wrap">{first}</td>{"".join(map(_answer, answers))}</tr>'


def _answer(row: Row | None) -> str:
    if row is None:
        return "<td></td>"
    turns = [str(turn.get("content", "")) for turn in row.get("turns", ())]
    text = " → ".join([*turns, str(row["answer"])])
    reward = row.get("reward")
    note = f"reward {format_number(float(reward))}" if isinstance(reward, int | float) else ""
    kind = "wrap passed" if row.get("exact") else "wrap"
    return f'<td class="{kind}">{_escape(text)}<div class="faint">{html.escape(note)}</div></td>'


def _escape(text: str) -> str:
    """Redacted, shortened with a mark, and escaped."""
    return escape_html(redact(text), MOST_CHARACTERS)


def _thumbnails(locations: Sequence[str]) -> str:
    """HTML of a question's first images, small; each a path or a data URL, as `sample_images` writes them."""
    shown = "".join(map(_thumbnail, locations[:MOST_IMAGES]))
    more = len(locations) - MOST_IMAGES
    return f'{shown}<div class="faint">{f"and {more} more images" if more > 0 else ""}</div>' if locations else ""


def _thumbnail(location: str) -> str:
    is_inline = location.startswith("data:")
    name = "image" if is_inline else Path(location).name
    try:
        content = base64.b64decode(location.partition(",")[2]) if is_inline else Path(location).read_bytes()
        image = decode_image(content)
    except (OSError, ValueError, DataError) as error:
        return f'<div class="faint">{_escape(f"{name} cannot be shown: {error}")}</div>'
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    small = io.BytesIO()
    image.save(small, "JPEG", quality=75)
    return f'<img alt="{_escape(name)}" src="data:image/jpeg;base64,{base64.b64encode(small.getvalue()).decode()}"> '
