"""Ragged batches: rows end to end, without padding; and their micro-batches.

Legend: N rows, T tokens in all rows.

    token channels  [T, ...]   ids, positions, parent, weight
    row channels    [N, ...]   lengths, unit

`parent[t]` is the index in the batch of the token before t, -1 at a root. Every [T] output belongs
to the predicted token: `logprobs[t] = log p(ids[t] | its ancestors)`, read at `parent[t]`; at a root
it is 0 and its weight is 0. A *unit* is what must not be cut: rows with equal `unit` are contiguous.
`totals` counts the whole optimizer step over all data ranks, so that a loss can divide by the total
it means and nothing divides later. Batches are built and cut on the CPU; one that was moved to a
device remembers itself there, so that how it is laid out can be read without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise

import numpy as np
import torch
from torch import Tensor

from runner.core.media import MEDIA_ID

PATCHES_PER_PLACE = 4  # the vision parts of most families merge 2 x 2 patches of an image into one of its places


@dataclass(frozen=True, slots=True)
class Batch:
    """A frozen ragged batch; see the module's legend.

    tokens: ids int64 [T], positions int64 [T], parent int64 [T], weight float32 [T], ...
    rows:   lengths int64 [N], unit int64 [N], ...
    totals: counts over the whole optimizer step: tokens with weight, rows that have one, units.
    host:   this batch on the CPU, where `to` moved it from there.
    """

    tokens: Mapping[str, Tensor]
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
        return int(self.tokens["ids"].shape[0])

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
        lengths = self.structure.rows["lengths"]
        first = int(lengths[:start].sum())
        last = first + int(lengths[start:stop].sum())
        tokens = {k: v[first:last] for k, v in self.tokens.items()}
        tokens["parent"] = torch.where(tokens["parent"] < 0, -1, tokens["parent"] - first)
        rows = {k: v[start:stop] for k, v in self.rows.items()}
        return Batch(tokens, rows, self.totals, self.host and self.host.slice_rows(start, stop))

    def count(self) -> dict[str, int]:
        """This batch's own contribution to `totals`."""
        unit = self.rows["unit"]
        return {
            "tokens": int((self.tokens["weight"] != 0).sum()),
            "rows": int((row_sum(self, (self.tokens["weight"] != 0).float()) > 0).sum()),
            "units": int(torch.unique_consecutive(unit).shape[0]),
        }


def pack(
    ids: Sequence[Sequence[int]], weights: Sequence[Sequence[float]], branches: Sequence[Sequence[int]] | None = None
) -> Batch:
    """Lay rows end to end, each its own unit; the weight of each unit's first token is set to 0.

    ids and weights have N rows of equal lengths. branches: of each, where the continuations of its beginning start;
    the beginning and each of these is then a row of the unit. Raises ValueError for an empty row and for other lengths.
    """
    edges = [(0, *(branches[at] if branches else ()), len(row)) for at, row in enumerate(ids)]
    if not ids or any(stop <= start for edge in edges for start, stop in pairwise(edge)):
        raise ValueError("a batch needs at least one row and no row may be empty")
    sizes = list(map(len, ids))
    if sizes != list(map(len, weights)):
        raise ValueError("every token needs a weight, and every weight a token")
    lengths = torch.tensor([stop - start for edge in edges for start, stop in pairwise(edge)])
    unit = torch.repeat_interleave(torch.arange(len(ids)), torch.tensor([len(edge) - 1 for edge in edges]))
    starts = torch.cumsum(lengths, 0) - lengths
    roots = torch.tensor([0, *accumulate(sizes)][:-1])
    shared = torch.tensor([edge[1] if at else 0 for edge in edges for at in range(len(edge) - 1)])
    index = torch.arange(sum(sizes))
    positions = index - torch.repeat_interleave(starts - shared, lengths)
    parent = index - 1
    parent[starts] = torch.where(shared > 0, roots[unit] + shared - 1, -1)
    weight = flatten_rows(weights, np.float32)
    weight[roots] = 0.0
    tokens = {"ids": flatten_rows(ids, np.int64), "positions": positions, "parent": parent, "weight": weight}
    return Batch(tokens, rows={"lengths": lengths, "unit": unit})


def flatten_rows(rows: Sequence[Sequence[float]], dtype: type[np.generic]) -> Tensor:
    """The numbers of all rows end to end, [T]."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(rows), dtype, count=sum(map(len, rows))))


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


def concat_batches(parts: Sequence[Batch]) -> Batch:
    """Concatenate batches with the same channels; `totals` are the first one's, units are renumbered."""
    sizes = torch.tensor([part.num_tokens for part in parts])
    offsets = (torch.cumsum(sizes, 0) - sizes).tolist()
    tokens = {name: torch.cat([part.tokens[name] for part in parts]) for name in parts[0].tokens}
    shifted = zip((part.tokens["parent"] for part in parts), offsets, strict=True)
    tokens["parent"] = torch.cat([torch.where(parent < 0, -1, parent + offset) for parent, offset in shifted])
    rows = {name: torch.cat([part.rows[name] for part in parts]) for name in parts[0].rows}
    counts = [torch.unique_consecutive(part.rows["unit"], return_inverse=True)[1] for part in parts]
    starts = [0, *accumulate(int(c[-1]) + 1 for c in counts)]
    rows["unit"] = torch.cat([count + start for count, start in zip(counts, starts, strict=False)])
    return Batch(tokens, rows, parts[0].totals)


def select_units(batch: Batch, order: Sequence[int]) -> Batch:
    """The units at the places `order`, in that order."""
    spans = unit_spans(batch)
    return concat_batches([batch.slice_rows(*spans[at][:2]) for at in order])


def with_tokens(batch: Batch, **channels: Tensor) -> Batch:
    """The same batch with token channels added or replaced, on the CPU and in float32."""
    return replace(batch, tokens={**batch.tokens, **{name: v.cpu().float() for name, v in channels.items()}})


def unit_spans(batch: Batch) -> list[tuple[int, int, int]]:
    """(first row, row after the last, tokens) of each unit, in order."""
    rows_of = batch.structure.rows
    counts = torch.unique_consecutive(rows_of["unit"], return_counts=True)[1].tolist()
    lengths = rows_of["lengths"].tolist()
    spans, row = [], 0
    for rows in counts:
        spans.append((row, row + rows, sum(lengths[row : row + rows])))
        row += rows
    return spans


def prefixes(batch: Batch) -> Tensor:
    """The row that each row continues, int64 [N] on the CPU; -1 for a row that begins at a root."""
    lengths = batch.structure.rows["lengths"].cpu()
    ends = torch.cumsum(lengths, 0)
    parents = batch.structure.tokens["parent"].cpu()[ends - lengths]
    return torch.where(parents < 0, -1, torch.searchsorted(ends, parents, right=True))


@dataclass(frozen=True, slots=True)
class Footprint:
    """Size of some units on a device: their tokens, or, padded, one row per path as long as the longest.

    patches: of their images, which the vision part computes beside the tokens
    """

    tokens: int = 0
    paths: int = 0
    longest: int = 0
    patches: int = 0

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(
            self.tokens + other.tokens,
            self.paths + other.paths,
            max(self.longest, other.longest),
            self.patches + other.patches,
        )

    def size(self, padded: bool) -> int:
        """Their number of slots: tokens, padding and patches."""
        return (self.paths * self.longest if padded else self.tokens) + self.patches


def footprints(batch: Batch, padded: bool) -> list[Footprint]:
    """What each unit takes up; without `padded`, no paths."""
    spans, patches = unit_spans(batch), _num_patches(batch)
    if not padded:
        return [Footprint(size, patches=more) for (*_, size), more in zip(spans, patches, strict=True)]
    before = prefixes(batch)
    ends = torch.cumsum(batch.structure.rows["lengths"], 0)
    whole = (batch.structure.tokens["positions"][ends - 1] + 1).tolist()  # of each row with what it continues
    shared = set(before.tolist())
    return [
        Footprint(size, sum(row not in shared for row in range(first, last)), max(whole[first:last]), more)
        for (first, last, size), more in zip(spans, patches, strict=True)
    ]


def _num_patches(batch: Batch) -> list[int]:
    """Patches of the images of each unit, by their places."""
    spans, is_image = unit_spans(batch), batch.structure.tokens["ids"] >= MEDIA_ID
    if not bool(is_image.any()):
        return [0] * len(spans)
    units = torch.split(is_image, [size for *_, size in spans])
    return [PATCHES_PER_PLACE * int(unit.sum()) for unit in units]


def micro_batch_ranges(taken: Sequence[Footprint], budget: int, *, padded: bool) -> list[range]:
    """Ranges of units that take at most `budget` token slots each; a larger unit is alone in its range."""
    runs, start, filled = list[range](), 0, Footprint()
    for unit, more in enumerate(taken):
        if unit > start and (filled + more).size(padded) > budget:
            runs.append(range(start, unit))
            start, filled = unit, Footprint()
        filled = filled + more
    return [*runs, range(start, len(taken))] if taken else []


def micro_batches(batch: Batch, max_tokens: int, *, padded: bool = False) -> Iterator[Batch]:
    """Cut between units so that each piece takes at most `max_tokens` token slots; a larger unit is alone.

    A slot is a token, a patch of an image or, for a model that runs padded, padding up to the longest row.
    """
    spans = unit_spans(batch)
    for run in micro_batch_ranges(footprints(batch, padded), max_tokens, padded=padded):
        yield batch.slice_rows(spans[run[0]][0], spans[run[-1]][1])


def split_rows(batch: Batch, parts: int) -> list[Batch]:
    """Cut a batch of units into `parts` runs of consecutive units whose counts differ by at most one."""
    spans = unit_spans(batch)
    edges = [len(spans) * i // parts for i in range(parts + 1)]
    return [batch.slice_rows(spans[a][0], spans[b - 1][1]) for a, b in pairwise(edges) if a < b]
