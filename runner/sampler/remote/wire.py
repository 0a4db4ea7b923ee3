"""What trainer and samplers say to one another: JSON over HTTP, whose floats come back bit for bit.

POST /sample ─▶ {"version", "digest", "prompts", "requests"}
            ◀─ {"held": {"version", "digest", "session"}, "result": [...]}, or "error": {"kind", "message", "exit_code"}
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.core.errors import EnvironmentProblem, OutOfMemory, RunnerError

if TYPE_CHECKING:
    from runner.interfaces import Request, Rollout


BEAT_S = 1.0  # between two signs of life of a sampler that is at work
LARGEST_BYTES = 1 << 30  # of what is asked, and of what is answered
STALE = "Stale"  # the kind of an error: other weights are held than were named
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Held:
    """The weights that a sampler has, version -1 before the first; `session`: drawn anew by every process."""

    version: int
    digest: str
    session: str

    def are(self, version: int, digest: str) -> bool:
        """Whether they are these."""
        return (self.version, self.digest) == (version, digest)

    def __str__(self) -> str:
        return f"version {self.version} ({self.digest[:8]})" if self.digest else "no weights"


@dataclass(frozen=True, slots=True)
class Wrong:
    """What went wrong in a sampler: the class of the error, its words, and the exit code that it stands for."""

    kind: str
    message: str
    exit_code: int

    @classmethod
    def of(cls, error: Exception) -> Wrong:
        """An error as the other side is told of it."""
        known = isinstance(error, RunnerError)
        first = (str(error).splitlines() or [""])[0]
        words = str(error) if known else f"{type(error).__name__}: {first}"
        torch = sys.modules.get("torch")
        full = torch is not None and isinstance(error, torch.OutOfMemoryError)
        return cls(type(error).__name__, words, OutOfMemory.exit_code if full else getattr(error, "exit_code", 1))

    def said(self) -> Json:
        """As it is sent."""
        return {"kind": self.kind, "message": self.message, "exit_code": self.exit_code}

    def error(self, who: str) -> RunnerError:
        """As the trainer raises it."""
        error = RunnerError(f"{who}: {self.message}")
        error.exit_code = self.exit_code
        return error


def authorization(secret: str) -> str:
    """The header that says who may ask."""
    return f"Bearer {secret}"


def asked(requests: Sequence[Request]) -> Json:
    """Requests, with each prompt once."""
    prompts: dict[tuple[int, ...], int] = {}
    rows = [
        [prompts.setdefault(one.prompt, len(prompts)), one.seed, one.max_new_tokens, one.group, one.raw]
        for one in requests
    ]
    return {"prompts": [list(prompt) for prompt in prompts], "requests": rows}


def requests_of(body: Mapping[str, Any]) -> list[Request]:
    """The requests again. Raises ValueError, TypeError, KeyError, IndexError for what is none."""
    from runner.interfaces import Request

    prompts = [tuple(prompt) for prompt in body["prompts"]]
    return [
        Request(prompts[at], int(seed), int(most), int(group), bool(raw))
        for at, seed, most, group, raw in body["requests"]
    ]


def answered(rollouts: Sequence[Rollout]) -> list[Json]:
    """Rollouts as they are sent."""
    return [
        {"ids": r.ids, "logprobs": r.logprobs, "raw_logprobs": r.raw_logprobs, "version": r.version, "finish": r.finish}
        for r in rollouts
    ]


# The secret of a job: the launcher makes it, rank 0 shows it to the samplers.
TOKEN = "RUN_SAMPLER_TOKEN"  # the variable in which a process of the job is given it
_token: list[str] = []


def take_token() -> None:
    """Take the secret of a job out of the environment, as early as may be: what this process starts, a user's reward
    for one, is not to have it."""
    if found := os.environ.pop(TOKEN, None):
        _token[:] = [found]


def job_token() -> str:
    """The secret of a job, also once it was taken. Raises EnvironmentProblem where there was none."""
    take_token()
    if _token:
        return _token[0]
    raise EnvironmentProblem(f"{TOKEN} is not set; the launcher of a job gives it to rank 0 and to samplers")
