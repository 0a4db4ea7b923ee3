"""The verbs that work on a run: start, resume, infer, export.

What they work with is imported when the config is composed: the answer to a mistake in it does not wait for that.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from runner.cli.args import UsageError, is_override
from runner.cli.config_sources import GROUP
from runner.cli.job_builder import (
    SPEC,
    ComposedJob,
    ExtraWords,
    JobDraft,
    compose_job,
    draft,
    no_extra_words,
    re_decode,
)
from runner.cli.overrides import TRUST
from runner.core.errors import NotReady, Problem, RunnerError, SpecError
from runner.core.rank_info import VARIABLES
from runner.spec.base import origin_of
from runner.spec.decode import decode_unchecked
from runner.spec.job import JobSpec
from runner.tracker.text import print_text

if TYPE_CHECKING:
    from runner.run_dir.folder import RunFolder

SETTING = re.compile(r"[+~]*(\w+)(?:\.[\w.]*)?=")
USABLE = re.compile(rf"[+]*(?:device(?:\.\w+)?=|model\.path=|{re.escape(TRUST)})")


def run(args: Namespace) -> int:
    """Start a job; with --cfg job print it, with --info say what it is composed of."""
    if args.info:
        from runner.cli import listing

        return listing.info(args)
    if args.multirun:
        from runner.cli import sweep

        return sweep.start_sweep(args)
    if args.cfg:
        return _show(compose_from_args(args, args.words))

    if VARIABLES[0] not in os.environ:
        return _start(args, args.words)
    from runner.launch import torchrun

    return torchrun.run_under_torchrun(args.words, lambda words: _start(args, words))


@contextmanager
def _explain_environment_problem(job: ComposedJob, command: Sequence[str]) -> Iterator[None]:
    """Replace the error of a machine that is not ready for the job by the doctor's list of steps."""
    try:
        yield
    except NotReady as error:
        from runner.cli.doctor import diagnosis

        if (refusal := diagnosis(job, command)) is None:
            raise
        raise refusal from error


def _start(args: Namespace, words: Sequence[str]) -> int:
    try:
        job = compose_from_args(args, words, _slurm_overrides)
    except SpecError as error:
        raise SpecError([*error.problems, *_machine_problems(args, words, error)]) from error
    from runner.launch import local

    if not job.spec.launch.queued:
        with _explain_environment_problem(job, _again(args, words, job)):
            return local.start_run(job.spec, job.overrides, job.origins, args.folder)
    from runner.launch.slurm import srun_task
    from runner.run_dir.folder import display_path

    if (before := srun_task.requeued_folder(args.folder)) is not None:
        print_text(f"requeued {display_path(before)} was begun by this Slurm job: continuing there", file=sys.stderr)
        return _continue_run(str(before), _trust(words))
    with srun_task.handle_slurm_signals(job.spec), _explain_environment_problem(job, _again(args, words, job)):
        srun_task.exec_srun(job.spec)
        return local.start_run(job.spec, job.overrides, job.origins, args.folder)


def _machine_problems(args: Namespace, words: Sequence[str], error: SpecError) -> list[Problem]:
    """What this machine lacks for the device and the sampler of a wrong job, where these are not wrong themselves.

    Nothing that asks a network: the answer to a mistake does not wait for that.
    """
    wrong = {problem.key.partition(".")[0] for problem in error.problems}
    if args.spec or wrong & {"", GROUP}:  # a job that is only partly known
        return []
    drafted = draft(words, args.config_dir)
    spec = None if drafted.unsure else decode_unchecked(drafted.data, drafted.origins)
    if spec is None or not spec.launch.here:
        return []
    found = []
    for part, check in (("device", spec.device.preflight), ("sampler", spec.sampler.preflight_here)):
        try:
            check()
        except RunnerError as lack:
            if part not in wrong:
                found.append(Problem(part, str(lack), origin_of(part, drafted.origins)))
    return found


def _again(args: Namespace, words: Sequence[str], job: ComposedJob) -> list[str]:
    """The words that say which job it is, the recipe that was taken unasked among them."""
    taken = [word for word in job.overrides if word.startswith(f"+{GROUP}=") and word not in words]
    files = {"--config-dir": args.config_dir, "--spec": args.spec}
    return [*taken, *words, *(word for flag, path in files.items() if path for word in (flag, str(path)))]


def _slurm_overrides(drafted: JobDraft) -> list[str]:
    """For launch=slurm, what Slurm says of the job's machines."""
    launch, device = drafted.data.get("launch"), drafted.data.get("device")
    if not isinstance(launch, Mapping) or launch.get("name") != "slurm" or not isinstance(device, Mapping):
        return []
    from runner.launch.slurm import srun_task

    return srun_task.slurm_layout(launch, drafted.origins, str(device.get("name")))


def compose_from_args(args: Namespace, words: Sequence[str], more: ExtraWords = no_extra_words) -> ComposedJob:
    """The job of a command line; prints what was chosen for the user. Raises as `compose_job` does."""
    where = (words, args.config_dir, more)
    spec = args.spec / SPEC if args.spec and args.spec.is_dir() else args.spec
    job = re_decode(spec, *where) if spec else compose_job(*where)
    for note in job.notes:
        print_text(note, file=sys.stderr)
    return job


def _show(composed: ComposedJob) -> int:
    print(yaml.safe_dump(composed.data, sort_keys=False, allow_unicode=True), end="")
    return 0


def resume(args: Namespace) -> int:
    """Continue a run."""
    where, overrides = _split_run(args.words)
    if args.cfg:
        from runner.run_dir.folder import find_run

        return _show(re_decode(find_run(where).spec, overrides))

    from runner.launch import torchrun

    return torchrun.run_under_torchrun(overrides, lambda words: _continue_run(where, words))


def _continue_run(where: str, overrides: Sequence[str]) -> int:
    from runner.run_dir.folder import find_run

    folder = find_run(where)
    before = re_decode(folder.spec, _trust(overrides))
    after = re_decode(folder.spec, overrides, more=_slurm_overrides)
    from runner.launch import local
    from runner.launch.slurm import srun_task

    with (
        srun_task.handle_slurm_signals(after.spec),
        _explain_environment_problem(after, ["--spec", str(folder.root), *overrides]),
    ):
        srun_task.exec_srun(after.spec)
        return local.resume(folder, before.spec, after.spec, after.overrides)


def infer(args: Namespace) -> int:
    """Answer prompts: those typed, those of a file (one a line), or line by line from the keyboard."""
    _check_sampling(args)
    folder, prompts, composed = _resolve_run(args)
    _load_torch(composed.spec)
    from runner.launch import infer_export
    from runner.run_dir.folder import display_path
    from runner.tracker.text import escape_controls

    if args.file:
        prompts += infer_export.read_prompts(args.file)
    model, loaded = infer_export.load_model(folder, composed.spec, args.checkpoint)
    style = loaded.state["identity"]["prompt_style"]
    asked = "asked as plain text, like the data" if style == "text" else "asked through the chat template"
    print_text(f"{display_path(folder.root)}, step {loaded.step}, {asked}", file=sys.stderr)
    several = args.file is not None or len(prompts) > 1
    settings = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
    shown_as = escape_controls if sys.stdout.isatty() else str  # a terminal obeys what a model or a file says
    for prompt in prompts or _typed_prompts():
        if several:
            print(shown_as(f"> {prompt}"))
        written = False
        for piece in infer_export.stream_answer(
            model, prompt, style, top_p=args.top_p or 1.0, seed=args.seed or 0, **settings
        ):
            print(shown_as(piece), end="", flush=True)
            written = written or bool(piece)
        print()
        if not written:
            print("(an empty answer)", file=sys.stderr)
    return 0


def export(args: Namespace) -> int:
    """Write an export of a run."""
    folder, more, composed = _resolve_run(args)
    if more:
        raise UsageError(f"what is '{more[0]}'? write: run export latest --checkpoint 100 --out FOLDER")
    _load_torch(composed.spec)
    from runner.launch import infer_export
    from runner.run_dir.folder import display_path

    target, step = infer_export.export(folder, composed.spec, args.checkpoint, args.out, args.merge)
    kind = (
        "a PEFT adapter (--merge writes a whole model)" if infer_export.is_adapter(target) else "a Hugging Face folder"
    )
    print_text(f"{display_path(folder.root)}, step {step}: {kind}", file=sys.stderr)
    print_text(display_path(target))
    return 0


def _load_torch(spec: JobSpec) -> None:
    from runner.core.auto_choices import Decisions
    from runner.launch.session import load_torch, set_environment

    set_environment(spec, Decisions(spec.strict))
    load_torch(spec.device.name)


def _split_run(words: Sequence[str]) -> tuple[str, list[str]]:
    """The run (`latest` where none is named, and before a prompt of several words) and the other words."""
    if words and not is_override(words[0]) and (Path(words[0]).exists() or not re.search(r"\s", words[0])):
        return words[0], list(words[1:])
    return "latest", list(words)


def _resolve_run(args: Namespace) -> tuple[RunFolder, list[str], ComposedJob]:
    """The run, the words that are prompts, and its job with the allowed overrides. Raises UsageError."""
    settings = [word for word in args.words if _is_setting(word)]
    for word in settings:
        if not USABLE.match(word):
            prompt = f"; as a prompt, write it after --: run infer latest -- '{word}'" if args.verb == "infer" else ""
            raise UsageError(
                f"run {args.verb}: only device=…, model.path=… and {TRUST}… can be set, not {word}{prompt}"
            )
    from runner.run_dir.folder import display_path, find_trained_run

    words = [word for word in args.words if word not in settings]
    where, words = _split_run(words)
    folder, passed_over = find_trained_run(where)
    if passed_over is not None:
        from runner.launch.local import read_status

        failed = read_status(passed_over).get("state") == "failed"
        why = "failed before its first checkpoint" if failed else "has no checkpoint yet"
        print_text(
            f"latest: {display_path(passed_over.root)} {why}; taking the newest run that has one", file=sys.stderr
        )
    return folder, [*words, *args.literal], re_decode(folder.spec, settings)


def _is_setting(word: str) -> bool:
    """Whether a word sets an option that a job has; any other text with an equals sign is a prompt."""
    named = SETTING.match(word)
    return named is not None and named[1] in (*JobSpec.model_fields, GROUP)


def _trust(words: Sequence[str]) -> list[str]:
    return [w for w in words if w.startswith(TRUST)]


def _check_sampling(args: Namespace) -> None:
    for name, value, good in (
        ("--max-new-tokens", args.max_new_tokens, args.max_new_tokens >= 1),
        ("--temperature", args.temperature, 0 <= args.temperature < float("inf")),
        ("--top-p", args.top_p, args.top_p is None or 0 < args.top_p <= 1),
        ("--seed", args.seed, args.seed is None or 0 <= args.seed < 2**63),
    ):
        if not good:
            raise UsageError(f"{name} {value} is out of range")
    if args.temperature == 0 and (args.top_p is not None or args.seed is not None):
        raise UsageError("--top-p and --seed are about drawing at random; give --temperature above 0, too")


def _typed_prompts() -> Iterator[str]:
    """Lines of standard input, with a prompt sign at a terminal, until it ends."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True, file=sys.stderr)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\r\n")
