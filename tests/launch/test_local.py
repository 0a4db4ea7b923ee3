"""Which overrides a resume accepts."""

from __future__ import annotations

import pytest

from runner.errors import SpecError
from runner.launch.local import refuse_other_job
from runner.spec.decode import decode


def spec(**changes: object):  # type: ignore[no-untyped-def]
    groups = {
        "device": "cpu",
        "parallelism": "single",
        "launch": "local",
        "model": "tiny",
        "adapter": "none",
        "data": "demo",
        "algorithm": "sft",
        "sampler": "none",
        "optimizer": "adamw",
        "schedule": "constant",
        "tracker": "none",
        "checkpoint": "safetensors",
    }
    data: dict[str, object] = {group: {"name": name} for group, name in groups.items()}
    return decode({**data, "steps": 10, **changes}, {})


def test_more_steps_and_other_watching_are_fine() -> None:
    refuse_other_job(spec(), spec(steps=20, evaluation={"every": 7}, tracker={"name": "tensorboard"}))


def test_what_the_curve_depends_on_is_refused_all_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        refuse_other_job(spec(), spec(seed=1, optimizer={"name": "sgd", "lr": 0.1}))
    assert [p.key for p in caught.value.problems] == ["seed", "optimizer"]


def test_fewer_steps_are_refused() -> None:
    with pytest.raises(SpecError, match="a run can only get longer"):
        refuse_other_job(spec(), spec(steps=5))
