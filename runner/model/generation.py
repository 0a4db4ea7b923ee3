"""Generate completions of many prompts at once.

    prompts ──admit──▶ live rows ◀──step── logits ──choose──▶ ids; a row that ends makes room for the next prompt

Functions here expect a transformers causal LM in evaluation mode with its own attention (see `causal`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from runner.interfaces.model import CachedDecoder
from runner.model.batch_layout import max_row_length
from runner.model.kv_cache import MakeDecoder, PromptIds

# Logits [n, V] after the rows of the prompts with these indices → the next id of each, None where the answer has ended.
ChooseTokens = Callable[[Tensor, Sequence[int]], Sequence[int | None]]


class CompletionGenerator:
    """Writes many answers at once: a row that ends leaves its place to the next prompt.

    ends: every id that ends an answer; longest: most tokens of prompt and answer together, and why; None = no limit
    """

    def __init__(
        self,
        causal: Any,
        ends: frozenset[int],
        make_decoder: MakeDecoder,
        generation_mode: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """generation_mode: the context in which the model generates, see `CausalLM`."""
        self.stop_token_ids = ends
        self.vocab_size: int = causal.config.get_text_config().vocab_size
        self.length_limit = max_row_length(causal.config)
        self._causal, self._make_decoder, self.generation_mode = causal, make_decoder, generation_mode

    def decode(self, prompts: Sequence[Sequence[int]], choose: ChooseTokens, rows: int) -> None:
        """Call `choose` for ids until every completion has ended, with at most `rows` at a time.

        Equal prompts are computed once. The order in which prompts come to `choose` is not theirs. Raises ValueError
        for an empty prompt.
        """
        if any(len(prompt) == 0 for prompt in prompts):
            raise ValueError("a prompt needs at least one token")
        asked = [tuple(prompt) for prompt in prompts]
        # longest first: little padding, and equal prompts follow one another
        order = sorted(range(len(asked)), key=lambda i: (-len(asked[i]), asked[i]))
        with self.generation_mode():
            decoder = self.make_decoder(min(rows, len(order)))
            decoder.expect([asked[i] for i in order])
            _run_decoder(decoder, asked, deque(order), choose, rows)

    def prompt_logits(self, ids: Sequence[int], chunk: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (index, logits [n, V]) after each id of one row, `chunk` ids at a time; index: of the first."""
        cache: Any = None
        for first in range(0, len(ids), chunk):
            part = torch.tensor([ids[first : first + chunk]], device=self._causal.device)
            out = self._causal(input_ids=part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            yield first, out.logits[0]

    def make_decoder(self, rows: int) -> CachedDecoder:
        """An empty cache for at most so many rows, to be used in `generation_mode`."""
        return self._make_decoder(self._causal, rows)


def _run_decoder(
    decoder: CachedDecoder, prompts: Sequence[PromptIds], waiting: deque[int], choose: ChooseTokens, rows: int
) -> None:
    live: list[int] = []  # whose row it is
    tokens: list[int | None] = []  # what it continues; None = it is over
    while waiting or live:
        over = [row for row, token in enumerate(tokens) if token is None]
        room = rows - len(live) + len(over)
        if waiting and room and (decoder.admits_any_time or not live):
            new = [waiting.popleft() for _ in range(min(room, len(waiting)))]
            places = [*over, *range(len(live), rows)][: len(new)]
            chosen = choose(decoder.admit([prompts[i] for i in new], places), new)
            for place, index, token in zip(places, new, chosen, strict=True):
                live[place : place + 1], tokens[place : place + 1] = [index], [token]
        elif over:
            left = decoder.evict(over)
            live, tokens = [live[row] for row in left], [tokens[row] for row in left]
        else:
            tokens = [*choose(decoder.step([token for token in tokens if token is not None]), live)]


def eos_token_ids(causal: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer, from the generation config and the tokenizer."""
    declared = causal.generation_config.eos_token_id if causal.generation_config is not None else None
    several = declared if isinstance(declared, list) else [declared]
    return frozenset(int(i) for i in [*several, tokenizer.eos_token_id] if i is not None)
