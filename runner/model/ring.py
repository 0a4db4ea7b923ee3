"""Ring attention: each rank has some tokens; keys and values arrive block by block (Liu et al., 2310.01889).

    step 0      own queries, own keys
    step s      own queries, the keys and values of the rank s before; those of step s + 1 are in flight
    backward    the same again; what a rank computes of another one's gradient of keys and values is sent back to it

The softmax of a query is combined from its blocks (running maximum and sum, Milakov and Gimelshein, 1805.02867) in
float32, in products of at most QUERIES × KEYS scores, and computed again in the backward pass. In the paper a block
travels from rank to rank; here it comes straight from its owner: as many bytes, and only of the keys that some query
there sees, so that short rows and windows send next to nothing. Gradients do not travel with their block either.

Which keys these are is computed on the CPU from the batch's layout: every token sees two runs of neighbouring places,
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
from runner.distributed.autograd_collectives import Post, posted
from runner.model.attention import of_one_type

QUERIES, KEYS = 512, 1024  # at most, of one product


@dataclass(frozen=True, slots=True)
class Seen:
    """The places that each of some tokens sees: from `first` up to and with `own`, and from `early` to before `end`."""

    first: Tensor  # int64, as are the others
    own: Tensor
    early: Tensor
    end: Tensor

    def of(self, places: Tensor | slice) -> Seen:
        """Of some of the tokens."""
        return Seen(self.first[places], self.own[places], self.early[places], self.end[places])

    def to(self, device: torch.device) -> Seen:
        """The same on a device."""
        channels = (self.first, self.own, self.early, self.end)
        return Seen(*(channel.to(device, non_blocking=True) for channel in channels))

    def sees(self, keys: Tensor) -> Tensor:
        """Whether each token sees each of the places `keys`, bool [tokens, keys]."""
        own = (keys >= self.first[:, None]) & (keys <= self.own[:, None])
        return own | ((keys >= self.early[:, None]) & (keys < self.end[:, None]))

    def all_see(self, first: Tensor, last: Tensor) -> bool:
        """Whether each token sees, in one of its two runs, every place from `first` to `last`."""
        own = (self.first.max() <= first) & (self.own.min() >= last)
        return bool(own | ((self.early.max() <= first) & (self.end.min() > last)))


@dataclass(frozen=True, slots=True)
class Tile:
    """Some queries and some keys, of which at least a few are seen; `cut`: not all by all."""

    queries: slice
    keys: slice
    cut: bool


@dataclass(frozen=True, slots=True)
class Visit:
    """A rank meets the keys of another, `step` ranks before it.

    given: int64, which of its own keys it gives in turn to the one `step` ranks behind it; keys: int64, the places of
    those that it meets; tiles: what there is to compute with them
    """

    given: Tensor
    keys: Tensor
    tiles: tuple[Tile, ...]


class Sight:
    """What the tokens of a batch see; held, real: which of them each rank has, int64 and bool [C, W]."""

    def __init__(self, structure: Batch, held: Tensor, real: Tensor) -> None:
        self._structure, self._held, self._real = structure, held, real
        self._seen: dict[int | None, Seen] = {}

    def seen(self, rank: int, window: int | None) -> Seen:
        """What each of a rank's tokens sees, its stand-ins included; window in tokens or None."""
        return self._all(window).of(self._held[rank])

    def visits(self, rank: int, window: int | None) -> list[Visit]:
        """The meetings of a rank, itself first."""
        size, own = len(self._held), self._all(window).of(self._held[rank])
        needed = [self._needed(one, window) for one in range(size)]
        found = []
        for step in range(size):
            before, behind = (rank - step) % size, (rank + step) % size
            keys = self._held[before][self._real[before] & needed[rank][self._held[before]]]
            given = (self._real[rank] & needed[behind][self._held[rank]]).nonzero()[:, 0]
            found.append(Visit(given, keys, tuple(tiles(own, keys))))
        return found

    def _all(self, window: int | None) -> Seen:
        if window not in self._seen:
            self._seen[window] = _seen(self._structure, window)
        return self._seen[window]

    def _needed(self, rank: int, window: int | None) -> Tensor:
        """Which tokens a rank's tokens see, bool [T]."""
        seen = self._all(window).of(self._held[rank])
        edges = torch.zeros(self._structure.num_tokens + 1, dtype=torch.int64)
        for first, end in ((seen.first, seen.own + 1), (seen.early, seen.end)):
            edges.index_add_(0, first, torch.ones_like(first)).index_add_(0, end, -torch.ones_like(end))
        return torch.cumsum(edges, 0)[:-1] > 0


def _seen(batch: Batch, window: int | None) -> Seen:
    lengths, row = batch.rows["lengths"], row_of_tokens(batch)
    starts, own = torch.cumsum(lengths, 0) - lengths, torch.arange(batch.num_tokens)
    before = prefixes(batch)[row]
    # a row that continues none sees an empty run, where nothing is
    early = torch.where(before < 0, 0, starts[before])
    end = torch.where(before < 0, 0, early + lengths[before])
    if window is None:
        return Seen(starts[row], own, early, end)
    first = torch.maximum(starts[row], own - window + 1)
    late = batch.tokens["positions"] - window + 1  # the first position that is seen
    return Seen(first, own, torch.minimum(early + late.clamp(min=0), end), end)


def tiles(seen: Seen, keys: Tensor) -> list[Tile]:
    """The products that queries which see so much need with the keys at these places, which ascend."""
    found = []
    for start in range(0, len(seen.own), QUERIES):
        queries = slice(start, min(start + QUERIES, len(seen.own)))
        part = seen.of(queries)
        for first, last in _runs(part, keys):
            found += [
                Tile(queries, slice(at, end), not part.all_see(keys[at], keys[end - 1]))
                for at in range(first, last, KEYS)
                for end in [min(at + KEYS, last)]
            ]
    return found


def _runs(seen: Seen, keys: Tensor) -> list[tuple[int, int]]:
    """At most two runs of the keys that hold all that is seen, and do not overlap."""
    edges = [int(seen.first.min()), int(seen.own.max()) + 1]
    if bool((some := seen.early < seen.end).any()):
        edges += [int(seen.early[some].min()), int(seen.end[some].max())]
    at = torch.searchsorted(keys, torch.tensor(edges)).tolist()
    runs = sorted(run for run in (tuple(at[:2]), tuple(at[2:])) if run and run[0] < run[1])
    if len(runs) == 2 and runs[0][1] >= runs[1][0]:
        return [(runs[0][0], max(runs[0][1], runs[1][1]))]
    return runs


class Ring:
    """The tokens of one batch as one rank of `group` sees them; its device is where they are."""

    def __init__(self, sight: Sight, group: Any, rank: int, device: torch.device) -> None:
        self._sight, self._group, self._rank, self._device = sight, group, rank, device
        self._routes: dict[int | None, Route] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, dropout: float, scale: float | None
    ) -> Tensor:
        """As `Rows.attend`, of tensors with this rank's W tokens. Collective in both directions.

        Raises SpecError for a dropout of attention's weights.
        """
        if dropout:
            text = f"ring attention drops none of its weights, and the model asks for {dropout:g}"
            text = f"{text}; type parallelism.cp_style=ulysses, or algorithm.dropout=false"
            raise SpecError([Problem("parallelism.cp_style", text)])
        query, key, value = of_one_type(query, key, value)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        pair = torch.cat([key[0], value[0]], -1)
        out: Tensor = _Attention.apply(query[0], pair, self._route(window), scale)
        return out[None]

    def _route(self, window: int | None) -> Route:
        if window not in self._routes:
            seen, visits = self._sight.seen(self._rank, window), self._sight.visits(self._rank, window)
            self._routes[window] = Route(seen, visits, self._group, self._rank, self._device)
        return self._routes[window]


class Route:
    """The meetings of one rank, and what travels for them."""

    def __init__(self, seen: Seen, visits: Sequence[Visit], group: Any, rank: int, device: torch.device) -> None:
        self.visits, self.seen = visits, seen.to(device)
        self.keys = [visit.keys.to(device, non_blocking=True) for visit in visits]
        self.given = [visit.given.to(device, non_blocking=True) for visit in visits]
        self._group, self._rank = group, rank

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each step, and what of `own` [k, W, ·] of another rank this one meets there, [k, K, ·]."""
        met = own.index_select(1, self.given[0])
        for step in range(len(self.visits)):
            ahead = self._asked(own, step + 1) if step + 1 < len(self.visits) else None
            yield step, met
            if ahead is not None:
                met = _apart(ahead.arrived(), len(own))

    def _asked(self, own: Tensor, step: int) -> Post:
        return self._posted(own.index_select(1, self.given[step]), step, len(self.keys[step]))

    def returned(self, found: Tensor, step: int) -> Post:
        """Give `found` [k, K, ·] back to the rank met in this step, and get the same from who met this one."""
        return self._posted(found, -step, len(self.given[step]))

    def _posted(self, going: Tensor, steps: int, count: int) -> Post:
        """Send `going` [k, n, ·] so many steps on; as much, but of `count` tokens, comes from as many steps before.
        Of all backends' ways this is the one that each of them has."""
        size = len(self.visits)
        there, here = [0] * size, [0] * size
        there[(self._rank + steps) % size], here[(self._rank - steps) % size] = going.shape[1], count
        return posted(going.transpose(0, 1).flatten(1), self._group, there, here)


def _apart(rows: Tensor, heads: int) -> Tensor:
    """[K, k · f] → [k, K, f]"""
    return rows.unflatten(1, (heads, -1)).transpose(0, 1)


class _Attention(torch.autograd.Function):
    """query [h, W, d], pair [k, W, d + e] of keys and values → [W, h, e]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, pair: Tensor, route: Route, scale: float) -> Tensor:
        grouped = query.unflatten(0, (len(pair), -1))
        found = Softmax(grouped, pair.shape[2] - query.shape[2])
        for step, met in route.blocks(pair):
            keys, values = met.split([query.shape[2], found.out.shape[3]], 2)
            for tile in route.visits[step].tiles:
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
        d_query, d_pair = _gradients(query.unflatten(0, grad.shape[:2]), pair, out, sums, grad, ctx.route, ctx.scale)
        return d_query.flatten(0, 1).to(query.dtype), d_pair.to(pair.dtype), None, None


class Softmax:
    """Sums of values under softmax, of keys that come one after the other; `query` [k, g, W, d] says their shape."""

    def __init__(self, query: Tensor, size: int) -> None:
        wide = torch.promote_types(query.dtype, torch.float32)
        self.out = query.new_zeros(*query.shape[:3], size, dtype=wide)
        self._total = query.new_zeros(query.shape[:3], dtype=wide)
        self._top = torch.full_like(self._total, torch.finfo(wide).min)  # infinity less infinity is no number

    def add(self, queries: slice, scores: Tensor, values: Tensor) -> None:
        """Scores [k, g, n, K] of some queries with some keys, and their values [k, K, e]. Overwrites the scores."""
        before = self._top[:, :, queries]
        top = torch.maximum(before, scores.amax(3))
        weights = scores.sub_(top[..., None]).exp_()
        shrunk = (before - top).exp_()
        self._total[:, :, queries] = self._total[:, :, queries] * shrunk + weights.sum(3)
        more = _product(weights.flatten(1, 2).to(values.dtype), values).view(*weights.shape[:3], -1)
        self.out[:, :, queries] = self.out[:, :, queries] * shrunk[..., None] + more
        self._top[:, :, queries] = top

    def result(self) -> tuple[Tensor, Tensor]:
        """The sums [k, g, W, e], and the logarithm of the sums of exponentials [k, g, W]."""
        return self.out / self._total[..., None], self._top + self._total.log()


def _gradients(
    query: Tensor, pair: Tensor, out: Tensor, sums: Tensor, grad: Tensor, route: Route, scale: float
) -> tuple[Tensor, Tensor]:
    """Of queries [k, g, W, d] and pairs [k, W, d + e]; out, grad [k, g, W, e], sums [k, g, W]."""
    size = query.shape[3]
    d_query, d_pair = torch.zeros_like(query, dtype=sums.dtype), torch.zeros_like(pair, dtype=sums.dtype)
    inner = (grad.to(sums.dtype) * out).sum(3)
    waiting: tuple[int, Post] | None = None
    for step, met in route.blocks(pair):
        found = torch.zeros_like(met, dtype=sums.dtype)
        keys, values = met[..., :size], met[..., size:]
        for tile in route.visits[step].tiles:
            at, of = tile.queries, tile.keys
            weights = _scores(query, keys, route, step, tile, scale).sub_(sums[:, :, at, None]).exp_()
            flat, given = weights.flatten(1, 2), grad[:, :, at].flatten(1, 2)
            found[:, of, size:] += _product(flat.mT.to(given.dtype), given)
            d_scores = _product(given, values[:, of].mT).view_as(weights).sub_(inner[:, :, at, None])
            flat = d_scores.mul_(weights).mul_(scale).flatten(1, 2).to(query.dtype)
            d_query[:, :, at] += _product(flat, keys[:, of]).view_as(d_query[:, :, at])
            found[:, of, :size] += _product(flat.mT, query[:, :, at].flatten(1, 2))
        if waiting is not None:
            d_pair.index_add_(1, route.given[waiting[0]], _apart(waiting[1].arrived(), len(pair)))
        if step:
            waiting = step, route.returned(found, step)
        else:
            d_pair.index_add_(1, route.given[0], found)
    if waiting is not None:
        d_pair.index_add_(1, route.given[waiting[0]], _apart(waiting[1].arrived(), len(pair)))
    return d_query, d_pair


def _scores(query: Tensor, keys: Tensor, route: Route, step: int, tile: Tile, scale: float) -> Tensor:
    """Of a tile, [k, g, n, K], −∞ where a key is not seen; query [k, g, W, d], keys [k, K, d] of all the step."""
    some = query[:, :, tile.queries]
    scores = _product(some.flatten(1, 2), keys[:, tile.keys].mT).mul_(scale).view(*some.shape[:3], -1)
    if tile.cut:
        scores.masked_fill_(~route.seen.of(tile.queries).sees(route.keys[step][tile.keys]), -torch.inf)
    return scores


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a [k, n, m] · b [k, m, l], summed and given in float32 at least."""
    if a.dtype.itemsize > 2:
        return a @ b
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
