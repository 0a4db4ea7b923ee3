"""`run -m …` starts a sweep; `run sweep resume|status|report` is about one that was started."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from runner.checkpoint.config import direction
from runner.cli.args import ACTIONS, UsageError, is_override
from runner.cli.compose import SPEC, compose_job, re_decode
from runner.cli.expand import Expansion, Member, expand
from runner.cli.files import SWEEP
from runner.cli.overrides import TRUST, read
from runner.cli.sweep_options import decode
from runner.errors import Problem, SpecError
from runner.spec import suggest
from runner.spec.job import JobSpec
from runner.sweep import drive, plan
from runner.sweep.config import SweepConfig
from runner.sweep.plan import JobPlan, Plan, Ranking, SweepFolder
from runner.sweep.search import Propose
from runner.sweep.slots import Slots, need_of
from runner.sweep.space import Search
from runner.tracker.config import WandbConfig


def start(args: Namespace) -> int:
    """Compose all jobs of a sweep, and run them; with --cfg job, print them."""
    if args.folder:
        raise UsageError("--folder is for one run; a sweep makes its own folder below outputs/sweeps/")
    expansion = expand(args.words, args.config_dir, args.spec and _spec_file(args.spec))
    for note in expansion.notes:
        print(note, file=sys.stderr)
    if args.cfg:
        documents = [member.composed.data for member in expansion.members]
        print(yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True, explicit_start=True), end="")
        return 0
    specs = [member.composed.spec for member in expansion.members]
    for one in {repr(spec.device): spec for spec in specs}.values():
        one.device.preflight()
    options = expansion.options
    if options.search and ranking(options, specs) is None:
        text = "must be given, or checkpoint.best in the job: a search needs to know what is better"
        raise SpecError([Problem("sweep.metric", text)])
    Slots(map(need_of, specs), options.parallel)  # refuses what never fits, before a folder is made
    folder = plan.create(_name(specs))
    made = planned(folder, args, expansion)
    return drive.start(folder, made, options, propose=proposer(folder, made))


def go(args: Namespace) -> int:
    """`run sweep ACTION [WHERE]`."""
    action, *others = args.words or [""]
    if action not in ACTIONS:
        meant = suggest.nearest(action, ACTIONS)
        hint = f"; did you mean '{meant}'?" if meant else ""
        raise UsageError(f"run sweep: resume, status or report is expected{hint}; a sweep is started with: run -m …")
    where = others[0] if others and not is_override(others[0]) else "latest"
    words = others[1:] if others and not is_override(others[0]) else others
    if action != "resume":
        if words or args.retry_failed or args.only:
            raise UsageError(f"run sweep {action}: takes a sweep's folder, or latest, and nothing else")
        return drive.status(where) if action == "status" else drive.report(where)
    if args.retry_failed and args.only:
        raise UsageError("--only names the jobs to run, also failed ones; leave --retry-failed out")
    folder, begun = plan.find(where)
    if begun.search and Path(begun.place) != Path.cwd():
        raise UsageError(f"a search composes its jobs as it goes; resume it where it began: cd {begun.place}")
    wanted, options = drive.Wanted(args.retry_failed, args.only), _changed(begun, words)
    return drive.resume(folder, begun, wanted, options, propose=proposer(folder, begun))


def planned(folder: SweepFolder, args: Namespace, expansion: Expansion) -> Plan:
    """What is written of a sweep before it begins."""
    members, options, prefix = expansion.members, expansion.options, _prefix(args)
    base, specs = _tracked(members[0], folder), [member.composed.spec for member in members]
    head = (_name(specs), tuple(args.words), base)
    said, best = options.model_dump(mode="json", exclude={"over"}, exclude_unset=True), ranking(options, specs)
    if options.search:
        where = (str(path.absolute()) if path else None for path in (args.config_dir, args.spec))
        search = Search(expansion.space, expansion.fixed, need_of(specs[0]), tuple(prefix), *where)
        return Plan(*head, [], said, best, search)
    jobs = [_job(index, member, base, folder, prefix) for index, member in enumerate(members)]
    return Plan(*head, jobs, said, best)


def proposer(folder: SweepFolder, begun: Plan) -> Propose | None:
    """What makes a job of the values that a search has chosen; None where all jobs are known."""
    search = begun.search
    if search is None:
        return None
    place = Path(search.config_dir) if search.config_dir else None

    def propose(index: int, words: Sequence[str], varied: Mapping[str, str]) -> JobPlan:
        composed = re_decode(_spec_file(Path(search.spec)), words, place) if search.spec else compose_job(words, place)
        return _job(index, Member(composed, dict(varied)), begun.base, folder, search.prefix)

    return propose


def _job(index: int, member: Member, base: Mapping[str, Any], folder: SweepFolder, prefix: Sequence[str]) -> JobPlan:
    data, typed = _tracked(member, folder), member.composed.overrides
    return JobPlan(
        index=index,
        varied=member.varied,
        words=(*prefix, *typed),
        sections={name: value for name, value in data.items() if value != base.get(name)},
        need=need_of(member.composed.spec),
        again=tuple(word for word in typed if word.lstrip("+").startswith(TRUST)),
    )


def _spec_file(path: Path) -> Path:
    return path / SPEC if path.is_dir() else path


def ranking(options: SweepConfig, specs: Sequence[JobSpec]) -> Ranking | None:
    """By what the jobs are compared, where that was said."""
    if options.metric is not None:
        mode = options.metric_mode or direction(options.metric)
        assert mode is not None  # sweep_options.decode has asked for it
        return Ranking(options.metric, mode, "last", "sweep.metric")
    said = {(s.checkpoint.best, s.checkpoint.best_mode or direction(s.checkpoint.best or "")) for s in specs}
    [(metric, mode)] = said if len(said) == 1 else [(None, None)]
    return None if metric is None or mode is None else Ranking(metric, mode, "best", "checkpoint.best")


def _tracked(member: Member, folder: SweepFolder) -> dict[str, Any]:
    """A job's data; in W&B it belongs to the sweep's group and is named by what it varies, unless it says otherwise."""
    data = dict(member.composed.data)
    if isinstance(member.composed.spec.tracker, WandbConfig):
        own = {"run_group": folder.root.name, "display_name": JobPlan(0, member.varied).label}
        # with --spec they may be those of the sweep that the spec comes from
        said = {k: v for k in own if (v := data["tracker"][k]) and _origin(member, f"tracker.{k}") != SPEC}
        data["tracker"] = data["tracker"] | own | said
    return data


def _origin(member: Member, key: str) -> str:
    return member.composed.origins.get(key, "")


def _name(specs: Sequence[JobSpec]) -> str:
    """What the jobs are called, if they agree."""
    names = {spec.name for spec in specs}
    return names.pop() if len(names) == 1 else SWEEP


def _prefix(args: Namespace) -> list[str]:
    """The options with dashes that each job's command needs, too."""
    spec = ["--spec", str(args.spec)] if args.spec else []
    return spec + (["--config-dir", str(args.config_dir)] if args.config_dir else [])


def _changed(begun: Plan, words: Sequence[str]) -> SweepConfig:
    """A sweep's options with those that a resume sets anew. Raises UsageError for a job's, SpecError for a mistake."""
    for word in words:
        key = word.lstrip("+").partition("=")[0]
        if not key.startswith(f"{SWEEP}."):
            raise UsageError(f"a sweep's jobs are fixed; only {SWEEP}.parallel=N and its like can be set, not {word}")
        if key.startswith((f"{SWEEP}.metric", f"{SWEEP}.search")):
            raise UsageError(f"{key} is fixed since the sweep began; results.json has every metric of every job")
    typed, problems = read(words, ())
    options, more = decode((), typed, begun.options)
    if problems or more:
        raise SpecError([*problems, *more])
    return options
