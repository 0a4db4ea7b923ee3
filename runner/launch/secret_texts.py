"""Keeps secrets out of a job's spec, before anything of it is written.

tracker.*      free texts, such as tags: masked, and a line says so
other options  refused: spec.yaml would keep the secret, and with a mask the job would not work
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from runner.core.errors import SecurityError
from runner.run_dir.manifest import redact
from runner.spec.base import origin_of
from runner.spec.job import JobSpec

TEXTS = "tracker"


def mask_secrets(spec: JobSpec, origins: Mapping[str, str]) -> JobSpec:
    """The spec, secrets in its tracker's texts masked. Raises SecurityRefusal where another option holds one."""
    found = [key for key, text in _texts(spec.model_dump(mode="json"), "") if redact(text) != text]
    for key in found:
        if not key.startswith(f"{TEXTS}."):
            who = origin_of(key, origins)
            raise SecurityError(
                f"{key} holds what looks like a secret, and spec.yaml would keep it\n  leave it out: libraries read "
                f"theirs from the environment, and reward.env=[NAME] lets a reward see a variable"
                f"{f'  [{who}]' if who else ''}"
            )
        print(f"note: {key} holds what looks like a secret: masked", file=sys.stderr)
    if not found:
        return spec
    masked = {name: _mask_value(value) for name, value in spec.tracker}
    return spec.model_copy(update={TEXTS: spec.tracker.model_copy(update=masked)})


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """(key, text) of every text below a value."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, key)


def _mask_value(value: Any) -> Any:
    """The same kind of value, its texts masked."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {name: _mask_value(inner) for name, inner in value.items()}
    return type(value)(map(_mask_value, value)) if isinstance(value, list | tuple) else value
