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
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 64  # bytes, of each channel in the buffer that is copied to a device
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
        host = None if device.type == "cpu" else self.structure
        return replace(self, tokens=move(self.tokens, device), rows=move(self.rows, device), host=host)

    def read(self) -> Batch:
        """The same batch with its tokens read, which this one does not keep."""
        return replace(self, tokens=self.tokens.read()) if isinstance(self.tokens, UnreadTokens) else self

    def read_ahead(self) -> None:
        """Keep what `read` gives, for any batch of the same step with the same units."""
        if isinstance(self.tokens, UnreadTokens):
            self.tokens.read_ahead()

    def without_tokens(self, name: str) -> Batch:
        """The same batch without a token channel."""
        return replace(self, tokens={k: v for k, v in self.tokens.items() if k != name})

    def slice_rows(self, start: int, stop: int) -> Batch:
        """Rows start..stop with all their tokens; `parent` is re-based, `totals` are kept."""
        return self.split([start, stop])[0]

    def split(self, edges: Sequence[int]) -> list[Batch]:
        """The same as `slice_rows` from each of some rows to the next of them."""
        lengths, unit = (self.structure.rows[name].numpy() for name in ("lengths", "unit"))
        ends = np.append(0, np.cumsum(lengths))[edges].tolist()
        rows = split_channels(self.rows, edges)
        if isinstance(self.tokens, UnreadTokens):
            at = unit - unit[0]
            units = [slice(at[a], at[b - 1] + 1) for a, b in pairwise(edges)]
            spans = [partial(slice, *span) for span in pairwise(ends)]
            tokens = [self.tokens.select(*one) for one in zip(units, rows, spans, strict=True)]
            return [Batch(*one, self.totals) for one in zip(tokens, rows, strict=True)]
        parts = split_channels(self.tokens, ends)
        for part, first in zip(parts, ends, strict=False):
            part["parent"] = torch.where(part["parent"] < 0, -1, part["parent"] - first)
        hosts = self.host.split(edges) if self.host else [None] * len(rows)
        return [Batch(part, row, self.totals, host) for part, row, host in zip(parts, rows, hosts, strict=True)]

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
    """The token channels of some units, all read when one of them is needed.

    Those that were selected from the same batch share what was read ahead.
    """

    def __init__(
        self,
        units: NDArray[np.int64],
        rows: Mapping[str, Tensor],
        read: ReadUnits,
        known: Mapping[str, Tensor],
        ahead: dict[bytes, dict[str, Tensor]],
    ) -> None:
        """rows: the row channels of these units; known: channels beside those that `read` gives, [T, ...]."""
        self._units, self._rows, self._read, self._known, self._ahead = units, rows, read, known, ahead

    @cached_property
    def _channels(self) -> Mapping[str, Tensor]:
        return self.read()

    def read(self) -> dict[str, Tensor]:
        """All channels."""
        found = self._ahead.get(self._units.tobytes())
        return {**(found or {**self._read(self._units), **token_layout(self._rows)}), **self._known}

    def read_ahead(self) -> None:
        """Read what `read` will give."""
        self._ahead[self._units.tobytes()] = {**self._read(self._units), **token_layout(self._rows)}

    def __getitem__(self, name: str) -> Tensor:
        return self._known[name] if name in self._known else self._channels[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._channels)

    def __len__(self) -> int:
        return len(self._channels)

    def select(
        self, places: slice | NDArray[np.int64], rows: Mapping[str, Tensor], tokens: Callable[[], slice | Tensor]
    ) -> UnreadTokens:
        """The channels of the units at some places, with their row channels and the places of their tokens."""
        known = {name: values[tokens()] for name, values in self._known.items()}
        return UnreadTokens(self._units[places], rows, self._read, known, self._ahead)

    def __or__(self, channels: Mapping[str, Tensor]) -> UnreadTokens:
        return UnreadTokens(self._units, self._rows, self._read, {**self._known, **channels}, self._ahead)


def unread_batch(rows: Mapping[str, Tensor], read: ReadUnits) -> Batch:
    """A batch whose units are read when they are needed. rows: row channels, units numbered from 0."""
    return Batch(UnreadTokens(np.arange(int(rows["unit"][-1]) + 1), rows, read, {}, {}), rows)


def split_channels(channels: Mapping[str, Tensor], edges: Sequence[int]) -> list[dict[str, Tensor]]:
    """The channels from each of some places to the next of them."""
    sizes = np.diff(edges).tolist()
    pieces = [torch.split(values[edges[0] : edges[-1]], sizes) for values in channels.values()]
    return [dict(zip(channels, piece, strict=True)) for piece in zip(*pieces, strict=True)]


def move(channels: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The channels on a device; a single copy, not waited for, if that is not the CPU."""
    if device.type == "cpu" or not all(values.is_cpu for values in channels.values()):
        return {name: values.to(device) for name, values in channels.items()}
    places = np.cumsum([0, *(-(-values.nbytes // ALIGNMENT) * ALIGNMENT for values in channels.values())]).tolist()
    buffer = torch.empty(places[-1], dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def views(whole: Tensor) -> dict[str, Tensor]:
        return {
            name: whole[place : place + values.nbytes].view(values.dtype).view(values.shape)
            for place, (name, values) in zip(places, channels.items(), strict=False)
        }

    for name, view in views(buffer).items():
        view.copy_(channels[name])
    return views(buffer.to(device, non_blocking=True))


def pack(ids: Sequence[Row], weights: Sequence[Row], branches: Sequence[Sequence[int]] | None = None) -> Batch:
    """Lay rows end to end, each its own unit; the weight of each unit's first token is set to 0.

    ids and weights have N rows of equal lengths. branches: of each, where the continuations of its beginning start;
    the beginning and each of these is then a row of the unit. Raises ValueError for an empty row and for other lengths.
    """
    sizes = list(map(len, ids))
    if sizes != list(map(len, weights)):
        raise ValueError("every token needs a weight, and every weight a token")
    rows = row_layout(np.array(sizes), branches)
    weight = np.concatenate(weights, dtype=np.float32)
    return Batch({"ids": flatten_rows(ids), "weight": zero_first(weight, np.array(sizes)), **token_layout(rows)}, rows)


def zero_first(weight: NDArray[np.float32], sizes: NDArray[np.int64]) -> Tensor:
    """The weights of units of these sizes end to end, changed in place: that of a unit's first token is 0."""
    weight[np.cumsum(sizes) - sizes] = 0.0
    return torch.from_numpy(weight)


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
    row_index = ranges(first, last - first)
    rows = {name: values[row_index] for name, values in batch.rows.items()}
    rows["unit"] = torch.from_numpy(np.repeat(np.arange(len(places)), last - first))
    if isinstance(batch.tokens, UnreadTokens):
        return Batch(batch.tokens.select(places, rows, lambda: ranges(before, sizes)), rows, batch.totals)
    index = ranges(before, sizes)
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


def split_rows(batch: Batch, parts: int) -> list[Batch]:
    """Cut a batch of units into `parts` runs of consecutive units whose counts differ by at most one."""
    first = unit_spans(batch)[:, 0]
    edges = sorted({len(first) * i // parts for i in range(parts)})
    return batch.split([*first[edges].tolist(), batch.num_rows])
