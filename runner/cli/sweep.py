"""`run -m …` starts a sweep; `run sweep resume|status|report` is about one that was started."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from runner.checkpoint.config import direction
from runner.cli.args import UsageError, is_override
from runner.cli.expand_sweep import Expansion, MakeDraft, SweepMember, expand, make_draft
from runner.cli.hydra_compose import SWEEP
from runner.cli.job_builder import SPEC, decode_draft, spec_file
from runner.cli.overrides import TRUST, read_overrides
from runner.cli.sweep_axes import decode_sweep_options, metric_directions
from runner.cli.verbs import ACTIONS
from runner.core.errors import EnvironmentProblem, Problem, SpecError
from runner.launch.preflight import mask_secrets
from runner.launch.upstream_runs import NOT_IN_KEY
from runner.run_dir.manifest import fingerprint, redact
from runner.spec import suggest
from runner.spec.base import iter_leaves
from runner.spec.job import JobSpec
from runner.spec.metric_check import metric_problems
from runner.spec.registry import default_registry
from runner.sweep import commands, plan
from runner.sweep.commands import make_executor
from runner.sweep.config import SweepConfig, as_tuple
from runner.sweep.executor import Cards, request_of
from runner.sweep.plan import JobPlan, Plan, Ranking, SweepFolder
from runner.sweep.search import Propose, load_optuna, search_problems
from runner.sweep.space import SearchSpace
from runner.tracker.text import print_text


def start_sweep(args: Namespace) -> int:
    """Compose all jobs of a sweep, and run them; with --cfg job, print them."""
    if args.folder:
        raise UsageError("--folder is for one run; a sweep makes its own folder below outputs/sweeps/")
    expansion = expand(args.words, args.config_dir, args.spec and spec_file(args.spec))
    for note in expansion.notes:
        print_text(note, file=sys.stderr)
    if args.cfg:
        documents = [member.composed.data for member in expansion.members]
        print(yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True, explicit_start=True), end="")
        return 0
    expansion = mask_expansion(expansion)
    specs = [member.composed.spec for member in expansion.members]
    options = expansion.options
    if options.on == "local":
        for one in {repr(spec.device): spec for spec in specs}.values():
            one.device.preflight()
    if problems := metric_problems(as_tuple(options.metric), specs):
        raise SpecError(problems)
    if options.search:
        _refuse_search(expansion, options)
    with make_executor(options) as executor:
        needs = [request_of(spec, executor.cards) for spec in specs]
        if options.search and len(set(needs)) > 1:
            text = f"all jobs of a search must need the same devices, not {' and '.join(sorted(set(map(str, needs))))}"
            raise SpecError([Problem("device", text)])
        executor.check(needs)  # refuses what never fits, before a folder is made
        folder = plan.create_sweep_folder(_name(specs))
        made = make_plan(folder, args, expansion, executor.cards)
        propose = proposer(folder, made, executor.cards, expansion.draft)
        return commands.start_sweep(folder, made, options, executor, propose=propose)


def go(args: Namespace) -> int:
    """`run sweep ACTION [WHERE]`."""
    action, *others = args.words or [""]
    if action not in ACTIONS:
        hint = suggest.did_you_mean(action, ACTIONS)
        raise UsageError(f"run sweep: expected resume, status or report{hint}; to start a sweep, type: run -m …")
    where = others[0] if others and not is_override(others[0]) else "latest"
    words = others[1:] if others and not is_override(others[0]) else others
    if action != "resume":
        if words or args.retry_failed or args.only:
            raise UsageError(f"run sweep {action}: expected only a sweep's folder, or latest")
        return commands.print_status(where) if action == "status" else commands.rewrite_report(where)
    if args.retry_failed and args.only:
        raise UsageError("--only already selects failed jobs too; leave --retry-failed out")
    folder, begun = plan.find_sweep(where)
    if begun.search and Path(begun.place) != Path.cwd():
        raise UsageError(f"a search composes jobs while it runs; resume it in its first folder: cd {begun.place}")
    wanted, options = commands.ResumeSelection(args.retry_failed, args.only or ()), _resume_options(begun, words)
    draft = None
    if begun.search:
        if problems := _search_problems(begun, begun.search, options):
            raise SpecError(problems)
        if not args.only and (options.trials or 0) > len(begun.jobs):
            draft = resume_draft(begun.search)
    with make_executor(options) as executor:
        propose = proposer(folder, begun, executor.cards, draft)
        return commands.resume_sweep(folder, begun, wanted, options, executor, propose=propose)


def make_plan(folder: SweepFolder, args: Namespace, expansion: Expansion, cards: Cards) -> Plan:
    """What is written of a sweep before it begins; `cards`: the kinds of card where its jobs run."""
    members, options, prefix = expansion.members, expansion.options, _prefix(args)
    base, specs = _with_sweep_tracker(members[0], folder), [member.composed.spec for member in members]
    head = (_name(specs), tuple(map(redact, args.words)), base)
    said, best = options.model_dump(mode="json", exclude={"over"}, exclude_unset=True), rankings(options, specs)
    if options.search:
        config_dir, spec = (str(path.absolute()) if path else None for path in (args.config_dir, args.spec))
        need = request_of(specs[0], cards)
        search = SearchSpace(expansion.space, expansion.fixed, need, tuple(prefix), config_dir, spec)
        search = replace(search, files=_files_fingerprint(search, expansion.draft))
        return Plan(*head, [], said, best, search)
    jobs = [_job(index, member, base, folder, prefix, cards) for index, member in enumerate(members)]
    return Plan(*head, jobs, said, best)


def proposer(folder: SweepFolder, begun: Plan, cards: Cards, draft: MakeDraft | None) -> Propose | None:
    """Return a function that makes a job of a search's values; None where all jobs are known.

    draft: None if the search proposes no more jobs
    """
    search = begun.search
    if search is None:
        return None
    noted = {key for key, _ in iter_leaves(begun.base)}  # the start of the sweep has printed the notes

    def propose(index: int, words: Sequence[str], varied: Mapping[str, str]) -> JobPlan:
        assert draft is not None
        member = SweepMember(decode_draft(draft(words), default_registry()), dict(varied))
        return _job(index, _mask_member(member, noted), begun.base, folder, search.prefix, cards)

    return propose


def _files_fingerprint(search: SearchSpace, draft: MakeDraft) -> str:
    corners = [draft(words).data for words, _ in search.corners()]
    return fingerprint({"corners": [{k: v for k, v in one.items() if k not in NOT_IN_KEY} for one in corners]})


def resume_draft(search: SearchSpace) -> MakeDraft:
    """Return what drafts further jobs of a search. Raises EnvironmentProblem if its files changed."""
    config_dir, spec = (Path(path) if path else None for path in (search.config_dir, search.spec))
    draft = make_draft(config_dir, spec and spec_file(spec))
    if search.files not in ("", _files_fingerprint(search, draft)):
        raise EnvironmentProblem(
            "a recipe, a config file or a default of this search has changed since it began, so further jobs are not "
            "comparable with the earlier ones; undo the change, or start a new search: run -m …"
        )
    return draft


def _job(
    index: int, member: SweepMember, base: Mapping[str, Any], folder: SweepFolder, prefix: Sequence[str], cards: Cards
) -> JobPlan:
    data, typed = _with_sweep_tracker(member, folder), member.composed.overrides
    return JobPlan(
        index=index,
        varied=member.varied,
        words=(*prefix, *typed),
        sections={name: value for name, value in data.items() if value != base.get(name)},
        need=request_of(member.composed.spec, cards),
        again=tuple(word for word in typed if word.lstrip("+").startswith(TRUST)),
    )


def mask_expansion(expansion: Expansion) -> Expansion:
    """The jobs as sweep.json may hold them. Raises SecurityError for a secret that cannot be masked."""
    noted: set[str] = set()
    members = tuple(_mask_member(member, noted) for member in expansion.members)
    return replace(expansion, members=members, fixed=tuple(map(redact, expansion.fixed)))


def _mask_member(member: SweepMember, noted: set[str]) -> SweepMember:
    spec = mask_secrets(member.composed.spec, member.composed.origins, noted)
    words = [redact(word) for word in member.composed.overrides]
    composed = replace(member.composed, spec=spec, data=spec.model_dump(mode="json"), overrides=words)
    return SweepMember(composed, {key: redact(value) for key, value in member.varied.items()})


def _refuse_search(expansion: Expansion, options: SweepConfig) -> None:
    """Raise EnvironmentProblem or SpecError where Optuna is not there, or does not support the request."""
    found = rankings(options, [member.composed.spec for member in expansion.members])
    problems = search_problems(options, SearchSpace(expansion.space, expansion.fixed), len(found))
    if not found:
        text = "must be set, or checkpoint.best in the job: a search needs a metric to optimize"
        problems.append(Problem("sweep.metric", text))
    if problems:
        raise SpecError(problems)
    load_optuna(options.sampler)


def _search_problems(begun: Plan, search: SearchSpace, options: SweepConfig) -> list[Problem]:
    """What is wrong with the options with which a search is to continue."""
    found = search_problems(options, search, len(begun.rankings))
    if (options.trials or 0) < len(begun.jobs):
        text = f"is {options.trials}, but the search already has {len(begun.jobs)} jobs; set more, or leave it out"
        found.append(Problem("sweep.trials", text))
    return found


def rankings(options: SweepConfig, specs: Sequence[JobSpec]) -> tuple[Ranking, ...]:
    """By what the jobs are compared, where that was said."""
    if options.metric is not None:
        return tuple(Ranking(metric, mode, "last", "sweep.metric") for metric, mode in metric_directions(options))
    said = {(s.checkpoint.best, s.checkpoint.best_mode or direction(s.checkpoint.best or "")) for s in specs}
    [(metric, mode)] = said if len(said) == 1 else [(None, None)]
    return () if metric is None or mode is None else (Ranking(metric, mode, "best", "checkpoint.best"),)


def _with_sweep_tracker(member: SweepMember, folder: SweepFolder) -> dict[str, Any]:
    """A job's data, with the sweep's name for its tracker unless the job sets one."""
    data = dict(member.composed.data)
    own = member.composed.spec.tracker.of_sweep(folder.root.name, JobPlan(0, member.varied).label)
    # with --spec they may be those of the sweep that the spec comes from
    origins = member.composed.origins
    said = {k: v for k in own if (v := data["tracker"][k]) and origins.get(f"tracker.{k}") != SPEC}
    data["tracker"] = data["tracker"] | own | said
    return data


def _name(specs: Sequence[JobSpec]) -> str:
    """What the jobs are called, if they agree."""
    names = {spec.name for spec in specs}
    return names.pop() if len(names) == 1 else SWEEP


def _prefix(args: Namespace) -> list[str]:
    """The options with dashes that each job's command needs, too."""
    spec = ["--spec", str(args.spec)] if args.spec else []
    return spec + (["--config-dir", str(args.config_dir)] if args.config_dir else [])


def _resume_options(begun: Plan, words: Sequence[str]) -> SweepConfig:
    """A sweep's options, with changes of a resume. Raises UsageError for a job's option, SpecError."""
    for word in words:
        key = word.lstrip("+").partition("=")[0]
        if not key.startswith(f"{SWEEP}."):
            raise UsageError(
                f"the jobs of a sweep are fixed; only {SWEEP}.parallel=N and the like can change, not {word}"
            )
        if key.startswith((f"{SWEEP}.metric", f"{SWEEP}.search")):
            raise UsageError(f"{key} cannot change in a resumed sweep; results.json has every metric of every job")
    typed, problems = read_overrides(words, ())
    options, more = decode_sweep_options((), typed, begun.options)
    if problems or more:
        raise SpecError([*problems, *more])
    return options
