"""The demo: right answers, nothing held out is trained on, and a quick start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.data.config import DemoConfig
from runner.data.demo import DemoData, build, numbers
from runner.decisions import Decisions
from runner.errors import DataError
from tests.data.conftest import CHATML, byte_tokenizer


def demo(tokenizer: Any, seed: int = 0, **options: Any) -> DemoData:
    config = DemoConfig(**options)
    return build(config, tokenizer=tokenizer, seed=seed, decide=Decisions(strict=True), cache_dir=Path("unused"))


def test_answers_are_sorted_and_held_out_numbers_are_not_trained_on(tokenizer: Any) -> None:
    found = demo(tokenizer)
    asked = {q.prompt.split("sort ")[1][:4] for q in found.held_out()}
    assert all(q.answer == "".join(sorted(q.prompt.split("sort ")[1][:4])) for q in found.held_out())
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
    found = numbers(digits, count, 3)
    assert len(set(found)) == count
    assert {len(number) for number in found} == {digits}
    assert {number[0] for number in found} == set("0123456789")


def test_more_items_than_numbers_is_a_problem_of_the_spec() -> None:
    assert [key for key, _ in DemoConfig(digits=2).problems(None)] == ["data.items"]
    assert DemoConfig(digits=2, items=80, held_out=20).problems(None) == []
    assert [key for key, _ in DemoConfig(overlong="skip").problems(None)] == ["data.overlong"]


def test_every_number_of_a_small_space_is_used_once(tokenizer: Any) -> None:
    found = demo(tokenizer, digits=2, items=80, held_out=20)
    everything = [*(q.prompt for q in found.held_out()), *(tokenizer.decode(i.ids) for i in found.take(0, 80))]
    assert len({text.split("sort ")[1][:2] for text in everything}) == 100


def test_too_long_is_said_before_the_first_step(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"4256 problems(?s:.)*demo: item 1: \d+ tokens, above data\.max_length=20"):
        demo(tokenizer, max_length=20)
    merged = byte_tokenizer(merges=[("4", "2")])  # some items are shorter than others: all are measured
    with pytest.raises(DataError, match=r"above data\.max_length=33"):
        demo(merged, max_length=33)
    assert len(demo(tokenizer, max_length=34).take(0, 1)[0].ids) == 34


def test_faults_of_the_template_are_found_at_the_start() -> None:
    with pytest.raises(DataError, match="no chat template"):
        demo(byte_tokenizer(template=None))
    with pytest.raises(Exception, match="where it ends is not learnt"):
        demo(byte_tokenizer(template=CHATML.replace("<|im_end|>", "##")))


def test_datasets_is_not_imported() -> None:
    program = "import sys, runner.data.demo; print({'datasets', 'pyarrow', 'pandas'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout == "set()\n"
