"""How the trainer's weights come to what samples.

Shared     it is the trainer's own model: nothing moves
Handed     this process's own tensors, by reference, until they change
Copied     copies on each rank's device, as many as the lag needs
Shelving   files that samplers read: one rank of a machine writes, all of them, or processes of their own, read
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from runner.distributed.work_partition import run_partitioned
from runner.interfaces import RankCollectives
from runner.weight_sync.shelf import Shelf, Shelved

Weights = Callable[[], Iterator[tuple[str, Tensor]]]  # collective: all ranks drain it
Told = tuple[Sequence[Path], str]  # files and digest


class Route(Protocol):
    """What versions go through. `publish` and `drop_below` are for the thread that trains, `get` for who collects."""

    def publish(self, version: int) -> int: ...  # the weights are these now; bytes that this rank has sent; collective

    def get(self, version: int) -> Mapping[str, Tensor] | None: ...  # None = they are in the sampler

    def drop_below(self, version: int) -> None: ...

    def close(self) -> None: ...


class Shared:
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


class Copied:
    """Every rank keeps copies; handed: the tensors themselves, which are right until the trainer's next update."""

    def __init__(self, weights: Weights, *, handed: bool = False) -> None:
        self._weights, self._handed = weights, handed
        self._kept: dict[int, dict[str, Tensor]] = {}

    def publish(self, version: int) -> int:
        """See `Route`."""
        found = {name: tensor.detach() for name, tensor in self._weights()}
        self._kept[version] = found if self._handed else {name: tensor.clone() for name, tensor in found.items()}
        return 0 if self._handed else sum(tensor.nbytes for tensor in found.values())

    def get(self, version: int) -> Mapping[str, Tensor]:
        """See `Route`."""
        return self._kept[version]

    def drop_below(self, version: int) -> None:
        """See `Route`."""
        for old in [one for one in self._kept if one < version]:
            del self._kept[old]

    def close(self) -> None:
        """Memory ends with the process."""


class Shelving:
    """Files, which some ranks write.

    changed, fixed: what training can change, at every version, and the rest of what a sampler needs, at the first one
    peers: all ranks, for the thread that trains; shelf: where this rank writes, None = another one does
    source: the rank whose files this rank's sampler reads; None = it has no sampler to give them to
    """

    def __init__(
        self,
        changed: Weights,
        fixed: Weights | None,
        *,
        peers: RankCollectives,
        shelf: Shelf | None,
        source: int | None,
    ) -> None:
        self._changed, self._fixed, self._peers, self._shelf, self._source = changed, fixed, peers, shelf, source
        self._held: dict[int, Shelved] = {}
        self._begun = False

    def publish(self, version: int) -> int:
        """See `Route`. What is raised where it is written is raised on all ranks. Raises StorageError."""
        if not self._begun and self._fixed is not None:
            self._drained(self._fixed(), lambda shelf, tensors: shelf.keep(tensors))
        self._begun = True
        told = self._drained(self._changed(), lambda shelf, tensors: shelf.put(version, tensors))
        if self._source is not None:
            files, digest = told[self._source] or ((), "")
            self._held[version] = Shelved(files, version, digest)
        return 0 if self._shelf is None else self._shelf.get(version).num_changed_bytes

    def _drained(
        self,
        tensors: Iterator[tuple[str, Tensor]],
        write: Callable[[Shelf, Iterator[tuple[str, Tensor]]], Shelved | None],
    ) -> list[Told | None]:
        """What each rank that writes has written of tensors that all of them drain."""

        def work(_: list[int]) -> list[Told | None]:
            if self._shelf is not None:
                made = write(self._shelf, tensors)
                return [None if made is None else (made.files, made.digest)]
            for _tensor in tensors:
                pass
            return [None]

        return run_partitioned(self._peers, range(self._peers.size), work)

    def get(self, version: int) -> Mapping[str, Tensor] | None:
        """See `Route`."""
        return self._held.get(version)

    def drop_below(self, version: int) -> None:
        """See `Route`."""
        for old in [one for one in self._held if one < version]:
            del self._held[old]
        if self._shelf is not None:
            self._shelf.drop_below(version)

    def close(self) -> None:
        """See `Route`; the files are removed."""
        if self._shelf is not None:
            self._shelf.close()
