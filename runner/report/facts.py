"""What a run folder says of a run: its spec, state, code, versions, device and decisions. Nothing here needs torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from runner.errors import EnvironmentProblem
from runner.folder import RunFolder
from runner.manifest import redacted
from runner.report.series import Series, read

SHOWN_PACKAGES = ("torch", "torch-npu", "transformers", "peft", "datasets", "vllm", "posttrain-run")


@dataclass(frozen=True, slots=True)
class Run:
    """A run as its folder tells it; what is missing is empty."""

    folder: RunFolder
    spec: Mapping[str, Any]
    set_by: Mapping[str, str]
    typed: tuple[str, ...]
    status: Mapping[str, Any]
    manifest: Mapping[str, Any]
    data: str  # the fingerprint of its data, from its newest checkpoint; empty before there is one
    series: Mapping[str, Series]

    @property
    def environment(self) -> dict[str, str]:
        """What it was made of, one line each: code, versions, device."""
        made, code = self.manifest, self.manifest.get("code", {})
        commit = code.get("commit") or code.get("reason") or "not known"
        lines = {
            "code": f"{commit}{' with uncommitted changes' if code.get('dirty') else ''}",
            "branch": str(code.get("branch") or ""),
            "python": str(made.get("python", {}).get("version", "")),
            "machine": str(made.get("platform", {}).get("system", "")),
            "device": ", ".join(f"{k} {v}" for k, v in made.get("device", {}).items()),
        }
        lines |= {name: made.get("packages", {}).get(name, "") for name in SHOWN_PACKAGES}
        lines |= made.get("environment", {})
        return {name: str(value) for name, value in lines.items() if value}


def read_run(folder: RunFolder) -> Run:
    """Everything that is known of a run, secrets masked. Raises EnvironmentProblem where its spec cannot be read."""
    try:
        spec = yaml.safe_load(folder.spec.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise EnvironmentProblem(f"{folder.spec} cannot be read: {error}") from error
    overrides = _yaml(folder.overrides)
    return Run(
        folder,
        redacted(spec),
        overrides.get("set_by", {}),
        tuple(redacted(overrides.get("typed", []))),
        _json(folder.status),
        _json(folder.manifest),
        _fingerprint(folder),
        read(folder.metrics),
    )


def _fingerprint(folder: RunFolder) -> str:
    newest = max(folder.checkpoints.glob("step-*/state.json"), default=None)
    identity = _json(newest).get("identity", {}) if newest is not None else {}
    return str(identity.get("data", "")) if isinstance(identity, dict) else ""


def _json(path: Path) -> dict[str, Any]:
    """A file's content; empty where it is not there. Raises EnvironmentProblem where it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error}") from error
    return dict(content) if isinstance(content, dict) else {}


def _yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, yaml.YAMLError) as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error}") from error
    return dict(content) if isinstance(content, dict) else {}
