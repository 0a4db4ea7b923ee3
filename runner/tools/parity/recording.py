"""A recording of a job's first steps on a device: safetensors with a JSON header.

    header   format · spec · made of · steps · prints (name, shape, norm) · experiences · sha256 of all
    tensors  print/N float64 [WIDTH]        experience/STEP/NAME

A print is a sketch of a tensor, from which the distance of two tensors follows although neither is kept:

    x [n] ─ random signs ─▶ ±x ─ sums over the indices that are equal modulo WIDTH ─▶ sketch [WIDTH]

It is the count sketch of Charikar, Chen and Farach-Colton (2002), with buckets by index instead of by a hash. The
squared distance of two sketches is, on average over the signs, that of the tensors; its relative standard deviation is
at most √(2 / WIDTH) where the difference is spread over the tensor. Tensors of up to WIDTH numbers are kept exactly.

torch is not imported: a comparison reads the job, and its device, before that.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from runner.core import fsync_io
from runner.core.errors import DataError, EnvironmentProblem, StorageError
from runner.core.rng import derive_seed

WIDTH = 512
PIECE = WIDTH * 2**11  # numbers that are in memory in float64 at once


def sketch_tensor(tensor: Tensor) -> TensorSketch:
    """The print of a tensor of any type, on any device; summed in float64 on the CPU."""
    sums, squares = np.zeros(WIDTH), 0.0
    for number, piece in enumerate(torch.split(tensor.detach().reshape(-1), PIECE)):
        values = piece.cpu().double().numpy()
        squares += float(values @ values)
        signed = np.zeros(-(-len(values) // WIDTH) * WIDTH)
        signed[: len(values)] = values * _signs(number)[: len(values)]
        sums += signed.reshape(-1, WIDTH).sum(0)
    return TensorSketch(tuple(tensor.shape), float(np.sqrt(squares)), sums)


def first_tensor(value: object) -> Tensor | None:
    """The tensor that a module gives or takes: itself, or the first floating-point one of several."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        value = next((one for one in value if isinstance(one, Tensor)), None)
    return value if isinstance(value, Tensor) and torch.is_floating_point(value) else None


@lru_cache(maxsize=32)
def _signs(number: int) -> NDArray[np.int8]:
    """±1 for each place of a piece; the same on every machine."""
    words = np.random.PCG64(derive_seed(0, "sketch", number)).random_raw(PIECE // 64).astype("<u8")
    return np.unpackbits(words.view(np.uint8)).astype(np.int8) * np.int8(2) - np.int8(1)


FORMAT = 2
ENTRY, DIGEST = "parity", "sha256"  # of the header


@dataclass(frozen=True, slots=True)
class TensorSketch:
    """A tensor's shape, its norm, and its sketch, float64 [WIDTH] (see `runner.tools.parity.recording`)."""

    shape: tuple[int, ...]
    norm: float
    sums: NDArray[np.float64]

    def distance(self, other: TensorSketch) -> float:
        """‖other − this‖, estimated; infinite where shapes differ or a number is not finite."""
        found = float(np.linalg.norm(other.sums - self.sums)) if self.shape == other.shape else math.inf
        return found if math.isfinite(found) else math.inf


@dataclass(frozen=True, slots=True)
class Recording:
    """Everything that two devices are compared by.

    spec: of the job, as plain data; made: device and what it multiplies in, versions, fingerprint of the data, where
          frozen models come from
    steps: the numbers of each step; experiences: what sampled algorithms trained on, as `Algorithm.encode` gives it
    prints: by `KIND/ROLE/NAME`, each kind in the order in which it was computed (see `runner.tools.parity.replay`)
    ended: why it has fewer steps than requested
    """

    spec: Mapping[str, Any]
    made: Mapping[str, Any]
    steps: Sequence[Mapping[str, float]]
    prints: Mapping[str, TensorSketch]
    experiences: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    ended: str | None = None

    @property
    def no_gradient_note(self) -> str | None:
        """What to say where no step had a gradient, so that none can be compared."""
        if any(step["train/grad_norm"] for step in self.steps):
            return None
        return "no recorded step had a gradient (equal rewards in all groups?): only outputs can differ"

    def of_kind(self, kind: str) -> dict[str, TensorSketch]:
        """The prints of one kind, by `ROLE/NAME`."""
        start = f"{kind}/"
        return {name.removeprefix(start): one for name, one in self.prints.items() if name.startswith(start)}


def write(path: Path, recording: Recording) -> None:
    """Write a recording: aside, then renamed. Raises StorageError."""
    tensors = {f"print/{number}": one.sums for number, one in enumerate(recording.prints.values())}
    plain = []
    for step, experience in enumerate(recording.experiences):
        tensors |= {f"experience/{step}/{name}": np.asarray(t) for name, t in experience["tensors"].items()}
        plain.append({name: value for name, value in experience.items() if name != "tensors"})
    header = {
        "format": FORMAT,
        "spec": recording.spec,
        "made": recording.made,
        "steps": recording.steps,
        "prints": [[name, one.shape, one.norm] for name, one in recording.prints.items()],
        "experiences": plain,
    }
    text = json.dumps(header)
    try:
        fsync_io.atomic_write(path, save(tensors, metadata={ENTRY: text, DIGEST: _digest(text, tensors)}))
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write {path}: {error}") from error


def read(path: Path) -> Recording:
    """Read a recording. Raises EnvironmentProblem if there is none, DataError if it is damaged."""
    if not path.is_file():
        raise EnvironmentProblem(f"{path}: no such file; to record one, type: run parity --record {path}")
    try:
        with safe_open(path, framework="np") as file:
            said = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: not a recording, or damaged ({error}); record again") from error
    if ENTRY not in said:
        raise DataError(f"{path}: safetensors, but not a recording; to record one, type: run parity --record FILE")
    if said.get(DIGEST) != _digest(said[ENTRY], tensors):
        raise DataError(f"{path} is damaged: its checksum does not match; copy it again, or record again")
    header = json.loads(said[ENTRY])
    if header["format"] != FORMAT:
        raise DataError(f"{path} has format {header['format']}, but this version reads {FORMAT}; record again with it")
    return _recording(header, tensors)


def _recording(header: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> Recording:
    prints = {
        name: TensorSketch(tuple(shape), norm, tensors[f"print/{number}"])
        for number, (name, shape, norm) in enumerate(header["prints"])
    }
    experiences = [one | {"tensors": dict(_below(tensors, step))} for step, one in enumerate(header["experiences"])]
    return Recording(header["spec"], header["made"], header["steps"], prints, experiences)


def _below(tensors: Mapping[str, NDArray[Any]], step: int) -> Iterator[tuple[str, NDArray[Any]]]:
    start = f"experience/{step}/"
    yield from ((name.removeprefix(start), t) for name, t in tensors.items() if name.startswith(start))


def _digest(text: str, tensors: Mapping[str, NDArray[Any]]) -> str:
    whole = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        one = tensors[name]
        whole.update(f"{name} {one.dtype} {one.shape}".encode())
        whole.update(np.ascontiguousarray(one).tobytes())
    return whole.hexdigest()
