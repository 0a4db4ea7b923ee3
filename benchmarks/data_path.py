"""Processor time of the data path for a token of the global batch: reading, packing, counting, partition among ranks.

    python benchmarks/data_path.py [--ranks 64] [--kind sft] [--json]
    python benchmarks/data_path.py --batch-size 64 --steps 1 --rows 40000    # memory with a cache of 210 MB

One process plays a rank of a job of so many ranks: of each step it takes the rows, makes the batch with its totals and
counts its operations, as every rank does, and lays out its own micro-batches. The global batch is the same for any
number of ranks. The cache is written with random rows and read as by a job; its first steps are not counted. The rows
of --kind grpo are random answers, 16 to a prompt: a rank pickles its own and reads those of all; nothing is sampled.
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from runner.algorithm.config import SftConfig
from runner.algorithm.policy.config import GrpoConfig
from runner.algorithm.policy.policy_gradient import build as build_policy
from runner.algorithm.preference.config import DpoConfig
from runner.algorithm.preference.learning import build_dpo
from runner.algorithm.sft import build
from runner.core.auto_choices import Decisions
from runner.core.batch import Batch
from runner.core.completion_text import completion_text
from runner.data.dataset import PROMPTS_WITH_ANSWERS, ROWS, TokenizedData, Write, load_or_build
from runner.data.sampling_order import ProportionalOrder, RefillOrders
from runner.distributed.work_partition import SingleProcess, shard_batch
from runner.interfaces import Completion, Prompt, Request, Rollout
from runner.interfaces.learning import AlgorithmInputs
from runner.model.flops import MatmulWeights, ModelFlops
from runner.model.tiny import byte_tokenizer

BUDGET = 8192  # tokens of a micro-batch
FLOPS = ModelFlops(MatmulWeights(trained=1e9), ((None, 1024),))


class OneOf(SingleProcess):
    """One of several ranks that nobody asks anything."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def make_record(kind: str, random: np.random.Generator, length: int) -> dict[str, Any]:
    """A row of `length` tokens, of which the second half is trained on."""
    ids, half = random.integers(0, 150_000, length).tolist(), length // 2
    if kind == "pairs":
        answers = [ids[half : half + half // 2 + 1], ids[half + half // 2 :]]
        return {"prompt": ids[:half], "answers": answers, "facts": '{"margin": null}'}
    mask = [0] * half + [1] * (length - half)
    return {"ids": ids, "loss_mask": mask, "first": half, "last": length, "branches": [], "trained": [length - half]}


def make_data(folder: Path, kind: str, rows: int, longest: int) -> TokenizedData:
    """Random rows of 64 to `longest` tokens, read from a cache in the folder."""
    random = np.random.default_rng(0)
    schema = PROMPTS_WITH_ANSWERS if kind == "pairs" else ROWS

    def fill(write: Write) -> dict[str, Any]:
        for first in range(0, rows, 512):
            lengths = random.integers(64, longest + 1, min(512, rows - first)).tolist()
            write(pa.RecordBatch.from_pylist([make_record(kind, random, length) for length in lengths], schema))
        return {}

    table, _ = load_or_build(folder / "cache", schema, fill, print)
    orders = RefillOrders(lambda seed, shuffle: ProportionalOrder([len(table)], seed, shuffle), 0, True)
    options: Any = {"prompt_style": "text", "tokenizer": None, "columns": frozenset(), "longest": longest}
    return TokenizedData(kind=kind, tables=[table], rounds=orders, fingerprint="", **options)  # type: ignore[arg-type]


class Scored:
    """Stands for a reference, whose log-probabilities all ranks get."""

    def forward(self, batch: Batch, needs: frozenset[str]) -> dict[str, torch.Tensor]:
        """Zeros, [T]."""
        return {"logprobs": torch.zeros(batch.num_tokens)}


class Prompts:
    """The same prompts in every step."""

    def take(self, step: int, count: int, round: int = 0) -> list[Prompt]:
        """`count` prompts of 128 tokens."""
        return [Prompt((97,) * 128, "a" * 128)] * count


class OtherRanks:
    """Stands for the samplers of all ranks: this one decodes and pickles its own answers, and unpickles everybody's."""

    temperature, max_model_len = 1.0, None

    def __init__(self, count: int, longest: int, ranks: int, tokenizer: Any) -> None:
        random, self.tokenizer = np.random.default_rng(0), tokenizer
        self.max_new_tokens, self.answers = longest, list[Rollout]()
        for length in random.integers(64, longest + 1, count).tolist():
            logprobs, ids = random.standard_normal(length), random.integers(0, 256, length).tolist()
            self.answers.append(Rollout(ids, logprobs, logprobs, 0, "stop", text=completion_text(tokenizer, ids)))
        self.own, self.sent = self.answers[: len(self.answers) // ranks], pickle.dumps(self.answers)

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        """The answers as another process would have sent them."""
        pickle.dumps([replace(one, text=completion_text(self.tokenizer, one.ids)) for one in self.own])
        return list(pickle.loads(self.sent))


class LengthReward:
    """1 for an answer of an even number of tokens, else 0."""

    def score(self, groups: Sequence[Sequence[Completion]]) -> list[list[float]]:
        """See `Reward`."""
        return [[1.0 - len(one.ids) % 2 for one in group] for group in groups]


def make_policy(rows: int, longest: int, ranks: int) -> Any:
    """GRPO that learns `rows` answers in each step."""
    tokenizer = byte_tokenizer(8192)
    config, sampler = (
        GrpoConfig(batch_size=rows // 16, group_size=16, kl_coef=0),
        OtherRanks(rows, longest, ranks, tokenizer),
    )
    parts: Any = {"data": Prompts(), "tokenizer": tokenizer, "sampler": sampler, "reward": LengthReward()}
    return build_policy(config, AlgorithmInputs(seed=0, decide=Decisions(), **parts))


def run_step(algorithm: Any, step: int, peers: SingleProcess) -> int:
    """What a rank does with the rows of a step; returns the tokens of the global batch."""
    tokens = 0
    for batch in algorithm.prepare(algorithm.collect(step), {"reference": Scored()}):
        tokens += batch.num_tokens
        FLOPS.batch_flops(batch)
        for micro, _ in shard_batch(batch, BUDGET, peers, padded=False):
            sum(int(channel[-1]) for channel in micro.read().tokens.values())
    return tokens


def make_algorithm(kind: str, data: TokenizedData, batch_size: int, ranks: int) -> Any:
    """SFT or DPO over the data; ranks: unused, since all of them read the same cache."""
    inputs: Any = SimpleNamespace(data=data)
    maker: Any = (build_dpo, DpoConfig) if kind == "pairs" else (build, SftConfig)
    return maker[0](maker[1](batch_size=batch_size), inputs)


def measure(algorithm: Any, ranks: int, steps: int) -> float:
    """Nanoseconds of processor time for a token of the global batch, on the middle one of the ranks."""
    peers, found = OneOf(ranks // 2, ranks), []
    for step in range(steps + 2):
        begin = time.process_time_ns()
        tokens = run_step(algorithm, step, peers)
        found.append((time.process_time_ns() - begin) / tokens)
    return statistics.median(found[2:])


def private_mb() -> int:
    """Resident memory of this process (MB) without the pages of files."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) // 1024


def main() -> None:
    """Print the figures of 1, 8 and --ranks ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--kind", choices=("sft", "pairs", "grpo"), default="sft")
    parser.add_argument("--batch-size", type=int, default=1024, help="rows of a step")
    parser.add_argument("--rows", type=int, help="rows of the cache; four steps if not given")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest row; the shortest has 64")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args()
    if args.kind == "grpo" and (args.batch_size < 16 or args.rows):
        parser.error("--kind grpo has 16 answers to a prompt and no cache: --batch-size from 16, and no --rows")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make = partial(make_policy, args.batch_size, args.longest)
        if args.kind != "grpo":
            data = make_data(Path(folder), args.kind, args.rows or 4 * args.batch_size, args.longest)
            make = partial(make_algorithm, args.kind, data, args.batch_size)
        found = {
            ranks: round(measure(make(ranks), ranks, args.steps), 2)
            for ranks in sorted({1, min(8, args.ranks), args.ranks})
        }
    own_mb = private_mb()
    if args.json:
        figures = {"ns_per_global_token": {str(ranks): ns for ranks, ns in found.items()}, "own_mb": own_mb}
        print(json.dumps({"kind": args.kind, **figures}))
    else:
        for ranks, nanoseconds in found.items():
            print(f"{ranks} ranks: {nanoseconds} ns of processor time on each rank for a token of the global batch")
        print(f"{own_mb} MB of memory of its own, beside the pages of the cache that it shares with other ranks")


if __name__ == "__main__":
    main()
