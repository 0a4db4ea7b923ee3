"""Ragged batches: rows end to end, without padding; and their micro-batches.

Legend: N rows, T tokens in all rows.

    token channels  [T, ...]   ids, positions, parent, weight
    row channels    [N, ...]   lengths, unit, start

`parent[t]` is the index in the batch of the token before t, -1 at a root. Every [T] output belongs
to the predicted token: `logprobs[t] = log p(ids[t] | its ancestors)`, read at `parent[t]`; at a root
it is 0 and its weight is 0. A *unit* is what must not be cut: rows with equal `unit` are contiguous. `start` is the
position of a row's first token: 0 at a root, else the row continues the first row of its unit.
`totals` counts the whole optimizer step over all data ranks, so that a loss can divide by the total
it means and nothing divides later. Batches are built and cut on the CPU; one that was moved to a
device remembers itself there, so that how it is laid out can be read without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.core.media import MEDIA_ID

PATCHES_PER_PLACE = 4  # the vision parts of most families merge 2 x 2 patches of an image into one of its places
Row = Sequence[float] | NDArray[np.generic]  # a number for each of its tokens
ReadUnits = Callable[[NDArray[np.int64]], Mapping[str, Tensor]]  # units → their token channels, but for the layout


@dataclass(frozen=True, slots=True)
class Batch:
    """A frozen ragged batch; see the module's legend.

    tokens: ids int64 [T], positions int64 [T], parent int64 [T], weight float32 [T], ...
    rows:   lengths int64 [N], unit int64 [N], start int64 [N], ...; of rows that are not read yet `trained` int64 [N],
            how many of their tokens have a weight, and `media`: places of images in a unit, at its first row
    totals: counts over the whole optimizer step: tokens with weight, rows that have one, units.
    host:   this batch on the CPU, where `to` moved it from there.
    """

    tokens: dict[str, Tensor] | UnreadTokens
    rows: Mapping[str, Tensor]
    totals: Mapping[str, int] = field(default_factory=dict)
    host: Batch | None = None

    @property
    def structure(self) -> Batch:
        """Where to read lengths, parents and units from: the batch on the CPU if it was there, else this one."""
        return self.host or self

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.structure.rows["lengths"].sum())

    @property
    def num_rows(self) -> int:
        """N."""
        return int(self.rows["lengths"].shape[0])

    def to(self, device: torch.device) -> Batch:
        """The same batch with every channel on `device`."""
        return replace(
            self,
            tokens={k: v.to(device, non_blocking=True) for k, v in self.tokens.items()},
            rows={k: v.to(device, non_blocking=True) for k, v in self.rows.items()},
            host=None if device.type == "cpu" else self.structure,
        )

    def without_tokens(self, name: str) -> Batch:
        """The same batch without a token channel."""
        return replace(self, tokens={k: v for k, v in self.tokens.items() if k != name})

    def slice_rows(self, start: int, stop: int) -> Batch:
        """Rows start..stop with all their tokens; `parent` is re-based, `totals` are kept."""
        rows = {k: v[start:stop] for k, v in self.rows.items()}
        lengths = self.structure.rows["lengths"].numpy()
        first = int(lengths[:start].sum())
        last = first + int(lengths[start:stop].sum())
        if isinstance(self.tokens, UnreadTokens):
            before = int(self.rows["unit"][0])
            units = slice(int(rows["unit"][0]) - before, int(rows["unit"][-1]) - before + 1)
            return Batch(self.tokens.select(units, rows, slice(first, last)), rows, self.totals)
        tokens = {k: v[first:last] for k, v in self.tokens.items()}
        tokens["parent"] = torch.where(tokens["parent"] < 0, -1, tokens["parent"] - first)
        return Batch(tokens, rows, self.totals, self.host and self.host.slice_rows(start, stop))

    def count(self) -> dict[str, int]:
        """This batch's own contribution to `totals`."""
        trained = self.rows.get("trained")
        if trained is None:
            trained = row_sum(self, (self.tokens["weight"] != 0).long())
        return {
            "tokens": int(trained.sum()),
            "rows": int((trained > 0).sum()),
            "units": int(torch.unique_consecutive(self.rows["unit"]).shape[0]),
        }


class UnreadTokens(Mapping[str, Tensor]):
    """The token channels of some units, all read when one of them is needed."""

    def __init__(
        self, units: NDArray[np.int64], rows: Mapping[str, Tensor], read: ReadUnits, known: Mapping[str, Tensor]
    ) -> None:
        """rows: the row channels of these units; known: channels beside those that `read` gives, [T, ...]."""
        self._units, self._rows, self._read, self._known = units, rows, read, known

    @cached_property
    def _channels(self) -> Mapping[str, Tensor]:
        return {**self._read(self._units), **token_layout(self._rows), **self._known}

    def __getitem__(self, name: str) -> Tensor:
        return self._known[name] if name in self._known else self._channels[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._channels)

    def __len__(self) -> int:
        return len(self._channels)

    def select(
        self, places: slice | NDArray[np.int64], rows: Mapping[str, Tensor], tokens: slice | Tensor
    ) -> UnreadTokens:
        """The channels of the units at some places, with their row channels and the places of their tokens."""
        known = {name: values[tokens] for name, values in self._known.items()}
        return UnreadTokens(self._units[places], rows, self._read, known)

    def __or__(self, channels: Mapping[str, Tensor]) -> UnreadTokens:
        return UnreadTokens(self._units, self._rows, self._read, {**self._known, **channels})


def unread_batch(rows: Mapping[str, Tensor], read: ReadUnits) -> Batch:
    """A batch whose units are read when they are needed. rows: row channels, units numbered from 0."""
    return Batch(UnreadTokens(np.arange(int(rows["unit"][-1]) + 1), rows, read, {}), rows)


def pack(ids: Sequence[Row], weights: Sequence[Row], branches: Sequence[Sequence[int]] | None = None) -> Batch:
    """Lay rows end to end, each its own unit; the weight of each unit's first token is set to 0.

    ids and weights have N rows of equal lengths. branches: of each, where the continuations of its beginning start;
    the beginning and each of these is then a row of the unit. Raises ValueError for an empty row and for other lengths.
    """
    sizes = list(map(len, ids))
    if sizes != list(map(len, weights)):
        raise ValueError("every token needs a weight, and every weight a token")
    rows = row_layout(np.array(sizes), branches)
    return Batch({**flatten_weighted(ids, weights), **token_layout(rows)}, rows)


def flatten_weighted(ids: Sequence[Row], weights: Sequence[Row]) -> dict[str, Tensor]:
    """The channels `ids` and `weight` of units end to end; the weight of a unit's first token is 0."""
    weight = flatten_rows(weights, np.float32)
    weight[[0, *accumulate(map(len, ids[:-1]))]] = 0.0
    return {"ids": flatten_rows(ids), "weight": weight}


def token_layout(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The channels `positions` and `parent` of rows end to end."""
    lengths, start = rows["lengths"].numpy(), rows["start"].numpy()
    first, every = np.cumsum(lengths) - lengths, np.arange(int(lengths.max()))
    positions = np.concatenate([every[:size] for size in lengths.tolist()])
    parent = np.arange(-1, len(positions) - 1)
    parent[first] = -1
    if start.any():
        positions += np.repeat(start, lengths)
        roots = np.maximum.accumulate(np.where(start == 0, first, 0))
        parent[first] = np.where(start > 0, roots + start - 1, -1)
    return {"positions": torch.from_numpy(positions), "parent": torch.from_numpy(parent)}


def row_layout(sizes: NDArray[np.int64], branches: Sequence[Sequence[int]] | None = None) -> dict[str, Tensor]:
    """The row channels of `pack` for rows of so many tokens; see there for `branches` and errors."""
    edges = [(0, *one, size) for one, size in zip(branches, sizes.tolist(), strict=True)] if branches else []
    if sum(map(len, edges)) > 2 * len(edges):
        lengths = np.concatenate([np.diff(edge) for edge in edges])
        unit = np.repeat(np.arange(len(sizes)), [len(edge) - 1 for edge in edges])
        start = np.concatenate([[0, *[edge[1]] * (len(edge) - 2)] for edge in edges])
    else:
        lengths, unit, start = sizes, np.arange(len(sizes)), np.zeros_like(sizes)
    if not len(sizes) or lengths.min() <= 0:
        raise ValueError("a batch needs at least one row and no row may be empty")
    return {"lengths": torch.from_numpy(lengths), "unit": torch.from_numpy(unit), "start": torch.from_numpy(start)}


def flatten_rows(rows: Sequence[Row], dtype: type[np.generic] = np.int64) -> Tensor:
    """The numbers of all rows end to end, [T]."""
    return torch.from_numpy(np.concatenate(rows, dtype=dtype))


def with_totals(batch: Batch, totals: Mapping[str, int]) -> Batch:
    """The same batch, knowing the counts of the whole optimizer step."""
    return replace(batch, totals=dict(totals))


def row_of_tokens(batch: Batch) -> Tensor:
    """The row that each token lies in, int64 [T]."""
    lengths = batch.rows["lengths"]
    every = torch.arange(len(lengths), device=lengths.device)
    return torch.repeat_interleave(every, lengths, output_size=batch.num_tokens)  # or it would wait for their sum


def row_sum(batch: Batch, values: Tensor) -> Tensor:
    """The sum of `values` [T] over each row, [N]; differentiable."""
    return values.new_zeros(batch.num_rows).index_add(0, row_of_tokens(batch), values)


def select_units(
    batch: Batch, order: Sequence[int] | NDArray[np.int64], spans: NDArray[np.int64] | None = None
) -> Batch:
    """The units at the places `order`, in that order; a view if they are neighbors.

    spans: the batch's `unit_spans`, where they are known
    """
    spans, places = unit_spans(batch) if spans is None else spans, np.asarray(order)
    first, last, sizes = spans[places].T
    if (np.diff(places) == 1).all():
        return batch.slice_rows(int(first[0]), int(last[-1]))
    before = (np.cumsum(spans[:, 2]) - spans[:, 2])[places]
    index, row_index = ranges(before, sizes), ranges(first, last - first)
    rows = {name: values[row_index] for name, values in batch.rows.items()}
    rows["unit"] = torch.from_numpy(np.repeat(np.arange(len(places)), last - first))
    if isinstance(batch.tokens, UnreadTokens):
        return Batch(batch.tokens.select(places, rows, index), rows, batch.totals)
    tokens = {name: values[index] for name, values in batch.tokens.items()}
    moved = torch.from_numpy(np.repeat(np.cumsum(sizes) - sizes - before, sizes))
    tokens["parent"] = torch.where(tokens["parent"] < 0, -1, tokens["parent"] + moved)
    return Batch(tokens, rows, batch.totals)


def ranges(firsts: NDArray[np.int64], sizes: NDArray[np.int64]) -> Tensor:
    """Ranges of integers end to end, each by its first one and its size, int64 [sum of sizes]."""
    return torch.from_numpy(np.arange(sizes.sum()) + np.repeat(firsts - (np.cumsum(sizes) - sizes), sizes))


def with_tokens(batch: Batch, **channels: Tensor) -> Batch:
    """The same batch with token channels added or replaced, on the CPU and in float32."""
    return replace(batch, tokens=batch.tokens | {name: values.cpu().float() for name, values in channels.items()})


def unit_spans(batch: Batch) -> NDArray[np.int64]:
    """First row, row after the last and tokens of each unit, in order, int64 [units, 3]."""
    unit, lengths = (batch.structure.rows[name].cpu().numpy() for name in ("unit", "lengths"))
    edges = np.concatenate(([0], np.flatnonzero(unit[1:] != unit[:-1]) + 1, [len(unit)]))
    return np.stack([edges[:-1], edges[1:], np.add.reduceat(lengths, edges[:-1])], 1)


def prefixes(batch: Batch) -> Tensor:
    """The row that each row continues, int64 [N] on the CPU; -1 for a row that begins at a root."""
    rows = batch.structure.rows
    first, last, _ = unit_spans(batch).T
    return torch.where(rows["start"].cpu() > 0, torch.from_numpy(np.repeat(first, last - first)), -1)


@dataclass(frozen=True, slots=True)
class Footprints:
    """What units take up on a device, int64 [units].

    tokens: without padding; paths, longest: with it every path is a row as long as the longest; else None
    patches: of their images, which the vision part computes beside the tokens
    """

    tokens: NDArray[np.int64]
    patches: NDArray[np.int64]
    paths: NDArray[np.int64] | None = None
    longest: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, units: slice | NDArray[np.int64]) -> Footprints:
        if self.paths is None or self.longest is None:
            return Footprints(self.tokens[units], self.patches[units])
        return Footprints(self.tokens[units], self.patches[units], self.paths[units], self.longest[units])

    def slots(self) -> NDArray[np.int64]:
        """Slots (tokens, padding, patches) of the first unit, of the first two together, … of all, [units]."""
        if self.paths is None or self.longest is None:
            return np.cumsum(self.tokens + self.patches)
        padded = np.cumsum(self.paths) * np.maximum.accumulate(self.longest)
        return padded + np.cumsum(self.patches)


def footprints(batch: Batch, padded: bool) -> Footprints:
    """What each unit takes up."""
    spans, patches, rows = unit_spans(batch), _num_patches(batch), batch.structure.rows
    if not padded:
        return Footprints(spans[:, 2], patches)
    before, is_leaf = prefixes(batch).numpy(), np.ones(len(rows["lengths"]), np.int64)
    is_leaf[before[before >= 0]] = 0
    whole = (rows["start"] + rows["lengths"]).cpu().numpy()  # of each row with what it continues
    paths, longest = np.add.reduceat(is_leaf, spans[:, 0]), np.maximum.reduceat(whole, spans[:, 0])
    return Footprints(spans[:, 2], patches, paths, longest)


def _num_patches(batch: Batch) -> NDArray[np.int64]:
    """Patches of the images of each unit, by their places, int64 [units]."""
    structure, spans = batch.structure, unit_spans(batch)
    if "media" in structure.rows:
        places = structure.rows["media"]
    elif bool((is_image := structure.tokens["ids"] >= MEDIA_ID).any()):
        places = row_sum(structure, is_image.long())
    else:
        return np.zeros(len(spans), np.int64)
    return PATCHES_PER_PLACE * np.add.reduceat(places.cpu().numpy(), spans[:, 0])


def micro_batch_ranges(taken: Footprints, budget: int) -> list[range]:
    """Ranges of units that take at most `budget` slots each; a larger unit is alone in its range."""
    runs, start = list[range](), 0
    while start < len(taken):
        fit = int(np.searchsorted(taken[start : start + budget].slots(), budget, side="right"))
        runs.append(range(start, start + max(fit, 1)))
        start = runs[-1].stop
    return runs


def micro_batches(batch: Batch, max_tokens: int, *, padded: bool = False) -> Iterator[Batch]:
    """Cut between units so that each piece takes at most `max_tokens` token slots; a larger unit is alone.

    A slot is a token, a patch of an image or, for a model that runs padded, padding up to the longest row.
    """
    spans = unit_spans(batch)
    for run in micro_batch_ranges(footprints(batch, padded), max_tokens):
        yield batch.slice_rows(spans[run[0], 0], spans[run[-1], 1])


def split_rows(batch: Batch, parts: int) -> list[Batch]:
    """Cut a batch of units into `parts` runs of consecutive units whose counts differ by at most one."""
    spans = unit_spans(batch)
    edges = [len(spans) * i // parts for i in range(parts + 1)]
    return [batch.slice_rows(spans[a, 0], spans[b - 1, 1]) for a, b in pairwise(edges) if a < b]
