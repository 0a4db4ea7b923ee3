"""`run eval`: measure models on evaluation sets."""

from __future__ import annotations

import re
import signal
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.cli.args import UsageError, is_override
from runner.cli.job_builder import JobDraft, decode_draft, draft
from runner.cli.overrides import TRUST
from runner.core.errors import Interrupted, Problem, SpecError
from runner.run_dir.folder import RunFolder
from runner.run_dir.user_files import with_copied_files
from runner.spec.base import COMMAND_LINE
from runner.spec.evaluation import HELD_OUT, AnswersConfig, EvaluationSet
from runner.spec.job import JobSpec
from runner.spec.registry import default_registry
from runner.spec.suggest import did_you_mean

if TYPE_CHECKING:
    from runner.inference.model_source import ModelSource

# The sections whose options can be set; a model brings everything else.
SECTIONS = ("evaluation", "device", "seed")
NO_JOB = ("model=tiny", "data=demo", "algorithm=sft", "tracker=none")  # what the sets of no run are composed in


def run(args: Namespace) -> int:
    """Evaluate models, and print one table a set. Raises UsageError, SpecError, Interrupted."""
    words = [word for word in args.words if is_override(word)]
    texts = [word for word in args.words if word not in words] or ["latest"]
    if twice := next((text for text in texts if texts.count(text) > 1), None):
        raise UsageError(f"run eval: {twice} is listed twice; leave one of them out")
    typed = dict(word.partition("=")[::2] for word in words)
    if "suite" in typed or "tasks" in typed:
        return _run_suite(args, texts, typed)
    if args.suite_python or args.literal:
        unused = "words after --" if args.literal else "--suite-python"
        raise UsageError(f"run eval: {unused} are for suite=NAME tasks=TASK")
    for word in words:
        key = word.lstrip("+")
        if re.split("[.=]", key)[0] not in SECTIONS and not key.startswith(("model.dtype=", TRUST)):
            raise UsageError(
                f"run eval: {word} is not an option of it; there are +evaluation=[…], evaluation.…, device=, seed=, "
                "model.dtype=; rows of your own: 'evaluation.sets.NAME={data: {name: file, path: FILE}}'"
            )
    from runner.inference.model_source import parse_source, resolve_model_path

    sources = [parse_source(text, checkpoint=args.checkpoint, base=args.base) for text in texts]
    own = _first_run_spec(sources, _trusts_remote_code(words))
    drafted = draft([*NO_JOB, *(word for word in words if not word.lstrip("+").startswith(TRUST))])
    edits = pop_run_set_options(drafted, own)
    spec = decode_draft(drafted, default_registry()).spec
    resolved = spec.evaluation.with_resolved_source(resolve_model_path)
    sets = [_with_options(one, args) for one in resolved.decoded_sets()]
    base = spec
    _refuse_without_data(sets, own, edits)
    if not sets:
        base, sets = _of_first_run(own, spec, edits, args, words)
    _refuse_unused(words, [one.name for one in sets])
    from runner.tools import evaluate

    try:
        found = evaluate.evaluate_sources(sources, sets, base, _settings(words, spec))
    except KeyboardInterrupt:
        text = "the answers so far are kept; the same command continues"
        raise Interrupted(signal.SIGINT, f"interrupted: {text}") from None
    evaluate.print_results(found, sets, evaluate.write_results(found, sets))
    return 0


def _refuse_unused(words: Sequence[str], names: Sequence[str]) -> None:
    """Raise UsageError for an option of `evaluation` that changes nothing; names: of the sets."""
    answers = AnswersConfig.model_fields.keys()
    for word in words:
        group, _, option = word.lstrip("+").partition("=")[0].partition(".")
        if group != "evaluation" or not option or option.split(".")[0] in ("sets", "batch_size"):
            continue
        if HELD_OUT not in names and option in answers:
            text = f"it applies only to a run's held-out rows; for a set, type evaluation.sets.{names[0]}.{option}=…"
            raise UsageError(f"run eval: {word} changes nothing: {text}")
        if option not in answers:
            raise UsageError(f"run eval: {word} changes nothing: it is an option of training; leave it out")


def _run_suite(args: Namespace, texts: Sequence[str], typed: Mapping[str, str]) -> int:
    """Run a harness on each model. Raises UsageError, EnvironmentProblem."""
    from runner.tools.eval_suites import SUITES, run_suites

    if unknown := typed.keys() - {"suite", "tasks", "device"}:
        text = f"{', '.join(sorted(unknown))} cannot be set; options of the harness go after --"
        raise UsageError(f"run eval suite=…: {text}")
    if typed.get("suite") not in SUITES or not typed.get("tasks"):
        raise UsageError(f"run eval: type suite={'|'.join(SUITES)} and tasks=TASK,TASK")
    suite = SUITES[typed["suite"]]
    if args.samples or args.suite_python is None:
        wrong = "--suite-python PYTHON is missing"
        if args.samples:
            wrong = "--samples applies only to '+evaluation=[…]' sets; leave it out"
        more = f"in a separate environment: {suite.install_line()}"
        raise UsageError(f"run eval suite={typed['suite']}: {wrong}\n  {more}")
    from runner.inference.model_source import parse_source

    sources = [parse_source(text, checkpoint=args.checkpoint, base=args.base) for text in texts]
    options = [*(["--limit", str(args.limit)] if args.limit else []), *args.literal]
    run_suites(sources, typed["suite"], typed["tasks"].split(","), args.suite_python, options, typed.get("device"))
    return 0


def _first_run_spec(sources: Sequence[ModelSource], trusts_remote_code: bool) -> JobSpec | None:
    """The spec of the first run among the sources, with the copies of the user's files."""
    from runner.inference.model_source import source_spec

    source = next((one for one in sources if one.kind == "run"), None)
    if source is None:
        return None
    return with_copied_files(source_spec(source, trust_remote_code=trusts_remote_code), RunFolder(Path(source.path)))


def pop_run_set_options(drafted: JobDraft, own: JobSpec | None) -> dict[str, dict[str, Any]]:
    """Remove options typed for sets of the run from the draft; returns these sets with the options.

    A preset that was named, and a set with data of its own, replace the run's set.
    """
    sets, prefix = drafted.data["evaluation"]["sets"], "evaluation.sets."
    files = (key for key, who in drafted.origins.items() if key.startswith(prefix) and who != COMMAND_LINE)
    presets = {key.split(".")[2] for key in files}
    known = own.evaluation.sets if own and isinstance(sets, dict) else {}
    names = [name for name in known if isinstance(sets.get(name), dict) and name not in presets]
    names = [name for name in names if "name" not in (sets[name].get("data") or {})]
    return {name: _merge_options(known[name], sets.pop(name)) for name in names}


def _merge_options(own: Mapping[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    """The options with those typed in place of them; a component that is named replaces the whole one."""

    def merge(old: Any, new: Any) -> Any:
        both = isinstance(old, dict) and isinstance(new, dict) and "name" not in new
        return _merge_options(old, new) if both else new

    return {**own, **{key: merge(own.get(key), value) for key, value in typed.items()}}


def _refuse_without_data(sets: Sequence[EvaluationSet], own: JobSpec | None, edits: Mapping[str, object]) -> None:
    """Raise UsageError for a set without data, and for new sets beside options of a run's sets."""
    if bare := next((one.name for one in sets if "data" not in one.components), None):
        no_such = f", and the first run has no such set{did_you_mean(bare, own.evaluation.sets)}" if own else ""
        text = f"evaluation.sets.{bare} has no data{no_such}"
        raise UsageError(
            f"run eval: {text}; for a new set, type evaluation.sets.{bare}.data={{name: file, path: FILE}}"
        )
    if sets and edits:
        text = f"evaluation.sets.{sets[0].name} is a new set, evaluation.sets.{next(iter(edits))} one of the run"
        raise UsageError(f"run eval: {text}; type a command for each")


def _of_first_run(
    own: JobSpec | None, spec: JobSpec, edits: Mapping[str, dict[str, Any]], args: Namespace, words: Sequence[str]
) -> tuple[JobSpec, list[EvaluationSet]]:
    """The evaluation sets and options of the first run among the sources; typed options replace its own.

    own: its spec; edits: its sets with typed options. Raises UsageError where no source is a run, SpecError.
    """
    from runner.inference.model_source import resolve_model_path
    from runner.tools.evaluate import sets_of_run

    if own is None:
        raise UsageError(
            "run eval: no model is a run, which would have held-out rows; name sets: '+evaluation=[gsm8k]'"
        )
    typed = {word.lstrip("+").partition("=")[0] for word in words}
    options = {name: value for name, value in spec.evaluation if name != "sets" and f"evaluation.{name}" in typed}
    evaluation = own.evaluation.model_copy(update={**options, "sets": {**own.evaluation.sets, **edits}})
    if edits:
        if found := evaluation.problems(own):
            raise SpecError([Problem(key, message, COMMAND_LINE) for key, message in found])
        evaluation = evaluation.with_resolved_source(resolve_model_path)
    changed = {"evaluation": evaluation, "seed": spec.seed if "seed" in typed else own.seed}
    own = own.model_copy(update=changed)
    update = {
        name: getattr(own, name)
        for name in ("data", "reward", "environment", "evaluation", "chat", "algorithm", "seed")
    }
    return spec.model_copy(update=update), [_with_options(one, args) for one in sets_of_run(own)]


def _with_options(one: EvaluationSet, args: Namespace) -> EvaluationSet:
    """The set with --samples and --limit. Raises UsageError for samples of multiple choice."""
    if args.samples and one.options.choices is not None:
        text = f"--samples does not apply to evaluation.sets.{one.name}, a multiple choice that samples nothing"
        raise UsageError(f"run eval: {text}; leave it out, or evaluate this set alone")
    typed = {name: value for name in ("samples", "limit") if (value := getattr(args, name)) is not None}
    return replace(one, options=one.options.model_copy(update=typed))


def _settings(words: Sequence[str], spec: JobSpec) -> dict[str, Any]:
    """The arguments of `load_source`."""
    typed = {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in words)}
    device = spec.device.model_dump(mode="json") if any(key.partition(".")[0] == "device" for key in typed) else None
    return {"device": device, "dtype": typed.get("model.dtype"), "trust_remote_code": _trusts_remote_code(words)}


def _trusts_remote_code(words: Sequence[str]) -> bool:
    return any(word.lstrip("+").lower() == f"{TRUST}true" for word in words)
