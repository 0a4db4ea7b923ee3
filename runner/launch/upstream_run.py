"""An upstream run, which another job needs first: its command, its cache key, its folder.

outputs/stages/<recipe>/<key>/      a run's folder; <key>.lock beside it is held by the job that runs it

The key is that of the resolved spec, of the stages that it needs itself, of the files that it names, and of the code:
equal keys are the same run, so that it is done once for all jobs of a sweep, and for every later start. On how many
devices it is made, and how it is spread over them, is no part of it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from runner.core.errors import RunnerError
from runner.core.rank_info import without_rank_variables
from runner.launch.run_records import UPSTREAM_RUN, is_upstream_run
from runner.run_dir.folder import OUTPUTS
from runner.run_dir.manifest import fingerprint
from runner.run_dir.resume_compatibility import LIBRARIES
from runner.spec.base import iter_leaves
from runner.spec.job import RECIPE
from runner.tracker.text import labeled_line

STAGES = OUTPUTS / "stages"
PLAIN_NAME = re.compile(r"[\w./-]+")
NOT_IN_KEY = ("name", "tracker", "watch", "strict")  # what changes nothing of the result
LAYOUT = ("launch", "parallelism")  # nor does this, up to the order of summation
KEY_CHARACTERS = 16


class UpstreamRunFailed(RunnerError):
    """A recipe that was to be run first is no job, or did not end well."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def upstream_environment() -> Mapping[str, str]:
    """The environment of a stage's process."""
    return {**without_rank_variables(os.environ), UPSTREAM_RUN: "1"}


def command_words(recipe: str, spec: Mapping[str, Any], *, own_model: bool) -> list[str]:
    """Words of a recipe that a job (`spec`, plain data) runs first, on its device, with model.

    The model is the job's unless the recipe has its own.
    """
    groups = ("device", "tracker") if own_model else ("device", "model", "tracker")
    words = [f"+recipe={_quote_recipe(recipe)}", f"seed={spec['seed']}"]
    for group in groups:
        words += [f"{group}={spec[group]['name']}", *_options(group, spec[group])]
    return words


def _quote_recipe(recipe: str) -> str:
    """A recipe's name, or its file's path, in the grammar of the command line."""
    path = recipe.replace("\\", "\\\\").replace("'", "\\'")
    return recipe if PLAIN_NAME.fullmatch(recipe) else f"'{path}'"


def layout_words(words: Sequence[str], spec: Mapping[str, Any]) -> tuple[list[str], str]:
    """Words for the layout of an upstream run, and, where it cannot have the job's, why it is one process.

    spec: the job as plain data.

    Of a job on several machines the stage has the one that the job was typed first on.
    """
    wanted = _layout(spec["launch"], spec["parallelism"])
    try:
        _resolve_spec([*words, *wanted])
    except UpstreamRunFailed as error:
        return _layout({**spec["launch"], "devices": 1}, {"name": "single"}), str(error)
    return wanted, ""


def _layout(launch: Mapping[str, Any], parallelism: Mapping[str, Any]) -> list[str]:
    here = {"name": "local", "devices": launch["devices"], "attempts": launch["attempts"]}  # whoever starts the job
    said = (("launch", here), ("parallelism", parallelism))
    return [word for group, values in said for word in (f"{group}={values['name']}", *_options(group, values))]


def _options(group: str, values: Mapping[str, Any]) -> list[str]:
    """A component's options as overrides."""
    flow = {k: yaml.safe_dump(v, default_flow_style=True, width=10**6) for k, v in values.items() if k != "name"}
    return [f"{group}.{key}={text.removesuffix(chr(10)).removesuffix('...').strip()}" for key, text in flow.items()]


def cache_folder(recipe: str, words: Sequence[str]) -> Path:
    """Where the stage that these words describe is kept. Raises StageFailed where they describe none."""
    name = Path(recipe).stem if recipe.endswith((".yaml", ".yml")) else recipe  # a file may be anywhere
    return STAGES / name / cache_key(words)


def cache_key(words: Sequence[str]) -> str:
    """Key of upstream runs that give the same weights. Raises UpstreamRunFailed where words make no job."""
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
    """The spec of words, from another process: composing is the command line's job."""
    command = [sys.executable, "-P", "-m", "runner", "--cfg", "job", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=upstream_environment())
    if done.returncode:
        raise UpstreamRunFailed(done.stderr.strip().removeprefix("error: "), done.returncode)
    return dict(yaml.safe_load(done.stdout))


def _files(key: str, value: Any) -> Iterator[tuple[str, int, int]]:
    """Name, size and time of change of the files that an option names; nothing where it names none."""
    for text in value if isinstance(value, list) else [value]:
        if not isinstance(text, str) or not ("/" in text or "." in text or key.endswith("path")):
            continue
        path = Path(text).expanduser()
        with suppress(OSError, ValueError):  # a text that can be no file's name
            inside = sorted(path.rglob("*")) if path.is_dir() else [path]
            stats = [(str(file), file.stat()) for file in inside if file.is_file()]
            yield from ((name, found.st_size, found.st_mtime_ns) for name, found in stats)


@cache
def _code() -> str:
    """A hash of this program's code."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def continue_hint(recipe: str, typed: Sequence[str] | None = None) -> str:
    """What to type where a stage was interrupted; empty if the job is a stage itself.

    typed: the words of the job; None = those of this process
    """
    if is_upstream_run():
        return ""
    words = ["run", *(sys.argv[1:] if typed is None else typed)]
    return "\n" + labeled_line("continue", f"{shlex.join(words)}     (+recipe={recipe} continues where it stopped)")
