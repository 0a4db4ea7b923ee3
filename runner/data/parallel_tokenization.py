"""Batches of examples to Arrow batches: in this process or, where that takes long, in several.

    examples ──▶ batches of 512 ──BatchTokenizer──▶ TokenizedBatch ──▶ in the order of the examples

The bytes are the same in both ways. `datasets.map(num_proc=…)` would need the rows as an Arrow table first, which turns
rows of different shapes into one, and it forks a process that has threads and devices.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

import pyarrow as pa
from tqdm import tqdm  # type: ignore[import-untyped]

from runner.core.errors import EnvironmentProblem, RankLost
from runner.core.media import MEDIA_ID
from runner.core.rank_info import RankInfo
from runner.core.signals import signal_name
from runner.core.subprocess import end_with_parent
from runner.data.chat import TrainOn
from runner.data.config import ChatConfig
from runner.data.dataset import IMAGE_COLUMN
from runner.data.examples import Example
from runner.data.items import LengthLimit, TruncationCounts
from runner.data.readers import Problems
from runner.data.tokenization import ExampleTokenizer
from runner.interfaces.media import images_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("runner")
ALONE_S = 2.0  # after so many seconds the rest is worth the start of other processes, 1 s each
LOG_EVERY_S = 60.0  # of a process without a terminal
MOST_PROCESSES = 16  # on a machine, each with a copy of the tokenizer, about 300 MB
ALONE = "  `taskset -c 0 run …` tokenizes in one process"


@dataclass(frozen=True, slots=True)
class TokenizedBatch:
    """The items of some examples as Arrow rows, and what was noticed in them."""

    items: pa.RecordBatch
    counts: TruncationCounts
    problems: Problems
    notes: frozenset[str]
    chat_notes: frozenset[str]


@dataclass(frozen=True, slots=True)
class TokenizerOptions:
    """What a process needs in order to tokenize examples."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatConfig
    train_on: TrainOn | None
    limit: LengthLimit
    schema: pa.Schema
    key: str  # the option that named the source
    source: str
    processes: int = 1  # at most


def num_processes(*, sharing_ranks: bool) -> int:
    """One per core, at most 16 on a machine.

    sharing_ranks: the ranks of the machine tokenize at the same time, as they do without a cache
    """
    ranks = RankInfo.from_environment(os.environ).local_size if sharing_ranks else 1
    return max(min(len(os.sched_getaffinity(0)), MOST_PROCESSES) // ranks, 1)


class BatchTokenizer:
    """Tokenizes examples and cuts them to length."""

    def __init__(self, options: TokenizerOptions) -> None:
        self._options = options
        self._tokenizer = ExampleTokenizer(options.tokenizer, options.chat, options.train_on)

    def tokenize(self, examples: Sequence[Example]) -> TokenizedBatch:
        """The items of the examples, in order. Raises DataError."""
        own, tokenizer = self._options, self._tokenizer
        problems, counts = Problems(own.key, own.source), TruncationCounts()
        encoded = tokenizer.encode(examples, problems)
        records = [item.record() for row in encoded for item in own.limit.apply(row, counts, problems)]
        for record in records if "trained" in own.schema.names else ():
            edges = (0, *record["branches"], len(record["ids"]))
            mask = [0, *record["loss_mask"][1:]]  # nothing predicts the first token
            record["trained"] = [sum(mask[start:stop]) for start, stop in pairwise(edges)]
        if reader := images_of(own.tokenizer):
            for record in records:
                parts = [record.get("ids", ()), record.get("prompt", ()), *record.get("answers", ())]
                ids = list(chain.from_iterable(parts))
                record[IMAGE_COLUMN] = [asdict(one) for one in reader.entries(ids)]
                record["media"] = sum(one >= MEDIA_ID for one in ids)
        items = pa.RecordBatch.from_pylist(records, own.schema)
        return TokenizedBatch(items, counts, problems, frozenset(tokenizer.notes), frozenset(tokenizer.chat_notes))


def tokenize_batches(batches: Iterator[Sequence[Example]], options: TokenizerOptions) -> Iterator[TokenizedBatch]:
    """Tokenize batch after batch. Raises DataError, and what `tokenize_in_processes` does."""
    here, begin = BatchTokenizer(options), time.monotonic()
    for batch in batches:
        yield here.tokenize(batch)
        if time.monotonic() - begin >= ALONE_S:
            break
    first = next(batches, None)
    if first is None:
        return
    batches = chain([first], batches)
    is_foreign = type(options.tokenizer).__module__.startswith("transformers_modules")  # not known to other processes
    if options.processes > 1 and not is_foreign:
        yield from tokenize_in_processes(batches, options, here)
    else:
        yield from map(here.tokenize, batches)


def tokenize_in_processes(
    batches: Iterator[Sequence[Example]], options: TokenizerOptions, here: BatchTokenizer
) -> Iterator[TokenizedBatch]:
    """The same in this process and others, which end with it.

    Raises EnvironmentProblem where one cannot be started, and RankLost where one ended.
    """
    others, started = options.processes - 1, dict[int, BaseProcess]()
    with _translate_start_errors(options):
        pool = ProcessPoolExecutor(others, get_context("spawn"), _start_worker, (options,))
    waiting: deque[Future[TokenizedBatch]] = deque()
    try:
        for batch in batches:
            if sum(not one.done() for one in waiting) < 2 * others:
                with _translate_start_errors(options):
                    waiting.append(pool.submit(_tokenize, batch))
                started |= pool._processes or {}  # whose exit codes nothing else tells
            else:  # the others have work, or are starting
                waiting.append(Future())
                waiting[-1].set_result(here.tokenize(batch))
            while waiting and (waiting[0].done() or len(waiting) > 4 * options.processes):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        pool.shutdown()  # waits for all of them, so that each has its exit code
        raise RankLost(
            f"{options.key}={options.source}: a process that tokenizes {_ending(started.values())}\n{ALONE}"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _translate_start_errors(options: TokenizerOptions) -> Iterator[None]:
    """Raise EnvironmentProblem where the system starts no process or thread."""
    try:
        yield
    except BrokenProcessPool:
        raise
    except (OSError, RuntimeError) as error:
        raise EnvironmentProblem(
            f"{options.key}={options.source}: cannot start a process that tokenizes: {error}\n"
            f"  check the limits of processes and files (ulimit -u, ulimit -n), and free memory\n{ALONE}"
        ) from error


def _ending(started: Iterable[BaseProcess]) -> str:
    """How the first of some processes ended; the others are terminated then."""
    codes = [code for process in started if (code := process.exitcode) not in (None, -signal.SIGTERM)]
    if not codes:
        return "ended"
    if codes[0] == -signal.SIGKILL:
        return "was killed (SIGKILL), as the kernel does where memory is short; free memory, then try again"
    if codes[0] < 0:
        return f"was killed ({signal_name(-codes[0])})"
    return f"ended with exit code {codes[0]}; its error is printed above"


def show_progress(batches: Iterator[TokenizedBatch], source: str) -> Iterator[TokenizedBatch]:
    """The batches; a terminal shows the number of rows after seconds, a log each minute."""
    rows, logged = 0, time.monotonic()
    with tqdm(desc=f"tokenizing {source}", unit=" rows", delay=ALONE_S, leave=False, disable=None) as bar:
        for batch in batches:
            bar.update(batch.counts.rows)
            rows += batch.counts.rows
            if bar.disable and time.monotonic() - logged >= LOG_EVERY_S:
                logged = time.monotonic()
                log.info("tokenizing %s: %d rows so far", source, rows)
            yield batch


_worker: BatchTokenizer


def _start_worker(options: TokenizerOptions) -> None:
    """Make this process a worker: it leaves Ctrl-C to its parent, and ends with it."""
    global _worker
    end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = BatchTokenizer(options)


def _tokenize(examples: Sequence[Example]) -> TokenizedBatch:
    return _worker.tokenize(examples)
