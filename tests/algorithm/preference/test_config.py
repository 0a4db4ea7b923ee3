"""What can be set of dpo, kto and rm: each loss has its own options, and no other; contradictions are named."""

from __future__ import annotations

from typing import Any

import pytest

from runner.algorithm.base import FrozenModelSpec
from runner.algorithm.loss_registry import resolved_options
from runner.algorithm.preference.config import DpoConfig, KtoConfig, RmConfig
from runner.core.errors import SpecError
from runner.spec.decode import decode
from runner.spec.registry import default_registry
from runner.spec.schema import groups_of
from tests.algorithm.preference.test_learning import GIVEN, LOSSES, options_of

KNOWN = {group: default_registry().classes(group) for group in groups_of(default_registry())}
JOB = {group: {"name": "none" if "none" in known else next(iter(known))} for group, known in KNOWN.items()}
JOB["data"] = {"name": "demo"}


def problems(adapter: str = "none", dropout: float | None = None, **algorithm: Any) -> dict[str, str]:
    of_adapter = {"name": adapter} | ({} if dropout is None else {"dropout": dropout})
    try:
        decode({**JOB, "adapter": of_adapter, "algorithm": algorithm}, {})
    except SpecError as error:
        return {p.key: p.message for p in error.problems}
    return {}


@pytest.mark.parametrize("loss", LOSSES)
def test_an_option_that_the_loss_does_not_use_is_an_error(loss: str) -> None:
    assert problems(name="dpo", loss=loss, **options_of(loss)) == {}
    for option in GIVEN.keys() - LOSSES[loss].options.keys():
        found = problems(name="dpo", loss=loss, **{option: GIVEN[option]})
        assert list(found) == [f"algorithm.{option}"]
        assert found[f"algorithm.{option}"].startswith(f"not used with loss={loss}; it belongs to loss=")


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ({"name": "dpo", "loss": "simpo", "reference": "copy"}, "algorithm.reference", "has no reference model"),
        ({"name": "dpo", "loss": "simpo", "reference": "adapter"}, "algorithm.reference", "has no reference model"),
        ({"name": "dpo", "reference": "adapter"}, "algorithm.reference", "type adapter=lora"),
        ({"name": "kto", "reference": "adapter"}, "algorithm.reference", "type adapter=lora"),
        ({"name": "dpo", "loss": "robust", "label_smoothing": 0.5}, "algorithm.label_smoothing", "below 0.5"),
        ({"name": "kto", "batch_size": 4, "mini_batches": 4}, "algorithm.batch_size", "at least 2 completions"),
        ({"name": "dpo", "batch_size": 4, "mini_batches": 3}, "algorithm.mini_batches", "does not divide"),
    ],
)
def test_contradictions(options: dict[str, Any], key: str, words: str) -> None:
    found = problems(**options)
    assert list(found) == [key] and words in found[key]


@pytest.mark.parametrize("reference", [None, "adapter", "copy"])
def test_the_reference_under_an_adapter(reference: Any) -> None:
    for name in ("dpo", "kto"):
        assert problems(adapter="lora", name=name, reference=reference) == {}
    for config in (DpoConfig(reference=reference), KtoConfig(reference=reference)):
        assert config.frozen_models() == {"reference": FrozenModelSpec(reference)}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_gets_its_own_defaults_or_what_was_set(loss: str) -> None:
    defaults = {name: option.default for name, option in LOSSES[loss].options.items()}
    assert defaults and resolved_options(DpoConfig(loss=loss), "loss") == defaults
    assert resolved_options(DpoConfig(loss=loss, **options_of(loss)), "loss") == options_of(loss)


def test_what_a_job_builds_for_a_reward_model() -> None:
    config = RmConfig()
    assert config.trained_models() == {"reward_model": "scalar"}
    assert config.frozen_models() == {} and config.item_kind == "pairs"


@pytest.mark.parametrize("algorithm", [{"name": "dpo"}, {"name": "dpo", "loss": "simpo"}, {"name": "kto"}])
def test_dropout_of_an_adapter_is_refused_unless_it_is_wanted(algorithm: dict[str, Any]) -> None:
    found = problems("lora", 0.1, **algorithm)
    assert list(found) == ["adapter.dropout"] and "type algorithm.dropout=true" in found["adapter.dropout"]
    assert problems("lora", 0.0, **algorithm) == {}
    assert problems("lora", None, **algorithm) == {}


def test_dropout_can_be_kept_and_reward_models_have_it() -> None:
    kept, switched_off = DpoConfig(dropout=True), DpoConfig()
    assert (kept.is_dropout_enabled(), switched_off.is_dropout_enabled(), RmConfig().is_dropout_enabled()) == (
        True,
        False,
        True,
    )
    adapter = {"name": "lora", "dropout": 0.1}
    decode({**JOB, "adapter": adapter, "algorithm": {"name": "dpo", "dropout": True}}, {})
    decode({**JOB, "adapter": adapter, "algorithm": {"name": "rm"}}, {})
