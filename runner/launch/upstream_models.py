"""Initial weights of a job (`init_from`), or its teacher: a run, an export, a recipe that runs first.

recipe:NAME ──a run in a process of its own, or one made before──▶ its export ─┐
a run's folder ──▶ its export ─────────────────────────────────────────────────┴──▶ an absolute folder

What can be said of those paths is said before the run folder is made and torch is imported.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from runner.core.errors import EnvironmentProblem, Interrupted, Problem, SpecError, StorageError
from runner.core.signals import SignalRecorder
from runner.inference.model_source import MODELSCOPE, resolve_model_path
from runner.launch.run_records import TRUST_REMOTE_CODE
from runner.launch.upstream_run import (
    UpstreamRunFailed,
    cache_folder,
    command_words,
    continue_hint,
    layout_words,
    upstream_environment,
)
from runner.model.hub_access import is_hub_id
from runner.model.model_folder import TOKENIZERS, adapter_base, check_model_folder, has_tokenizer, is_adapter
from runner.run_dir.folder import RunFolder, display_path, read_mapping
from runner.spec.job import RECIPE, JobSpec
from runner.tracker.text import print_text


def resolve_init_from(spec: JobSpec) -> JobSpec:
    """The spec with `init_from` as an absolute folder of weights; a recipe is run now.

    Raises SpecError if there are no weights, Interrupted or StageFailed if the recipe did not end well.
    """
    if spec.init_from is None:
        return spec
    if spec.init_from.startswith(RECIPE):
        where = _run_upstream(spec, spec.init_from.removeprefix(RECIPE), "init_from", own_model=False)
    else:
        where = _locate(spec.init_from, "init_from")
    folder = _weights_folder(where, "init_from")
    if is_adapter(folder) and spec.model.source is None:
        text = f"{display_path(folder)} is an adapter, and model={spec.model.name} is not its base"
        typed = f"type model=hf model.path={adapter_base(folder)} adapter=lora"
        raise SpecError([Problem("init_from", f"{text}; {typed}")])
    return spec.model_copy(update={"init_from": str(folder)})


def resolve_other_models(spec: JobSpec) -> JobSpec:
    """The spec with each other model of its algorithm, e.g. a teacher, as a folder or hub id.

    A recipe is run now, on a model of its own.

    Raises SpecError if a folder has no weights, Interrupted or StageFailed if the recipe did not end well.
    """
    found = {option: _resolve_model(spec, option, path) for option, path in spec.algorithm.upstream_models().items()}
    return spec.model_copy(update={"algorithm": spec.algorithm.model_copy(update=found)}) if found else spec


def _resolve_model(spec: JobSpec, option: str, path: str) -> str:
    """The absolute folder or hub id that `path`, which an option of the algorithm says, stands for."""
    key, revision = f"algorithm.{option}", f"{option.removesuffix('_path')}_revision"
    if path.startswith(RECIPE):
        where = _run_upstream(spec, path.removeprefix(RECIPE), key, own_model=True)
    elif is_hub_id(path) and "/" not in path and path != "latest":
        raise SpecError([Problem(key, f"{path}: no such folder; a hub id looks like ORG/NAME")])
    elif is_hub_id(path) and path != "latest" and not path.startswith(MODELSCOPE):
        print_text(f"{key}: no folder {path} here, so taken as a hub id", file=sys.stderr)
        return path
    else:
        where = _locate(path, key)
    if getattr(spec.algorithm, revision, None) is not None:
        raise SpecError([Problem(f"algorithm.{revision}", f"not used with {path}; it belongs to a hub id")])
    folder = _weights_folder(where, key)
    if not has_tokenizer(folder) and not (is_adapter(folder) and adapter_base(folder)):
        text = (
            f"{display_path(folder)} has no tokenizer ({', '.join(TOKENIZERS)}); copy the one it was trained with there"
        )
        raise SpecError([Problem(key, text)])
    return str(folder)


def _locate(text: str, key: str) -> Path:
    """The folder that a model's name means; `latest` and modelscope:ID as everywhere. Raises SpecError."""
    if text == "latest" or text.startswith(MODELSCOPE):
        return Path(resolve_model_path(text, key))
    return Path(text).expanduser()


def _weights_folder(where: Path, key: str) -> Path:
    """The folder with safetensors at `where`, or in its export: a model's, or an adapter's."""
    for folder in (where / "export", where):
        if is_adapter(folder) or list(folder.glob("*.safetensors")):
            if is_adapter(folder) or (folder / "config.json").exists():
                check_model_folder(folder, key)
            return folder.resolve()
    expected = f"a finished run's folder, an export, an adapter's folder or {RECIPE}NAME is expected"
    raise SpecError([Problem(key, f"no weights in {display_path(where)}; {expected}")])


def _run_upstream(spec: JobSpec, recipe: str, key: str, *, own_model: bool) -> Path:
    """The run of the recipe that the option `key` names: a finished one, or one run or resumed now.

    One job at a time runs it; other jobs wait for it.
    """
    words = command_words(recipe, spec.model_dump(mode="json"), own_model=own_model)
    try:
        folder = RunFolder(cache_folder(recipe, words).absolute())
    except UpstreamRunFailed as error:
        text = f"+recipe={recipe}, which {key} asks for, ended with exit code {error.exit_code}: {error}"
        raise UpstreamRunFailed(text, error.exit_code) from error
    with _lock_upstream_run(folder, f"{key}: +recipe={recipe}") as lock:
        if _is_done(folder):
            again = f"(to run it again: rm -r {display_path(folder.root)})"
            print_text(
                f"{key}: +recipe={recipe} was run before, with this spec and code: taking its weights {again}",
                file=sys.stderr,
            )
            return folder.root
        layout = _layout_of(recipe, key, words, spec)
        from runner.launch.slurm.srun_task import handle_slurm_signals

        with handle_slurm_signals(spec):
            _run(folder, recipe, key, words, layout, lock, own_model=own_model)
    return folder.root


def _layout_of(recipe: str, key: str, words: Sequence[str], spec: JobSpec) -> list[str]:
    """The words of the stage's layout: the job's, or, said so, one process."""
    layout, why_not = layout_words(words, spec.model_dump(mode="json"))
    said = f"{key}: +recipe={recipe} runs"
    if why_not:
        print_text(f"{said} as one process, as this job's layout is not for it:\n{why_not}", file=sys.stderr)
    elif spec.launch.machines > 1:
        wait = "the others wait for it, parallelism.timeout_s at most"
        print_text(f"{said} on this machine's devices; {wait}", file=sys.stderr)
    return layout


def _run(
    folder: RunFolder, recipe: str, key: str, words: Sequence[str], layout: Sequence[str], lock: int, *, own_model: bool
) -> None:
    from runner.core.subprocess import ChildProcess
    from runner.launch.slurm.commands import count_stage

    what = "its own model" if own_model else "this job's model"
    begun = folder.spec.is_file()
    verb = "continuing" if begun else "running"
    print_text(
        f"{key}: {verb} +recipe={recipe} first, on {what} ({display_path(folder.root)})", file=sys.stderr, flush=True
    )
    trust = [word for word in words if word == TRUST_REMOTE_CODE]
    typed = ["resume", str(folder.root), *trust] if begun else [*words, "--folder", str(folder.root)]
    typed += layout
    command = [sys.executable, "-P", "-m", "runner", *typed]
    count_stage(folder)
    interrupts = SignalRecorder(saves=True)
    with interrupts.record_signals():
        # The lock is held until the stage has saved, too. The first signal that it is sent makes it save and end.
        stage = ChildProcess(
            command, end_signal=signal.SIGTERM, stdin=None, env=upstream_environment(), pass_fds=(lock,)
        )
        code = stage.wait_and_forward(interrupts.noted_signals)
    if interrupts.stop_signals and code <= 0:  # it was done by then, or had not yet begun to listen
        code = 128 + interrupts.stop_signals[0]
    if code in (130, 143):
        raise Interrupted(
            code - 128, f"while running +recipe={recipe} first; this job was not begun{continue_hint(recipe)}"
        )
    if code:
        raise UpstreamRunFailed(f"+recipe={recipe}, which {key} asks for, ended with exit code {code}", code)
    if not _is_done(folder):
        raise EnvironmentProblem(
            f"+recipe={recipe} ended well, but left no finished run in {display_path(folder.root)}"
        )


def _is_done(folder: RunFolder) -> bool:
    """Whether a stage has ended well. Its export is looked for by who wants it."""
    try:
        return read_mapping(folder.status).get("state") == "done"
    except EnvironmentProblem:  # cut off: it is continued
        return False


@contextmanager
def _lock_upstream_run(folder: RunFolder, whose: str) -> Iterator[int]:
    """Hold a stage for this job and what it starts; yields the descriptor. Raises StorageError."""
    try:
        folder.root.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder.root.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StorageError(f"cannot write in {folder.root.parent}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print_text(
                f"{whose} is being run by another job; waiting for it ({display_path(folder.root)})",
                file=sys.stderr,
                flush=True,
            )
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)
