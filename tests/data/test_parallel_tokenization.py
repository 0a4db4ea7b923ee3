"""Tokenizing in processes gives what one process gives, in the same order; a killed process is an error in words."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from runner.core.errors import DataError, EnvironmentProblem, RankLost
from runner.core.rank_info import RankInfo
from runner.data import parallel_tokenization
from runner.data.config import ChatConfig
from runner.data.dataset import ROWS
from runner.data.examples import ChatExample
from runner.data.items import LengthLimit
from runner.data.parallel_tokenization import (
    BatchTokenizer,
    TokenizedBatch,
    TokenizerOptions,
    num_processes,
    show_progress,
    tokenize_batches,
    tokenize_in_processes,
)
from runner.data.readers import SourceLocation
from tests.data.conftest import chat
from tests.data.test_file import data

Batches = Iterator[list[ChatExample]]


@pytest.fixture
def options(tokenizer: Any) -> TokenizerOptions:
    return TokenizerOptions(tokenizer, ChatConfig(), None, LengthLimit(40, "skip"), ROWS, "data.path", "a.jsonl", 2)


def batches(count: int = 12, size: int = 3) -> Batches:
    for at in range(0, count * size, size):
        places = (SourceLocation("a.jsonl", at + i + 1) for i in range(size))
        yield [ChatExample(place, tuple(chat("x" * (place.number % 30), "b"))) for place in places]


def in_processes(given: Batches, options: TokenizerOptions) -> Iterator[TokenizedBatch]:
    return tokenize_in_processes(given, options, BatchTokenizer(options))


def test_a_log_has_a_line_each_minute(
    options: TokenizerOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "runner")
    assert list(show_progress(tokenize_batches(batches(2), options), "a.jsonl")) and not caplog.messages
    monkeypatch.setattr(parallel_tokenization, "LOG_EVERY_S", 0.0)
    list(show_progress(tokenize_batches(batches(2), options), "a.jsonl"))
    assert caplog.messages == ["tokenizing a.jsonl: 3 rows so far", "tokenizing a.jsonl: 6 rows so far"]


def test_processes_give_the_same_as_one(options: TokenizerOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = list(tokenize_batches(batches(), options))
    assert not multiprocessing.active_children()  # little data stay in this process
    monkeypatch.setattr(parallel_tokenization, "ALONE_S", 0.0)
    shared = list(tokenize_batches(batches(), options))
    assert [b.counts for b in shared] == [b.counts for b in alone] and any(b.counts.overlong for b in alone)
    tables = [pa.Table.from_batches([b.items for b in each]) for each in (alone, shared)]
    assert tables[0].equals(tables[1]) and tables[0].num_rows > 20


def test_faults_come_back_from_the_processes(
    tokenizer: Any, tmp_path: Path, jsonl: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl([{"text": "a"}] + [{"text": "x" * n} for n in (30, 50)])
    said = []
    for wait in (100.0, 0.0):
        monkeypatch.setattr(parallel_tokenization, "ALONE_S", wait)
        monkeypatch.setattr("runner.data.prepare.BATCH", 1)
        with pytest.raises(DataError) as caught:
            data(tokenizer, tmp_path, path=path, max_length=20)
        said.append(str(caught.value))
    assert said[0] == said[1] and "2 of 3 rows are too long; type data.max_length=51" in said[0]


def test_the_ranks_of_a_machine_share_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(12)))
    for name, value in RankInfo(5, 8, 1, 4).to_environment().items():
        monkeypatch.setenv(name, value)
    assert [num_processes(sharing_ranks=sharing) for sharing in (False, True)] == [12, 3]
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert num_processes(sharing_ranks=True) == 1


def test_a_killed_process_is_named(options: TokenizerOptions) -> None:
    found = in_processes(batches(200), options)
    next(found)
    for child in multiprocessing.active_children():
        child.kill()
    with pytest.raises(RankLost, match=r"data\.path=a\.jsonl: a process that tokenizes was killed \(SIGKILL\)"):
        list(found)


class Unreadable:
    """A tokenizer that another process cannot read."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_a_process_that_fails_is_not_called_killed(options: TokenizerOptions) -> None:
    with pytest.raises(RankLost, match=r"a process that tokenizes ended with exit code 1; its error is printed above"):
        list(
            tokenize_in_processes(
                batches(), replace(options, tokenizer=cast(Any, Unreadable())), BatchTokenizer(options)
            )
        )


def test_a_process_that_cannot_start_is_an_error_in_words(options: TokenizerOptions) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), hard))
    try:
        with pytest.raises(EnvironmentProblem, match=r"cannot start a process .* Too many open files") as caught:
            list(in_processes(batches(), options))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "ulimit -u" in str(caught.value) and "taskset -c 0 run" in str(caught.value)
