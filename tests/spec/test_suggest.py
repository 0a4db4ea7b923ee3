"""Suggestions: every synonym leads to an option that exists."""

from __future__ import annotations

import pytest

from runner.registry import default_registry
from runner.spec import suggest
from runner.spec.schema import Keys

OPTIONS = Keys(default_registry()).options


@pytest.mark.parametrize("target", sorted(set(suggest.KEYS.values())))
def test_every_synonym_leads_somewhere(target: str) -> None:
    place, _, leaf = target.rpartition(".")
    assert any(leaf in names for names in OPTIONS[place].values())


def test_no_synonym_is_an_option_itself() -> None:
    options = {name for members in OPTIONS.values() for names in members.values() for name in names}
    assert options & suggest.KEYS.keys() <= {"path", "epochs"}  # epochs: over sampled answers, not over data


@pytest.mark.parametrize(
    ("group", "wrong", "right"),
    [
        ("device", "gpu", "cuda"),
        ("device", "ascend", "npu"),
        ("device", "CPU", "cpu"),
        ("optimizer", "adamw8", "adamw"),
        ("device", "zzz", None),
    ],
)
def test_names(group: str, wrong: str, right: str | None) -> None:
    assert suggest.name(group, wrong, default_registry().classes(group)) == right


@pytest.mark.parametrize(
    ("section", "chosen", "wrong", "hint"),
    [
        ("", "", "max_steps", "did you mean 'steps'?"),
        ("data", "demo", "epochs", "did you mean 'steps' (steps = epochs × items / algorithm.batch_size)?"),
        ("optimizer", "adamw", "learning_rate", "did you mean 'lr'?"),
        ("algorithm", "sft", "learning_rate", "did you mean 'optimizer.lr'?"),
        ("optimizer", "adamw", "momentum", "an option of optimizer=sgd"),
        ("model", "tiny", "every", "did you mean 'checkpoint.every' or 'evaluation.every'?"),
        ("", "", "num_epochs", "did you mean 'steps' (steps = epochs × items / algorithm.batch_size)?"),
        ("", "", "deepspeed", "a run is one process on one device in this version"),
        ("model", "tiny", "qqqqq", ""),
    ],
)
def test_keys(section: str, chosen: str, wrong: str, hint: str) -> None:
    assert suggest.key(section, chosen, wrong, OPTIONS) == hint
