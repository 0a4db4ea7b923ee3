"""Batches of examples to Arrow batches: in this process or, where that takes long, in several.

    examples ──▶ batches of 512 ──BatchTokenizer──▶ TokenizedBatch ──▶ in the order of the examples

The bytes are the same in both ways. `datasets.map(num_proc=…)` would need the rows as an Arrow table first, which turns
rows of different shapes into one, and it forks a process that has threads and devices.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING

import pyarrow as pa
from tqdm import tqdm  # type: ignore[import-untyped]

from runner.core.errors import RankLost
from runner.core.subprocess import end_with_parent
from runner.data.chat import TrainOn
from runner.data.config import ChatConfig
from runner.data.examples import Example
from runner.data.items import LengthLimit, TruncationCounts
from runner.data.readers import Problems
from runner.data.tokenization import ExampleTokenizer, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ALONE_S = 5.0  # after so many seconds the rest is worth the start of other processes
MOST_PROCESSES = 16  # each with a copy of the tokenizer, about 300 MB


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


class BatchTokenizer:
    """Tokenizes examples and cuts them to length."""

    def __init__(self, options: TokenizerOptions) -> None:
        self._options = options
        self._tokenizer = ExampleTokenizer(options.tokenizer, options.chat, options.train_on)

    def tokenize(self, examples: Sequence[Example]) -> TokenizedBatch:
        """The items of the examples, in order. Raises DataError."""
        own, tokenizer = self._options, self._tokenizer
        problems, counts = Problems(own.key, own.source), TruncationCounts()
        encoded = encode(tokenizer, examples, problems)
        records = [item.record() for row in encoded for item in own.limit.apply(row, counts, problems)]
        items = pa.RecordBatch.from_pylist(records, own.schema)
        return TokenizedBatch(items, counts, problems, frozenset(tokenizer.notes), frozenset(tokenizer.chat_notes))


def tokenize_batches(batches: Iterator[Sequence[Example]], options: TokenizerOptions) -> Iterator[TokenizedBatch]:
    """Tokenize batch after batch. Raises DataError, and RankLost where a process was killed."""
    here, begin = BatchTokenizer(options), time.monotonic()
    for batch in batches:
        yield here.tokenize(batch)
        if time.monotonic() - begin >= ALONE_S:
            break
    processes = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    is_foreign = type(options.tokenizer).__module__.startswith("transformers_modules")  # not known to other processes
    if processes > 1 and not is_foreign:
        yield from tokenize_in_processes(batches, options, processes)
    else:
        yield from map(here.tokenize, batches)


def tokenize_in_processes(
    batches: Iterator[Sequence[Example]], options: TokenizerOptions, processes: int
) -> Iterator[TokenizedBatch]:
    """The same in so many processes, which end with this one."""
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _start_worker, (options,))
    waiting: deque[Future[TokenizedBatch]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(_tokenize, batch))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise RankLost(
            f"{options.key}={options.source}: a process that tokenizes was killed, as the kernel does where memory is "
            "short\n  free memory and type the command again; `taskset -c 0 run …` tokenizes in one process"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def show_progress(batches: Iterator[TokenizedBatch], source: str) -> Iterator[TokenizedBatch]:
    """The batches; a terminal shows the number of rows once that has taken seconds."""
    with tqdm(desc=f"tokenizing {source}", unit=" rows", delay=ALONE_S, leave=False, disable=None) as bar:
        for batch in batches:
            bar.update(batch.counts.rows)
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
