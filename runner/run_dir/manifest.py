"""The manifest of a run: code, versions, device, automatic choices, environment; secrets are masked.

Nothing here imports torch. Everything that writes text of a user, a model or a library calls `redact` first.

What must be equal to resume from a checkpoint, and what must be equal for the same bits:

spec (its immutable options), data, model     differ ─▶ error
versions, device                              differ ─▶ warning: the run continues, but not bit for bit
prompt_style                                  how `run infer` formats prompts
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any, Literal

from runner import __version__
from runner.core.errors import CheckpointError, DataError, Problem, SpecError
from runner.core.package import read_table
from runner.core.subprocess import ChildProcess
from runner.spec.base import iter_leaves
from runner.spec.job import JobSpec
from runner.spec.saved_spec import KEY, SCHEMA, is_older, translate_spec

MASK = "***"
STOPPED_EARLY = "stopped early"  # the manifest's fact with the last step and the reason
DIFF_BYTES = 1_000_000
GIT_DEADLINE_S = 10.0

VARIABLES: dict[str, list[str]] = read_table(__file__, "environment.yaml")  # names of environment variables, by use

SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
NO_SECRET_NAME = re.compile(r"^TOKENIZERS_|(?:_FILE|_PATH|_DIR|_SOCK|_LENGTH|_TOKENS)$", re.IGNORECASE)
# In a tree of plain data: `api_key` and `token` hold secrets; `tokenizer` and `max_new_tokens` do not.
SECRET_FIELD = re.compile(r"(?:^|[_.-])(?:api_?key|key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
PUBLIC_FIELD = re.compile(r"^(?:commit|revision|fingerprint|spec_sha256)$")
SHORTEST_SECRET = 8

_ASSIGNED = r"(?:api[_-]?key|access[_-]?key(?:[_-]id)?|token|secret|password|passwd)"
SHAPES = re.compile("|".join(VARIABLES["secret_shapes"]), re.DOTALL)
# Secrets that are recognized by the text before them, which is kept.
KEPT_PREFIX = re.compile(
    r"(?P<keep>(?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,30}://)[^\s/@'\"]+(?=@)"  # user-info of a URL
    r"|(?P<bearer>\b(?:Bearer|Basic)\s+)[A-Za-z0-9._~+/=-]{16,}"
    rf"|(?P<name>{_ASSIGNED}['\"]?\s?[=:]\s?['\"]?)(?=[\w.+/=-]{{0,200}}[0-9])[\w.+/=-]{{{SHORTEST_SECRET},}}",
    re.IGNORECASE,
)


def early_stop(manifest: Mapping[str, Any]) -> str | None:
    """The last step of a run that stopped early, and why; None for other runs."""
    found = (fact for fact in manifest.get("facts", ()) if fact["feature"] == STOPPED_EARLY)
    return next((f"{STOPPED_EARLY} {fact['value']}: {fact['reason']}" for fact in found), None)


def redact(text: str) -> str:
    """The text with possible secrets, and values of secret environment variables, masked."""
    values = {v for k, v in os.environ.items() if is_secret_name(k) and len(v) >= SHORTEST_SECRET}
    for value in sorted(values, key=len, reverse=True):  # a value may be part of a longer one
        text = text.replace(value, MASK)
    text = SHAPES.sub(MASK, text)
    return KEPT_PREFIX.sub(lambda m: (m["keep"] or m["bearer"] or m["name"]) + MASK, text)


def redact_values(value: Any) -> Any:
    """A copy of plain data with every text redacted; fields such as token or password are masked."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {k: _redacted_field(str(k), v) for k, v in value.items()}
    return [redact_values(v) for v in value] if isinstance(value, list | tuple) else value


def _redacted_field(name: str, value: Any) -> Any:
    if isinstance(value, str) and value:
        if SECRET_FIELD.search(name):
            return MASK
        if PUBLIC_FIELD.match(name):  # a hash, which looks like a W&B key
            return value
    return redact_values(value)


def is_secret_name(name: str) -> bool:
    """Whether an environment variable of this name counts as a secret."""
    return bool(SECRET_NAME.search(name)) and not NO_SECRET_NAME.search(name)


def collect_manifest(spec: Mapping[str, Any], device: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of this process as JSON-able data; missing facts have a reason.

    Automatic choices and facts (`Decisions.records`) are added later, because the run still records some.
    """
    code = code_state(Path(__file__).resolve().parents[2], below="runner")
    here = code_state(Path.cwd())
    return {
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": redact_values(sys.argv),
        "spec_sha256": fingerprint(spec),
        "code": code,
        "working_directory": {"reason": "the same checkout as code"} if here == code and "root" in here else here,
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "platform": {
            "system": platform.platform(),
            "machine": platform.machine(),
            "host": socket.gethostname(),
            "cpus": os.cpu_count(),
        },
        "packages": dict(sorted(((d.metadata["Name"] or "?").lower(), d.version) for d in distributions())),
        "device": redact_values(dict(device)),
        "environment": allowed_environment(),
    }


def fingerprint(spec: Mapping[str, Any]) -> str:
    """sha256 of the spec as canonical JSON, in hexadecimal."""
    canonical = json.dumps(spec, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


def allowed_environment() -> dict[str, str]:
    """The variables of the allow-list without those that are named like a secret."""
    names, prefixes = VARIABLES["recorded"], tuple(VARIABLES["recorded_prefixes"])
    kept = (k for k in sorted(os.environ) if (k.startswith(prefixes) or k in names) and not is_secret_name(k))
    return {k: redact(os.environ[k]) for k in kept}


def code_state(folder: Path, below: str = "") -> dict[str, Any]:
    """Commit, branch and uncommitted changes of the git checkout that `folder` lies in.

    below: a subfolder that the checkout must track; a package that is installed inside another repository is not that
    repository's code. Without a checkout: {"reason": ...}.
    """
    try:
        top = _git(folder, "rev-parse", "--show-toplevel").strip()
        if below and not _git(folder, "ls-files", "--", below).strip():
            return {"reason": f"{folder}: {below}/ is not tracked by git"}
        status = _git(folder, "status", "--porcelain")
        return {
            "root": top,
            "commit": _git_optional(folder, "rev-parse", "--verify", "--quiet", "HEAD"),
            "branch": _git_optional(folder, "symbolic-ref", "--quiet", "--short", "HEAD"),
            "dirty": bool(status),
            "changed_files": redact(status[:DIFF_BYTES]).splitlines(),
            "diff": _diff(folder) if status else "",
        }
    except (OSError, subprocess.SubprocessError) as error:
        return {"reason": redact(_git_failure(error))}


def _diff(folder: Path) -> str:
    """Changes against the last commit (against nothing, before the first), at most DIFF_BYTES of them."""
    base = "HEAD" if _git_optional(folder, "rev-parse", "--verify", "--quiet", "HEAD") else "--cached"
    command = _command(folder, "diff", "--no-ext-diff", "--no-textconv", "--no-color", base)
    # Read more than is kept, so that a secret at the cut is still recognized.
    limit = DIFF_BYTES + 4096
    with ChildProcess(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **_git_options()) as git:
        assert git.stdout is not None
        raw = git.stdout.read(limit)
        git.kill()
    kept = redact(raw.decode(errors="replace")).encode()[:DIFF_BYTES].decode(errors="ignore")
    return kept if len(raw) < limit else f"{kept}\n[cut after {DIFF_BYTES} bytes]\n"


def _command(folder: Path, *command: str) -> list[str]:
    """A git command that runs no program of the repository's own configuration."""
    return ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-C", str(folder), *command]


def _git_options() -> dict[str, Any]:
    quiet = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    return {"stdin": subprocess.DEVNULL, "env": os.environ | quiet}


def _git(folder: Path, *command: str) -> str:
    """What a git query prints. Raises OSError or SubprocessError."""
    options = {"capture_output": True, "check": True, "timeout": GIT_DEADLINE_S, **_git_options()}
    return str(subprocess.run(_command(folder, *command), **options).stdout.decode(errors="replace"))


def _git_optional(folder: Path, *command: str) -> str | None:
    """The output of a git query, None if it fails."""
    try:
        return _git(folder, *command).strip() or None
    except subprocess.CalledProcessError:
        return None


def _git_failure(error: OSError | subprocess.SubprocessError) -> str:
    if isinstance(error, FileNotFoundError):
        return "git is not installed"
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return lines[0] if lines else f"git exited with code {error.returncode}"
    return str(error)


log = logging.getLogger("runner")

PromptStyle = Literal["chat", "text"]
# Options that may change when a run is resumed: duration, devices, tracking, checkpoints; no option on which earlier
# steps depend. Of the sampler: its address, timeouts and tolerances. Compiled layers differ by rounding alone.
RESUMABLE = (
    "steps", "epochs", "strict", "launch", "parallelism", "evaluation", "watch", "callbacks", "tracker", "checkpoint",
    "sampler.timeout_s", "sampler.sync_logprob_tolerance", "sampler.url",
    "sampler.api_key_env", "sampler.folder", "sampler.retries", "model.compile",
)  # fmt: skip
LIBRARIES = ("torch", "transformers", "peft")


def run_identity(
    spec: JobSpec, data: str, style: PromptStyle, model: Mapping[str, str], device: Mapping[str, Any]
) -> dict[str, Any]:
    """The identity of a run, JSON-able.

    data: the fingerprint of the data; model: the source of weights that are not in the checkpoint (`origin`);
    device: the device's description
    """
    fixed = {KEY: SCHEMA, "spec": immutable_fields(spec), "data": data, "model": dict(model), "prompt_style": style}
    return fixed | {"runner": __version__} | {name: version(name) for name in LIBRARIES} | dict(device)


def immutable_fields(spec: JobSpec) -> dict[str, Any]:
    """The part of a spec that cannot change after a run has started."""
    found = spec.model_dump(mode="json", exclude=set(RESUMABLE))
    for group, name in (key.split(".") for key in RESUMABLE if "." in key):
        found[group].pop(name, None)
    return found


def check_spec_unchanged(spec: JobSpec, saved: Mapping[str, Any], free: Collection[str] = ()) -> None:
    """Raise SpecError naming each immutable option that differs from that of the checkpoint.

    saved: the identity in a checkpoint; free: dotted keys, or groups, that the caller may change
    """
    then = translate_spec({KEY: saved.get(KEY, 0), **saved["spec"]}).data
    now, before = dict(iter_leaves(immutable_fields(spec))), dict(iter_leaves(then))
    # An option that the checkpoint lacks is newer than the checkpoint; a new key of a mapping is a change.
    options = [f"{option}." for option in spec.mapping_options()]
    mappings = tuple(one for one in options if any(f"{key}.".startswith(one) for key in before))

    def fault(key: str) -> str:
        if key not in before:
            return f"is {now[key]} now, and the checkpoint has no such key; remove it"
        return f"was {before[key]} in the checkpoint, but is {now.get(key)} now; restore it"

    problems = [
        Problem(key, fault(key), "spec.yaml")
        for key in (*before, *(key for key in now if key not in before and key.startswith(mappings)))
        if now.get(key) != before.get(key) and not {key, key.partition(".")[0]} & {*free, *RESUMABLE}
    ]
    if problems:
        raise SpecError(problems)


def check_model_unchanged(origin: Mapping[str, str], saved: Mapping[str, Any], role: str = "model") -> None:
    """Raise CheckpointError if the model comes from another source than that of the checkpoint."""
    before = saved["model"]
    if changed := [name for name in sorted({*before, *origin}) if before.get(name) != origin.get(name)]:
        source = {"model": "model.path", "teacher": "algorithm.teacher"}.get(role, "algorithm.reference_path")
        source = f"{role}.path" if role.startswith("reward") else source
        names = {
            "commit": f"commit of {source}",
            "config": f"config.json of {source}",
            "adapter": f"adapter of {source}",
            "weights": f"weights of {source}",
            "drawn": "random weights (seed, options of model)",
        }
        shown = (f"{names.get(name, name)}: was {before.get(name)}, now {origin.get(name)}" for name in changed)
        raise CheckpointError(
            f"the checkpoint was written for another {role}: {'; '.join(shown)}\n"
            "  restore the model that the run started with"
        )


def check_compatible(now: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise DataError for other data, CheckpointError for another model.

    Other differences are a warning, because the run then continues with other bits.
    """
    if is_older(saved):
        log.warning("an older version fingerprinted the data in another way: whether it changed was not checked")
    elif now["data"] != saved["data"]:
        raise DataError(
            "the data (or its tokenizer) changed since the checkpoint was written (of streamed files above 1 GiB "
            "their modification time counts, too); restore it, or start a new run from the export of this one"
        )
    check_model_unchanged(now["model"], saved)
    for role, origin in now.get("frozen", {}).items():
        before = saved["frozen"].get(role, origin)  # a version of before compared no reward models
        check_model_unchanged(origin, {"model": before}, role)
    compared = now.keys() - {KEY, "spec", "data", "model", "frozen"}
    differing = [f"{k} was {saved.get(k)}, now {v}" for k, v in now.items() if k in compared and saved.get(k) != v]
    if differing:
        log.warning("resumed, but not bit for bit: %s", ", ".join(differing))
