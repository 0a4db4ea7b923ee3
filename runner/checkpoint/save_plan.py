"""The content of a checkpoint if each rank has a part of the state: each part is written once.

    rank 0: a, b ─┐
                  ├─▶ file: a, b, c;   rank 0 writes a and b, rank 1 writes c
    rank 1: b, c ─┘

Ranks first exchange a digest of the names, shapes and types of their tensors; if it is equal, nothing else is sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from runner.checkpoint.format import (
    SplitState,
    TensorEntry,
    TensorPiece,
    file_layout,
    is_written_here,
    tensor_entries,
)
from runner.core.errors import RunnerError
from runner.core.safetensors_layout import FileLayout
from runner.distributed.dtensor_utils import local_slice, local_tensor
from runner.distributed.work_partition import run_partitioned
from runner.interfaces import RankCollectives

PER_RANK_KEY = "optimizer"  # the entry of a section's values that has only those of the rank's own tensors
NONE_WRITTEN = "no checkpoint was written; earlier ones are unchanged"


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Content of a checkpoint: the text of state.json, the file layouts, and what this rank writes."""

    values: bytes
    layouts: Mapping[str, FileLayout]
    pieces: Mapping[str, Mapping[str, TensorPiece]]

    @property
    def num_bytes(self) -> int:
        """Size on disk without headers; tied tensors count once."""
        return len(self.values) + sum(one.num_bytes for one in self.layouts.values())


@dataclass(frozen=True, slots=True)
class RankState:
    """The description of a rank's part of the state.

    listings: each section's tensors; holders: the ranks with shards of a sharded tensor
    apart: each section's values that differ between ranks
    """

    listings: Mapping[str, Mapping[str, TensorEntry]]
    holders: Mapping[str, Mapping[str, tuple[int, ...]]]
    apart: Mapping[str, Any]

    def digest(self) -> str:
        """Equal on ranks with the same tensors, however sharded, and the same values."""
        entries = {s: {n: (e.kind, e.shape, e.tied) for n, e in one.items()} for s, one in self.listings.items()}
        return hashlib.sha256(json.dumps([entries, self.apart]).encode()).hexdigest()


def make_save_plan(read: Callable[[], SplitState], peers: RankCollectives) -> SavePlan:
    """Merge the state of all ranks; collective. read: returns this rank's state.

    Values are those of the first rank, except for a section's `optimizer`, which is merged. Raises RunnerError if ranks
    have different tensors or values of the same name, or if a shard is missing; an error of `read` on one rank is
    raised on all.
    """
    own: list[tuple[SplitState, RankState]] = []

    def own_digest(_: list[int]) -> list[str]:
        contents = read()
        own.append((contents, _rank_state(contents)))
        return [own[0][1].digest()]

    digests = run_partitioned(peers, range(peers.size), own_digest)
    [(contents, part)] = own
    parts = [part] if len(set(digests)) == 1 else peers.all_gather(part)
    listings = {name: _merge_entries(name, parts) for name in _sections(parts)}
    values = {name: dict(one) for name, one in contents.values.items()}
    for name in part.apart:
        by_rank = {rank: one.apart[name] for rank, one in enumerate(parts)}
        values[name][PER_RANK_KEY] = _merge_values(by_rank, f"{name}.{PER_RANK_KEY}")
    homes = {name: _writer_ranks(name, parts) for name in listings}
    pieces = {
        name: _pieces_to_write(held, part.listings[name], homes[name], peers.rank)
        for name, held in contents.tensors.items()
    }
    text = json.dumps(values, indent=1, allow_nan=False).encode() + b"\n"
    return SavePlan(text, {name: file_layout(one) for name, one in listings.items()}, pieces)


def _rank_state(contents: SplitState) -> RankState:
    return RankState(
        {name: tensor_entries(held) for name, held in contents.tensors.items()},
        {
            name: {key: _mesh_ranks(tensor) for key, tensor in held.items() if isinstance(tensor, DTensor)}
            for name, held in contents.tensors.items()
        },
        {name: one[PER_RANK_KEY] for name, one in contents.values.items() if PER_RANK_KEY in one},
    )


def _mesh_ranks(tensor: DTensor) -> tuple[int, ...]:
    """The ranks with shards or replicas of a tensor."""
    return tuple(sorted(tensor.device_mesh.mesh.flatten().tolist()))


def _sections(parts: Sequence[RankState]) -> list[str]:
    """The sections with tensors. Raises RunnerError if they differ between ranks."""
    for rank, part in enumerate(parts):
        for own, first in ((part.listings, parts[0].listings), (part.apart, parts[0].apart)):
            if unlike := sorted(own.keys() ^ first.keys()):
                raise RunnerError(f"ranks 0 and {rank} have different state sections ({unlike[0]}): {NONE_WRITTEN}")
    return list(parts[0].listings)


def _merge_entries(section: str, parts: Sequence[RankState]) -> dict[str, TensorEntry]:
    """The tensors of all ranks. Raises RunnerError if two ranks have different tensors of the same name."""
    found: dict[str, tuple[int, TensorEntry]] = {}
    for rank, part in enumerate(parts):
        for name, entry in part.listings[section].items():
            first, known = found.setdefault(name, (rank, entry))
            if known != entry:
                raise RunnerError(
                    f"ranks {first} and {rank} have different tensors in section {section}: {name} is "
                    f"{_entry_text(known)} and {_entry_text(entry)}: {NONE_WRITTEN}"
                )
    return {name: entry for name, (_, entry) in found.items()}


def _entry_text(entry: TensorEntry) -> str:
    return f"{entry.kind}{list(entry.shape)}" + (f" tied to {entry.tied}" if entry.tied else "")


def _writer_ranks(section: str, parts: Sequence[RankState]) -> dict[str, int]:
    """The first rank that has each tensor: this rank and those with the other shards write it.

    Raises RunnerError if one of them does not have it.
    """
    homes: dict[str, int] = {}
    for rank, part in enumerate(parts):
        for name in part.listings[section]:
            if homes.setdefault(name, rank) != rank or len(parts) == 1:
                continue
            holders = part.holders[section].get(name, (rank,))
            if lacking := [one for one in holders if name not in parts[one].listings[section]]:
                raise RunnerError(f"rank {lacking[0]} lacks its shard of {name} in {section}: {NONE_WRITTEN}")
    return homes


def _pieces_to_write(
    tensors: Mapping[str, Tensor], entries: Mapping[str, TensorEntry], homes: Mapping[str, int], rank: int
) -> dict[str, TensorPiece]:
    """The shards that this rank writes, tied tensors once."""
    own = {name: tensors[name] for name, entry in entries.items() if entry.tied is None}
    return {
        name: TensorPiece(local_tensor(one), local_slice(one), tuple(one.shape))
        for name, one in own.items()
        if (_mesh_ranks(one)[0] if isinstance(one, DTensor) else rank) == homes[name] and is_written_here(one)
    }


def _merge_values(found: Mapping[int, Any], where: str) -> Any:
    """Merge one value of several ranks: dicts key by key, lists item by item.

    Raises RunnerError if two ranks have different values.
    """
    ranks, values = list(found), list(found.values())
    first = values[0]
    if all(isinstance(one, dict) for one in values):
        alike = all(one.keys() == first.keys() for one in values)
        keys = first if alike else sorted(set().union(*values))
        return {k: _merge_values({r: one[k] for r, one in found.items() if k in one}, f"{where}.{k}") for k in keys}
    if all(isinstance(one, list) and len(one) == len(first) for one in values):
        return [_merge_values({r: one[at] for r, one in found.items()}, f"{where}[{at}]") for at in range(len(first))]
    for rank, one in zip(ranks, values, strict=True):
        if one != first:
            text = f"ranks {ranks[0]} and {rank} have different values of {where}: {first!r} and {one!r}"
            raise RunnerError(f"{text}: {NONE_WRITTEN}")
    return first
