"""Ring attention: each rank has some tokens; keys and values come in blocks (Liu et al., 2310.01889).

    step 0      own queries, own keys
    step s      own queries, the keys and values of the rank s before; those of step s + 1 are in flight
    backward    the same again; what a rank computes of another one's gradient of keys and values is sent back to it

The softmax of a query is combined from its blocks (running maximum and sum, Milakov and Gimelshein, 1805.02867) in
float32, in products of at most QUERIES × KEYS scores, and computed again in the backward pass. In the paper a block
is sent from rank to rank; here it comes straight from its owner: as many bytes, and only of the keys that some query
there sees, so that short rows and windows send next to nothing. Gradients are not sent with their block either.

Which keys these are is computed on the CPU from the batch's layout: every token sees two runs of neighboring places,
its own row up to itself, and the row that it continues; with a window both begin later. All ranks know this.

Legend: N rows, T tokens, C ranks, W tokens of each, K keys of a block; h heads, k key-value heads, g = h/k, d head
size, e that of values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from runner.core.batch import Batch, prefixes, row_of_tokens
from runner.core.errors import Problem, SpecError
from runner.distributed.autograd_collectives import AsyncAllToAll, start_all_to_all
from runner.model.packed_attention import promote_to_common_dtype

QUERIES, KEYS = 512, 1024  # at most, of one product


@dataclass(frozen=True, slots=True)
class VisibleRanges:
    """The keys visible to each of some tokens: from `first` through `own`, and from `early` before `end`."""

    first: Tensor  # int64, as are the others
    own: Tensor
    early: Tensor
    end: Tensor

    def select(self, places: Tensor | slice) -> VisibleRanges:
        """Of some of the tokens."""
        return VisibleRanges(self.first[places], self.own[places], self.early[places], self.end[places])

    def to(self, device: torch.device) -> VisibleRanges:
        """The same on a device."""
        channels = (self.first, self.own, self.early, self.end)
        return VisibleRanges(*(channel.to(device, non_blocking=True) for channel in channels))

    def is_visible(self, keys: Tensor) -> Tensor:
        """Whether each token sees each of the places `keys`, bool [tokens, keys]."""
        own = (keys >= self.first[:, None]) & (keys <= self.own[:, None])
        return own | ((keys >= self.early[:, None]) & (keys < self.end[:, None]))

    def is_fully_visible(self, first: Tensor, last: Tensor) -> bool:
        """Whether each token sees, in one of its two runs, every place from `first` to `last`."""
        own = (self.first.max() <= first) & (self.own.min() >= last)
        return bool(own | ((self.early.max() <= first) & (self.end.min() > last)))


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Some queries and some keys, of which at least a few are seen; `is_masked`: not all by all."""

    queries: slice
    keys: slice
    is_masked: bool


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """A rank meets the keys of another, `step` ranks before it.

    sent: int64, which of its own keys it gives in turn to the one `step` ranks behind it; keys: int64, the places of
    those that it meets; tiles: what there is to compute with them
    """

    sent: Tensor
    keys: Tensor
    tiles: tuple[AttentionTile, ...]


class CpMask:
    """What the tokens of a batch see; held, real: which of them each rank has, int64 and bool [C, W]."""

    def __init__(self, structure: Batch, held: Tensor, real: Tensor) -> None:
        self._structure, self._held, self._real = structure, held, real
        self._seen: dict[int | None, VisibleRanges] = {}

    def visible_ranges(self, rank: int, window: int | None) -> VisibleRanges:
        """What each of a rank's tokens sees, its stand-ins included; window in tokens or None."""
        return self._ranges_of_all(window).select(self._held[rank])

    def transfers(self, rank: int, window: int | None) -> list[KvTransfer]:
        """The meetings of a rank, itself first."""
        size, own = len(self._held), self._ranges_of_all(window).select(self._held[rank])
        needed = [self._needed_tokens(one, window) for one in range(size)]
        found = []
        for step in range(size):
            before, behind = (rank - step) % size, (rank + step) % size
            keys = self._held[before][self._real[before] & needed[rank][self._held[before]]]
            given = (self._real[rank] & needed[behind][self._held[rank]]).nonzero()[:, 0]
            found.append(KvTransfer(given, keys, tuple(attention_tiles(own, keys))))
        return found

    def _ranges_of_all(self, window: int | None) -> VisibleRanges:
        if window not in self._seen:
            self._seen[window] = _visible_ranges(self._structure, window)
        return self._seen[window]

    def _needed_tokens(self, rank: int, window: int | None) -> Tensor:
        """Which tokens a rank's tokens see, bool [T]."""
        seen = self._ranges_of_all(window).select(self._held[rank])
        edges = torch.zeros(self._structure.num_tokens + 1, dtype=torch.int64)
        for first, end in ((seen.first, seen.own + 1), (seen.early, seen.end)):
            edges.index_add_(0, first, torch.ones_like(first)).index_add_(0, end, -torch.ones_like(end))
        return torch.cumsum(edges, 0)[:-1] > 0


def _visible_ranges(batch: Batch, window: int | None) -> VisibleRanges:
    lengths, row = batch.rows["lengths"], row_of_tokens(batch)
    starts, own = torch.cumsum(lengths, 0) - lengths, torch.arange(batch.num_tokens)
    before = prefixes(batch)[row]
    # a row that continues none sees an empty run, where nothing is
    early = torch.where(before < 0, 0, starts[before])
    end = torch.where(before < 0, 0, early + lengths[before])
    if window is None:
        return VisibleRanges(starts[row], own, early, end)
    first = torch.maximum(starts[row], own - window + 1)
    late = batch.tokens["positions"] - window + 1  # the first position that is seen
    return VisibleRanges(first, own, torch.minimum(early + late.clamp(min=0), end), end)


def attention_tiles(seen: VisibleRanges, keys: Tensor) -> list[AttentionTile]:
    """The products that queries which see so much need with the keys at these places, which ascend."""
    found = []
    for start in range(0, len(seen.own), QUERIES):
        queries = slice(start, min(start + QUERIES, len(seen.own)))
        part = seen.select(queries)
        for first, last in _key_runs(part, keys):
            found += [
                AttentionTile(queries, slice(at, end), not part.is_fully_visible(keys[at], keys[end - 1]))
                for at in range(first, last, KEYS)
                for end in [min(at + KEYS, last)]
            ]
    return found


def _key_runs(seen: VisibleRanges, keys: Tensor) -> list[tuple[int, int]]:
    """At most two runs of the keys that hold all that is seen, and do not overlap."""
    edges = [int(seen.first.min()), int(seen.own.max()) + 1]
    if bool((some := seen.early < seen.end).any()):
        edges += [int(seen.early[some].min()), int(seen.end[some].max())]
    at = torch.searchsorted(keys, torch.tensor(edges)).tolist()
    runs = sorted(run for run in (tuple(at[:2]), tuple(at[2:])) if run and run[0] < run[1])
    if len(runs) == 2 and runs[0][1] >= runs[1][0]:
        return [(runs[0][0], max(runs[0][1], runs[1][1]))]
    return runs


class RingAttention:
    """The tokens of one batch as one rank of `group` sees them; its device is where they are."""

    def __init__(self, sight: CpMask, group: Any, rank: int, device: torch.device) -> None:
        self._sight, self._group, self._rank, self._device = sight, group, rank, device
        self._schedules: dict[int | None, KvSchedule] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, dropout: float, scale: float | None
    ) -> Tensor:
        """As `PackedRows.attend`, of tensors with this rank's W tokens. Collective in both directions.

        Raises SpecError for a dropout of attention's weights.
        """
        if dropout:
            text = f"ring attention has no attention dropout, but the model has {dropout:g}"
            text = f"{text}; type parallelism.cp_backend=ulysses, or algorithm.dropout=false"
            raise SpecError([Problem("parallelism.cp_backend", text)])
        query, key, value = promote_to_common_dtype(query, key, value)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        pair = torch.cat([key[0], value[0]], -1)
        out: Tensor = _RingAttentionFunction.apply(query[0], pair, self._schedule(window), scale)
        return out[None]

    def _schedule(self, window: int | None) -> KvSchedule:
        if window not in self._schedules:
            seen, visits = self._sight.visible_ranges(self._rank, window), self._sight.transfers(self._rank, window)
            self._schedules[window] = KvSchedule(seen, visits, self._group, self._rank, self._device)
        return self._schedules[window]


class KvSchedule:
    """The attention tiles of one rank, and the keys and values that are sent for them."""

    def __init__(
        self, seen: VisibleRanges, visits: Sequence[KvTransfer], group: Any, rank: int, device: torch.device
    ) -> None:
        self.transfers, self.seen = visits, seen.to(device)
        self.keys = [visit.keys.to(device, non_blocking=True) for visit in visits]
        self.sent = [visit.sent.to(device, non_blocking=True) for visit in visits]
        self._group, self._rank = group, rank

    def kv_blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each step, and what of `own` [k, W, ·] of another rank this one meets there, [k, K, ·]."""
        met = own.index_select(1, self.sent[0])
        for step in range(len(self.transfers)):
            ahead, then = None, step + 1
            if then < len(self.transfers):
                ahead = self._shift(own.index_select(1, self.sent[then]), then, len(self.keys[then]))
            yield step, met
            if ahead is not None:
                met = _split_heads(ahead.wait(), len(own))

    def send_back(self, found: Tensor, step: int) -> AsyncAllToAll:
        """Give `found` [k, K, ·] back to the rank met in this step, and get the same from who met this one."""
        return self._shift(found, -step, len(self.sent[step]))

    def _shift(self, going: Tensor, steps: int, count: int) -> AsyncAllToAll:
        """Send `going` [k, n, ·] by `steps` ranks; `count` tokens come from the rank as many steps before.

        All backends have this collective.
        """
        size = len(self.transfers)
        there, here = [0] * size, [0] * size
        there[(self._rank + steps) % size], here[(self._rank - steps) % size] = going.shape[1], count
        return start_all_to_all(going.transpose(0, 1).flatten(1), self._group, there, here)


def _split_heads(rows: Tensor, heads: int) -> Tensor:
    """[K, k · f] → [k, K, f]"""
    return rows.unflatten(1, (heads, -1)).transpose(0, 1)


class _RingAttentionFunction(torch.autograd.Function):
    """query [h, W, d], pair [k, W, d + e] of keys and values → [W, h, e]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, pair: Tensor, route: KvSchedule, scale: float) -> Tensor:
        grouped = query.unflatten(0, (len(pair), -1))
        found = OnlineSoftmax(grouped, pair.shape[2] - query.shape[2])
        for step, met in route.kv_blocks(pair):
            keys, values = met.split([query.shape[2], found.out.shape[3]], 2)
            for tile in route.transfers[step].tiles:
                scores = _scores(grouped, keys, route, step, tile, scale)
                found.add(tile.queries, scores, values[:, tile.keys])
        out, sums = found.result()
        ctx.save_for_backward(query, pair, out.to(query.dtype), sums)
        ctx.route, ctx.scale = route, scale
        return out.to(query.dtype).flatten(0, 1).transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, pair, out, sums = ctx.saved_tensors
        grad = grad.transpose(0, 1).unflatten(0, (len(pair), -1))
        d_query, d_pair = _attention_gradients(
            query.unflatten(0, grad.shape[:2]), pair, out, sums, grad, ctx.route, ctx.scale
        )
        return d_query.flatten(0, 1).to(query.dtype), d_pair.to(pair.dtype), None, None


class OnlineSoftmax:
    """Softmax-weighted sums of values whose keys arrive in blocks; `query` [k, g, W, d] gives the shape."""

    def __init__(self, query: Tensor, size: int) -> None:
        wide = torch.promote_types(query.dtype, torch.float32)
        self.out = query.new_zeros(*query.shape[:3], size, dtype=wide)
        self._total = query.new_zeros(query.shape[:3], dtype=wide)
        self._top = torch.full_like(self._total, torch.finfo(wide).min)  # infinity less infinity is no number

    def add(self, queries: slice, scores: Tensor, values: Tensor) -> None:
        """Add scores [k, g, n, K] of some queries and keys, with their values [k, K, e]; overwrites scores."""
        before = self._top[:, :, queries]
        top = torch.maximum(before, scores.amax(3))
        weights = scores.sub_(top[..., None]).exp_()
        shrunk = (before - top).exp_()
        self._total[:, :, queries] = self._total[:, :, queries] * shrunk + weights.sum(3)
        more = _matmul_float32(weights.flatten(1, 2).to(values.dtype), values).view(*weights.shape[:3], -1)
        self.out[:, :, queries] = self.out[:, :, queries] * shrunk[..., None] + more
        self._top[:, :, queries] = top

    def result(self) -> tuple[Tensor, Tensor]:
        """The sums [k, g, W, e], and the logarithm of the sums of exponentials [k, g, W]."""
        return self.out / self._total[..., None], self._top + self._total.log()


def _attention_gradients(
    query: Tensor, pair: Tensor, out: Tensor, sums: Tensor, grad: Tensor, route: KvSchedule, scale: float
) -> tuple[Tensor, Tensor]:
    """Of queries [k, g, W, d] and pairs [k, W, d + e]; out, grad [k, g, W, e], sums [k, g, W]."""
    size = query.shape[3]
    d_query, d_pair = torch.zeros_like(query, dtype=sums.dtype), torch.zeros_like(pair, dtype=sums.dtype)
    inner = (grad.to(sums.dtype) * out).sum(3)
    waiting: tuple[int, AsyncAllToAll] | None = None
    for step, met in route.kv_blocks(pair):
        found = torch.zeros_like(met, dtype=sums.dtype)
        keys, values = met[..., :size], met[..., size:]
        for tile in route.transfers[step].tiles:
            at, of = tile.queries, tile.keys
            weights = _scores(query, keys, route, step, tile, scale).sub_(sums[:, :, at, None]).exp_()
            flat, given = weights.flatten(1, 2), grad[:, :, at].flatten(1, 2)
            found[:, of, size:] += _matmul_float32(flat.mT.to(given.dtype), given)
            d_scores = _matmul_float32(given, values[:, of].mT).view_as(weights).sub_(inner[:, :, at, None])
            flat = d_scores.mul_(weights).mul_(scale).flatten(1, 2).to(query.dtype)
            d_query[:, :, at] += _matmul_float32(flat, keys[:, of]).view_as(d_query[:, :, at])
            found[:, of, :size] += _matmul_float32(flat.mT, query[:, :, at].flatten(1, 2))
        if waiting is not None:
            d_pair.index_add_(1, route.sent[waiting[0]], _split_heads(waiting[1].wait(), len(pair)))
        if step:
            waiting = step, route.send_back(found, step)
        else:
            d_pair.index_add_(1, route.sent[0], found)
    if waiting is not None:
        d_pair.index_add_(1, route.sent[waiting[0]], _split_heads(waiting[1].wait(), len(pair)))
    return d_query, d_pair


def _scores(query: Tensor, keys: Tensor, route: KvSchedule, step: int, tile: AttentionTile, scale: float) -> Tensor:
    """Scores of a tile, [k, g, n, K], −∞ where a key is not visible; query [k, g, W, d], keys [k, K, d]."""
    some = query[:, :, tile.queries]
    scores = _matmul_float32(some.flatten(1, 2), keys[:, tile.keys].mT).mul_(scale).view(*some.shape[:3], -1)
    if tile.is_masked:
        scores.masked_fill_(~route.seen.select(tile.queries).is_visible(route.keys[step][tile.keys]), -torch.inf)
    return scores


def _matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    """a [k, n, m] · b [k, m, l], summed and given in float32 at least."""
    if a.dtype.itemsize > 2:
        return a @ b
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
