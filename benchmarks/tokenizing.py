"""Tokenizing a file of conversations: in one process with one thread, with the library's threads, and in processes.

    python benchmarks/tokenizing.py [--rows 40000] [--rounds 3]

All arms read, check, render and tokenize the same JSONL file and write Arrow tables without a cache; the tables must be
equal. `tokenizers` itself encodes a batch on all cores, but templates and checks run on one: that is the second arm. A
round runs one after the other; its ratios are between these. Seconds of the processor are printed beside, because on a
machine with other work the seconds of the clock are theirs too. The start of the processes is included.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

# Libraries are imported in functions: a new process imports this module again, and `run`, in its place, imports little.

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_rows(file: Path, rows: int) -> list[str]:
    """Conversations of six messages of 40 to 120 words; returns some of their text."""
    random = Random(0)
    words = ["".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=random.randint(2, 9))) for _ in range(5000)]
    texts = [" ".join(random.choices(words, k=random.randint(40, 120))) for _ in range(2000)]
    with file.open("w") as handle:
        for _ in range(rows):
            roles = ("user", "assistant") * 3
            talk = [{"role": role, "content": random.choice(texts)} for role in roles]
            handle.write(json.dumps({"messages": talk}) + "\n")
    return texts


def make_tokenizer(texts: list[str]) -> Any:
    """A byte-level BPE of 8,000 tokens with ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet))
    marks = ["<|im_start|>", "<|im_end|>"]
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=marks[1], additional_special_tokens=marks)
    found.chat_template = CHATML
    return found


ARMS = {"one thread": (True, "false"), "one process": (True, "true"), "processes": (False, "true")}


def measure(file: Path, tokenizer: Any, arm: str) -> tuple[float, float, str]:
    """(seconds of the clock, of the processor in all processes, sha256 of the table)."""
    from runner.core.auto_choices import Decisions
    from runner.data import parallel_tokenization
    from runner.data.config import FileConfig
    from runner.data.prepare import build

    alone, os.environ["TOKENIZERS_PARALLELISM"] = ARMS[arm]
    parallel_tokenization.ALONE_S = float("inf") if alone else 0.0
    options = {"seed": 0, "decide": Decisions(), "cache_dir": file.parent, "kind": "sft"}
    begin, used = time.perf_counter(), processor_seconds()
    data = build(FileConfig(path=str(file), cache=False), tokenizer=tokenizer, **options)  # type: ignore[arg-type]
    seconds, used = time.perf_counter() - begin, processor_seconds() - used
    [table] = data.tables  # type: ignore[attr-defined]
    rows = [table.record(row) for row in range(len(table))]
    return seconds, used, hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def processor_seconds() -> float:
    """Of this process and of those that ended below it."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in both)


def main() -> int:
    """Run the rounds; 1 if the tables differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    ratios: dict[str, list[float]] = {"one thread": [], "one process": []}
    digests = set()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        tokenizer = make_tokenizer(write_rows(file, args.rows))
        print(f"{args.rows} rows, {file.stat().st_size / 1e6:.0f} MB, {len(os.sched_getaffinity(0))} cores")
        for _ in range(args.rounds):
            found = {arm: measure(file, tokenizer, arm) for arm in ARMS}
            digests |= {digest for _, _, digest in found.values()}
            for arm, values in ratios.items():
                values.append(found[arm][0] / found["processes"][0])
            said = (f"{arm} {clock:.1f} s (processor {used:.1f} s)" for arm, (clock, used, _) in found.items())
            print(", ".join(said), flush=True)
    for arm, values in ratios.items():
        print(f"processes are {statistics.median(values):.2f} times as fast as {arm} (median)")
    print(f"tables {'equal' if len(digests) == 1 else 'DIFFER'}")
    return int(len(digests) != 1)


if __name__ == "__main__":
    sys.exit(main())
