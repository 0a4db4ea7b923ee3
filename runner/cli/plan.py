"""`run plan`: what a job would take on which cards, found without a card, without weights, in seconds;
`run parity`: whether another device computes what this one did. numpy and torch are imported on the way.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

from runner.cli.args import UsageError
from runner.cli.job import compose_from_args
from runner.cli.job_builder import SPEC, re_decode
from runner.core.errors import EnvironmentProblem
from runner.device.cards import CARDS, DEFAULT_CARDS, Card
from runner.run_dir.folder import display_path
from runner.spec.job import JobSpec
from runner.spec.registry import default_registry
from runner.tracker.text import count_noun, print_text


def show(args: Namespace) -> int:
    """Print the plan of a job; returns 0, whether it fits or not."""
    spec = compose_from_args(args, args.words).spec
    card = _card(args.card, spec)
    from runner.tools.plan import plan_text
    from runner.tools.plan.budget import largest_micro_batch, with_micro_batch
    from runner.tools.plan.estimate import estimate
    from runner.tools.plan.model import resolve_local_sources
    from runner.tools.plan.remedies import advise

    spec = resolve_local_sources(spec)
    if spec.algorithm.micro_batch_tokens is None and card is not None:
        tokens, reason = largest_micro_batch(spec, card)
        print_text(f"algorithm.micro_batch_tokens: {tokens} ({reason})", file=sys.stderr)
        spec = with_micro_batch(spec, tokens)
    plan = estimate(spec, card)
    advice = advise(spec, card) if card is not None and not plan.fits(card) else None
    given = (spec, plan, card, advice)
    as_text = json.dumps(plan_text.as_json(*given), indent=1) if args.json else "\n".join(plan_text.plan_lines(*given))
    print_text(as_text)
    return 0


def _card(name: str | None, spec: JobSpec) -> Card | None:
    """The card that was named, or the usual one of the job's device; None for the CPU. Raises UsageError."""
    device = "auto" if spec.device.is_auto else spec.device.kind.name
    if name is None:
        return CARDS[DEFAULT_CARDS[device]] if device in DEFAULT_CARDS else None
    if name not in CARDS:
        raise UsageError(f"run plan: no card named '{name}'; known cards: {', '.join(CARDS)}")
    if device not in ("auto", "cpu", CARDS[name].device):
        raise UsageError(
            f"run plan: {name} is a card of device={CARDS[name].device}, but the job has device={spec.device.name}"
        )
    return CARDS[name]


STEPS, TOLERANCE = 5, 0.005
FORMS = "type run parity --record FILE device=cpu …, or run parity --compare FILE device=npu"


def run(args: Namespace) -> int:
    """Record the first steps of a job, or compare them; returns 0 where they agree. Raises ParityError."""
    if (args.record is None) == (args.compare is None):
        raise UsageError(f"run parity: expected --record or --compare; {FORMS}")
    return _record(args) if args.compare is None else _compare(args)


def _record(args: Namespace) -> int:
    if args.tolerance is not None:
        raise UsageError("run parity --record: --tolerance is for --compare")
    from runner.tools.parity import run_parity

    path, words = _target(args.record, args.words)
    spec = compose_from_args(args, words).spec
    recording = run_parity.record_steps(spec, min(args.steps or STEPS, spec.steps), path)
    steps = count_noun(len(recording.steps), "step")
    print_text(f"recorded {steps} of {spec.name} on {recording.made['device']['name']}")
    if recording.no_gradient_note:
        print_text(f"note: {recording.no_gradient_note}", file=sys.stderr)
    print_text(f"compare  run parity --compare {display_path(path)} device=npu")
    return 0


def _target(record: str, words: list[str]) -> tuple[Path, list[str]]:
    """Output file and the job's words: `--record cpu` means `--record parity-cpu.safetensors device=cpu`."""
    if record in default_registry().classes("device"):
        if any(word.startswith("device=") for word in words):
            raise UsageError(f"run parity --record {record} already sets the device; with device=… set a file: {FORMS}")
        record, words = f"parity-{record}.safetensors", [*words, f"device={record}"]
    path = Path(record)
    if path.is_dir() or not path.parent.is_dir():
        raise EnvironmentProblem(f"--record {record}: expected a file in an existing folder")
    return path, words


def _compare(args: Namespace) -> int:
    given = {"--steps": args.steps, "--spec": args.spec, "--config-dir": args.config_dir}
    if unused := [flag for flag, value in given.items() if value is not None]:
        raise UsageError(f"run parity --compare: the recording sets the job and its steps; leave out {unused[0]}")
    from runner.tools.parity import recording, run_parity

    recorded = recording.read(args.compare)
    with TemporaryDirectory(prefix="run-parity-") as folder:
        path = Path(folder) / SPEC
        path.write_text(json.dumps(recorded.spec), encoding="utf-8")  # JSON is YAML
        spec = re_decode(path, args.words).spec
    tolerance = TOLERANCE if args.tolerance is None else args.tolerance
    run_parity.compare_with(recorded, spec, tolerance, lambda lines: print_text("\n".join(lines)))
    print("\nthey agree")
    return 0
