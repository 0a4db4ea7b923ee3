"""The demo: right answers, nothing held out is trained on, and a quick start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import DataError, SpecError
from runner.data.config import DemoConfig
from runner.data.demo import DemoData, SortTask, SumTask, build, draw_numbers
from runner.environment import calculator
from runner.environment.config import CalculatorConfig
from runner.interfaces import EvalQuestion, LabeledCompletion, PreferencePair, Prompt, TokenizedExample
from runner.spec.base import ItemKind
from tests.data.conftest import CHATML, byte_tokenizer


def demo(tokenizer: Any, seed: int = 0, kind: ItemKind = "sft", **options: Any) -> DemoData:
    config, decide, unused = DemoConfig(**options), Decisions(strict=True), Path("unused")
    return build(config, tokenizer=tokenizer, seed=seed, decide=decide, cache_dir=unused, kind=kind)


def test_answers_are_sorted_and_held_out_numbers_are_not_trained_on(tokenizer: Any) -> None:
    found = demo(tokenizer)
    asked = {q.prompt.split("sort ")[1][:4] for q in found.held_out_questions()}
    assert all(q.answer == "".join(sorted(q.prompt.split("sort ")[1][:4])) for q in found.held_out_questions())
    learnt = {tokenizer.decode(item.ids).split("sort ")[1][:4] for item in found.take(0, 4000)}
    assert (len(asked), len(learnt), asked & learnt) == (256, 4000, set())
    [item] = found.take(0, 1)
    expected = "".join(sorted(tokenizer.decode(item.ids).split("sort ")[1][:4])) + "<|im_end|>"
    assert tokenizer.decode([i for i, w in zip(item.ids, item.weights, strict=True) if w]) == expected


def test_it_is_a_function_of_seed_and_step(tokenizer: Any) -> None:
    one, two = demo(tokenizer), demo(tokenizer)
    assert one.take(7, 32) == two.take(7, 32)
    assert one.take(3, 32) == two.take(3, 32)
    assert one.fingerprint == two.fingerprint
    other = demo(tokenizer, seed=1)
    assert other.take(7, 32) != one.take(7, 32)
    assert other.fingerprint != one.fingerprint
    assert demo(tokenizer, digits=5).fingerprint != one.fingerprint


@pytest.mark.parametrize(("digits", "count"), [(2, 100), (4, 4256), (7, 500), (12, 4256)])
def test_numbers_are_distinct_and_spread(digits: int, count: int) -> None:
    found = draw_numbers(10**digits, count, 3)
    assert len(set(found)) == count
    assert all(0 <= number < 10**digits for number in found)
    assert {str(number).zfill(digits)[0] for number in found} == set("0123456789")


KINDS: tuple[ItemKind, ...] = ("sft", "pairs", "judged", "prompts")


def asked_in(tokenizer: Any, ids: Any) -> str:
    return str(tokenizer.decode(ids)).split("sort ")[1].split("<")[0]


def prompt_of(item: Any) -> Any:
    return item.ids if isinstance(item, TokenizedExample | Prompt) else item.prompt


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_held_out_is_learnt_whatever_the_kind(tokenizer: Any, kind: ItemKind) -> None:
    found = demo(tokenizer, kind=kind, items=500, held_out=50)
    held_out = {q.prompt.split("sort ")[1][:4] for q in found.held_out_questions()}
    learnt = [asked_in(tokenizer, prompt_of(item)) for item in found.take(0, 500)]
    assert len(held_out) == 50
    assert (len(set(learnt)), held_out & set(learnt)) == (500, set())
    assert [asked_in(tokenizer, i.prompt) for i in found.held_out_items()] == (
        [q.prompt.split("sort ")[1][:4] for q in found.held_out_questions()] if kind in ("pairs", "judged") else []
    )


def test_the_same_numbers_and_questions_whatever_the_kind(tokenizer: Any) -> None:
    data = [demo(tokenizer, kind=kind, items=200, held_out=9) for kind in KINDS]
    orders = [[asked_in(tokenizer, prompt_of(item)) for item in d.take(1, 90)] for d in data]
    questions = [[(q.prompt_ids, q.prompt, q.answer) for q in d.held_out_questions()] for d in data]
    assert all(order == orders[0] for order in orders)
    assert all(question == questions[0] for question in questions)
    sft = data[0].held_out_questions()[0].item
    for found in data[1:]:  # the same loss: only the line break after the end token, which is context, is not there
        item = found.held_out_questions()[0].item
        assert item.ids == sft.ids[: len(item.ids)]
        assert item.weights == sft.weights[: len(item.ids)]
        assert sum(item.weights) == sum(sft.weights)
    assert len({d.fingerprint for d in data}) == len(KINDS)


@pytest.mark.parametrize("digits", [2, 4, 12])
def test_of_a_pair_one_answer_is_right_and_the_other_is_not(tokenizer: Any, digits: int) -> None:
    found = demo(tokenizer, kind="pairs", digits=digits, items=80, held_out=20)
    for item in [*found.take(0, 80), *found.held_out_items()]:
        assert isinstance(item, PreferencePair)
        number = asked_in(tokenizer, item.prompt)
        right, other = tokenizer.decode(item.chosen), tokenizer.decode(item.rejected)
        assert right == "".join(sorted(number)) + "<|im_end|>"
        assert other != right and other.endswith("<|im_end|>") and len(other) == len(right)
        assert sorted(other[:digits]) == sorted(number) or len(set(number)) == 1
        assert item.margin is None


def test_judged_answers_are_right_and_wrong_in_turn(tokenizer: Any) -> None:
    found = demo(tokenizer, kind="judged", items=100, held_out=10)
    items = [*found.take(0, 100), *found.held_out_items()]
    for item in items:
        assert isinstance(item, LabeledCompletion)
        right = "".join(sorted(asked_in(tokenizer, item.prompt))) + "<|im_end|>"
        assert (tokenizer.decode(item.completion) == right) == item.good
    assert sum(item.good for item in items) == 55
    other = demo(tokenizer, seed=1, kind="judged", items=100, held_out=10)
    assert [i.good for i in other.held_out_items()] == [not i.good for i in found.held_out_items()]


def test_prompts_have_the_answer_for_rewards(tokenizer: Any) -> None:
    [item] = demo(tokenizer, kind="prompts").take(0, 1)
    assert isinstance(item, Prompt)
    number = asked_in(tokenizer, item.ids)
    assert item.messages == ({"role": "user", "content": f"sort {number}"},)
    assert item.columns == {"answer": "".join(sorted(number))}
    assert item.text == tokenizer.apply_chat_template(item.messages, tokenize=False, add_generation_prompt=True)
    assert list(item.ids) == tokenizer(item.text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_refill_draws_from_an_order_of_its_own(tokenizer: Any, kind: ItemKind) -> None:
    one, two = (demo(tokenizer, kind=kind, items=100, held_out=10) for _ in range(2))
    assert one.take(3, 8, 2) == two.take(3, 8, round=2)
    assert one.take(3, 8, 0) == two.take(3, 8)
    assert len({str(one.take(3, 8, round)) for round in range(4)}) == 4


def test_a_wrong_answer_is_seeded() -> None:
    four = SortTask(DemoConfig())
    assert four.wrong(5031, 0) == four.wrong(5031, 0)
    assert len({four.wrong(5031, seed) for seed in range(40)}) > 10
    assert four.wrong(9999, 0) == "9990"
    assert {SortTask(DemoConfig(digits=2)).wrong(10, seed) for seed in range(9)} == {"10"}


def test_more_items_than_numbers_is_a_problem_of_the_spec() -> None:
    assert [key for key, _ in DemoConfig(digits=2).problems(None)] == ["data.items"]
    assert DemoConfig(digits=2, items=80, held_out=20).problems(None) == []
    assert [key for key, _ in DemoConfig(truncation="skip").problems(None)] == ["data.truncation"]


def test_every_number_of_a_small_space_is_used_once(tokenizer: Any) -> None:
    found = demo(tokenizer, digits=2, items=80, held_out=20)
    everything = [
        *(q.prompt for q in found.held_out_questions()),
        *(tokenizer.decode(i.ids) for i in found.take(0, 80)),
    ]
    assert len({text.split("sort ")[1][:2] for text in everything}) == 100


def test_too_long_is_said_before_the_first_step(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"320 problems(?s:.)*items 1-20 and 300 more: \d+ tokens, above data\.max_len"):
        demo(tokenizer, max_length=20, items=300, held_out=20)
    merged = byte_tokenizer(merges=[("4", "2")])  # some items are shorter than others: all are measured
    with pytest.raises(DataError, match=r"above data\.max_length=33"):
        demo(merged, max_length=33, items=300)
    assert len(demo(tokenizer, max_length=34).take(0, 1)[0].ids) == 34
    assert len(demo(tokenizer, kind="prompts", max_length=28).take(0, 1)[0].ids) == 28
    with pytest.raises(DataError, match=r"demo: items 1-20 and 12 more: 33 tokens, above data\.max_length=32"):
        demo(tokenizer, kind="pairs", max_length=32, items=16, held_out=16)


def test_faults_of_the_template_are_found_at_the_start() -> None:
    with pytest.raises(DataError, match="no chat template"):
        demo(byte_tokenizer(template=None))
    with pytest.raises(Exception, match="so its end is not trained"):
        demo(byte_tokenizer(template=CHATML.replace("<|im_end|>", "##")))


def test_datasets_is_not_imported() -> None:
    program = "import sys, runner.data.demo; print({'datasets', 'pyarrow', 'pandas'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout == "set()\n"


SUM = {"task": "sum", "digits": 3, "terms": 3}


def summed(question: str) -> str:
    """The answer to a question, from its words."""
    return str(sum(map(int, question.split("sum ")[1].split("<")[0].split())))


def test_every_other_sum_is_taught_as_the_conversation_that_the_calculator_would_have(tokenizer: Any) -> None:
    """What the tool says is what environment=calculator says, and only the assistant is trained on."""
    found = demo(tokenizer, items=300, held_out=20, **SUM)
    environment = calculator.build(CalculatorConfig()).make()
    asked = 0
    for item in found.take(0, 300):
        text = tokenizer.decode(item.ids)
        own = tokenizer.decode([i for i, w in zip(item.ids, item.weights, strict=True) if w])
        *call, answer, end = own.split("<|im_end|>")
        assert (answer, end) == (summed(text), "") and environment.step(answer) is None
        if call:
            asked += 1
            said = environment.step(call[0])
            assert call[0].startswith("calc ") and said is not None and said.text == answer
            assert f"<|im_start|>{said.role}\n{said.text}<|im_end|>" in text
    assert asked == 150


def test_sums_are_distinct_in_training_and_held_out_and_the_same_for_every_kind(tokenizer: Any) -> None:
    sft, prompts = (demo(tokenizer, kind=kind, items=400, held_out=50, **SUM) for kind in ("sft", "prompts"))
    learnt = [tokenizer.decode(item.ids).split("sum ")[1].split("<")[0] for item in sft.take(2, 400)]
    asked = [item.messages[0]["content"].removeprefix("sum ") for item in prompts.take(2, 400)]
    assert learnt == asked and len(set(asked)) == 400
    held_out = {q.messages[0]["content"].removeprefix("sum ") for q in prompts.held_out_questions()}
    assert len(held_out) == 50 and not held_out & set(asked)
    for item in prompts.take(0, 400):
        assert item.columns == {"answer": summed(item.text)}
    for terms in asked:
        assert all(len(term) == 3 and term[0] != "0" for term in terms.split()) and len(terms.split()) == 3


@pytest.mark.parametrize("task", ["sort", "sum"])
def test_a_held_out_prompt_is_what_an_environment_is_told(tokenizer: Any, task: Any) -> None:
    questions = demo(tokenizer, kind="prompts", task=task, items=100, held_out=8).held_out_questions()
    for one in questions:
        assert isinstance(one, EvalQuestion) and one.columns == {"answer": one.answer} and one.messages is not None
        assert one.prompt == tokenizer.apply_chat_template(one.messages, tokenize=False, add_generation_prompt=True)


def test_every_question_of_a_small_sum_is_another() -> None:
    config = DemoConfig(task="sum", digits=2)
    task = SumTask(config)
    assert len({task.question(n) for n in range(config.num_questions)}) == 8100


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("algorithm=dpo", r"data\.task: sum is answered in several turns; algorithm=dpo compares completions"),
        ("algorithm=kto", r"data\.task: sum .*type data\.task=sort"),
        ("algorithm=rm", r"data\.task: sum"),
        ("algorithm=sft data.digits=10", r"data\.digits: 2 numbers of data\.digits=10 are more than 18 digits"),
        (
            "algorithm=sft data.digits=2 data.items=9000",
            r"data\.items: 9000 and .* the 8100 questions of data\.task=sum",
        ),
        ("algorithm=sft data.task=sort data.terms=3", r"data\.terms: not used with task=sort; it belongs to task=sum"),
    ],
)
def test_what_makes_no_sense_of_a_sum_is_refused(words: str, problem: str, workdir: Path) -> None:
    with pytest.raises(SpecError, match=problem):
        compose_job(
            ["model=tiny", "data=demo", *(["data.task=sum"] if "data.task" not in words else []), *words.split()]
        )


def test_an_example_of_each_task_can_be_typed() -> None:
    assert DemoConfig().example_prompt() == '"sort 5031"'
    assert DemoConfig(**SUM).example_prompt() == '"sum 503 503 503"'


def test_the_longest_sum_is_what_is_measured(tokenizer: Any) -> None:
    """Only every other one has the tool in it, and some sums have a digit more than others."""
    lengths = sorted({len(item.ids) for item in demo(tokenizer, items=300, held_out=20, **SUM).take(0, 300)})
    assert len(lengths) == 4
    with pytest.raises(DataError, match=rf"{lengths[-1]} tokens, above data\.max_length={lengths[-2]}"):
        demo(tokenizer, items=300, held_out=20, max_length=lengths[-2], **SUM)
    assert len(demo(tokenizer, items=300, held_out=20, max_length=lengths[-1], **SUM)) == 300
