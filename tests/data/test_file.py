"""From the user's files to items: cached, ordered, counted, and refused with all that is wrong."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from runner.core.auto_choices import Decisions
from runner.core.errors import DataError, EnvironmentProblem, StorageError
from runner.data.cache_files import cache_lock
from runner.data.chat import Renderer
from runner.data.chat_template import install_template
from runner.data.config import ChatConfig, FileConfig
from runner.data.dataset import TokenizedData
from runner.data.prepare import build
from runner.inference.answer_text import hidden_token_ids
from runner.inference.chat_prompt import render_chat
from runner.spec.base import ItemKind
from tests.data.conftest import CHATML, byte_tokenizer, chat

Jsonl = Callable[..., str]
TALKS = [{"messages": chat(f"question {i}", f"answer {i}"), "id": i} for i in range(20)]


def data(
    tokenizer: Any,
    cache_dir: Path,
    decide: Decisions | None = None,
    seed: int = 0,
    kind: ItemKind = "sft",
    chat_options: ChatConfig | None = None,
    **options: Any,
) -> TokenizedData:
    config, decide, cache = FileConfig(**options), decide or Decisions(), cache_dir / "cache"
    return build(config, tokenizer=tokenizer, seed=seed, decide=decide, cache_dir=cache, kind=kind, chat=chat_options)


def texts(tokenizer: Any, found: TokenizedData, step: int, count: int) -> list[str]:
    return [tokenizer.decode(item.ids) for item in found.take(step, count)]


def said(decide: Decisions, feature: str) -> list[str]:
    return [str(d) for d in decide.entries if d.feature == feature]


def test_items_come_in_file_order_or_shuffled(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    path = jsonl([{"text": str(i)} for i in range(10)])
    plain = data(tokenizer, tmp_path, path=path, shuffle=False)
    assert texts(tokenizer, plain, 1, 4) == [f"{i}<|im_end|>" for i in (4, 5, 6, 7)]
    shuffled = data(tokenizer, tmp_path, path=path)
    assert sorted(texts(tokenizer, shuffled, 0, 10)) == texts(tokenizer, plain, 0, 10)
    assert texts(tokenizer, shuffled, 0, 10) != texts(tokenizer, plain, 0, 10)
    assert len(shuffled) == 10
    assert plain.held_out_questions() == ()


def test_items_are_plain_numbers_with_weights(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    [item] = data(tokenizer, tmp_path, path=jsonl([{"prompt": "a", "completion": "b"}])).take(0, 1)
    assert item.weights == (0.0, 1.0, 1.0)
    assert all(type(i) is int for i in item.ids)
    assert all(type(w) is float for w in item.weights)


def test_format_counts_and_ignored_columns_are_said(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    decide = Decisions(strict=True)
    data(tokenizer, tmp_path, decide, path=jsonl(TALKS))
    assert "messages" in said(decide, "data.format")[0]
    assert "20 items" in said(decide, "data.format")[0]
    assert "not read: id" in said(decide, "data.rename_columns")[0]
    again = Decisions(strict=True)
    data(tokenizer, tmp_path, again, path=jsonl(TALKS))
    assert again.entries == decide.entries  # a hit of the cache says the same


@pytest.mark.parametrize("cache", [True, False])
def test_with_or_without_cache_the_items_are_the_same(
    tokenizer: Any, tmp_path: Path, jsonl: Jsonl, cache: bool
) -> None:
    found = data(tokenizer, tmp_path, path=jsonl(TALKS), cache=cache)
    again = data(tokenizer, tmp_path, path=jsonl(TALKS), cache=True)
    assert found.take(3, 7) == again.take(3, 7)
    assert found.fingerprint == again.fingerprint


def test_nothing_is_written_without_cache(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    data(tokenizer, tmp_path, path=jsonl(TALKS), cache=False)
    assert not (tmp_path / "cache").exists()


def caches(root: Path) -> list[Path]:
    return [path for path in (root / "cache").iterdir() if not path.name.startswith(".")]


def _read(tmp_path: Path, path: Path, told: Any) -> None:
    decide = Decisions()
    told.put((list(data(byte_tokenizer(), tmp_path, decide, path=path).take(0, 20)), said(decide, "data.cache")))


def test_the_ranks_of_a_job_make_a_damaged_cache_again_once(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    path = jsonl(TALKS)
    items = list(data(tokenizer, tmp_path, path=path).take(0, 20))  # before the file is damaged
    [folder] = caches(tmp_path)
    (folder / "ids.item").write_bytes(b"damaged")
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    ranks = [context.Process(target=_read, args=(tmp_path, path, told)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    found = [told.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert [rows for rows, _ in found] == [items] * 4
    assert sorted(len(words) for _, words in found) == [0, 0, 0, 1]  # who came first has found it, and said so


def test_the_cache_is_used_and_a_damaged_one_made_again(
    tokenizer: Any, tmp_path: Path, jsonl: Jsonl, decide: Decisions
) -> None:
    path = jsonl(TALKS)
    items = list(data(tokenizer, tmp_path, path=path).take(0, 20))  # before the file is damaged
    [folder] = caches(tmp_path)
    before = (folder / "ids.item").stat().st_ino
    data(tokenizer, tmp_path, decide, path=path)
    assert (folder / "ids.item").stat().st_ino == before
    assert said(decide, "data.cache") == []
    whole = (folder / "ids.item").read_bytes()
    middle = len(whole) // 2
    (folder / "ids.item").write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    assert data(tokenizer, tmp_path, decide, path=path).take(0, 20) == items
    assert "checksum" in said(decide, "data.cache")[0]
    (folder / "summary.json").write_text("{")
    assert data(tokenizer, tmp_path, path=path).take(0, 20) == items
    (folder / "ids.item").unlink()
    assert data(tokenizer, tmp_path, path=path).take(0, 20) == items
    assert caches(tmp_path) == [folder] and not list((tmp_path / "cache").glob(".staging-*"))


def test_what_killed_processes_left_is_deleted(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    cache, other = tmp_path / "cache", "another-machine"
    for name in (f"killed-{platform.node()}", f"running-{platform.node()}", f"killed-{other}"):
        (cache / f".staging-{name}").mkdir(parents=True)
    with cache_lock(cache / "running"):
        data(tokenizer, tmp_path, path=jsonl(TALKS))
    left = {path.name for path in cache.glob(".staging-*")}
    assert left == {f".staging-running-{platform.node()}", f".staging-killed-{other}"}


def test_a_faulty_file_leaves_no_cache(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    with pytest.raises(DataError):
        data(tokenizer, tmp_path, path=jsonl([{"text": "a"}, {"text": ""}]))
    assert caches(tmp_path) == [] and not list((tmp_path / "cache").glob(".staging-*"))


def test_a_cache_that_cannot_be_written_says_what_to_do(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match=r"data\.cache=false"):
        data(tokenizer, tmp_path, path=jsonl(TALKS))


def test_the_fingerprint_follows_everything_that_items_depend_on(tmp_path: Path, jsonl: Jsonl) -> None:
    path = jsonl([{"messages": chat("a", "b", "c", "d")}])

    def fingerprint(tokenizer: Any = None, **options: Any) -> str:
        return data(tokenizer or byte_tokenizer(), tmp_path, **{"path": path, **options}).fingerprint

    base = fingerprint()
    assert fingerprint() == base
    used = byte_tokenizer()
    used(["a", "bcd"], padding=True, truncation=True, max_length=2)  # leaves its mark on the backend
    assert fingerprint(used) == base
    (tmp_path / "moved").mkdir()
    assert fingerprint(path=jsonl([{"messages": chat("a", "b", "c", "d")}], "moved/rows.jsonl")) == base
    others = [
        fingerprint(path=jsonl([{"messages": chat("a", "b", "c", "e")}], "other.jsonl")),
        fingerprint(byte_tokenizer(merges=[("a", "b")])),
        fingerprint(byte_tokenizer(template=CHATML + "{# another #}")),
        fingerprint(chat_options=ChatConfig(train_on="last")),
        fingerprint(max_length=99),
        fingerprint(truncation="skip"),
        fingerprint(eval_path=path),
    ]
    assert len({base, *others}) == len(others) + 1


def test_faults_of_reading_format_and_length_come_together(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    path = jsonl([{"text": "a"}, {"text": 3}, {"text": "x" * 50}, []])
    with pytest.raises(DataError) as caught:
        data(tokenizer, tmp_path, path=path, max_length=20)
    message = str(caught.value)
    assert "3 problems" in message
    assert "rows.jsonl:2: column text: expected text" in message
    assert "rows.jsonl:3: 51 tokens, above data.max_length=20" in message
    assert "rows.jsonl:4: expected an object" in message


def test_overlong_rows_are_counted_and_said(tokenizer: Any, tmp_path: Path, jsonl: Jsonl, decide: Decisions) -> None:
    path = jsonl([{"text": "a"}, {"text": "x" * 50}, {"text": "b"}])
    assert len(data(tokenizer, tmp_path, decide, path=path, max_length=20, truncation="skip")) == 2
    assert "1 of 3 rows were longer than data.max_length=20: left out" in said(decide, "data.truncation")[0]
    assert len(data(tokenizer, tmp_path, path=path, max_length=20, truncation="split")) == 5
    with pytest.raises(DataError, match=r"no item remains; 1 of 1 rows"):
        only = jsonl([{"text": "x" * 50}], "long.jsonl")
        data(tokenizer, tmp_path, path=only, max_length=20, truncation="skip")


def test_split_is_for_plain_text(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    with pytest.raises(DataError, match=r"truncation=split needs plain text.*rows\.jsonl:1 has messages"):
        data(tokenizer, tmp_path, path=jsonl(TALKS), truncation="split")


def test_held_out_rows_become_questions(tokenizer: Any, tmp_path: Path, jsonl: Jsonl, decide: Decisions) -> None:
    held_out = jsonl([{"messages": chat("a", "b", "c", f"d{i}")} for i in range(5)], "eval.jsonl")
    found = data(tokenizer, tmp_path, decide, path=jsonl(TALKS), eval_path=held_out, max_eval_examples=3)
    questions = found.held_out_questions()
    assert [q.answer for q in questions] == ["d0", "d1", "d2"]
    prompt = tokenizer.apply_chat_template(chat("a", "b", "c"), tokenize=False, add_generation_prompt=True)
    assert questions[0].prompt == prompt
    assert list(questions[0].prompt_ids) == tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert questions[0].item.ids[: len(questions[0].prompt_ids)] == questions[0].prompt_ids
    assert "the first 3 of 5" in said(decide, "data.max_eval_examples")[0]


def test_held_out_text_has_a_loss_and_no_question(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    path = jsonl([{"text": "abc"}])
    [question] = data(tokenizer, tmp_path, path=path, eval_path=path).held_out_questions()
    assert (question.prompt_ids, question.prompt, question.answer) == ((), "", "")
    assert sum(question.item.weights) == 3


def test_an_answer_that_was_cut_is_no_question(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    path = jsonl([{"prompt": "abc", "completion": "defgh"}])
    cut = {"path": path, "eval_path": path, "max_length": 6}
    assert data(tokenizer, tmp_path, truncation="truncate_right", **cut).held_out_questions()[0].prompt_ids == ()
    assert data(tokenizer, tmp_path, truncation="truncate_left", **cut).held_out_questions()[0].prompt_ids == ()
    [asked] = data(tokenizer, tmp_path, truncation="truncate_left", **{**cut, "max_length": 7}).held_out_questions()
    assert (asked.prompt, asked.answer) == ("c", "defgh")


def test_a_mixture_has_its_shares_and_each_source_its_format(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    one = jsonl([{"text": f"a{i}"} for i in range(7)], "one.jsonl")
    two = jsonl([{"prompt": "b", "completion": str(i)} for i in range(50)], "two.jsonl")
    found = data(tokenizer, tmp_path, path=(one, two), mixture_weights=(0.25, 0.75))
    drawn = texts(tokenizer, found, 0, 1000)
    assert sum(text.startswith("a") for text in drawn) == 250
    assert len(found) == 57
    by_size = data(tokenizer, tmp_path, path=(one, two))
    assert sum(text.startswith("a") for text in texts(tokenizer, by_size, 0, 57)) == 7
    assert by_size.fingerprint != found.fingerprint


def test_a_folder_is_one_source_of_one_format(tokenizer: Any, tmp_path: Path, jsonl: Jsonl, decide: Decisions) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.csv").write_text("text\nc\n")
    (tmp_path / "in" / "README.md").write_text("hello")
    (tmp_path / "in" / "c.json").write_text(json.dumps([{"text": "d"}]))
    jsonl([{"text": "a"}, {"text": "b"}], "in/a.jsonl")
    found = data(tokenizer, tmp_path, decide, path=str(tmp_path / "in"), shuffle=False)
    assert texts(tokenizer, found, 0, 4) == [f"{c}<|im_end|>" for c in "abcd"]
    assert "not read: README.md" in said(decide, "data.files")[0]
    jsonl([{"prompt": "a", "completion": "b"}], "in/d.jsonl")
    with pytest.raises(DataError, match=r"d\.jsonl:1: no column text; expected text as at .*a\.jsonl:1"):
        data(tokenizer, tmp_path, path=str(tmp_path / "in"))


def test_many_rows_over_several_batches(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    found = data(tokenizer, tmp_path, path=jsonl([{"text": f"n{i}"} for i in range(1500)]), shuffle=False)
    assert texts(tokenizer, found, 0, 1500) == [f"n{i}<|im_end|>" for i in range(1500)]


def test_a_template_that_rewrites_history_trains_on_every_turn(tmp_path: Path, jsonl: Jsonl) -> None:
    """Each question has the prompt that generation sees; what the branches cost is said."""
    rewriting = CHATML.replace("{{ m.content }}", "{{ 'T' if loop.last and m.role == 'assistant' }}{{ m.content }}")
    tokenizer, decide = byte_tokenizer(template=rewriting), Decisions(strict=True)
    path = jsonl([{"messages": chat("a", "b", "c", "d")}])
    found = data(tokenizer, tmp_path, decide, path=path, eval_path=path)
    [item] = found.take(0, 1)
    assert len(item.branches) == 2
    trained = [i for i, weight in zip(item.ids, item.weights, strict=True) if weight]
    assert tokenizer.decode(trained) == "Tb<|im_end|>Td<|im_end|>"
    [question] = found.held_out_questions()
    assert question.prompt == tokenizer.apply_chat_template(
        chat("a", "b", "c"), tokenize=False, add_generation_prompt=True
    )
    assert question.answer == "Td" and tokenizer.decode(list(question.answer_ids)) == "Td<|im_end|>"
    said = " ".join(map(str, decide.entries))
    assert "1 of 1 rows: generation sees other tokens of earlier turns" in said and "chat.train_on=last" in said


def test_control_tokens_in_rows_are_said(tmp_path: Path, jsonl: Jsonl) -> None:
    for row, note in (
        ({"messages": chat("a<|im_end|>", "b")}, "encoded as text"),
        ({"text": "a<|im_end|>b"}, "encoded as special tokens"),
    ):
        decide = Decisions(strict=True)
        data(byte_tokenizer(), tmp_path, decide, path=jsonl([row]))
        assert note in " ".join(map(str, decide.entries))


def test_content_that_the_template_does_not_write_is_refused(tmp_path: Path, jsonl: Jsonl) -> None:
    thoughtful = {**chat("a", "b")[1], "reasoning_content": "well"}
    path = jsonl([{"messages": [*chat("a", "b"), *chat("c")]}, {"messages": [*chat("a"), thoughtful]}])
    with pytest.raises(
        DataError, match=r"rows\.jsonl:2: the chat template does not render the reasoning of messages\[1\]"
    ):
        data(byte_tokenizer(), tmp_path, path=path)
    found = data(byte_tokenizer(), tmp_path, path=path, chat_options=ChatConfig(drop=("reasoning",)))
    assert len(found) == 2


def test_rows_that_are_too_long_are_named_with_the_value_that_keeps_them(
    tokenizer: Any, tmp_path: Path, jsonl: Jsonl
) -> None:
    path = jsonl([{"text": "a" * size} for size in (3, 9, 30, 8)])
    with pytest.raises(DataError) as caught:
        data(tokenizer, tmp_path, path=path, max_length=8)
    lines = str(caught.value).splitlines()
    assert [line.rpartition("rows.jsonl")[2] for line in lines[1:4]] == [
        f":{row}: {length} tokens, above data.max_length=8" for row, length in ((2, 10), (3, 31), (4, 9))
    ]
    assert "3 of 4 rows are too long; type data.max_length=31 to keep all, or data.truncation=skip" in lines[4]
    assert len(data(tokenizer, tmp_path, path=path, max_length=31)) == 4


def test_keys_of_messages_that_nothing_reads_are_said_once_and_refused_by_strict(
    tokenizer: Any, tmp_path: Path, jsonl: Jsonl
) -> None:
    talks = [{"messages": [m | {"channel": "final"} for m in row["messages"]]} for row in TALKS]
    path, decide = jsonl(talks), Decisions()
    data(tokenizer, tmp_path, decide, path=path, holdout=0.2)
    [line] = said(decide, "data.columns")
    assert "not read: messages[].channel instead of every key read" in line
    with pytest.raises(EnvironmentProblem, match=r"strict=true .*messages\[\]\.channel"):
        data(tokenizer, tmp_path, Decisions(strict=True), path=path)
    decide = Decisions()
    data(byte_tokenizer(CHATML + "{# channel #}"), tmp_path, decide, path=path)
    assert said(decide, "data.columns") == []


def test_nulls_are_missing_keys_in_every_format(tmp_path: Path, jsonl: Jsonl) -> None:
    """As `datasets` writes them into JSON: templates test for keys, and schemas have none of them."""
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": '{"a": null}', "parameters": None}}
    messages = [
        {"role": "user", "content": "w?", "name": None, "tool_calls": None},
        {"role": "assistant", "content": None, "name": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "name": None, "tool_calls": None},
        {"role": "assistant", "content": "it is 42", "name": None, "tool_calls": None},
    ]
    schema = {"name": "f", "description": None, "parameters": {"a": {"type": "integer", "enum": None}}}
    rows = [{"messages": messages, "tools": [{"type": "function", "function": schema}], "id": None}]
    template = (
        "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}{{ ' ' ~ m.name if 'name' in m }}\n"
        "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments | tojson }}"
        "{% endfor %}<|im_end|>{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "rows.parquet")
    as_text = [rows[0] | {"tools": json.dumps(rows[0]["tools"])}]
    paths = [
        jsonl(rows),
        jsonl(table.to_pylist(), "arrow.jsonl"),
        jsonl(as_text, "text.jsonl"),
        str(tmp_path / "rows.parquet"),
    ]
    tokenizer = byte_tokenizer(template)
    items = [data(tokenizer, tmp_path, path=path).take(0, 1)[0] for path in paths]
    assert len({item.ids for item in items}) == len({item.weights for item in items}) == 1
    text = tokenizer.decode(items[0].ids)
    assert "None" not in text and "enum" not in text
    assert 'f {"a": null}' in text  # what the model wrote itself


def test_rows_that_several_sources_share_are_on_one_side(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    rows = [{"text": f"row {i}"} for i in range(60)]
    one, two = jsonl(rows[:40], "one.jsonl"), jsonl(rows[20:], "two.jsonl")
    found = data(tokenizer, tmp_path, path=(one, two), holdout=0.3, max_eval_examples=None, shuffle=False)
    training = set(texts(tokenizer, found, 0, len(found)))
    held_out = [tokenizer.decode(question.item.ids) for question in found.held_out_questions()]
    assert training.isdisjoint(held_out) and len(training) + len(set(held_out)) == 60
    assert len(held_out) >= 24
    with pytest.raises(DataError, match=r"of data\.path=.*two\.jsonl: 1 distinct rows or prompts leave no training"):
        data(tokenizer, tmp_path, path=(one, jsonl(rows[:1], "two.jsonl")), holdout=0.3)


def test_rows_of_a_group_are_on_one_side(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    rows = [{"text": f"user {i % 6}: {i}", "info": {"user": i % 6}} for i in range(60)]
    path = jsonl(rows)
    options: dict[str, Any] = {"holdout": 0.34, "holdout_group": "info.user", "max_eval_examples": None}
    found = data(tokenizer, tmp_path, path=path, **options)
    users = {text.partition(":")[0] for text in texts(tokenizer, found, 0, len(found))}
    others = {tokenizer.decode(question.item.ids).partition(":")[0] for question in found.held_out_questions()}
    assert (len(users), len(others), users & others, len(found)) == (4, 2, set(), 40)
    with pytest.raises(DataError, match=r"rows\.jsonl:60: no column info\.user; data\.holdout_group needs one"):
        data(tokenizer, tmp_path, path=jsonl([*rows[:59], {"text": "x"}]), **options)


def test_truncate_left_keeps_the_bos_of_the_tokenizer(tmp_path: Path, jsonl: Jsonl) -> None:
    tokenizer = byte_tokenizer(bos=True)
    path = jsonl([{"prompt": "x" * 50 + "q", "chosen": " yes", "rejected": " no"}])
    options: dict[str, Any] = {"max_length": 16, "truncation": "truncate_left"}
    [pair] = data(tokenizer, tmp_path, kind="pairs", path=path, **options).take(0, 1)
    assert pair.prompt[0] == tokenizer.bos_token_id
    assert tokenizer.decode(pair.prompt[1:]).endswith("xxq") and len(pair.prompt) + 5 == 16


def call_tokenizer(*names: str) -> Any:
    """A tokenizer of a job with chat.special_tokens, which has the special token <call>."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<call>"]})
    install_template(tokenizer, ChatConfig(special_tokens=names), Decisions())
    return tokenizer


def test_special_tokens_of_the_user_are_tokens_in_assistant_turns_alone(tmp_path: Path, jsonl: Jsonl) -> None:
    tokenizer = call_tokenizer("<call>")
    token = tokenizer.convert_tokens_to_ids("<call>")
    path = jsonl([{"messages": chat("a", "<call>b")}])
    assert token not in data(call_tokenizer(), tmp_path, path=path).take(0, 1)[0].ids
    item = data(tokenizer, tmp_path, path=path).take(0, 1)[0]
    assert item.ids.count(token) == 1 and item.weights[item.ids.index(token)] == 1
    bad = jsonl([{"messages": chat("a <call>", "b")}], "bad.jsonl")
    with pytest.raises(DataError, match=r"bad\.jsonl:1: messages\[0\] \(role user\) has the special token '<call>'"):
        data(tokenizer, tmp_path, path=bad)
    for name, said in (("<none>", "the tokenizer has no special token"), ("<|im_end|>", "ends or opens turns")):
        with pytest.raises(DataError, match=f"chat.special_tokens: .*{said}"):
            data(call_tokenizer(name), tmp_path, path=path)


def test_special_tokens_of_the_user_are_tokens_in_earlier_turns_of_whoever_has_the_export(tmp_path: Path) -> None:
    """As in training: the server and the terminal read the tokenizer alone."""
    call_tokenizer("<call>").save_pretrained(tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path)
    token = read.convert_tokens_to_ids("<call>")
    history = chat("a", "<call>b", "c")
    assert render_chat(Renderer(read), history).ids.count(token) == 1
    assert token not in hidden_token_ids(read, ()) and token in hidden_token_ids(call_tokenizer(), ())
    with pytest.raises(DataError, match=r"messages\[2\] \(role user\) has the special token '<call>'"):
        render_chat(Renderer(read), chat("a", "b", "<call>"))
    ids = Renderer(read).extend(read("a<|im_end|>").input_ids, [{"role": "tool", "content": "<call>"}])
    assert token not in ids and "<call>" in read.decode(ids)  # what an environment says is text


THINKS = CHATML.replace("assistant\n{%", "assistant\n{% if think is defined and not think %}<no>{% endif %}{%").replace(
    "{{ m.content }}", "{{ '<no>' if m.role == 'assistant' and think is defined and not think }}{{ m.content }}"
)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_has_variables_of_the_template_of_its_own(tmp_path: Path, jsonl: Jsonl, streaming: bool) -> None:
    tokenizer = byte_tokenizer(THINKS)
    talk = {"messages": chat("a", "b")}
    rows = [talk, talk | {"chat_template_kwargs": {"think": False}}, talk | {"chat_template_kwargs": {"think": True}}]
    options: dict[str, Any] = {"shuffle": False, "streaming": streaming, "max_length": 200}
    decide = Decisions(strict=True)
    found = data(tokenizer, tmp_path, decide, path=jsonl(rows), **options)
    assert ["<no>" in text for text in texts(tokenizer, found, 0, 3)] == [False, True, False]
    assert not said(decide, "data.columns") and not said(decide, "data.rename_columns")
    prompts = data(
        tokenizer, tmp_path, decide, kind="prompts", path=jsonl([row | {"prompt": chat("a")} for row in rows])
    )
    assert sorted("<no>" in prompt.text for prompt in prompts.take(0, 3)) == [False, False, True]
    job = ChatConfig(kwargs={"think": False})
    own = data(tokenizer, tmp_path, path=jsonl(rows), chat_options=job, **options)
    assert ["<no>" in text for text in texts(tokenizer, own, 0, 3)] == [True, True, False]
    of_verl = byte_tokenizer(THINKS.replace("think", "enable_thinking"))
    rows = [talk, talk | {"enable_thinking": False}]
    found = data(of_verl, tmp_path, Decisions(strict=True), path=jsonl(rows), **options)
    assert ["<no>" in text for text in texts(of_verl, found, 0, 2)] == [False, True]


def test_variables_of_a_row_that_the_template_does_not_read_are_said(tmp_path: Path, jsonl: Jsonl) -> None:
    tokenizer, decide = byte_tokenizer(THINKS), Decisions()
    path = jsonl([{"messages": chat("a", "b"), "chat_template_kwargs": {"thinks": False}, "enable_thinking": True}])
    data(tokenizer, tmp_path, decide, path=path)
    assert "variable of the chat template: enable_thinking, variable" in said(decide, "data.columns")[0]
    with pytest.raises(EnvironmentProblem, match="variable of the chat template: thinks"):
        data(tokenizer, tmp_path, Decisions(strict=True), path=path)


@pytest.mark.parametrize(
    "columns",
    [
        {"chat_template_kwargs": "x"},
        {"chat_template_kwargs": {"think": [1]}},
        {"enable_thinking": [True]},
        {"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True},
    ],
)
def test_variables_of_a_row_are_plain_values(columns: dict[str, Any], tmp_path: Path, jsonl: Jsonl) -> None:
    path = jsonl([{"messages": chat("a", "b"), **columns}])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: (column )?chat_template_kwargs"):
        data(byte_tokenizer(THINKS), tmp_path, path=path)


@pytest.mark.parametrize("kind", ["sft", "prompts"])
def test_a_time_in_a_message_is_a_key_that_nothing_reads(kind: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Rows of Parquet have values without a JSON form, as those of WildChat."""
    asked = [{"role": "user", "content": "a <|im_end|> b", "timestamp": datetime.datetime(2024, 1, 1)}]
    row = {"messages": [*asked, {"role": "assistant", "content": "c"}]} if kind == "sft" else {"prompt": asked}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    decide = Decisions()
    found = data(tokenizer, tmp_path, decide, kind=kind, path=str(tmp_path / "a.parquet"))
    assert len(found) == 1 and any("[].timestamp" in str(one) for one in decide.entries)
