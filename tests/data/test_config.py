"""What the data's options refuse, given what the algorithm learns from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from runner.data.config import ChatConfig, DataConfig, FileConfig, HubConfig
from runner.spec.base import ItemKind


def keys(config: DataConfig | ChatConfig, items: ItemKind = "sft", name: str = "dpo") -> list[str]:
    job: Any = SimpleNamespace(algorithm=SimpleNamespace(item_kind=items, name=name))
    return [key for key, _ in config.problems(job)]


@pytest.mark.parametrize("cls", [FileConfig, HubConfig])
@pytest.mark.parametrize("items", ["pairs", "judged", "prompts"])
def test_options_that_a_kind_has_no_use_for_are_refused(cls: type[Any], items: ItemKind) -> None:
    assert keys(cls(path="a"), items) == []
    assert keys(cls(path="a", truncation="truncate_left"), items) == []
    assert keys(cls(path="a", truncation="split"), items) == ["data.truncation"]
    assert keys(ChatConfig(train_on="last"), items) == ["chat.train_on"]
    assert keys(ChatConfig(kwargs={"enable_thinking": False}, drop=("reasoning",)), items) == []


def test_sft_uses_them_all() -> None:
    for rule in ("error", "skip", "truncate_left", "truncate_right", "split"):
        assert keys(FileConfig(path="a", truncation=rule)) == []
    assert keys(ChatConfig(train_on="all")) == []


def test_the_message_names_the_algorithm_and_what_to_choose() -> None:
    job: Any = SimpleNamespace(algorithm=SimpleNamespace(item_kind="pairs", name="dpo"))
    [(_, train_on)] = ChatConfig(train_on="all").problems(job)
    [(_, overlong)] = FileConfig(path="a", truncation="split").problems(job)
    assert "is used only by sft and distill; algorithm=dpo" in train_on
    assert "choose error, skip, truncate_left" in overlong


def test_weights_fit_the_sources_and_names_are_distinct() -> None:
    assert keys(FileConfig(path=("a", "b"), mixture_weights=(0.5, 0.5))) == []
    assert keys(FileConfig(path=("a", "b"), mixture_weights=(1.0,))) == ["data.mixture_weights"]
    assert keys(FileConfig(path=("a", "b"), mixture_weights=(1.0, 0.0))) == ["data.mixture_weights"]
    assert keys(FileConfig(path="a", rename_columns={"question": "prompt", "answer": "prompt"})) == [
        "data.rename_columns"
    ]
    assert keys(FileConfig(path="a", rename_columns={"question": "prompt", "prompt": "question"})) == []


def test_an_evaluation_set_holds_out_all_its_rows_or_those_that_it_names() -> None:
    assert FileConfig(path="a").as_held_out().eval_path == "a"
    assert FileConfig(path="a", eval_path="b").as_held_out().eval_path == "b"
    assert HubConfig(path="a", split="test").as_held_out().eval_split == "test"
    for config in (FileConfig(path="a", holdout=0.1), HubConfig(path="a", holdout=0.1)):
        assert config.as_held_out().eval_option() is None  # the fraction names them
