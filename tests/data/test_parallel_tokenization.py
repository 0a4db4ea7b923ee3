"""Tokenizing in processes gives what one process gives, in the same order; a killed process is an error in words."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from runner.core.errors import DataError, RankLost
from runner.data import parallel_tokenization
from runner.data.config import ChatConfig
from runner.data.dataset import ROWS
from runner.data.examples import ChatExample
from runner.data.items import LengthLimit
from runner.data.parallel_tokenization import TokenizerOptions, tokenize_batches, tokenize_in_processes
from runner.data.readers import SourceLocation
from tests.data.conftest import chat
from tests.data.test_file import data

Batches = Iterator[list[ChatExample]]


@pytest.fixture
def options(tokenizer: Any) -> TokenizerOptions:
    return TokenizerOptions(tokenizer, ChatConfig(), None, LengthLimit(40, "skip"), ROWS, "data.path", "a.jsonl")


def batches(count: int = 12, size: int = 3) -> Batches:
    for at in range(0, count * size, size):
        places = (SourceLocation("a.jsonl", at + i + 1) for i in range(size))
        yield [ChatExample(place, tuple(chat("x" * (place.number % 30), "b"))) for place in places]


def test_processes_give_the_same_as_one(options: TokenizerOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = list(tokenize_batches(batches(), options))
    assert not multiprocessing.active_children()  # little data stay in this process
    monkeypatch.setattr(parallel_tokenization, "ALONE_S", 0.0)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
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


def test_a_killed_process_is_named(options: TokenizerOptions) -> None:
    found = tokenize_in_processes(batches(200), options, 2)
    next(found)
    for child in multiprocessing.active_children():
        child.kill()
    with pytest.raises(RankLost, match=r"data\.path=a\.jsonl: a process that tokenizes was killed"):
        list(found)
