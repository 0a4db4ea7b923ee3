"""KV cache for a batch of sequences: next-token logits of many growing rows at once.

    prompts ──each distinct one once──▶ keys, values ──copied to the rows that join──▶ cache ◀── step: one id per row

Three ways, with the same verbs (admit, step, evict); a model gets the first that fits it:

    ContinuousBatchDecoder   a preallocated cache whose rows all end in the same column: rows join and leave at any time
    WaveBatchDecoder         the cache that the model makes for itself: rows leave at any time, join when all have left
    RecomputeBatchDecoder    no cache: every token is computed again, for models whose state is neither

              columns →   · · 3 1 4 1 5 │        a step writes one column for every row; a row that joins is put
              rows ↓      · · · · 2 6 5 │        left of the line, where the mask hides what stands before it
                                        end

The places of rows that join are those of rows that are over, which they replace, and then B, B+1, …

Distances between columns are distances between positions, so that the models' own mask functions hold, sliding windows
included. Legend: B live rows, L tokens of a prompt, W columns in use, V vocabulary, d head size.
"""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from runner.interfaces.model import CachedDecoder
from runner.interfaces.routing import ExpertRouting

PromptIds = tuple[int, ...]
KeyValueLayers = Sequence[tuple[Tensor, Tensor]]  # of one row: keys and values [heads, L, d] by layer
PREFILL_TOKENS = 4096  # of prompts, padding included, that are computed at once; a longer prompt is computed alone
MIN_GROWTH = 64  # columns


MakeDecoder = Callable[[Any, int], CachedDecoder]  # of model, most rows


def recorded_experts(causal: Any, ids: Tensor) -> Tensor | None:
    """The experts of the tokens `ids` [B, L] of the last pass, int16 [B, L, M, k], if routers record them."""
    routing: ExpertRouting | None = getattr(causal, "expert_routing", None)
    return routing.last_experts(*ids.shape) if routing is not None and routing.records else None


class CachedForward:
    """A causal LM's forward with the keywords that it knows, for the logits after the last column."""

    def __init__(self, causal: Any) -> None:
        parameters = inspect.signature(causal.forward).parameters
        self.device: torch.device = causal.device
        self._causal = causal
        self._positions = "position_ids" in parameters
        self._media = getattr(causal, "media_inputs", None)
        config = causal.config.get_text_config()
        plain = {*(getattr(config, "layer_types", None) or ())} == {"full_attention"} and self._media is None
        self._takes_full_mask = plain and config._attn_implementation == "sdpa"  # [B, 1, L, W], as its layers want it
        self.experts: Tensor | None = None  # int16 [B, L, M, k], of the tokens of the last call, if they are recorded
        self._more = {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in parameters else {})

    def __call__(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """ids, positions [B, L], mask [B, W] or None where all columns are real → logits [B, V], cache."""
        more = self._more | ({"position_ids": positions} if self._positions else {})
        if mask is not None and ids.shape[1] == 1 and self._takes_full_mask:
            mask = mask.bool()[:, None, None]
        out = self._causal(input_ids=ids, attention_mask=mask, past_key_values=cache, **more)
        self.experts = recorded_experts(self._causal, ids)
        return out.logits[:, -1], out.past_key_values

    def rotary_shift(self, prompt: PromptIds) -> int:
        """What is added to the index of a token after this prompt to get its position; not 0 after images."""
        return self._media.rotary_shift(prompt) if self._media else 0

    def prefill(self, prompts: Sequence[PromptIds], cache: Any) -> tuple[Tensor, Any, Tensor]:
        """Whole prompts, padded on the left → logits [B, V], cache, mask [B, L]."""
        width = max(map(len, prompts))
        ids = torch.tensor([(0,) * (width - len(p)) + p for p in prompts], device=self.device)
        starts = torch.tensor([width - len(p) for p in prompts], device=self.device)
        positions = torch.arange(width, device=self.device) - starts[:, None]
        mask = (positions >= 0).long()
        logits, cache = self(ids, mask if bool(starts.any()) else None, positions.clamp(min=0), cache)
        return logits, cache, mask


@dataclass(slots=True)
class CacheWindow:
    """The part of the cache in use: rows 0 … rows-1, columns begin … end-1."""

    rows: int = 0
    begin: int = 0
    end: int = 0


class PreallocatedLayer(CacheLayerMixin):
    """One layer's keys and values [rows, heads, columns, d], of which `span` is in use."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, span: CacheWindow, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.span, self.keys, self.values, self.is_initialized = span, keys, values, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the memory exists from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the next column of every live row, [B, heads, 1, d]; returns all columns in use."""
        rows, begin, end = self.span.rows, self.span.begin, self.span.end
        self.keys[:rows, :, end : end + 1] = key_states
        self.values[:rows, :, end : end + 1] = value_states
        return self.keys[:rows, :, begin : end + 1], self.values[:rows, :, begin : end + 1]

    def shift(self, by: int, rows: int, columns: int | None) -> None:
        """Shift used columns by `by`, into memory for so many rows and columns unless that is None."""
        self.keys = self._shift_tensor(self.keys, by, rows, columns)
        self.values = self._shift_tensor(self.values, by, rows, columns)

    def _shift_tensor(self, old: Tensor, by: int, rows: int, columns: int | None) -> Tensor:
        span = self.span
        used = old[: span.rows, :, span.begin : span.end]
        # unused memory is 0 at first, because a hidden NaN would still spread through the attention
        new = old if columns is None else old.new_zeros(rows, old.shape[1], columns, old.shape[3])
        new[: span.rows, :, span.begin + by : span.end + by] = used.clone() if new is old else used
        return new

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that a query sees, and the number of the first."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Columns in use."""
        return self.span.end - self.span.begin

    def get_max_length(self) -> int:
        """-1, no limit: it is moved to larger memory when it is full."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older transformers


class PreallocatedCache(Cache):
    """What the model is given as its cache: right-aligned rows in memory that is moved when it is full."""

    def __init__(self, like: KeyValueLayers, rows: int) -> None:
        """like: any prompt's keys and values, for their sizes and types; rows: most at once."""
        self.span, self._max_rows = CacheWindow(), rows
        empty = [[t.new_zeros(0, t.shape[0], 0, t.shape[2]) for t in pair] for pair in like]
        self._columns = [PreallocatedLayer(self.span, keys, values) for keys, values in empty]
        super().__init__(layers=[*self._columns])

    def ensure_room(self, longest: int, rows: int) -> int:
        """Make room for `rows` rows of `longest` tokens and one more; returns how far columns moved."""
        span, columns, has_rows = self.span, self._columns[0].keys.shape[2], rows <= self._columns[0].keys.shape[0]
        if longest <= span.end < columns and has_rows:
            return 0
        end = max(span.end - span.begin, longest)
        by = end - span.end
        grow = end + MIN_GROWTH > columns or not has_rows
        room = self._columns[0].keys.shape[0] if has_rows else min(self._max_rows, 2 * rows)
        for layer in self._columns:
            layer.shift(by, room, end + max(MIN_GROWTH, end // 2) if grow else None)
        span.begin, span.end = span.begin + by, end
        return by

    def write_row(self, row: int, layers: KeyValueLayers) -> None:
        """Write a prompt's keys and values into a row, up to the last column in use."""
        end = self.span.end
        for layer, (keys, values) in zip(self._columns, layers, strict=True):
            layer.keys[row, :, end - keys.shape[1] : end] = keys
            layer.values[row, :, end - values.shape[1] : end] = values

    def copy_row(self, target: int, source: int) -> None:
        """Overwrite a row by another, in the columns in use."""
        begin, end = self.span.begin, self.span.end
        for layer in self._columns:
            for tensor in (layer.keys, layer.values):
                tensor[target, :, begin:end] = tensor[source, :, begin:end]


class ContinuousBatchDecoder:
    """Rows that join and leave at any time, in a preallocated cache."""

    admits_any_time: ClassVar[bool] = True

    def __init__(self, causal: Any, rows: int) -> None:
        self._forward, self._max_rows = CachedForward(causal), rows
        self._queue = deque[PromptIds]()
        self._uses = Counter[PromptIds]()
        # of each prompt its keys and values, the logits [V] after it, and its experts if they are recorded
        self._computed: dict[PromptIds, tuple[KeyValueLayers, Tensor, Tensor | None]] = {}
        self.experts: list[Tensor] = []
        self._cache: PreallocatedCache | None = None
        self._starts: list[int] = []  # the first column of each live row
        self._shifts: list[int] = []  # see `CachedForward.rotary_shift`

    def expect(self, prompts: Sequence[PromptIds]) -> None:
        """Equal ones are computed once, as long as one of them has not joined."""
        self._queue.extend(prompt for prompt in dict.fromkeys(prompts) if not self._uses[prompt])
        self._uses.update(prompts)

    def admit(self, prompts: Sequence[PromptIds], slots: Sequence[int]) -> Tensor:
        """New rows, each with its prompt in the cache."""
        self.expect([*(Counter(prompts) - self._uses).elements()])
        while any(prompt not in self._computed for prompt in prompts):
            self._prefill()
        logits = torch.stack([self._computed[prompt][1] for prompt in prompts])
        self.experts = [found for prompt in prompts if (found := self._computed[prompt][2]) is not None]
        cache = self._ensure_room(prompts, max(slots) + 1)
        for prompt, place in zip(prompts, slots, strict=True):
            cache.write_row(place, self._computed[prompt][0])
            self._starts[place : place + 1] = [cache.span.end - len(prompt)]
            self._shifts[place : place + 1] = [self._forward.rotary_shift(prompt)]
            self._release_prompt(prompt)
        self._update_window(cache.span)
        return logits

    def step(self, tokens: Sequence[int]) -> Tensor:
        """The next column of all live rows."""
        cache = self._ensure_room()
        span, device = cache.span, self._forward.device
        ids, starts, shifts = torch.tensor([tokens, self._starts, self._shifts], device=device).unsqueeze(-1)
        mask = None
        if max(self._starts) > span.begin:
            mask = (torch.arange(span.begin, span.end + 1, device=device) >= starts).long()
        logits, _ = self._forward(ids, mask, span.end - starts + shifts, cache)
        self.experts = [] if self._forward.experts is None else [*self._forward.experts]
        span.end += 1
        return logits

    def evict(self, gone: Sequence[int]) -> list[int]:
        """Fill the places of rows that leave with the last rows; no other row is touched."""
        assert self._cache is not None
        before, left = len(self._starts), len(self._starts) - len(gone)
        holes = [row for row in gone if row < left]
        fillers = sorted(set(range(left, before)) - set(gone))
        order = list(range(left))
        for hole, filler in zip(holes, fillers, strict=True):
            self._cache.copy_row(hole, filler)
            order[hole] = filler
        self._starts, self._shifts = ([values[row] for row in order] for values in (self._starts, self._shifts))
        self._update_window(self._cache.span)
        return order

    def recompute_prompts(self) -> None:
        """Those computed ahead; rows that have joined keep their keys and values."""
        self._queue.extendleft(reversed(self._computed))
        self._computed.clear()

    def _prefill(self) -> None:
        """Compute the next prompts of the queue, as many as the budget allows and at least one."""
        chunk = [self._queue.popleft()]
        longest = len(chunk[0])
        while self._queue and (len(chunk) + 1) * max(longest, len(self._queue[0])) <= PREFILL_TOKENS:
            chunk.append(self._queue.popleft())
            longest = max(longest, len(chunk[-1]))
        logits, cache, _ = self._forward.prefill(chunk, DynamicCache())
        for row, prompt in enumerate(chunk):
            layers = tuple((x.keys[row, :, -len(prompt) :], x.values[row, :, -len(prompt) :]) for x in cache.layers)
            experts = None if self._forward.experts is None else self._forward.experts[row, -len(prompt) :]
            self._computed[prompt] = (layers, logits[row], experts)

    def _release_prompt(self, prompt: PromptIds) -> None:
        self._uses[prompt] -= 1
        if not self._uses[prompt]:
            del self._computed[prompt]

    def _ensure_room(self, prompts: Sequence[PromptIds] = (), rows: int = 0) -> PreallocatedCache:
        if self._cache is None:
            self._cache = PreallocatedCache(self._computed[prompts[0]][0], self._max_rows)
        by = self._cache.ensure_room(max(map(len, prompts), default=0), rows)
        if by:
            self._starts = [start + by for start in self._starts]
        return self._cache

    def _update_window(self, span: CacheWindow) -> None:
        span.rows = len(self._starts)
        span.begin = min(self._starts, default=span.end)


class WaveBatchDecoder:
    """Rows that start together, in the cache that the model makes for itself."""

    admits_any_time: ClassVar[bool] = False

    def __init__(self, causal: Any, rows: int) -> None:
        self._forward = CachedForward(causal)
        self._cache: Any = None
        self._mask = self._shifts = torch.zeros(0)
        self.experts: list[Tensor] = []

    def expect(self, prompts: Sequence[PromptIds]) -> None:
        """Nothing is computed ahead of a wave."""

    def admit(self, prompts: Sequence[PromptIds], slots: Sequence[int]) -> Tensor:
        """A new wave; each distinct prompt is computed once."""
        distinct = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
        logits, self._cache, self._mask = self._forward.prefill(list(distinct), None)
        rows = torch.tensor([distinct[prompt] for prompt in prompts], device=self._forward.device)
        experts = self._forward.experts
        self.experts = [] if experts is None else [experts[distinct[p], -len(p) :] for p in prompts]
        self._shifts = torch.tensor([[self._forward.rotary_shift(prompt)] for prompt in distinct], device=rows.device)
        self._select(rows)
        return logits[rows]

    def step(self, tokens: Sequence[int]) -> Tensor:
        """One more column."""
        ids = torch.tensor(tokens, device=self._forward.device)[:, None]
        self._mask = torch.cat([self._mask, torch.ones_like(ids)], 1)
        positions = self._mask.sum(1, keepdim=True) - 1 + self._shifts
        logits, self._cache = self._forward(ids, self._mask, positions, self._cache)
        self.experts = [] if self._forward.experts is None else [*self._forward.experts]
        return logits

    def evict(self, gone: Sequence[int]) -> list[int]:
        """Leave rows out, in the same order."""
        order = sorted(set(range(len(self._mask))) - set(gone))
        self._select(torch.tensor(order, dtype=torch.int64, device=self._forward.device))
        return order

    def recompute_prompts(self) -> None:
        """Nothing is computed ahead of a wave."""

    def _select(self, rows: Tensor) -> None:
        self._cache.reorder_cache(rows)
        self._mask, self._shifts = self._mask[rows], self._shifts[rows]


class RecomputeBatchDecoder:
    """Continuous batching without a cache: every step computes whole rows, grouped by length, unpadded."""

    admits_any_time: ClassVar[bool] = True

    def __init__(self, causal: Any, rows: int) -> None:
        self._causal, self._rows = causal, list[PromptIds]()
        self.experts: list[Tensor] = []

    def expect(self, prompts: Sequence[PromptIds]) -> None:
        """Nothing is computed ahead."""

    def admit(self, prompts: Sequence[PromptIds], slots: Sequence[int]) -> Tensor:
        """New rows."""
        for prompt, slot in zip(prompts, slots, strict=True):
            self._rows[slot : slot + 1] = [prompt]
        return self._logits(prompts)

    def step(self, tokens: Sequence[int]) -> Tensor:
        """One more token of each row."""
        self._rows = [(*row, token) for row, token in zip(self._rows, tokens, strict=True)]
        logits = self._logits(self._rows)
        self.experts = [experts[-1:] for experts in self.experts]
        return logits

    def evict(self, gone: Sequence[int]) -> list[int]:
        """Leave rows out, in the same order."""
        order = sorted(set(range(len(self._rows))) - set(gone))
        self._rows = [self._rows[row] for row in order]
        return order

    def recompute_prompts(self) -> None:
        """Nothing is computed ahead."""

    def _logits(self, rows: Sequence[PromptIds]) -> Tensor:
        found: dict[PromptIds, Tensor] = {}
        used: dict[PromptIds, Tensor] = {}
        for length in {len(row) for row in rows}:
            alike = [row for row in dict.fromkeys(rows) if len(row) == length]
            ids = torch.tensor(alike, device=self._causal.device)
            found |= zip(alike, self._causal(input_ids=ids, use_cache=False).logits[:, -1], strict=True)
            if (experts := recorded_experts(self._causal, ids)) is not None:
                used |= zip(alike, experts, strict=True)
        self.experts = [used[row] for row in rows] if used else []
        return torch.stack([found[row] for row in rows])
