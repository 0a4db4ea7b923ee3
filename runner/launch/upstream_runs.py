"""Initial weights (`init_from`) or teacher of a job: a run, an export, or a recipe that runs first.

recipe:NAME ──a run in its own process, or an earlier one──▶ its export ─┐
a run's folder ──▶ its export ───────────────────────────────────────────┴──▶ an absolute folder

These paths are checked before the run folder is created and torch is imported.

A recipe that runs first (an upstream run) has its own folder:

outputs/stages/<recipe>/<key>/      a run folder; the job that runs it holds <key>.lock beside it

The key is a hash of the resolved spec, of the upstream runs and files that it names, and of the code. Equal keys are
the same run, which is made once for all jobs of a sweep and all later starts. The number of devices and the parallelism
are not part of the key.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from runner.core.errors import EnvironmentProblem, Interrupted, Problem, RankLost, RunnerError, SpecError
from runner.core.file_lock import FileLock
from runner.core.fsync_io import storage_errors
from runner.core.rank_info import without_rank_variables
from runner.core.signals import SignalRecorder, signal_name
from runner.core.subprocess import ChildProcess
from runner.inference.model_source import resolve_model_path
from runner.launch.run_records import TRUST_REMOTE_CODE, UPSTREAM_RUN, is_upstream_run
from runner.launch.slurm.commands import count_stage
from runner.launch.slurm.srun_task import handle_slurm_signals
from runner.model.model_folder import (
    MODELSCOPE,
    TOKENIZERS,
    adapter_base,
    check_model_folder,
    has_tokenizer,
    is_adapter,
    is_hub_id,
)
from runner.run_dir.folder import OUTPUTS, RunFolder, display_path, read_mapping
from runner.run_dir.manifest import LIBRARIES, fingerprint
from runner.run_dir.user_files import imported_files
from runner.spec.base import iter_leaves
from runner.spec.job import CONFIG_DIR, RECIPE, JobSpec
from runner.tracker.text import labeled_line, print_text

STAGES = OUTPUTS / "stages"
PLAIN_NAME = re.compile(r"[\w./-]+")
NOT_IN_KEY = ("name", "tracker", "watch", "strict")  # these do not change the result
JOB_ONLY = ("quantization", "router_replay")  # of the model: the recipe may train all weights, and sample nothing
LAYOUT = ("launch", "parallelism")  # these change only the order of summation
KEY_CHARACTERS = 16
USER_CODE = re.compile(r"\.py:\w+$")  # FILE.py:NAME, as of reward=function


class UpstreamRunFailed(RunnerError):
    """A recipe that must run first is not a job, or failed."""


def upstream_environment() -> Mapping[str, str]:
    """The environment of an upstream run."""
    return {**without_rank_variables(os.environ), UPSTREAM_RUN: "1"}


def command_words(recipe: str, spec: Mapping[str, Any], *, own_model: bool) -> list[str]:
    """Words of a recipe that a job (`spec`, plain data) runs first, on the job's device.

    recipe: its name or file, which may be followed by the --config-dir of the job; own_model: the recipe has its own
    model; otherwise it uses the job's
    """
    recipe, _, config_dir = recipe.partition(CONFIG_DIR)
    groups = ("device", "tracker") if own_model else ("device", "model", "tracker")
    # A name as it is, and the path of a file in the grammar of the command line.
    escaped = recipe.replace("\\", "\\\\").replace("'", "\\'")
    words = ["+recipe=" + (recipe if PLAIN_NAME.fullmatch(recipe) else f"'{escaped}'"), f"seed={spec['seed']}"]
    for group in groups:
        kept = {key: value for key, value in spec[group].items() if key not in JOB_ONLY}
        words += [f"{group}={spec[group]['name']}", *_options(group, kept)]
    return [*words, *(["--config-dir", config_dir] if config_dir else [])]


def layout_words(words: Sequence[str], spec: Mapping[str, Any]) -> tuple[list[str], str]:
    """Words for an upstream run's layout, and why it is one process if it cannot have the job's layout.

    spec: the job as plain data. The upstream run of a job on several machines uses only machine 0.
    """
    wanted = _layout(spec["launch"], spec["parallelism"])
    try:
        _resolve_spec([*words, *wanted])
    except UpstreamRunFailed as error:
        return _layout({**spec["launch"], "devices": 1}, {"name": "single"}), str(error)
    return wanted, ""


def _layout(launch: Mapping[str, Any], parallelism: Mapping[str, Any]) -> list[str]:
    here = {"name": "local", "devices": launch["devices"], "attempts": launch["attempts"]}  # however the job starts
    groups = (("launch", here), ("parallelism", parallelism))
    return [word for group, values in groups for word in (f"{group}={values['name']}", *_options(group, values))]


def _options(group: str, values: Mapping[str, Any]) -> list[str]:
    """A component's options as overrides."""
    flow = {k: yaml.safe_dump(v, default_flow_style=True, width=10**6) for k, v in values.items() if k != "name"}
    return [f"{group}.{key}={text.removesuffix(chr(10)).removesuffix('...').strip()}" for key, text in flow.items()]


def cache_folder(recipe: str, words: Sequence[str]) -> Path:
    """The folder of the upstream run of these words. Raises UpstreamRunFailed if they are not a job."""
    recipe = recipe.partition(CONFIG_DIR)[0]
    name = Path(recipe).stem if recipe.endswith((".yaml", ".yml")) else recipe  # a recipe's file
    return STAGES / name / cache_key(words)


def cache_key(words: Sequence[str]) -> str:
    """Key of upstream runs with the same weights. Raises UpstreamRunFailed if the words are not a job."""
    spec = _resolve_spec(words)
    inner = {
        key: cache_key(command_words(value.removeprefix(RECIPE), spec, own_model=key != "init_from"))
        for key, value in iter_leaves(spec)
        if isinstance(value, str) and value.startswith(RECIPE)
    }
    counted = {key: value for key, value in spec.items() if key not in (*NOT_IN_KEY, *LAYOUT)}
    files = {key: found for key, value in iter_leaves(counted) if (found := list(_files(key, value)))}
    versions = {name: version(name) for name in LIBRARIES}
    whole = {"spec": counted, "stages": inner, "files": files, "code": _code(), "versions": versions}
    return fingerprint(whole)[:KEY_CHARACTERS]


def _resolve_spec(words: Sequence[str]) -> dict[str, Any]:
    """The spec of these words, composed by the command line in another process."""
    command = [sys.executable, "-P", "-m", "runner", "--cfg", "job", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=upstream_environment())
    if done.returncode:
        raise UpstreamRunFailed(done.stderr.strip().removeprefix("error: "), done.returncode)
    return dict(yaml.safe_load(done.stdout))


def _files(key: str, value: Any) -> Iterator[tuple[str, int, int]]:
    """Name, size and modification time of the files that an option names, and that they import."""
    for name, text in _texts(key, value):
        if not ("/" in text or "." in text or name.endswith("path")):
            continue
        path = Path(USER_CODE.sub(".py", text)).expanduser()
        with suppress(OSError, ValueError):  # not a valid file name
            inside = sorted(path.rglob("*")) if path.is_dir() else [path, *imported_files(path)]
            stats = [(str(file), file.stat()) for file in inside if file.is_file()]
            yield from ((file, found.st_size, found.st_mtime_ns) for file, found in stats)


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """The texts in an option, each with its key; those of the parts of a reward, too."""
    if isinstance(value, str):
        yield key, value
    for name, one in value.items() if isinstance(value, Mapping) else ():
        yield from _texts(str(name), one)
    for one in value if isinstance(value, list) else ():
        yield from _texts(key, one)


@cache
def _code() -> str:
    """A hash of this program's code."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def continue_hint(recipe: str, typed: Sequence[str] | None = None) -> str:
    """The command that continues after an interrupted upstream run; empty in an upstream run.

    typed: the words of the job; None = those of this process
    """
    if is_upstream_run():
        return ""
    words = ["run", *(sys.argv[1:] if typed is None else typed)]
    return "\n" + labeled_line("continue", f"{shlex.join(words)}     (+recipe={recipe} continues where it stopped)")


def resolve_init_from(spec: JobSpec) -> JobSpec:
    """The spec with `init_from` as an absolute folder of weights; a recipe runs now.

    Raises SpecError if there are no weights, Interrupted or UpstreamRunFailed if the recipe failed.
    """
    if spec.init_from is None:
        return spec
    if spec.init_from.startswith(RECIPE):
        where = _run_upstream(spec, spec.init_from.removeprefix(RECIPE), "init_from", own_model=False)
    else:
        where = _locate(spec.init_from, "init_from")
    folder = _weights_folder(where, "init_from")
    if is_adapter(folder) and spec.model.source is None:
        text = f"{display_path(folder)} is an adapter, but model={spec.model.name} is not its base"
        typed = f"type model=hf model.path={adapter_base(folder)} adapter=lora"
        raise SpecError([Problem("init_from", f"{text}; {typed}")])
    return spec.model_copy(update={"init_from": str(folder)})


def resolve_other_models(spec: JobSpec) -> JobSpec:
    """The spec with each other model of its algorithm, e.g. a teacher, as a folder or hub id.

    A recipe runs now, with its own model. Raises SpecError if a folder has no weights, Interrupted or UpstreamRunFailed
    if the recipe failed.
    """
    found = dict[str, str | None]()
    for option, path in spec.algorithm.upstream_models().items():
        found |= _resolve_model(spec, option, path)
    return spec.model_copy(update={"algorithm": spec.algorithm.model_copy(update=found)}) if found else spec


def _resolve_model(spec: JobSpec, option: str, path: str) -> dict[str, str | None]:
    """Options for a model that one names by `path`: an absolute folder without a revision, or a hub id."""
    key, revision = f"algorithm.{option}", f"{option.removesuffix('_path')}_revision"
    commit: str | None = getattr(spec.algorithm, revision, None)
    if path.startswith(RECIPE):
        where = _run_upstream(spec, path.removeprefix(RECIPE), key, own_model=True)
    elif is_hub_id(path) and "/" not in path and path != "latest":
        raise SpecError([Problem(key, f"{path}: no such folder; a hub id looks like ORG/NAME")])
    elif is_hub_id(path) and path != "latest" and not path.startswith(MODELSCOPE):
        print_text(f"{key}: no folder {path} here, so it is read as a hub id", file=sys.stderr)
        return {option: path}
    else:
        where = _locate(path, key, commit)
    if commit is not None and not path.startswith(MODELSCOPE):
        raise SpecError([Problem(f"algorithm.{revision}", f"not used with {path}; it is for a hub id")])
    folder = _weights_folder(where, key)
    if not has_tokenizer(folder) and not (is_adapter(folder) and adapter_base(folder)):
        text = f"{display_path(folder)} has no tokenizer ({', '.join(TOKENIZERS)}); copy its tokenizer into the folder"
        raise SpecError([Problem(key, text)])
    return {option: str(folder)} | ({} if commit is None else {revision: None})


def _locate(text: str, key: str, revision: str | None = None) -> Path:
    """The folder of a model: a path, a run, `latest` or modelscope:ID. Raises SpecError."""
    if text == "latest" or text.startswith(MODELSCOPE) or (Path(text).expanduser() / "spec.yaml").is_file():
        return Path(resolve_model_path(text, key, revision=revision))
    return Path(text).expanduser()


def _weights_folder(where: Path, key: str) -> Path:
    """The folder with a model's or adapter's safetensors: `where`, or its export."""
    for folder in (where / "export", where):
        if is_adapter(folder) or list(folder.glob("*.safetensors")):
            if is_adapter(folder) or (folder / "config.json").exists():
                check_model_folder(folder, key)
            return folder.resolve()
    expected = f"expected the folder of a finished run, an export, an adapter's folder or {RECIPE}NAME"
    raise SpecError([Problem(key, f"no weights in {display_path(where)}; {expected}")])


def _run_upstream(spec: JobSpec, recipe: str, key: str, *, own_model: bool) -> Path:
    """The run of the recipe that `key` names: a finished one, or one that is run or resumed now.

    Only one job runs it at a time; other jobs wait.
    """
    words = command_words(recipe, spec.model_dump(mode="json"), own_model=own_model)
    if spec.model.quantization is not None and not own_model:
        text = f"{key}: +recipe={recipe} does not take over model.quantization={spec.model.quantization}"
        print_text(f"{text}, which stores the base of this job", file=sys.stderr)
    try:
        folder = RunFolder(cache_folder(recipe, words).absolute())
    except UpstreamRunFailed as error:
        text = f"+recipe={recipe}, which {key} needs, failed with exit code {error.exit_code}: {error}"
        raise UpstreamRunFailed(text, error.exit_code) from error
    with _lock_upstream_run(folder, f"{key}: +recipe={recipe}") as lock:
        if _is_done(folder):
            again = f"(to run it again: rm -r {display_path(folder.root)})"
            text = f"{key}: using the weights of an earlier +recipe={recipe} with this spec and code {again}"
            print_text(text, file=sys.stderr)
            return folder.root
        layout, why_not = layout_words(words, spec.model_dump(mode="json"))
        text = f"{key}: running +recipe={recipe}"
        if why_not:
            text += f" as one process, because it does not support this job's layout:\n{why_not}"
            print_text(text, file=sys.stderr)
        elif spec.launch.machines > 1:
            wait = "the others wait for at most parallelism.timeout_s"
            print_text(f"{text} on this machine's devices; {wait}", file=sys.stderr)
        with handle_slurm_signals(spec):
            _run(folder, recipe, key, words, layout, lock, own_model=own_model)
    return folder.root


def _run(
    folder: RunFolder, recipe: str, key: str, words: Sequence[str], layout: Sequence[str], lock: int, *, own_model: bool
) -> None:
    what = "its own model" if own_model else "this job's model"
    begun = folder.spec.is_file()
    verb = "continuing" if begun else "running"
    where = display_path(folder.root)
    print_text(f"{key}: {verb} +recipe={recipe} first, on {what} ({where})", file=sys.stderr, flush=True)
    trust = [word for word in words if word == TRUST_REMOTE_CODE]
    typed = ["resume", str(folder.root), *trust] if begun else [*words, "--folder", str(folder.root)]
    typed += layout
    command = [sys.executable, "-P", "-m", "runner", *typed]
    count_stage(folder)
    interrupts = SignalRecorder(saves=True)
    with interrupts.record_signals():
        # The lock is also held until the upstream run has saved: the first signal makes it save and end.
        own = upstream_environment()
        stage = ChildProcess(command, end_signal=signal.SIGTERM, stdin=None, env=own, pass_fds=(lock,))
        code = stage.wait_and_forward(interrupts.noted_signals)
    if interrupts.stop_signals and code <= 0:  # it had already ended, or did not handle signals yet
        code = 128 + interrupts.stop_signals[0]
    if code in (130, 143):
        text = f"while running +recipe={recipe} first; this job did not start{continue_hint(recipe)}"
        raise Interrupted(code - 128, text)
    if code:
        how = f"failed with exit code {code}" if code > 0 else f"was killed ({signal_name(-code)})"
        raise UpstreamRunFailed(f"+recipe={recipe}, which {key} needs, {how}", code if code > 0 else RankLost.exit_code)
    if not _is_done(folder):
        raise EnvironmentProblem(f"+recipe={recipe} succeeded, but there is no finished run in {where}")


def _is_done(folder: RunFolder) -> bool:
    """Whether an upstream run succeeded. The caller checks its export."""
    try:
        return read_mapping(folder.status).get("state") == "done"
    except EnvironmentProblem:  # unreadable: the run is resumed
        return False


@contextmanager
def _lock_upstream_run(folder: RunFolder, whose: str) -> Iterator[int]:
    """Hold an upstream run's lock; yields the descriptor, which its process inherits. Raises StorageError."""
    with storage_errors(f"cannot write in {folder.root.parent}"):
        folder.root.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.root.with_suffix(".lock"))
    with lock:
        try:
            lock.acquire()
        except BlockingIOError:
            text = f"another job runs {whose}; waiting for it ({display_path(folder.root)})"
            print_text(text, file=sys.stderr, flush=True)
            lock.acquire(wait=True)
        yield lock.handle
