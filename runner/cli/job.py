"""The verbs that work on a run: start, resume, export.

What they work with is imported when the config is composed: the answer to a mistake in it does not wait for that.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from runner.cli.args import UsageError, is_override
from runner.cli.config_sources import GROUP
from runner.cli.job_builder import ComposedJob, ExtraWords, JobDraft, compose_job, no_extra_words, re_decode, spec_file
from runner.cli.overrides import TRUST
from runner.core.errors import NotReady, Problem, RunnerError, SpecError
from runner.core.rank_info import VARIABLES
from runner.run_dir.folder import RunFolder, display_path, find_run, latest_path, read_mapping, read_spec
from runner.spec.base import origin_of
from runner.spec.decode import decode_unchecked
from runner.spec.job import JobSpec
from runner.tracker.text import print_text

if TYPE_CHECKING:
    from runner.inference.model_source import ModelSource

SETTING = re.compile(r"[+~]*(\w+)(?:\.[\w.]*)?=")
USABLE = re.compile(rf"[+]*(?:device(?:\.\w+)?=|model\.path=|model\.dtype=|{re.escape(TRUST)})")


def run(args: Namespace) -> int:
    """Start a job; with --cfg job print it, with --info say what it is composed of."""
    if args.info:
        from runner.cli import help

        return help.info(args)
    if args.multirun:
        from runner.cli import sweep

        return sweep.start_sweep(args)
    if args.cfg:
        return _show(compose_from_args(args, args.words))

    if VARIABLES[0] not in os.environ:
        return _start(args, args.words)
    from runner.launch import torchrun

    return torchrun.run_under_torchrun(args.words, lambda words: _start(args, words))


# What run tinker chooses.
SERVER = {"name": "tinker", "algorithm": "tinker", "data": "none", "adapter": "lora", "sampler": "torch"}


def tinker(args: Namespace) -> int:
    """Start the server of training clients: a job with these components."""
    typed = {word.lstrip("+").partition("=")[0] for word in args.words}
    args.words = [*(f"{group}={name}" for group, name in SERVER.items() if group not in typed), *args.words]
    args.info = args.multirun = None
    return run(args)


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
    drafts: list[JobDraft] = []

    def more(drafted: JobDraft) -> list[str]:
        drafts.append(drafted)
        return _slurm_overrides(drafted)

    try:
        job = compose_from_args(args, words, more)
    except SpecError as error:
        lacking = [] if args.spec or not drafts else _machine_problems(drafts[0], error)
        raise SpecError([*error.problems, *lacking]) from error
    from runner.launch import local

    if not args.folder and latest_path().is_dir():
        from runner.tools.report.run_status import note_killed

        note_killed(RunFolder(latest_path().resolve()))
    if not job.spec.launch.queued:
        with _explain_environment_problem(job, _again(args, words, job)):
            return local.start_run(job.spec, job.overrides, job.origins, args.folder)
    from runner.launch.slurm import srun_task

    if (before := srun_task.requeued_folder(args.folder)) is not None:
        print_text(f"requeued {display_path(before)} was started by this Slurm job: continuing it", file=sys.stderr)
        srun_task.record_run_folder(RunFolder(before))
        return _continue_run(str(before), _trust(words))
    with srun_task.handle_slurm_signals(job.spec), _explain_environment_problem(job, _again(args, words, job)):
        srun_task.exec_srun(job.spec)
        return local.start_run(job.spec, job.overrides, job.origins, args.folder)


def _machine_problems(drafted: JobDraft, error: SpecError) -> list[Problem]:
    """What this machine lacks for a wrong job's device and sampler, where these are not wrong themselves.

    Nothing that uses a network: an error message does not wait for that.
    """
    wrong = {problem.key.partition(".")[0] for problem in error.problems}
    if wrong & {"", GROUP}:  # a job that is only partly known
        return []
    spec = None if drafted.unsure else decode_unchecked(drafted.data, drafted.origins)
    if spec is None or not spec.launch.here:
        return []
    found = []
    for part, check in (("device", spec.device.preflight), ("sampler", spec.sampler.preflight_here)):
        try:
            if part not in wrong:
                check()
        except RunnerError as lack:
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
    spec = args.spec and spec_file(args.spec)
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
        return _show(re_decode(find_run(where).spec, overrides))

    from runner.launch import torchrun

    return torchrun.run_under_torchrun(overrides, lambda words: _continue_run(where, words))


def _continue_run(where: str, overrides: Sequence[str]) -> int:
    from runner.tools.report.run_status import note_killed

    folder = find_run(where)
    note_killed(folder)
    before = re_decode(folder.spec, _trust(overrides))
    after = re_decode(folder.spec, overrides, more=_slurm_overrides)
    for note in after.notes:
        print_text(note, file=sys.stderr)
    from runner.launch import local
    from runner.launch.slurm import srun_task

    with (
        srun_task.handle_slurm_signals(after.spec),
        _explain_environment_problem(after, ["--spec", str(folder.root), *overrides]),
    ):
        srun_task.exec_srun(after.spec)
        return local.resume(folder, before.spec, after.spec, after.overrides)


def describe_source(source: ModelSource) -> str:
    """A source as a user knows it: a run by its folder, `latest` too."""
    return display_path(Path(source.path)) if source.kind == "run" else source.text


def export(args: Namespace) -> int:
    """Write an export of a run, or adapters as one folder."""
    source, more, settings = resolve_source(args)
    if more:
        raise UsageError(f"'{more[0]}' is not supported; type: run export latest --checkpoint 100 --out FOLDER")
    _check_export(args, source)
    from runner.inference.model_source import prepare_process, source_spec
    from runner.model.model_folder import is_adapter

    if source.kind == "run":
        spec = source_spec(source, **settings)
        prepare_process(spec)
        from runner.launch import infer_export

        done = infer_export.export(
            RunFolder(Path(source.path)),
            spec,
            source.checkpoint,
            args.out,
            merge=args.merge,
            check=args.check,
            other=args.other,
            quantize=args.quantize,
        )
        target, what = done.folder, f"{describe_source(source)}, step {done.step}"
        checked = f"check    {done.check or 'none (--check compares the folder of a language model with the run)'}"
        print_text(checked, file=sys.stderr)
    else:
        from runner.launch import infer_export

        target, what = args.out, ", ".join(adapter.name for adapter in source.adapters)
        weights = args.weights or (1.0,) * len(source.adapters)
        density = 0.5 if args.density is None else args.density
        infer_export.combine_adapters(source, target, args.combine, weights, density, args.merge, **settings)
    whole = not is_adapter(target)
    kind = "a Hugging Face folder" if whole else "a PEFT adapter (--merge writes a full model)"
    print_text(f"{what}: {kind}", file=sys.stderr)
    is_text = "vision_config" not in read_mapping(target / "config.json")  # GGUF has that part in another file
    if whole and is_text and not args.quantize:
        print_text(_other_formats(target), file=sys.stderr)
    print_text(display_path(target))
    if args.push:
        print_text(infer_export.push(target, args.push))
    return 0


def _check_export(args: Namespace, source: ModelSource) -> None:
    """Raise UsageError for options of `run export` that do not fit the source, or one another."""
    if args.push and not re.fullmatch(r"(hub|modelscope):[\w.-]+/[\w.-]+", args.push):
        raise UsageError(f"--push {args.push}: expected hub:OWNER/NAME or modelscope:OWNER/NAME")
    if args.other and args.check is False:
        raise UsageError("--with checks the export, and --no-check does not; leave one of them out")
    if args.quantize and (source.kind != "run" or not args.other):
        raise UsageError(
            "--quantize is for a run, and needs --with ENV, where llmcompressor is installed (docs/models.md)"
        )
    if args.weights and not args.combine:
        raise UsageError("--weights is for adapters that --combine combines; leave it out")
    if args.density is not None and not (args.combine or "").startswith(("ties", "dare")):
        raise UsageError("--density is for --combine ties, dare_linear and dare_ties; leave it out")
    if source.kind == "run":
        if args.adapter or args.combine:
            raise UsageError("--adapter and --combine need a base, not a run; type run export BASE --adapter FOLDER")
        return
    if not source.adapters:
        raise UsageError(f"{source.text} is already a full model; run export takes a run, or adapters")
    if len(source.adapters) > 1 and not args.combine:
        raise UsageError("several adapters are set; type how to combine them: --combine linear|ties|dare_linear")
    if len(source.adapters) == 1 and (args.combine or not args.merge):
        raise UsageError("one adapter is already a folder; --merge merges it into its base, --adapter adds another one")
    if args.weights and len(args.weights) != len(source.adapters):
        raise UsageError(f"--weights has {len(args.weights)} numbers for {len(source.adapters)} adapters")
    if args.check or args.other:
        option = "--check" if args.check else "--with"
        raise UsageError(f"{option} compares an export with its run, but this is not a run")
    if args.out is None or (args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir()))):
        raise UsageError("--out FOLDER is required, an empty or new folder")


def _other_formats(folder: Path) -> str:
    """The commands that make a GGUF file and an Ollama model of a Hugging Face folder."""
    folder = folder.resolve()
    called = folder.parent.name if folder.name.startswith("export") else folder.name
    path, name = shlex.quote(display_path(folder)), re.sub(r"[^a-z0-9]+", "-", called.lower()).strip("-")
    return (
        f"gguf     python llama.cpp/convert_hf_to_gguf.py {path} --outfile {name}.gguf\n"
        f"ollama   echo 'FROM ./{name}.gguf' > Modelfile && ollama create {name} -f Modelfile"
    )


def _split_run(words: Sequence[str]) -> tuple[str, list[str]]:
    """The run (`latest` where none is named, and before a prompt of several words) and the other words."""
    if words and not is_override(words[0]) and (Path(words[0]).exists() or not re.search(r"\s", words[0])):
        return words[0], list(words[1:])
    return "latest", list(words)


def resolve_source(args: Namespace) -> tuple[ModelSource, list[str], dict[str, Any]]:
    """The model, the words that are prompts, and the arguments of `load_source`. Raises UsageError."""
    groups = (*JobSpec.model_fields, GROUP)  # any other text with an equals sign is a prompt
    set_words = [word for word in args.words if (named := SETTING.match(word)) and named[1] in groups]
    for word in set_words:
        if not USABLE.match(word):
            prompt = f"; as a prompt, write it after --: run infer latest -- '{word}'" if args.verb == "infer" else ""
            raise UsageError(
                f"run {args.verb}: only device=…, model.dtype=…, model.path=… and {TRUST}… can be set, not "
                f"{word}{prompt}"
            )
    where, words = _split_run([word for word in args.words if word not in set_words])
    values = {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in set_words)}
    from runner.inference.model_source import parse_source

    base = values.get("model.path") or args.base
    source = parse_source(where, checkpoint=args.checkpoint, base=base, adapters=args.adapter or ())
    trust = yaml.safe_load(values.get("model.trust_remote_code", "false")) is True
    device = _device_section(source, [word for word in set_words if word.lstrip("+").startswith("device")])
    settings = {"device": device, "dtype": values.get("model.dtype"), "trust_remote_code": trust}
    return source, [*words, *args.literal], settings


def _device_section(source: ModelSource, words: Sequence[str]) -> dict[str, Any] | None:
    """The device of a spec: what is typed, on top of a run's own; None = nothing is typed."""
    if not words:
        return None
    own = read_spec(RunFolder(Path(source.path))).data["device"] if source.kind == "run" else {"name": "auto"}
    if any(word.lstrip("+").startswith("device=") for word in words):
        return dict(compose_job([*words, "tracker=none"]).data["device"])
    typed = compose_job([f"device={own['name']}", *words, "tracker=none"]).data["device"]
    return {**own, **{key: typed[key] for key in (word.partition("=")[0].rpartition(".")[2] for word in words)}}


def _trust(words: Sequence[str]) -> list[str]:
    return [w for w in words if w.startswith(TRUST)]
