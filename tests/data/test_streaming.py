"""A stream: items are a function of the step, also where a run resumes; what needs all rows is refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import DataError, SpecError
from runner.data import files
from tests.data.conftest import CHATML, byte_tokenizer, chat
from tests.data.test_file import data, said, texts

Jsonl = Callable[..., str]
STREAM: dict[str, Any] = {"streaming": True, "max_length": 40}


def test_every_row_comes_once_a_pass_in_the_order_of_its_block(
    tokenizer: Any, tmp_path: Path, jsonl: Jsonl, decide: Decisions
) -> None:
    path = jsonl([{"text": f"{i:02}"} for i in range(12)])
    found = data(tokenizer, tmp_path, decide, path=path, shuffle_buffer=4, **STREAM)
    first = [text[:2] for step in range(3) for text in texts(tokenizer, found, step, 4)]
    assert sorted(first[:4]) == ["00", "01", "02", "03"] and sorted(first) == [f"{i:02}" for i in range(12)]
    assert first != sorted(first)
    again = [text[:2] for step in range(3, 6) for text in texts(tokenizer, found, step, 4)]
    assert sorted(again) == sorted(first) and again != first
    assert "4 rows are shuffled together" in said(decide, "data.streaming")[0]
    assert (len(found), found.longest) == (sys.maxsize, 40)
    plain = data(tokenizer, tmp_path, path=path, shuffle=False, **STREAM)
    assert [text[:2] for text in texts(tokenizer, plain, 1, 5)] == ["05", "06", "07", "08", "09"]


def test_a_resumed_run_sees_the_same_items(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    path = jsonl([{"text": f"{i:02}"} for i in range(11)])
    options = {"path": path, "shuffle_buffer": 4, **STREAM}
    whole = data(tokenizer, tmp_path, **options)
    steps = [texts(tokenizer, whole, step, 3) for step in range(9)]
    resumed = data(tokenizer, tmp_path, **options)
    assert [texts(tokenizer, resumed, step, 3) for step in range(5, 9)] == steps[5:]
    assert texts(tokenizer, resumed, 1, 3) == steps[1]  # and back
    assert resumed.fingerprint == whole.fingerprint
    assert data(tokenizer, tmp_path, **{**options, "shuffle_buffer": 5}).fingerprint != whole.fingerprint


def test_rows_are_checked_when_they_are_read(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    path = jsonl([{"text": "a"}] * 4 + [{"text": "x" * 50}] + [{"text": 1}] + [{"text": "b"}] * 2)
    with pytest.raises(DataError, match=r"rows\.jsonl:6: column text: expected text") as caught:
        data(tokenizer, tmp_path, path=path, shuffle_buffer=4, **STREAM).take(1, 4)
    assert "rows.jsonl:5: 51 tokens, above data.max_length=40" in str(caught.value)
    long = jsonl([{"text": "a"}] * 3 + [{"text": "x" * 50}], name="long.jsonl")
    found = data(tokenizer, tmp_path, path=long, shuffle_buffer=4, truncation="skip", **STREAM)
    assert len(found.take(0, 4)) == 4  # one item twice
    with pytest.raises(DataError, match=r"the model sets no limit to a row's length; type data\.max_length=N"):
        data(tokenizer, tmp_path, path=path, streaming=True)


def test_a_block_without_an_item_is_replaced_by_the_next_one(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    long = [{"text": "x" * 50}] * 4
    rows = [*long, *long, *({"text": f"a{i}"} for i in range(4)), *long, *({"text": f"b{i}"} for i in range(4))]
    options = {"path": jsonl(rows), "shuffle_buffer": 4, "truncation": "skip", **STREAM}
    whole = data(tokenizer, tmp_path, **options)
    blocks = [[text[:2] for text in texts(tokenizer, whole, step, 4)] for step in range(10)]
    assert [block[0][0] for block in blocks] == list("aaabbaaabb")
    assert all(sorted(block) == [f"{block[0][0]}{i}" for i in range(4)] for block in blocks)
    resumed = data(tokenizer, tmp_path, **options)
    assert [[text[:2] for text in texts(tokenizer, resumed, step, 4)] for step in (6, 7, 3, 1)] == [
        blocks[step] for step in (6, 7, 3, 1)
    ]
    with pytest.raises(DataError, match=r"no item remains; 8 of 8 rows were longer than data\.max_length=40: left out"):
        data(tokenizer, tmp_path, **{**options, "path": jsonl(long + long, name="long.jsonl")})


def test_a_stream_that_lost_all_items_ends_after_a_pass(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    path = jsonl([{"text": "a"}] * 6)
    found = data(tokenizer, tmp_path, path=path, shuffle_buffer=4, truncation="skip", **STREAM)
    jsonl([{"text": "x" * 50}] * 6)
    with pytest.raises(DataError, match=r"no item remains; \d+ of \d+ rows were longer"):
        found.take(0, 4)


def test_what_first_appears_in_a_later_block_is_said_once(
    tokenizer: Any, tmp_path: Path, jsonl: Jsonl, decide: Decisions
) -> None:
    path = jsonl([{"text": "a", "id": 1}] * 4 + [{"text": "b<|im_end|>", "url": "u"}] * 8)
    found = data(tokenizer, tmp_path, decide, path=path, shuffle_buffer=4, **STREAM)
    assert [text.partition(" (")[0] for text in said(decide, "data.rename_columns")] == [
        "data.rename_columns: not read: id"
    ]
    assert said(decide, "chat") == []
    found.take(0, 24)
    assert [("block 1" in text, "url" in text) for text in said(decide, "data.rename_columns")[1:]] == [(True, True)]
    assert len(said(decide, "chat")) == 1 and "block 1" in said(decide, "chat")[0]


def test_an_edited_file_is_other_data(
    tokenizer: Any, tmp_path: Path, jsonl: Jsonl, decide: Decisions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprint(word: str, changed_at: int) -> str:
        path = jsonl([{"text": word}] * 4)
        os.utime(path, (changed_at, changed_at))
        return data(tokenizer, tmp_path, decide, path=path, **STREAM).fingerprint

    assert fingerprint("ab", 1) == fingerprint("ab", 2) != fingerprint("ac", 1)
    assert said(decide, "data.fingerprint") == []
    monkeypatch.setattr(files, "MOST_HASHED_BYTES", 10)
    assert len({fingerprint("ab", 1), fingerprint("ab", 2), fingerprint("ac", 1), fingerprint("ac", 1)}) == 3
    monkeypatch.setattr(files, "SAMPLE_BYTES", 1)  # the difference is in the middle
    assert fingerprint("ab", 1) == fingerprint("ac", 1) != fingerprint("ac", 2)
    assert "modification times, first and last MiB" in said(decide, "data.fingerprint")[0]


def test_branches_that_a_block_has_no_place_for_are_counted(
    tmp_path: Path, jsonl: Jsonl, caplog: pytest.LogCaptureFixture
) -> None:
    """Two branches of a conversation, each short enough and both together too long, are two items of one row."""
    rewriting = CHATML.replace("{{ m.content }}", "{{ 'T' if loop.last and m.role == 'assistant' }}{{ m.content }}")
    tokenizer = byte_tokenizer(template=rewriting)
    path = jsonl([{"messages": chat("a", f"{i}", "c", f"{i}")} for i in range(4)])
    options = {"path": path, "shuffle_buffer": 4, "streaming": True}
    together = len(data(tokenizer, tmp_path, path=path).take(0, 1)[0].ids)
    with caplog.at_level("WARNING", "runner"):
        data(tokenizer, tmp_path, max_length=together, **options).take(0, 8)
        assert caplog.messages == []
        found = data(tokenizer, tmp_path, max_length=together - 1, **options)
        passes = [set(texts(tokenizer, found, step, 4)) for step in range(2)]
    assert passes[0] != passes[1] and [len(items) for items in passes] == [4, 4]
    assert [text.partition(": ")[2] for text in caplog.messages] == [
        "its 4 rows became 8 items, one for each branch of a conversation above the limit; 4 are left out; "
        "to train on all, raise data.max_length or type data.streaming=false"
    ] * 2
    assert [f"block {i}" in text for i, text in enumerate(caplog.messages)] == [True, True]


def test_pairs_that_a_later_block_leaves_out_are_counted(
    tokenizer: Any, tmp_path: Path, jsonl: Jsonl, caplog: pytest.LogCaptureFixture
) -> None:
    path = jsonl([{"prompt": "p", "chosen": "a", "rejected": word} for word in "bcab"])
    with caplog.at_level("INFO", "runner"):
        options = {"path": path, "max_length": 99, "shuffle_buffer": 2, "streaming": True}
        data(tokenizer, tmp_path, kind="pairs", **options).take(0, 4)
    text = caplog.messages[-1]
    assert text.endswith("block 1: pairs left out, as chosen and rejected are the same: 1")


def test_held_out_rows_are_read_whole(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    held_out = jsonl([{"prompt": f"q{i}", "completion": "a"} for i in range(5)], name="eval.jsonl")
    path = jsonl([{"prompt": "q", "completion": "a"}])
    assert len(data(tokenizer, tmp_path, path=path, eval_path=held_out, **STREAM).held_out_questions()) == 5


@pytest.mark.parametrize(
    ("words", "key", "text"),
    [
        (["data.path=[a,b]", "data.streaming=true"], "data.path", "set one source"),
        (["data.path=a", "data.streaming=true", "data.holdout=0.1"], "data.holdout", "data.eval_path"),
        (["data.path=a", "data.streaming=true", "epochs=2"], "epochs", "the number of rows is unknown; set steps"),
        (["data.path=a", "data.streaming=true", "data.truncation=split"], "data.truncation", "type error, skip"),
        (
            ["+recipe=grpo_demo", "data.path=a", "data.streaming=true", "algorithm.zero_variance=resample"],
            "algorithm.zero_variance",
            "type keep or drop",
        ),
        (["data.path=a", "data.shuffle_buffer=9"], "data.shuffle_buffer", "type data.streaming=true"),
    ],
)
def test_what_needs_all_rows_is_refused(words: list[str], key: str, text: str) -> None:
    with pytest.raises(SpecError) as caught:
        compose_job([*words, "data=file"])
    assert [p.key for p in caught.value.problems] == [key] and text in str(caught.value)
