r"""The protocol of a trainer and its rollout servers: a JSON header and arrays in one HTTP body.

    safetensors of   "header": {"version": 7, "digest": …} as UTF-8   "0", "1", …: the arrays

    GET  /health            what the server holds, at once
    POST /rollouts/sample   a step's requests in one call ─▶ token ids and log-probabilities, bit for bit, or
                            {"missing": [media ids]} of images that the server does not have
    POST /rollouts/image    {"id", "several"} and the bytes of such an image
    POST /rollouts/score    rows ─▶ their log-probabilities by each engine
    POST /rollouts/release  give up memory until the next call
    POST /weights/load      {"version", "digest", "files"} ─▶ loaded, or {"missing": [names]}
    PUT  /weights/NAME      the bytes of a file that the server does not see

A POST is answered with a line feed each second while it is at work, so that a stopped process is noticed.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from runner.core import fsync_io
from runner.core.errors import OutOfMemory, RunnerError
from runner.core.untrusted_text import parse_json
from runner.interfaces import Request, Rollout
from runner.weight_sync.weight_store import FIXED

PROTOCOL = "posttrain-run rollouts 1"  # what /health says
SAMPLE, SCORE, RELEASE, LOAD = "/rollouts/sample", "/rollouts/score", "/rollouts/release", "/weights/load"
ADD_IMAGE = "/rollouts/image"
BEAT_S = 1.0  # between two line feeds of a server that is at work
MAX_BODY_BYTES = 1 << 30
STALE = "StaleWeights"  # the kind of an error: other weights are held than were named
HEADER = "header"  # the name of its tensor
ROUNDING = 1e-3  # by which a log-probability may lie above 0
Json = dict[str, Any]
Array = np.ndarray[Any, np.dtype[Any]]


class InvalidAnswerError(Exception):
    """A response that cannot be the answer to the request; says which part and why."""


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """What an answer may contain: ids below `vocab_size`, and at most `max_new_tokens` of them."""

    vocab_size: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """The weights that a server has, version -1 before the first; `session` is new with every process."""

    version: int
    digest: str
    session: str

    def match(self, version: int, digest: str) -> bool:
        """Whether they are these."""
        return (self.version, self.digest) == (version, digest)

    def __str__(self) -> str:
        return f"version {self.version} ({self.digest[:8]})" if self.digest else "no weights"


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A weight file as another machine identifies it: where its path shows the same, it is not sent."""

    name: str
    size: int
    mtime_ns: int

    @classmethod
    def at(cls, path: Path) -> WeightFile:
        """The file at a path. Raises OSError."""
        status = path.stat()
        return cls(path.name, status.st_size, status.st_mtime_ns)

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same in every version."""
        return self.name.startswith(FIXED)


@dataclass(frozen=True, slots=True)
class ServerError:
    """An error of a server's: the class, the message, and the exit code that it stands for."""

    kind: str
    message: str
    exit_code: int

    @classmethod
    def from_exception(cls, error: Exception) -> ServerError:
        """As it is sent; of an error that is not made for users, the class and the first line."""
        first = (str(error).splitlines() or [""])[0]
        text = str(error) if isinstance(error, RunnerError) else f"{type(error).__name__}: {first}"
        torch = sys.modules.get("torch")
        full = torch is not None and isinstance(error, torch.OutOfMemoryError)
        return cls(type(error).__name__, text, OutOfMemory.exit_code if full else getattr(error, "exit_code", 1))

    def to_exception(self, server: str) -> RunnerError:
        """As the trainer raises it."""
        error = RunnerError(f"{server}: {self.message}")
        error.exit_code = self.exit_code
        return error


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a rollout server listens, and which process it is."""

    url: str
    pid: int
    session: str

    def write(self, path: Path) -> None:
        """Write the file by which a client finds the server, atomically. Raises OSError."""
        fsync_io.atomic_write(path, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, path: Path) -> Endpoint:
        """Read such a file. Raises OSError, and ValueError where it holds something else."""
        found = parse_json(path.read_bytes())
        try:
            return cls(str(found["url"]), int(found["pid"]), str(found["session"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a valid endpoint file of a sampler: {error}") from error


def endpoint_path(folder: Path, index: int) -> Path:
    """The file of sampler `index`."""
    return folder / f"{index}.json"


def encode(header: Mapping[str, Any], *arrays: Array) -> bytes:
    """A body of a header and arrays of numbers."""
    content = np.frombuffer(json.dumps(header).encode(), np.uint8)
    return save({HEADER: content, **{str(at): array for at, array in enumerate(arrays)}})


def decode(body: bytes) -> tuple[Json, list[Array]]:
    """The header and the arrays again; line feeds before them are skipped. Raises ValueError."""
    try:
        arrays = load(body.lstrip(b"\n"))  # whose first byte is a multiple of 8, and so no line feed
        header = parse_json(arrays.pop(HEADER).tobytes())
        ordered = [arrays[str(at)] for at in range(len(arrays))]
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"the body is not a header and arrays: {error}") from error
    if not isinstance(header, dict):
        raise ValueError("the body has no header")
    return header, ordered


def encode_requests(requests: Sequence[Request], header: Mapping[str, Any]) -> bytes:
    """A batch of requests, each prompt once."""
    prompts: dict[tuple[int, ...], int] = {}
    rows = [[prompts.setdefault(r.prompt, len(prompts)), r.seed, r.max_new_tokens, r.group, r.raw] for r in requests]
    return encode({**header, "requests": rows}, *_pack_rows(list(prompts)))


def decode_requests(header: Mapping[str, Any], arrays: Sequence[Array]) -> list[Request]:
    """The requests again. Raises ValueError, TypeError, KeyError, IndexError for anything else."""
    prompts = [tuple(row) for row in unpack_rows(*arrays)]
    return [
        Request(prompts[at], int(seed), int(most), int(group), bool(raw))
        for at, seed, most, group, raw in header["requests"]
    ]


def encode_rows(rows: Sequence[Sequence[int]], header: Mapping[str, Any]) -> bytes:
    """Rows of token ids."""
    return encode(header, *_pack_rows(rows))


def _pack_rows(rows: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    return np.array([len(row) for row in rows], np.int32), _end_to_end(rows, np.int64)  # which an image needs


def _end_to_end(rows: Sequence[Sequence[float]], kind: type[np.generic]) -> Array:
    return np.concatenate([np.asarray(row, kind) for row in rows] or [np.empty(0, kind)])


def unpack_rows(sizes: Array, values: Array) -> list[list[Any]]:
    """Rows of numbers that lie end to end. Raises ValueError where the sizes are not those of the values."""
    return [row.tolist() for row in _split(sizes, values)]


def _split(sizes: Array, values: Array) -> list[Array]:
    if sizes.dtype.kind != "i" or sizes.ndim != 1 or (sizes < 0).any() or sizes.sum() != values.size:
        raise ValueError(f"{values.size} values do not match the row sizes")
    return np.split(values, np.cumsum(sizes))[: len(sizes)]


def encode_rollouts(rollouts: Sequence[Rollout], header: Mapping[str, Any]) -> bytes:
    """Rollouts; log-probabilities as float64, which holds every float32 exactly."""
    rows = [[r.version, r.finish, r.raw_logprobs is not None] for r in rollouts]
    experts = [r.experts for r in rollouts if r.experts is not None]
    return encode(
        {**header, "rollouts": rows},
        *_pack_rows([r.ids for r in rollouts]),
        _end_to_end([r.logprobs for r in rollouts], np.float64),
        _end_to_end([r.raw_logprobs or () for r in rollouts], np.float64),
        *([np.concatenate(experts)] if experts else []),
    )


def decode_rollouts(
    header: Mapping[str, Any], arrays: Sequence[Array], requests: Sequence[Request], version: int, limits: AnswerLimits
) -> list[Rollout]:
    """Rollouts in the order of the requests. Raises InvalidAnswerError for what cannot be answers to them."""
    try:
        rows, (sizes, ids, logprobs, raw, *experts) = header["rollouts"], arrays
        with_raw = np.array([size if has_raw else 0 for size, (_, _, has_raw) in zip(sizes, rows, strict=True)])
        columns = _split(sizes, ids), _split(sizes, logprobs), _split(with_raw.astype(int), raw)
        if ids.dtype != np.int64 or logprobs.dtype != np.float64 or raw.dtype != np.float64:
            raise ValueError(f"expected int64 and float64, not {ids.dtype}, {logprobs.dtype} and {raw.dtype}")
        answers = list(zip(rows, *columns, strict=True))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidAnswerError(f"the response cannot be read: {error}") from error
    if len(answers) != len(requests):
        raise InvalidAnswerError(f"{len(requests)} completions were requested, but {len(answers)} arrived")
    used = _split_experts(experts[0], requests, sizes) if experts else [None] * len(requests)
    found = list[Rollout]()
    for at, (request, ((held, finish, has_raw), tokens, values, raws)) in enumerate(
        zip(requests, answers, strict=True)
    ):
        drawn = array("q", tokens.tobytes()), array("d", values.tobytes())
        raw_logprobs = None
        if has_raw and request.raw:  # the same array where nothing was truncated
            raw_logprobs = drawn[1] if raws.tobytes() == values.tobytes() else array("d", raws.tobytes())
        rollout = Rollout(*drawn, raw_logprobs, held, finish, experts=used[at])
        check_rollout(rollout, request, version, limits, f"answer {at}")
        found.append(rollout)
    return found


def _split_experts(experts: Array, requests: Sequence[Request], sizes: Array) -> list[Array]:
    """The experts of each answer. Raises InvalidAnswerError where they are not those of its tokens."""
    ends = np.cumsum([len(request.prompt) + int(size) - 1 for request, size in zip(requests, sizes, strict=True)])
    if experts.dtype != np.int16 or experts.ndim != 3 or len(experts) != ends[-1]:
        raise InvalidAnswerError(f"{experts.dtype} {list(experts.shape)} do not match {ends[-1]} tokens")
    return np.split(experts, ends[:-1])


def check_rollout(rollout: Rollout, request: Request, version: int, limits: AnswerLimits, name: str) -> None:
    """Raise InvalidAnswerError where a rollout cannot answer a request under the weights of `version`."""
    most, size = min(request.max_new_tokens, limits.max_new_tokens), len(rollout.ids)
    if not 0 < size <= most:
        raise InvalidAnswerError(f"{name} has {size} tokens, not 1 to {most}")
    ids = np.asarray(rollout.ids)
    if len(wrong := ids[(ids < 0) | (ids >= limits.vocab_size)]):
        raise InvalidAnswerError(f"{name} has the id {wrong[0]}, but the vocabulary has {limits.vocab_size} ids")
    if rollout.version != version:
        raise InvalidAnswerError(f"{name} is of version {rollout.version!r}, not {version}")
    if rollout.finish not in ("stop", "length"):
        raise InvalidAnswerError(f"{name} ends with {rollout.finish!r}, not with stop or length")
    for values in (rollout.logprobs, rollout.raw_logprobs or rollout.logprobs):
        check_logprobs(values, size, name)


def check_logprobs(values: Sequence[float], size: int, name: str) -> None:
    """Raise InvalidAnswerError unless there are `size` numbers that can be log-probabilities."""
    if len(values) != size:
        raise InvalidAnswerError(f"{name} has {len(values)} log-probabilities for {size} tokens")
    found = np.asarray(values, np.float64)
    if len(wrong := found[~(np.isfinite(found) & (found <= ROUNDING))]):
        raise InvalidAnswerError(f"{name} has the log-probability {wrong[0]}")


def encode_scores(scores: Sequence[Sequence[Sequence[float]]], header: Mapping[str, Any]) -> bytes:
    """Log-probabilities by engine and row."""
    rows = [row for engine in scores for row in engine]
    sizes = np.array([len(row) for row in rows], np.int32)
    return encode({**header, "engines": len(scores)}, sizes, np.array([v for row in rows for v in row], np.float64))


def decode_scores(
    header: Mapping[str, Any], arrays: Sequence[Array], rows: Sequence[Sequence[int]]
) -> list[list[list[float]]]:
    """Scores of `rows` by engine. Raises InvalidAnswerError for anything else."""
    try:
        engines, found = int(header["engines"]), unpack_rows(*arrays)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidAnswerError(f"the response cannot be read: {error}") from error
    if engines < 1 or len(found) != engines * len(rows):
        raise InvalidAnswerError(f"{len(rows)} rows were sent, but {engines} engines returned {len(found)}")
    for at, scores in enumerate(found):
        check_logprobs(scores, len(rows[at % len(rows)]) - 1, f"row {at % len(rows)}")
    return [found[at : at + len(rows)] for at in range(0, len(found), len(rows))]
