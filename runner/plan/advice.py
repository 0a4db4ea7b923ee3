"""What to change so that a job fits: one change if one is enough, cheapest first, else as many as are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.device.cards import Card
from runner.errors import SpecError
from runner.plan.changes import STEPS, Change, Step
from runner.plan.estimate import Band, estimate
from runner.spec.job import JobSpec


@dataclass(frozen=True, slots=True)
class Advice:
    """Changes that make a job fit, or, where `fits` is false, that do not suffice either."""

    changes: Sequence[Change]
    band: Band
    fits: bool


def advise(spec: JobSpec, card: Card) -> Advice:
    """The cheapest change with which the job fits the card; else all that lower the upper end of the band."""
    offers = [step for step in STEPS if next(step(spec), None) is not None]
    for step in offers:
        tried = _until_it_fits(spec, step, card)
        if tried.fits:
            return tried
    changes: list[Change] = []
    band = estimate(spec, card).fullest(card)
    for step in offers:
        now = _until_it_fits(changes[-1].spec if changes else spec, step, card)
        if now.changes and now.band.high < band.high:
            changes, band = [*changes, *now.changes], now.band
        if now.fits:
            return Advice(changes, band, True)
    return Advice(changes, band, False)


def _until_it_fits(spec: JobSpec, step: Step, card: Card) -> Advice:
    """One kind of change, as far as it has to go: only its last, largest form is what is to be typed."""
    found = Advice([], Band(0, 0), False)
    for change in step(spec):
        try:
            plan = estimate(change.spec, card)
        except SpecError:  # not of this model
            continue
        found = Advice([change], plan.fullest(card), plan.fits(card))
        if found.fits:
            break
    return found
