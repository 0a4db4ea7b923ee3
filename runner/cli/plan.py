"""`run plan`: what a job would take on which cards, found without a card, without weights, in seconds."""

from __future__ import annotations

import json
import sys
from argparse import Namespace

from runner.cli.args import UsageError
from runner.cli.compose import SPEC, compose_job, re_decode
from runner.device.cards import CARDS, USUAL, Card
from runner.spec.job import JobSpec


def show(args: Namespace) -> int:
    """Print the plan of a job; returns 0, whether it fits or not."""
    spec_file = args.spec / SPEC if args.spec and args.spec.is_dir() else args.spec
    composed = (
        re_decode(spec_file, args.words, args.config_dir) if spec_file else compose_job(args.words, args.config_dir)
    )
    for note in composed.notes:
        print(note, file=sys.stderr)
    spec = composed.spec
    card = _card(args.card, spec)
    from runner.plan import words
    from runner.plan.advice import advise
    from runner.plan.estimate import estimate

    plan = estimate(spec, card)
    advice = advise(spec, card) if card is not None and not plan.fits(card) else None
    given = (spec, plan, card, advice)
    print(json.dumps(words.as_json(*given), indent=1) if args.json else "\n".join(words.lines(*given)))
    return 0


def _card(name: str | None, spec: JobSpec) -> Card | None:
    """The card that was named, or the usual one of the job's device; None for the CPU. Raises UsageError."""
    device = "auto" if spec.device.name == "auto" else spec.device.kind.name
    if name is None:
        return CARDS[USUAL[device]] if device in USUAL else None
    if name not in CARDS:
        raise UsageError(f"run plan: no card named '{name}'; known are {', '.join(CARDS)}")
    if device not in ("auto", "cpu", CARDS[name].device):
        raise UsageError(
            f"run plan: a {name} is a card of device={CARDS[name].device}, and the job has device={spec.device.name}"
        )
    return CARDS[name]
