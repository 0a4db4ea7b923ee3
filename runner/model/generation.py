"""Generate completions of many prompts at once.

    waiting ──admit──▶ rows ◀──decode── logits ──choose──▶ one id for each; a finished row makes room for the next

Functions here expect a transformers causal LM in evaluation mode with its own attention (see `CausalLM`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from typing import Any, Generic

import torch
from torch import Tensor, nn

from runner.interfaces.model import (
    Arrivals,
    CachedDecoder,
    ChooseTokens,
    NewerWeights,
    RecordExperts,
    Row,
    no_arrivals,
    no_newer_weights,
)
from runner.interfaces.routing import ExpertRouting
from runner.model.batch_layout import max_row_length
from runner.model.capability_probe import head_objection
from runner.model.kv_cache import MakeDecoder


class DecodingBatch(Generic[Row]):
    """Rows over one cache: waiting ones join where there is room, finished ones make room.

    `admit` and `decode` return logits [n, V] and the n rows after which they come. The caller then appends an id to
    each of these rows, or marks it as finished.
    """

    def __init__(self, decoder: CachedDecoder, max_rows: int) -> None:
        self.waiting, self.rows = deque[Row](), list[Row]()
        self.decoder, self._max_rows = decoder, max_rows

    @property
    def is_idle(self) -> bool:
        """Whether no row waits, and all are finished."""
        return not self.waiting and all(row.is_finished for row in self.rows)

    def extend(self, rows: Sequence[Row]) -> None:
        """Let rows wait. Raises ValueError for an empty prompt."""
        if any(len(row.prompt_ids) == 0 for row in rows):
            raise ValueError("a prompt needs at least one token")
        # longest first: little padding, and equal prompts follow one another
        order = sorted(rows, key=lambda row: (-len(row.prompt_ids), row.prompt_ids))
        self.decoder.expect([row.prompt_ids for row in order])
        self.waiting.extend(order)

    def admit(self) -> tuple[Tensor, Sequence[Row]] | None:
        """Let waiting rows join, in their order; None where none waits, or there is no room."""
        slots = self._free_slots()[: len(self.waiting)]
        if not slots:
            return None
        new = [self.waiting.popleft() for _ in slots]
        if not self.decoder.admits_any_time:  # all rows are finished, and a new wave replaces them
            self.rows.clear()
        logits = self.decoder.admit([row.prompt_ids for row in new], slots)
        for slot, row in zip(slots, new, strict=True):
            self.rows[slot : slot + 1] = [row]
        return logits, new

    def decode(self) -> tuple[Tensor, Sequence[Row]] | None:
        """Continue every row by its newest id; None where all are finished."""
        if finished := self._finished_rows():
            self.rows = [self.rows[at] for at in self.decoder.evict(finished)]
        return (self.decoder.step([row.ids[-1] for row in self.rows]), self.rows) if self.rows else None

    def _finished_rows(self) -> list[int]:
        return [at for at, row in enumerate(self.rows) if row.is_finished]

    def _free_slots(self) -> list[int]:
        """The places that new rows may take now: first those of finished rows."""
        finished = self._finished_rows()
        if not self.decoder.admits_any_time and len(finished) < len(self.rows):
            return []
        return [*finished, *range(len(self.rows), self._max_rows)]


class CompletionGenerator:
    """Writes many answers at once: a row that ends leaves its place to the next prompt.

    stop_token_ids: every id that ends an answer; length_limit: most tokens of prompt and answer together, and why;
    None = no limit
    """

    def __init__(
        self,
        causal: Any,
        ends: frozenset[int],
        make_decoder: MakeDecoder,
        generation_mode: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """generation_mode: the context in which the model generates, under `no_grad`; see `CausalLM`."""
        self.stop_token_ids = ends
        self.vocab_size: int = causal.config.get_text_config().vocab_size
        self.length_limit = max_row_length(causal.config)
        self._causal, self._make_decoder, self.generation_mode = causal, make_decoder, generation_mode

    @torch.no_grad()
    def decode(
        self,
        rows: Sequence[Row],
        choose: ChooseTokens[Row],
        max_rows: int,
        newer: NewerWeights = no_newer_weights,
        record: RecordExperts[Row] | None = None,
        arrivals: Arrivals[Row] = no_arrivals,
    ) -> None:
        """Call `choose` for ids until every row is finished, with at most `max_rows` at a time.

        Equal prompts are computed once. The order in which rows come to `choose` is not theirs. Newer weights continue
        rows with the keys and values of earlier ones. `record` gets the experts of each row's tokens.
        Raises ValueError for an empty prompt.
        """
        with ExitStack() as mode, self._recording(record is not None):
            mode.enter_context(self.generation_mode())
            batch = DecodingBatch[Row](self.make_decoder(min(max_rows, len(rows)) or max_rows), max_rows)
            batch.extend(rows)
            while True:
                batch.extend(arrivals(batch.is_idle))
                if (found := batch.admit() or batch.decode()) is None:
                    return
                if record is not None:
                    for row, experts in zip(found[1], batch.decoder.experts, strict=True):
                        record(row, experts)
                choose(*found)
                if load := newer():
                    mode.close()
                    load()
                    mode.enter_context(self.generation_mode())
                    batch.decoder.recompute_prompts()

    @contextmanager
    def _recording(self, on: bool) -> Iterator[None]:
        """Let routers record their experts for a while."""
        if not on:
            yield
            return
        routing: ExpertRouting = self._causal.expert_routing
        routing.records = True
        try:
            yield
        finally:
            routing.records = False

    @torch.no_grad()
    def prompt_logits(self, ids: Sequence[int], chunk: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (index, logits [n, V]) after each id of one row, `chunk` ids at a time; index: of the first.

        The row is computed in one pass: not every model can continue its cache by several ids. Logits are made of the
        hidden states chunk by chunk, or all at once where the model changes them.
        """
        if not ids:
            return
        row = {"input_ids": torch.tensor([ids], device=self._causal.device), "use_cache": False}
        if self._has_plain_head:
            head, states = self._causal.get_output_embeddings(), self._causal.base_model(**row).last_hidden_state[0]
        else:
            head, states = nn.Identity(), self._causal(**row).logits[0]
        for first in range(0, len(ids), chunk):
            yield first, head(states[first : first + chunk])

    @cached_property
    def _has_plain_head(self) -> bool:
        """Whether logits are the LM head of hidden states; in `generation_mode`."""
        return head_objection(self._causal, self._causal.device) is None

    def make_decoder(self, rows: int) -> CachedDecoder:
        """An empty cache for at most so many rows, to be used in `generation_mode`."""
        return self._make_decoder(self._causal, rows)


def eos_token_ids(causal: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer, from the generation config and the tokenizer."""
    declared = causal.generation_config.eos_token_id if causal.generation_config is not None else None
    several = declared if isinstance(declared, list) else [declared]
    return frozenset(int(i) for i in [*several, tokenizer.eos_token_id] if i is not None)
