"""`epochs` gives the steps once the items are counted."""

from __future__ import annotations

import pytest

from runner.build.job import resolve_epochs
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import SpecError
from runner.launch.local import refuse_other_job


@pytest.mark.parametrize(
    ("epochs", "items", "steps"), [(3.0, 40, 15), (1.0, 41, 6), (0.5, 8, 1), (0.01, 8, 1), (2.5, 40, 13)]
)
def test_steps_are_the_passes_over_the_items_rounded_up(epochs: float, items: int, steps: int) -> None:
    decide = Decisions(strict=True)
    spec = compose_job([f"epochs={epochs}", "algorithm.batch_size=8"]).spec
    found = resolve_epochs(spec, items, decide)
    assert (found.steps, found.epochs) == (steps, None)
    assert [str(d) for d in decide.entries] == [f"steps: {steps} (epochs={epochs:g} of {items} items, 8 per step)"]
    assert resolve_epochs(found, items + 100, decide) is found
    refuse_other_job(found, spec.model_copy(update={"steps": steps}))  # a resume may give epochs again


def test_a_schedule_is_checked_against_the_steps_that_the_epochs_come_to() -> None:
    words = ["epochs=2", "algorithm.batch_size=8", "schedule=wsd", "schedule.warmup_steps=0", "schedule.decay_steps=30"]
    spec = compose_job(words).spec
    assert resolve_epochs(spec, 160, Decisions()).steps == 40
    with pytest.raises(SpecError, match=r"schedule\.decay_steps: the sum of 30 and .* is above steps=10"):
        resolve_epochs(spec, 40, Decisions())


def test_epochs_and_steps_together_and_epochs_of_a_weighted_mixture_are_refused() -> None:
    with pytest.raises(
        SpecError, match=r"steps: 5, but epochs=2 decides \(set by: command line\); leave one of them out"
    ):
        compose_job(["epochs=2", "steps=5"])
    compose_job(["+recipe=sft_demo", "epochs=2"])  # whose steps are its file's
    mixture = ["data=file", "data.path=[a,b]", "data.mixture_weights=[1,1]"]
    with pytest.raises(SpecError, match=r"with data\.mixture_weights each source has its own epochs; set steps"):
        compose_job([*mixture, "epochs=2"])
