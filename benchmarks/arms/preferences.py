"""Pairs, prompts and a reward, beside the model that `workload` made: what dpo and grpo learn from.

python -m arms.preferences FOLDER

FOLDER/pairs.jsonl          {"prompt", "chosen", "rejected"} per line, plain text
FOLDER/prompts.jsonl        {"prompt"} per line, plain text
FOLDER/long-prompts.jsonl   the same behind a few others with their answers
FOLDER/reward.py            score(prompts, completions, **columns), for every arm the same
FOLDER/several-ends/        the same model, whose answers end at one of several ids, so that their lengths differ
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

LONGEST_ASKED = 48  # words of a question
ENDS = list(range(3, 15))  # of the model whose answers differ in length: as likely as any other of 512 ids
REWARD = '''"""The share of the letter a, so that answers to one prompt differ in reward."""


def score(prompts, completions, **columns):
    return [text.count("a") / max(len(text), 1) for text in completions]
'''


@dataclass(frozen=True, slots=True)
class Rollouts:
    """A way of sampling: model, file of prompts, prompts per step, answers per prompt, most tokens of an answer."""

    model: str
    data: str
    prompts: int
    group: int
    new: int

    @property
    def answers(self) -> int:
        """Per step."""
        return self.prompts * self.group


GRPO = {
    "equal lengths": Rollouts("model", "prompts.jsonl", prompts=8, group=8, new=64),
    "lengths differ": Rollouts("several-ends", "prompts.jsonl", prompts=8, group=8, new=128),
    "short answers": Rollouts("several-ends", "prompts.jsonl", prompts=8, group=8, new=16),
    "long prompts": Rollouts("several-ends", "long-prompts.jsonl", prompts=8, group=8, new=128),
}
SHOTS = 5  # of a long prompt


def make(folder: Path) -> None:
    """Write it all into `folder`; the same bytes every time."""
    rng = random.Random(0)
    pairs = []
    for line in (folder / "conversations.jsonl").read_text().splitlines():
        asked, answer = (message["content"] for message in json.loads(line)["messages"][:2])
        words = answer.split()
        if len(set(words)) > 2 and len(words) <= LONGEST_ASKED:
            wrong = words
            while wrong == words:
                wrong = rng.sample(words, len(words) - rng.randint(0, len(words) // 3))
            pairs.append({"prompt": asked + "\n", "chosen": answer, "rejected": " ".join(wrong)})
    _write(folder / "pairs.jsonl", pairs)
    _write(folder / "prompts.jsonl", [{"prompt": pair["prompt"]} for pair in pairs])
    shown = [pair["prompt"] + pair["chosen"] + "\n" for pair in pairs]
    long = ["".join(rng.sample(shown, SHOTS)) + pair["prompt"] for pair in pairs]
    _write(folder / "long-prompts.jsonl", [{"prompt": text} for text in long])
    (folder / "reward.py").write_text(REWARD)
    other = folder / "several-ends"
    shutil.copytree(folder / "model", other, dirs_exist_ok=True)
    declared = json.loads((other / "generation_config.json").read_text())
    (other / "generation_config.json").write_text(json.dumps(declared | {"eos_token_id": ENDS}))


def _write(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
