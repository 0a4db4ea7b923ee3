"""Registered functions: what a decorator refuses, and plug-ins that fit, do not fit, or cannot be imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any

import pytest
from pydantic import Field

from runner.algorithm import loss_registry
from runner.algorithm.policy.config import GrpoConfig
from runner.algorithm.preference.config import DpoConfig
from runner.cli.job_builder import compose_job
from runner.core import package
from runner.core.errors import RunnerError
from runner.interfaces.losses import INPUTS, PreferenceLosses, correction, policy_loss, preference_loss, registration_of

Sharpness = Annotated[float, Field(gt=0, description="How sharp")]


def loss(name: str, function: Callable[..., Any]) -> Any:
    return policy_loss(name, paper="a paper", formula="a formula")(function)


def sharp(advantages: Any, *, sharpness: Sharpness = 2.5, scale: float = 3.0) -> tuple[Any, dict[str, Any]]:
    return -sharpness * scale * advantages, {}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., loss_registry.Functions]]:
    """Install modules as plug-ins; what they register is the answer."""

    def installed(**modules: list[Any] | Exception) -> loss_registry.Functions:
        points = []
        for name, content in modules.items():
            module = ModuleType(name)
            for place, value in enumerate(content if isinstance(content, list) else []):
                setattr(module, f"function_{place}", value)
            if isinstance(content, list):
                monkeypatch.setitem(sys.modules, name, module)
            points.append(SimpleNamespace(name=name, value=name, dist=SimpleNamespace(name=f"run-{name}")))
        monkeypatch.setattr(package, "entry_points", lambda group: points)
        monkeypatch.setattr(package, "_FAILED", {})
        monkeypatch.setattr(package, "LEFT_OUT", {})
        loss_registry.plug_ins.cache_clear()
        loss_registry.functions.cache_clear()
        return loss_registry.plug_ins()

    yield installed
    loss_registry.plug_ins.cache_clear()
    loss_registry.functions.cache_clear()


def test_a_function_stays_a_function_and_says_what_it_takes() -> None:
    function = loss("sharp", sharp)
    assert function is sharp and function(2.0, sharpness=1.0) == (-6.0, {})
    found = registration_of(function)
    assert found is not None and (found.kind, found.inputs) == ("policy_loss", ("advantages",))
    assert {name: (o.default, o.description) for name, o in found.options.items()} == {"sharpness": (2.5, "How sharp")}


def unknown_input(rewards: Any) -> Any: ...


def no_default(ratio: Any, *, sharpness: Sharpness) -> Any: ...


@pytest.mark.parametrize(
    ("function", "said"),
    [(unknown_input, "no input named rewards; there are: ratio, logprobs"), (no_default, "needs a default")],
)
def test_a_function_that_does_not_fit_is_refused_by_name(function: Any, said: str) -> None:
    with pytest.raises(RunnerError, match=said):
        loss("wrong", function)


def test_a_plug_in_adds_a_value_and_its_options(install: Any) -> None:
    found = install(theirs=[loss("sharp", sharp)])
    assert list(found["policy_loss"]) == ["sharp"] and package.plugin_warnings() == []
    cls = GrpoConfig.with_plugin_options()
    names = list(cls.model_fields)
    assert names[names.index("policy_loss") + 1 :][:4] == ["clip_low", "clip_high", "dual_clip", "tau_positive"]
    config = cls(policy_loss="sharp", sharpness=4.0)
    assert isinstance(config, GrpoConfig)
    assert loss_registry.resolved_options(config, "policy_loss") == {"sharpness": 4.0}
    assert config.model_dump()["sharpness"] == 4.0
    assert cls().model_dump() == GrpoConfig().model_dump()  # a run that does not use it is the same run
    said = dict(loss_registry.unused_options(cls(sharpness=4.0)))
    assert said == {"algorithm.sharpness": "not used with policy_loss=clip; it belongs to policy_loss=sharp"}
    with pytest.raises(ValueError, match="greater than 0"):
        cls(policy_loss="sharp", sharpness=0.0)


def clipped(log_ratio: Any, *, correction_max: Annotated[float, Field(ge=1, description="Bound")] = 3.0) -> Any: ...


@pytest.mark.parametrize("for_stale", [True, False])
def test_a_correction_says_whether_it_is_for_stale_samples(install: Any, for_stale: bool) -> None:
    words = {"paper": "a paper", "formula": "a formula", "for_stale": for_stale}
    install(theirs=[correction("clipped", **words)(clipped)])
    config = GrpoConfig.with_plugin_options()(correction="clipped", lag=3)
    assert loss_registry.resolved_options(config, "correction") == {"correction_max": 3.0}
    spec = compose_job(["+recipe=grpo_demo"]).spec
    said = [message for key, message in config.problems(spec) if key == "algorithm.lag"]
    assert bool(said) is not for_stale
    assert all("algorithm.correction=decoupled:" in message for message in said)


def test_a_plug_in_may_import_what_it_builds_upon(install: Any) -> None:
    ours = loss_registry.built_in()["policy_loss"]["clip"].function
    theirs = loss("sharp", sharp)
    found = install(theirs=[ours, theirs, theirs], more=[theirs])
    assert list(found["policy_loss"]) == ["sharp"] and not package.plugin_warnings()


def flatter(
    chosen_log_ratios: Any,
    rejected_log_ratios: Any,
    *,
    beta: Annotated[float, Field(gt=0, description="Factor")] = 0.7,
) -> PreferenceLosses:
    return PreferenceLosses(chosen_log_ratios, chosen_log_ratios, rejected_log_ratios)


def test_an_option_that_exists_is_shared_and_has_the_default_of_each_loss(install: Any) -> None:
    install(theirs=[preference_loss("flatter", paper="a paper", formula="a formula")(flatter)])
    cls = DpoConfig.with_plugin_options()
    assert "0.7 (flatter)" in str(cls.model_fields["beta"].description)
    assert list(cls.model_fields) == list(DpoConfig.model_fields)
    assert loss_registry.resolved_options(cls(loss="flatter"), "loss") == {"beta": 0.7}
    assert loss_registry.resolved_options(cls(), "loss") == {"beta": 0.1}


def reserved(advantages: Any, *, batch_size: Sharpness = 1.0) -> Any: ...


def of_another_kind(advantages: Any, *, gamma: Sharpness = 1.0) -> Any: ...


def other_range(advantages: Any, *, clip_low: Annotated[float, Field(gt=5, description="x")] = 6.0) -> Any: ...


@pytest.mark.parametrize(
    ("name", "function", "said"),
    [
        ("clip", sharp, "policy_loss 'clip' exists already (runner.algorithm.policy.losses)"),
        ("sharp", reserved, "the option 'batch_size' of policy_loss 'sharp' is an option of the algorithm"),
        ("sharp", of_another_kind, "the option 'gamma' of policy_loss 'sharp' is an option of the algorithm"),
        ("sharp", other_range, "has another type or range than that of 'clip'"),
    ],
)
def test_a_plug_in_that_takes_a_name_is_left_out_and_named(name: str, function: Any, said: str, install: Any) -> None:
    found = install(theirs=[loss(name, function)], good=[loss("good", lambda advantages: (advantages, {}))])
    assert list(found["policy_loss"]) == ["good"]
    [warning] = package.plugin_warnings()
    assert said in warning and "plug-in run-theirs" in warning and "pip uninstall run-theirs" in warning


def test_two_functions_of_one_plug_in_may_not_share_a_name(install: Any) -> None:
    found = install(theirs=[loss("sharp", sharp), loss("sharp", lambda advantages: (advantages, {}))])
    assert not found["policy_loss"] and "'sharp' exists already" in package.plugin_warnings()[0]


def test_a_plug_in_that_cannot_be_imported_is_named(install: Any) -> None:
    found = install(gone=ModuleNotFoundError(), good=[loss("good", sharp)])
    assert list(found["policy_loss"]) == ["good"]
    assert "not loaded: gone (ModuleNotFoundError" in package.plugin_warnings()[0]


def test_every_built_in_function_names_its_source_and_its_formula() -> None:
    for kind in INPUTS:
        assert loss_registry.built_in()[kind]
        for one in loss_registry.built_in()[kind].values():
            assert one.paper and one.formula and one.function.__doc__, one.name
            assert all(option in one.formula or kind == "aggregation" for option in one.options), one.name
