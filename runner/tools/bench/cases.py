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
        AutoConfig.for_model(self.shape.kind, **self.shape.options() | ends).save_pretrained(folder / "model")
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
    short, long = (256, 1024) if toy else (2048, 8192)
    tokens = long  # of a micro-batch; a step of sft has two
    small = Shape("qwen3", 1024, 192, 576, 3, 4, 2, tied=True, head_size=48)
    large = Shape("qwen3", 1024, 256, 768, 4, 4, 2, head_size=64)
    if not toy:
        small, large = PUBLISHED["Qwen/Qwen3-0.6B"], PUBLISHED["Qwen/Qwen3-8B"]
    names = ("tiny", "small") if toy else ("0.6B", "8B")
    budget = f"algorithm.micro_batch_tokens={tokens}"
    full = ("model=hf",) if toy else ("model=qwen3_0_6b",)
    adapted = ("model=hf" if toy else "model=qwen2_5_7b_instruct", "adapter=lora", "model.gradient_checkpointing=true")
    group, answer = (4, 32) if toy else (8, 256)
    sft = [
        Case(
            f"sft {name} {length}", shape, "text", 2 * tokens // length, length, length, ("algorithm=sft", budget, *how)
        )
        for name, shape, how in zip(names, (small, large), (full, adapted), strict=True)
        for length in (short, long)
    ]
    sampling = (*("sampler=torch", f"sampler.max_new_tokens={answer}", "reward=length", f"reward.target={answer}"),)
    grpo = ("algorithm=grpo", f"algorithm.group_size={group}", "algorithm.zero_variance=keep", *sampling, budget, *full)
    dpo = Case(
        f"dpo {names[0]} {short}", small, "pairs", tokens // short, short, short // 2, ("algorithm=dpo", budget, *full)
    )
    rows = 4 if toy else 16
    return [*sft, dpo, Case(f"grpo {names[0]} {short // 2}", small, "prompts", rows, short // 2, answer, grpo)]
