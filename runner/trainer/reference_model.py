"""Frozen models that only score: a reference, a teacher, a policy with its adapter off.

Precomputed log-probabilities are kept on disk, by a unit's tokens and how they are connected.

    before the first step   batches that the run needs ──unknown ones──▶ the model ──▶ kept log-probabilities
    in the run              batch ──▶ kept log-probabilities                     no second model, no second pass

    units of a batch ──sha256 of ids, positions, parents──▶ keys
    key, log-probabilities ──64 MiB at a time──▶ <folder>/<sha256 of the file>.safetensors ──▶ looked up again

A file is written aside and renamed, so that it is whole or not there, and one that is open stays readable after its
folder was deleted; its name is the checksum of its bytes, so that one that was damaged later is found out, and its
units are unknown again. Two processes may fill one folder at once.

Legend: T tokens, U units of a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from runner.core import fsync_io
from runner.core.batch import Batch, unit_spans
from runner.core.errors import RunnerError, UnsupportedModelError
from runner.distributed.work_partition import SINGLE_PROCESS, SINGLE_STAGE, map_sharded
from runner.interfaces import LOGPROBS, Outputs, PipelineStage, RankCollectives, TrainableModel, as_generative


@dataclass(eq=False)
class FrozenModel:
    """Scores batches of any size without gradient, inside `during`, e.g. with the adapter disabled.

    stage: which of the model's layers are here
    """

    model: TrainableModel
    budget: int
    device: torch.device
    during: Callable[[], AbstractContextManager[Any]] = nullcontext
    peers: RankCollectives = SINGLE_PROCESS
    stage: PipelineStage = SINGLE_STAGE

    @property
    def base_fingerprint(self) -> Mapping[str, str]:
        """Where its weights come from."""
        return self.model.base_fingerprint

    def lm_head(self) -> Callable[[Tensor], Tensor]:
        """A function from the output `hidden` [S, H] to logits [S, V].

        Raises UnsupportedModelError without such a head.
        """
        model = as_generative(self.model)
        if model is None:
            raise UnsupportedModelError(f"{type(self.model).__name__} has no LM head")
        return model.lm_head()

    @torch.no_grad()
    def forward(self, batch: Batch, needs: frozenset[str]) -> Outputs:
        """The outputs named in `needs`, [T] or [N], on the model's device; all ranks pass the same."""
        return self._score(batch, needs, self.peers)

    @torch.no_grad()
    def forward_local(self, batch: Batch, needs: frozenset[str]) -> Outputs:
        """The same of a batch that is this rank's own."""
        return self._score(batch, needs, SINGLE_PROCESS)

    def _score(self, batch: Batch, needs: frozenset[str], peers: RankCollectives) -> Outputs:
        def run(micro: Batch) -> Outputs:
            return self.model.outputs(micro.to(self.device), needs)

        with self.during():
            return map_sharded(batch, run, self.budget, peers, padded=self.model.is_padded, stage=self.stage)


def frozen_copy_of_adapter(model: TrainableModel) -> Callable[[], AbstractContextManager[None]]:
    """Copy the trainable parameters now; returns a context manager that puts the copy in their place.

    For a reference that is the policy before it learns, without a second base. The block is no part of a pass that is
    differentiated. Not for parameters that DeepSpeed has partitioned.
    """
    initial = {name: p.detach().clone() for name, p in model.trainable().items()}

    @contextmanager
    def swap() -> Iterator[None]:
        trained = {name: p.detach().clone() for name, p in model.trainable().items()}
        try:
            _copy_into(model, initial)
            yield
        finally:
            _copy_into(model, trained)

    return swap


@torch.no_grad()
def _copy_into(model: TrainableModel, values: Mapping[str, Tensor]) -> None:
    for name, parameter in model.trainable().items():
        parameter.copy_(values[name])


class PrecomputedReference(FrozenModel):
    """Knows the logprobs of the units given to `precompute`, and of those that were kept before.

    The model may be the one that a run trains: it is used only before the first step.
    """

    def __init__(
        self,
        model: TrainableModel,
        kept: LogprobCache,
        origin: Mapping[str, str],
        everyone: RankCollectives = SINGLE_PROCESS,
        **options: Any,
    ) -> None:
        """origin: source of the model's weights; everyone: all ranks, each of which has all log-probabilities.

        options: see `FrozenModel`
        """
        super().__init__(model, **options)
        self.cache, self._origin, self._everyone = kept, origin, everyone

    @property
    def base_fingerprint(self) -> Mapping[str, str]:
        """Where the weights come from that the log-probabilities are of."""
        return self._origin

    def precompute(self, batch: Batch) -> int:
        """Score a batch if any of its units is unknown; returns how many were.

        The whole batch is scored, so that a number does not depend on what else was known.
        """
        keys = unit_keys(batch)
        own = {key for key in keys if key not in self.cache}
        unknown = set().union(*self._everyone.all_gather(own))  # ranks whose caches differ still score the same batches
        if unknown:
            logprobs = super().forward(batch, LOGPROBS)["logprobs"].cpu()
            sizes = unit_spans(batch)[:, 2].tolist()
            for key, values in zip(keys, torch.split(logprobs, sizes), strict=True):
                if key not in self.cache:
                    self.cache.add(key, values)
        return len(unknown)

    def forward(self, batch: Batch, needs: frozenset[str]) -> Outputs:
        """logprobs, float32 [T] on the CPU. Raises RunnerError for another output, and for an unknown unit."""
        if needs != LOGPROBS:
            raise RunnerError(f"only log-probabilities were precomputed, not: {', '.join(sorted(needs))}")
        try:
            return {"logprobs": torch.cat([self.cache[key] for key in unit_keys(batch)])}
        except KeyError as error:
            raise RunnerError(
                "a reference log-probability was not precomputed; type algorithm.reference=copy, and report this with "
                "the job's spec.yaml"
            ) from error


DIGEST_BYTES = 32
TOKENS_PER_FILE = 2**24  # of float32: 64 MiB


class LogprobCache:
    """The log-probabilities of a folder; what is needed is read from its files, which stay there.

    report: receives each damaged file, which is removed.
    """

    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        """Raises StorageError where the folder cannot be made or read."""
        self.folder = folder
        self._places: dict[bytes, tuple[int, int, int]] = {}  # key → (file, first token, tokens)
        self._files: list[Any] = []
        self._new: dict[bytes, Tensor] = {}
        self._tokens = 0
        with self._storage_errors():
            folder.mkdir(parents=True, exist_ok=True)
            fsync_io.remove_leftovers(folder)
            for path in sorted(folder.glob("*.safetensors")):
                with suppress(FileNotFoundError):  # another process found the damage first
                    if _sha256(path.read_bytes()) == path.stem:
                        self._open(path)
                    else:
                        report(f"the checksum of {path} does not match its name")
                        path.unlink()

    def __contains__(self, key: bytes) -> bool:
        return key in self._places or key in self._new

    def __getitem__(self, key: bytes) -> Tensor:
        """float32 [T] of a unit. Raises KeyError for one that is not known or has not been written yet."""
        file, first, size = self._places[key]
        values: Tensor = self._files[file].get_slice("values")[first : first + size]
        return values

    def add(self, key: bytes, values: Tensor) -> None:
        """Keep float [T] of a unit. Raises StorageError where a file that is full cannot be written."""
        self._new[key] = values.detach().float().clone()
        self._tokens += len(values)
        if self._tokens >= TOKENS_PER_FILE:
            self.write()

    def write(self) -> None:
        """Put on disk what was added. Raises StorageError."""
        if not self._new:
            return
        keys = np.frombuffer(b"".join(self._new), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        content = save(
            {
                "keys": torch.from_numpy(keys.copy()),
                "lengths": torch.tensor([len(values) for values in self._new.values()]),
                "values": torch.cat(list(self._new.values())),
            }
        )
        path = self.folder / f"{_sha256(content)}.safetensors"
        with self._storage_errors():
            self.folder.mkdir(parents=True, exist_ok=True)  # a cache may be deleted at any time
            fsync_io.atomic_write(path, content)
            self._open(path)
        self._new, self._tokens = {}, 0

    def _open(self, path: Path) -> None:
        file: Any = safe_open(path, "pt")
        lengths = file.get_tensor("lengths")
        firsts = (torch.cumsum(lengths, 0) - lengths).tolist()
        digests = file.get_tensor("keys").numpy().tobytes()
        keys = (digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES))
        places = ((len(self._files), first, size) for first, size in zip(firsts, lengths.tolist(), strict=True))
        self._places.update(zip(keys, places, strict=True))
        self._files.append(file)

    def _storage_errors(self) -> AbstractContextManager[None]:
        remedy = "; free space, set RUNNER_CACHE to another folder, or type algorithm.reference=copy"
        return fsync_io.storage_errors(f"cannot write log-probabilities to {self.folder}", remedy)


def unit_keys(batch: Batch) -> list[bytes]:
    """What each unit's log-probabilities are a function of, as a sha256: its ids, positions and parents."""
    tokens = batch.structure.tokens
    ids, positions, parents = (tokens[name].numpy() for name in ("ids", "positions", "parent"))
    keys, first = list[bytes](), 0
    for size in unit_spans(batch)[:, 2].tolist():
        span = slice(first, first + size)
        own = np.where(parents[span] < 0, -1, parents[span] - first)
        keys.append(hashlib.sha256(np.stack([ids[span], positions[span], own]).tobytes()).digest())
        first += size
    return keys


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
