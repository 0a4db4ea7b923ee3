"""How weights get from the trainer to a sampler.

SameModel     the sampler's model is the trainer's: nothing moves
DeviceCopy    copies on each rank's device, as many as the lag needs, or the tensors themselves by reference
SharedFiles   files that samplers read: one rank of a machine writes; all ranks, or rollout servers, read
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from runner.distributed.work_partition import run_partitioned
from runner.interfaces import RankCollectives
from runner.weight_sync.weight_store import StoredWeights, WeightStore

Weights = Callable[[], Iterator[tuple[str, Tensor]]]  # collective: all ranks drain it
WrittenFiles = tuple[Sequence[Path], str]  # files and digest


class WeightTransport(Protocol):
    """Carries versions of weights: the training thread calls `publish` and `drop_below`, collectors `get`."""

    def publish(self, version: int) -> int: ...  # the weights are these now; bytes that this rank has sent; collective

    def get(self, version: int) -> Mapping[str, Tensor] | None: ...  # None = they are in the sampler

    def drop_below(self, version: int) -> None: ...

    def close(self) -> None: ...


class SameModel:
    """The sampler's model is the trainer's."""

    def publish(self, version: int) -> int:
        """Nothing moves."""
        return 0

    def get(self, version: int) -> None:
        """They are there."""

    def drop_below(self, version: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is kept."""


class DeviceCopy:
    """Every rank keeps copies; by_reference: the tensors themselves, valid until the next update."""

    def __init__(self, weights: Weights, *, by_reference: bool = False) -> None:
        self._weights, self._by_reference = weights, by_reference
        self._kept: dict[int, dict[str, Tensor]] = {}

    def publish(self, version: int) -> int:
        """See `WeightTransport`. Collectors find a version once it is whole."""
        found = {name: tensor.detach() for name, tensor in self._weights()}
        self._kept[version] = found if self._by_reference else {name: tensor.clone() for name, tensor in found.items()}
        return 0 if self._by_reference else sum(tensor.nbytes for tensor in found.values())

    def get(self, version: int) -> Mapping[str, Tensor]:
        """See `WeightTransport`."""
        return self._kept[version]

    def newest(self) -> tuple[int, Mapping[str, Tensor]]:
        """The newest version and its weights, which live as long as they are used. For collectors."""
        return list(self._kept.items())[-1]

    def drop_below(self, version: int) -> None:
        """See `WeightTransport`."""
        self._kept = {one: weights for one, weights in self._kept.items() if one >= version}

    def close(self) -> None:
        """Memory ends with the process."""


@dataclass(eq=False, slots=True)
class SharedFiles:
    """Files, which some ranks write.

    changed, fixed: what training can change, at every version, and the rest of what a sampler needs, at the first one
    peers: all ranks, for the thread that trains; store: where this rank writes, None = another one does
    source: the rank whose files this rank's sampler reads; None = it has no sampler to give them to
    """

    changed: Weights
    fixed: Weights | None
    peers: RankCollectives
    store: WeightStore | None
    source: int | None
    _held: dict[int, StoredWeights] = field(default_factory=dict)
    _begun: bool = False

    def publish(self, version: int) -> int:
        """See `WeightTransport`. An error of the writing rank is raised on all ranks. Raises StorageError."""
        if not self._begun and self.fixed is not None:
            self._write_on_ranks(self.fixed(), lambda store, tensors: store.keep(tensors))
        self._begun = True
        written = self._write_on_ranks(self.changed(), lambda store, tensors: store.put(version, tensors))
        if self.source is not None:
            files, digest = written[self.source] or ((), "")
            self._held[version] = StoredWeights(files, version, digest)
        return 0 if self.store is None else self.store.get(version).num_changed_bytes

    def _write_on_ranks(
        self,
        tensors: Iterator[tuple[str, Tensor]],
        write: Callable[[WeightStore, Iterator[tuple[str, Tensor]]], StoredWeights | None],
    ) -> list[WrittenFiles | None]:
        """What each rank that writes has written of tensors that all of them drain."""

        def work(_: list[int]) -> list[WrittenFiles | None]:
            if self.store is not None:
                made = write(self.store, tensors)
                return [None if made is None else (made.files, made.digest)]
            for _tensor in tensors:
                pass
            return [None]

        return run_partitioned(self.peers, range(self.peers.size), work)

    def get(self, version: int) -> Mapping[str, Tensor] | None:
        """See `WeightTransport`."""
        return self._held.get(version)

    def drop_below(self, version: int) -> None:
        """See `WeightTransport`."""
        self._held = {one: weights for one, weights in self._held.items() if one >= version}
        if self.store is not None:
            self.store.drop_below(version)

    def close(self) -> None:
        """See `WeightTransport`; the files are removed."""
        if self.store is not None:
            self.store.close()
