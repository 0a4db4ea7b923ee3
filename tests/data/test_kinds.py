"""From the user's files to pairs, judged answers and prompts: cached, ordered, limited and held out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.core.auto_choices import Decisions
from runner.core.errors import DataError, EnvironmentProblem
from runner.data.config import ChatConfig, FileConfig, today
from runner.data.dataset import TokenizedData
from runner.data.prepare import build
from runner.interfaces import LabeledCompletion, PreferencePair, Prompt
from runner.spec.base import ItemKind
from tests.data.conftest import CHATML, byte_tokenizer, chat

Jsonl = Callable[..., str]
END = "<|im_end|>"
PAIRS = [{"prompt": f"p{i}", "chosen": f"c{i}", "rejected": f"r{i}", "margin": i / 4} for i in range(12)]
JUDGED = [{"prompt": f"p{i}", "completion": f"c{i}", "label": i % 3 == 0} for i in range(12)]
PROMPTS = [{"prompt": chat(f"p{i}"), "answer": f"a{i}", "level": i} for i in range(12)]
ROWS: dict[ItemKind, list[Any]] = {
    "sft": [{"text": f"t{i}"} for i in range(12)],
    "pairs": PAIRS,
    "judged": JUDGED,
    "prompts": PROMPTS,
}
KINDS = tuple(ROWS)


def data(
    tokenizer: Any, folder: Path, kind: ItemKind, decide: Decisions | None = None, seed: int = 0, **options: Any
) -> TokenizedData:
    config, decide, cache = FileConfig(**options), decide or Decisions(), folder / "cache"
    return build(config, tokenizer=tokenizer, seed=seed, decide=decide, cache_dir=cache, kind=kind)


def said(decide: Decisions, feature: str) -> list[str]:
    return [str(d) for d in decide.entries if d.feature == feature]


def test_pairs(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    decide = Decisions(strict=True)
    found = data(tokenizer, tmp_path, "pairs", decide, path=jsonl(PAIRS), shuffle=False).take(0, 12)
    for i, item in enumerate(found):
        assert isinstance(item, PreferencePair)
        assert [tokenizer.decode(ids) for ids in (item.prompt, item.chosen, item.rejected)] == [
            f"p{i}",
            f"c{i}{END}",
            f"r{i}{END}",
        ]
        assert item.margin == i / 4
        assert all(type(token) is int for token in (*item.prompt, *item.chosen, *item.rejected))
    assert "prompt+chosen+rejected (text)" in said(decide, "data.format")[0]
    assert "12 items" in said(decide, "data.format")[0]


@pytest.mark.parametrize("kind", KINDS)
def test_how_to_ask_follows_the_training_rows(tokenizer: Any, tmp_path: Path, jsonl: Jsonl, kind: ItemKind) -> None:
    path, talks = jsonl(ROWS[kind]), jsonl([{"prompt": chat("a"), "answer": "b"}], "talks.jsonl")
    assert data(tokenizer, tmp_path, kind, path=path).prompt_style == ("chat" if kind == "prompts" else "text")
    if kind == "prompts":
        plain = jsonl([{"prompt": "a"}], "plain.jsonl")
        assert data(tokenizer, tmp_path, kind, path=plain, eval_path=talks).prompt_style == "text"
        assert data(tokenizer, tmp_path, kind, path=(plain, talks)).prompt_style == "chat"


def test_judged_answers(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    found = data(tokenizer, tmp_path, "judged", path=jsonl(JUDGED), shuffle=False).take(0, 12)
    expected = [(f"p{i}", f"c{i}{END}", i % 3 == 0) for i in range(12)]
    assert [(tokenizer.decode(i.prompt), tokenizer.decode(i.completion), i.good) for i in found] == expected
    assert {type(i) for i in found} == {LabeledCompletion}


def test_prompts_with_what_rewards_see(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    decide = Decisions(strict=True)
    [*found] = data(tokenizer, tmp_path, "prompts", decide, path=jsonl(PROMPTS), shuffle=False).take(0, 12)
    text = tokenizer.apply_chat_template(chat("p3"), tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert found[3] == Prompt(tuple(ids), text, tuple(chat("p3")), {"answer": "a3", "level": 3})
    assert "for rewards: answer, level" in said(decide, "data.rename_columns")[0]
    assert not any("not read" in line for line in said(decide, "data.rename_columns"))


def test_a_completion_is_not_learnt_from_a_prompt_and_this_is_said(
    tokenizer: Any, tmp_path: Path, jsonl: Jsonl, decide: Decisions
) -> None:
    path = jsonl([{"prompt": chat("a"), "completion": chat("a", "b")[1:]}])
    [item] = data(tokenizer, tmp_path, "prompts", decide, path=path).take(0, 1)
    assert item.columns == {"completion": "b"}
    assert "the completion is not trained on" in said(decide, "data.rename_columns")[0]


def test_columns_that_are_no_json_are_left_out_and_said(tokenizer: Any, tmp_path: Path, decide: Decisions) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "a", "blob": b"\x00", "answer": "b"}]), path)
    [item] = data(tokenizer, tmp_path, "prompts", decide, path=str(path)).take(0, 1)
    assert item.columns == {"answer": "b"}
    assert "not read: blob instead of given to rewards" in said(decide, "data.rename_columns")[0]
    with pytest.raises(EnvironmentProblem, match="blob"):
        data(tokenizer, tmp_path, "prompts", Decisions(strict=True), path=str(path))


@pytest.mark.parametrize("kind", KINDS)
def test_cached_or_not_the_items_are_the_same(tokenizer: Any, tmp_path: Path, jsonl: Jsonl, kind: ItemKind) -> None:
    path, decisions = jsonl(ROWS[kind]), [Decisions(), Decisions(), Decisions()]
    fresh, again = (data(tokenizer, tmp_path, kind, d, path=path) for d in decisions[:2])
    memory = data(tokenizer, tmp_path, kind, decisions[2], path=path, cache=False)
    assert fresh.take(2, 9) == again.take(2, 9) == memory.take(2, 9)
    assert fresh.take(2, 9, 3) == again.take(2, 9, 3) == memory.take(2, 9, 3)
    assert fresh.fingerprint == again.fingerprint == memory.fingerprint
    assert decisions[0].entries == decisions[1].entries == decisions[2].entries
    assert len([path for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")]) == 1


def test_the_day_changes_the_tokens_of_templates_that_read_it_alone(tmp_path: Path, jsonl: Jsonl) -> None:
    path = jsonl([{"prompt": chat("a")}])

    def prepared(template: str, date: str | None) -> TokenizedData:
        options: dict[str, Any] = {"decide": Decisions(), "cache_dir": tmp_path / "cache", "kind": "prompts", "seed": 0}
        chat_options = ChatConfig(date=date)
        return build(FileConfig(path=path), tokenizer=byte_tokenizer(template), chat=chat_options, **options)

    first, other = (prepared(CHATML, date) for date in ("2024-02-03", None))
    assert first.fingerprint == other.fingerprint
    dated = "{{ strftime_now('%Y-%m-%d') }}" + CHATML
    found = [prepared(dated, date) for date in ("2024-02-03", "2024-02-04", "2024-02-03", today(), None)]
    assert [data.fingerprint == found[0].fingerprint for data in found] == [True, False, True, False, False]
    assert found[3].fingerprint == found[4].fingerprint
    assert [data.take(0, 1)[0].text[:10] for data in found[:3]] == ["2024-02-03", "2024-02-04", "2024-02-03"]


def test_the_fingerprint_follows_the_kind_and_the_names(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    row = {"prompt": "a b", "chosen": "a b", "rejected": "a c", "completion": "d", "label": True, "answer": "e"}
    path = jsonl([row, row])
    found = [data(tokenizer, tmp_path, kind, path=path).fingerprint for kind in KINDS]
    found.append(data(tokenizer, tmp_path, "prompts", path=path, rename_columns={"answer": "solution"}).fingerprint)
    found.append(data(tokenizer, tmp_path, "prompts", path=path, eval_path=path).fingerprint)
    assert len(set(found)) == 6


ASKED = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=6)


@pytest.mark.parametrize("kind", KINDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(asked=ASKED, shuffle=st.booleans(), weighted=st.booleans())
def test_a_resumed_run_goes_on_with_the_same_items(
    tokenizer: Any, tmp_path: Path, jsonl: Jsonl, kind: ItemKind, asked: Any, shuffle: bool, weighted: bool
) -> None:
    """Whatever was taken before, and by whichever process, `take` gives the same."""
    paths = (jsonl(ROWS[kind][:5], "one.jsonl"), jsonl(ROWS[kind][5:], "two.jsonl"))
    options = {"path": paths, "shuffle": shuffle, "mixture_weights": (0.25, 0.75) if weighted else None}
    one = data(tokenizer, tmp_path, kind, **options)
    before = [one.take(*a) for a in asked]
    for a, items in zip(reversed(asked), reversed(before), strict=True):
        assert data(tokenizer, tmp_path, kind, **options).take(*a) == items == one.take(*a)
    joined = [item for step in range(4) for item in one.take(step, 6, 1)]
    assert joined == [item for step in range(2) for item in one.take(step, 12, 1)]


def test_a_refill_differs_from_what_it_refills(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    found = data(tokenizer, tmp_path, "prompts", path=jsonl(PROMPTS), shuffle=False)
    assert [p.columns["level"] for p in found.take(0, 12)] == list(range(12))
    orders = [[p.columns["level"] for p in found.take(0, 12, round)] for round in range(3)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("kind", ["pairs", "judged"])
def test_held_out_pairs_and_judged_answers(tokenizer: Any, tmp_path: Path, jsonl: Jsonl, kind: ItemKind) -> None:
    held_out = jsonl(ROWS[kind][::-1], "eval.jsonl")
    decide = Decisions(strict=True)
    found = data(tokenizer, tmp_path, kind, decide, path=jsonl(ROWS[kind]), eval_path=held_out, max_eval_examples=5)
    assert [tokenizer.decode(i.prompt) for i in found.held_out_items()] == [f"p{i}" for i in range(11, 6, -1)]
    assert found.held_out_questions() == ()
    assert "the first 5 of 12" in said(decide, "data.max_eval_examples")[0]
    assert data(tokenizer, tmp_path, kind, path=jsonl(ROWS[kind])).held_out_items() == ()


def test_held_out_prompts_become_questions(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    path = jsonl(PROMPTS)
    found = data(tokenizer, tmp_path, "prompts", path=path, eval_path=path)
    sft = jsonl([{"prompt": p["prompt"], "completion": chat("", p["answer"])[1:]} for p in PROMPTS], "sft.jsonl")
    expected = data(tokenizer, tmp_path, "sft", path=sft, eval_path=sft).held_out_questions()
    assert [(q.prompt_ids, q.prompt, q.answer) for q in found.held_out_questions()] == [
        (q.prompt_ids, q.prompt, q.answer) for q in expected
    ]
    trained = {prompt.ids: prompt for prompt in found.take(0, len(PROMPTS))}
    for one in found.held_out_questions():  # an environment is told of it what it is told of the same row in training
        asked = trained[one.prompt_ids]
        assert (one.messages, one.columns, one.prompt) == (asked.messages, asked.columns, asked.text)
    assert (
        found.held_out_questions()[0].item.ids == expected[0].item.ids[:-1]
    )  # without the line break after the end token
    assert sum(found.held_out_questions()[0].item.weights) == sum(expected[0].item.weights) == 3
    assert (
        found.held_out_questions()[2].prompt_ids
        == found.take(0, 12)[0].ids[:0] + found.held_out_questions()[2].item.ids[:-3]
    )
    assert found.held_out_items() == ()
    assert data(tokenizer, tmp_path, "prompts", path=path).held_out_questions() == ()


def test_a_template_that_opens_a_thought_asks_and_compares_texts(tmp_path: Path, jsonl: Jsonl) -> None:
    """The expected answer is no continuation of the prompt, so it has no loss."""
    tokenizer, decide = (
        byte_tokenizer(CHATML.replace("assistant\n{%", "assistant\n<think>\n{%")),
        Decisions(strict=True),
    )
    path = jsonl(PROMPTS)
    found = data(tokenizer, tmp_path, "prompts", decide, path=path, eval_path=path).held_out_questions()
    assert len(found) == len(PROMPTS)
    for number, question in enumerate(found):
        assert question.prompt.endswith(f"p{number}{END}\n<|im_start|>assistant\n<think>\n")
        assert (question.answer, tokenizer.decode(question.answer_ids)) == (f"a{number}", f"a{number}")
        assert question.item.ids == question.prompt_ids and not any(question.item.weights)
    assert any("their loss is not measured" in line for line in said(decide, "chat"))


def test_a_held_out_prompt_without_answer_names_the_row(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    path, held_out = jsonl(PROMPTS), jsonl([PROMPTS[0], {"prompt": chat("a")}], "eval.jsonl")
    expected = r"(?s)data\.eval_path=.*eval\.jsonl:2: no column answer; expected prompt\+answer"
    with pytest.raises(DataError, match=expected):
        data(tokenizer, tmp_path, "prompts", path=path, eval_path=held_out)
    with pytest.raises(DataError, match=expected):
        FileConfig(path=path, eval_path=held_out).preflight("prompts")


def test_max_length_bounds_prompt_and_longer_answer(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    path = jsonl(
        [{"prompt": "abcd", "chosen": "e", "rejected": "efg"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    )
    with pytest.raises(DataError, match=r"rows\.jsonl:1: 8 tokens, above data\.max_length=7\n"):
        data(tokenizer, tmp_path, "pairs", path=path, max_length=7)
    assert len(data(tokenizer, tmp_path, "pairs", path=path, max_length=7, truncation="skip")) == 1
    decide = Decisions()
    cut = data(tokenizer, tmp_path, "pairs", decide, path=path, max_length=7, truncation="truncate_left", shuffle=False)
    assert tokenizer.decode(cut.take(0, 1)[0].prompt) == "bcd"
    assert "1 of 2 rows were longer than data.max_length=7: truncated by 1 tokens" in said(decide, "data.truncation")[0]


def test_max_length_bounds_a_prompt_and_its_text_is_what_is_left(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    path = jsonl([{"prompt": "abcdefgh", "answer": "a long answer"}])
    options = {"path": path, "eval_path": path, "max_length": 5}
    with pytest.raises(DataError, match="8 tokens, above"):
        data(tokenizer, tmp_path, "prompts", **options)
    found = data(tokenizer, tmp_path, "prompts", truncation="truncate_left", **options)
    assert found.take(0, 1)[0].text == "defgh" == found.held_out_questions()[0].prompt
    assert found.held_out_questions()[0].answer == "a long answer"


def test_what_a_reward_sees_of_plain_text_is_that_of_the_data(tmp_path: Path, jsonl: Jsonl) -> None:
    path, tokenizer = jsonl([{"prompt": "once", "answer": "upon"}]), byte_tokenizer(bos=True)
    found = data(tokenizer, tmp_path, "prompts", path=path, eval_path=path)
    [item], [question] = found.take(0, 1), found.held_out_questions()
    assert item.ids[0] == question.prompt_ids[0] == tokenizer.bos_token_id
    assert item.as_argument() == question.prompt == "once"


def test_pairs_that_are_the_same_are_left_out_and_said(
    tokenizer: Any, tmp_path: Path, jsonl: Jsonl, decide: Decisions
) -> None:
    same = {"prompt": "a", "chosen": "b", "rejected": "b"}
    assert len(data(tokenizer, tmp_path, "pairs", decide, path=jsonl([same, PAIRS[0], same]))) == 1
    assert "2 skipped instead of all" in said(decide, "data.pairs")[0]
    with pytest.raises(DataError, match="no item remains; 1 pairs with equal completions"):
        data(tokenizer, tmp_path, "pairs", path=jsonl([same], "same.jsonl"))


def test_answers_of_several_turns_are_said(tokenizer: Any, tmp_path: Path, jsonl: Jsonl, decide: Decisions) -> None:
    path = jsonl([{"chosen": chat("a", "b", "c", "d"), "rejected": chat("a", "x", "y", "z")}])
    [item] = data(tokenizer, tmp_path, "pairs", decide, path=path).take(0, 1)
    assert tokenizer.decode(item.rejected).count(END) == 3
    assert "in 1 rows a completion has several turns" in said(decide, "data.turns")[0]


def test_columns_are_renamed_before_anything_else(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    path = jsonl([{"question": "1+1?", "answer": "2"}])
    columns = {"question": "prompt"}
    with pytest.raises(DataError, match=r"type 'data\.rename_columns=\{question: prompt\}'"):
        FileConfig(path=path).preflight("prompts")
    FileConfig(path=path, rename_columns=columns).preflight("prompts")
    [item] = data(tokenizer, tmp_path, "prompts", path=path, rename_columns=columns).take(0, 1)
    assert (item.text, item.messages, item.columns) == ("1+1?", None, {"answer": "2"})
    [item] = data(tokenizer, tmp_path, "sft", path=path, rename_columns={**columns, "answer": "completion"}).take(0, 1)
    assert tokenizer.decode(item.ids) == f"1+1?2{END}"


def test_a_name_that_no_row_has_is_an_error(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    one, two = jsonl([{"question": "a"}], "one.jsonl"), jsonl([{"prompt": "b"}], "two.jsonl")
    assert len(data(tokenizer, tmp_path, "prompts", path=(one, two), rename_columns={"question": "prompt"})) == 2
    with pytest.raises(DataError, match=r"data\.rename_columns: no row has a column answr; check the name"):
        data(tokenizer, tmp_path, "prompts", path=two, rename_columns={"answr": "answer"})


def test_data_of_another_kind_names_file_line_and_format(jsonl: Jsonl) -> None:
    path = jsonl([{"messages": chat("a", "b")}])
    expected = r"rows\.jsonl:1: this algorithm trains on preference pairs: expected the columns `prompt`, `chosen`"
    with pytest.raises(DataError, match=expected):
        FileConfig(path=path).preflight("pairs")


def test_preflight_of_every_kind_without_heavy_imports_and_config_can_be_imported_last(jsonl: Jsonl) -> None:
    path = jsonl([{"prompt": "a b", "chosen": "a b", "rejected": "a c", "completion": "d", "label": True, "text": "a"}])
    program = (
        "import sys\n"
        "import runner.data.formats\n"
        "from runner.data.config import FileConfig\n"
        "for kind in ('sft', 'pairs', 'judged', 'prompts'):\n"
        "    FileConfig(path=sys.argv[1]).preflight(kind)\n"
        "print({'torch', 'transformers', 'datasets', 'numpy', 'pyarrow'} & set(sys.modules))\n"
    )
    command = [sys.executable, "-c", program, path]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout == "set()\n"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), min_size=2, max_size=60),
    fraction=st.floats(0.01, 0.6),
    kind=st.sampled_from(KINDS),
)
def test_holdout_splits_every_row_to_one_side_and_no_prompt_to_both(
    tokenizer: Any, tmp_path: Path, jsonl: Jsonl, rows: list[tuple[int, int]], fraction: float, kind: ItemKind
) -> None:
    make: dict[ItemKind, Callable[[int, int], Any]] = {
        "sft": lambda i, j: {"prompt": f"p{i}.", "completion": f"c{j}", "id": (i, j)},
        "pairs": lambda i, j: {"prompt": f"p{i}.", "chosen": f"c{j}", "rejected": "no"},
        "judged": lambda i, j: {"prompt": f"p{i}.", "completion": f"c{j}", "label": True},
        "prompts": lambda i, j: {"prompt": f"p{i}.", "answer": f"c{j}"},
    }
    path = jsonl([make[kind](i, j) for i, j in rows])
    distinct = len({i for i, _ in rows})
    options = {"path": path, "cache": False, "holdout": fraction, "max_eval_examples": None}
    wanted = max(1, round(fraction * distinct))
    if wanted >= distinct:
        with pytest.raises(DataError, match=r"data\.holdout=.* distinct rows or prompts leave no training data"):
            data(tokenizer, tmp_path, kind, **options)
        return
    found = data(tokenizer, tmp_path, kind, **options)
    evaluation = found.evaluation
    assert evaluation is not None and len(found) + len(evaluation) == len(rows)

    def prompts(records: list[Any]) -> set[str]:
        return {tokenizer.decode(r["ids"] if kind == "sft" else r["prompt"]).split(".")[0] for r in records}

    training, held_out = prompts(list(map(found.tables[0].record, range(len(found))))), prompts(evaluation.records())
    assert not training & held_out
    assert len(held_out) == wanted
    reordered = data(
        tokenizer, tmp_path, kind, seed=1, **{**options, "path": jsonl([make[kind](*r) for r in rows[::-1]])}
    )
    assert reordered.evaluation is not None and prompts(reordered.evaluation.records()) == held_out


@pytest.mark.parametrize("form", ["UltraFeedback", "conversations", "text"])
def test_holdout_keeps_pairs_of_one_prompt_together(form: str, tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    def pair(i: int, j: int) -> dict[str, Any]:
        if form == "text":
            same = "I " * (j % 2)  # both answers may begin alike
            return {side: f"Human: q{i}?\n\nAssistant: {same}{side}{j}" for side in ("chosen", "rejected")}
        sides = {side: chat(f"q{i}?", f"{side}{j}") for side in ("chosen", "rejected")}
        return sides | ({"prompt": f"q{i}?"} if form == "UltraFeedback" else {})

    path = jsonl([pair(i, j) for i in range(5) for j in range(6)])
    found = data(tokenizer, tmp_path, "pairs", path=path, holdout=0.4, max_eval_examples=None)
    assert found.evaluation is not None and (len(found), len(found.evaluation)) == (18, 12)
    training = {item.prompt for item in found.take(0, len(found))}
    assert not training & {item.prompt for item in found.held_out_items()}
    path = jsonl([pair(i, 0) for i in range(4)] + [{"chosen": [], "rejected": [{"content": "x"}]}])
    if form == "conversations":
        with pytest.raises(DataError, match=r"rows\.jsonl:5: column chosen"):
            data(tokenizer, tmp_path, "pairs", path=path, holdout=0.4)


def test_holdout_of_several_sources_takes_from_each(tokenizer: Any, tmp_path: Path, jsonl: Jsonl) -> None:
    decide = Decisions(strict=True)
    sizes = {"a": 80, "b": 20}
    paths = tuple(jsonl([{"text": f"{name}{i}"} for i in range(size)], f"{name}.jsonl") for name, size in sizes.items())
    found = data(tokenizer, tmp_path, "sft", decide, path=paths, holdout=0.1, max_eval_examples=5)
    assert (len(found), [len(table) for table in found.tables]) == (90, [72, 18])
    assert found.evaluation is not None
    assert [tokenizer.decode(r["ids"])[:1] for r in found.evaluation.records()] == ["a", "a", "a", "a", "b"]
    assert [line for line in said(decide, "data.format") if "held out of data.path=" in line and "8 items" in line]
    again = data(tokenizer, tmp_path, "sft", path=paths, holdout=0.1)
    assert again.take(0, 90) == found.take(0, 90)


def test_holdout_and_held_out_rows_of_their_own_contradict_each_other() -> None:
    [(key, text)] = FileConfig(path="a", holdout=0.1, eval_path="b")._holdout_problems()
    assert (key, text) == (
        "data.holdout",
        "0.1, but data.eval_path=b sets the held-out rows too; leave one of them out",
    )
