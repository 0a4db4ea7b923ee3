"""The jobs that `run bench` measures: on a card at the shapes of Qwen3 0.6B and 8B, on a processor at toy size.

case ──▶ words of a job, a folder with its model's shape, a tokenizer and a file of rows that are all equally long
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from runner.tools.plan.published import PUBLISHED, Shape

ROWS = 64  # of a file; steps take them in turns
END = 1  # token that a tokenizer of bytes adds to a text
COMMON = (
    *("data=file", "data.cache=false", "model.from_scratch=true", "tracker=none", "schedule=constant"),
    *("evaluation.every=0", "checkpoint.every=0", "checkpoint.export=false", "watch.device_s=0"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A job, and the same as a baseline. rows: of a step; length: tokens of each, answers included; words: of the job,
    beside what follows from these."""

    name: str
    shape: Shape
    kind: Literal["text", "pairs", "prompts"]
    rows: int
    length: int
    answer: int
    words: tuple[str, ...]

    def job(self, folder: Path, steps: int) -> list[str]:
        """The words of the job, whose files are in `folder`."""
        sizes = [f"algorithm.batch_size={self.rows}", f"data.max_length={self.prompt}", f"steps={steps}"]
        return [*self.words, *COMMON, f"model.path={folder / 'model'}", f"data.path={folder / 'rows.jsonl'}", *sizes]

    @property
    def prompt(self) -> int:
        """Tokens of a row of data."""
        return self.length - self.answer if self.kind == "prompts" else self.length

    def write(self, folder: Path) -> None:
        """Make the files. Imports transformers."""
        from transformers import AutoConfig

        from runner.model.tiny import byte_tokenizer

        tokenizer = byte_tokenizer(self.length)
        tokenizer.save_pretrained(folder / "model")
        ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        AutoConfig.for_model(**self.shape | ends).save_pretrained(folder / "model")
        letters = random.Random(0)

        def text(tokens: int) -> str:
            return "".join(letters.choices(string.ascii_lowercase, k=tokens))

        make: dict[str, Callable[[], dict[str, str]]] = {
            "text": lambda: {"text": text(self.length - END)},
            "prompts": lambda: {"prompt": text(self.prompt)},
            "pairs": lambda: (
                {"prompt": text(self.length - self.answer)}
                | {side: text(self.answer - END) for side in ("chosen", "rejected")}
            ),
        }
        lines = (json.dumps(make[self.kind]()) for _ in range(ROWS))
        (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def cases(toy: bool) -> list[Case]:
    """What is measured on a processor (toy), or on a card."""
    table = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))
    shapes = {**table["shapes"], **PUBLISHED}
    found = table["toy" if toy else "card"]
    return [Case(**one | {"shape": shapes[one["shape"]], "words": tuple(one["words"])}) for one in found]
