"""Writing text: answers to many prompts at once, greedy ones, and a stream of text for one.

    prompts ──join──▶ live rows ◀──step── logits ──choose──▶ ids; a row that ends makes room for the next prompt
    prompts ──left-pad──▶ generate ──cut at end of sequence──▶ ids                     (where no cache of ours fits)
    prompt  ──token by token with a cache──▶ ids ──whole characters only──▶ text

Functions here expect a transformers causal LM in evaluation mode with its own attention (see `causal`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from runner.interfaces import GreedyOutput, StopCriterion
from runner.model.batch_layout import max_row_length, new_tokens_that_fit
from runner.model.kv_cache import CachedDecoder, MakeDecoder, PromptIds

REPLACEMENT = "\ufffd"  # what a decoder shows for the bytes of an unfinished character


# Logits [n, V] after the rows of the prompts with these indices → the next id of each, None where the answer has ended.
ChooseTokens = Callable[[Tensor, Sequence[int]], Sequence[int | None]]


class CompletionGenerator:
    """Writes many answers at once: a row that ends leaves its place to the next prompt.

    ends: every id that ends an answer; longest: most tokens of prompt and answer together, and why; None = no limit
    """

    def __init__(
        self, causal: Any, ends: frozenset[int], way: MakeDecoder, writing: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """writing: the context in which the model writes, see `CausalLM`."""
        self.stop_token_ids = ends
        self.vocab_size: int = causal.config.get_text_config().vocab_size
        self.length_limit = max_row_length(causal.config)
        self._causal, self._way, self._writing = causal, way, writing

    def decode(self, prompts: Sequence[Sequence[int]], choose: ChooseTokens, rows: int) -> None:
        """Ask `choose` for ids until it has ended every answer, with at most `rows` answers in work.

        Equal prompts are computed once. The order in which prompts come to `choose` is not theirs. Raises ValueError
        for an empty prompt.
        """
        if any(len(prompt) == 0 for prompt in prompts):
            raise ValueError("a prompt needs at least one token")
        asked = [tuple(prompt) for prompt in prompts]
        # longest first: little padding, and equal prompts follow one another
        order = sorted(range(len(asked)), key=lambda i: (-len(asked[i]), asked[i]))
        with self._writing():
            decoder = self._way(self._causal, [asked[i] for i in order], min(rows, len(order)))
            _run_decoder(decoder, asked, deque(order), choose, rows)


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


def finish_at_limit(ids: Sequence[int], limit: int) -> str | None:
    """The `StopCriterion` of a model that ends its answers itself."""
    return "length" if len(ids) >= limit else None


@dataclass(slots=True)
class GreedyDraft:
    """A greedy answer in the making; with room for no token it has ended before it begins."""

    limit: int
    ids: list[int] = field(default_factory=list)
    finish: str | None = None

    def __post_init__(self) -> None:
        if self.limit == 0:
            self.finish = "length"

    def extend(self, token: int, ends: frozenset[int], finish: StopCriterion) -> int | None:
        """Take the likeliest id; returns it while the answer continues."""
        if token in ends:
            self.finish = "stop"
            return None
        self.ids.append(token)
        self.finish = finish(self.ids, self.limit)
        return token if self.finish is None else None

    def to_completion(self) -> GreedyOutput:
        """The finished answer."""
        assert self.finish is not None
        return GreedyOutput(tuple(self.ids), self.finish)


def greedy_decode(
    writer: CompletionGenerator,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    rows: int,
    finish: StopCriterion = finish_at_limit,
) -> list[GreedyOutput]:
    """The likeliest next id of each prompt, again and again, with at most `rows` answers in work.

    An answer ends where `finish` says so, and before its row is longer than `writer.longest`. Raises ValueError for an
    empty prompt.
    """
    drafts = [GreedyDraft(new_tokens_that_fit(len(prompt), max_new_tokens, writer.length_limit)) for prompt in prompts]
    asked = [at for at, draft in enumerate(drafts) if draft.finish is None]

    def choose(logits: Tensor, which: Sequence[int]) -> list[int | None]:
        tokens = logits.argmax(-1).tolist()
        return [drafts[asked[n]].extend(t, writer.stop_token_ids, finish) for n, t in zip(which, tokens, strict=True)]

    if asked:
        writer.decode([prompts[at] for at in asked], choose, rows)
    return [draft.to_completion() for draft in drafts]


def greedy_hf_generate(
    causal: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    rows: int,
    finish: StopCriterion = finish_at_limit,
) -> list[GreedyOutput]:
    """Greedy answers with the model's own `generate`, for a model that no `CompletionGenerator` fits.

    `rows` answers at a time; all continue until the last one has ended, and are cut then. Raises ValueError as well.
    """
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a prompt needs at least one token")
    ends, longest = eos_token_ids(causal, tokenizer), max_row_length(causal.config)
    drafts = [GreedyDraft(new_tokens_that_fit(len(prompt), max_new_tokens, longest)) for prompt in prompts]
    alike = defaultdict[int, list[int]](list)  # prompts with room for as many tokens
    for at, draft in enumerate(drafts):
        if draft.finish is None:
            alike[draft.limit].append(at)
    batches = [some[first : first + rows] for some in alike.values() for first in range(0, len(some), rows)]
    for batch in batches:
        limit = drafts[batch[0]].limit
        made = _hf_generate(causal, tokenizer, [prompts[at] for at in batch], limit, ends)
        for at, ids in zip(batch, made, strict=True):
            for token in ids:
                if drafts[at].extend(token, ends, finish) is None:
                    break
    return [draft.to_completion() for draft in drafts]


def _hf_generate(
    causal: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], limit: int, ends: frozenset[int]
) -> list[list[int]]:
    """`limit` ids of each prompt, or fewer where all have ended; what follows an end means nothing."""
    width = max(map(len, prompts))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0  # hidden by the mask
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=causal.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=causal.device)
    config = GenerationConfig(
        max_new_tokens=limit, do_sample=False, eos_token_id=sorted(ends) or None, pad_token_id=pad
    )
    own, causal.generation_config = causal.generation_config, config  # or its sampling options would be mixed in
    try:
        out = causal.generate(input_ids=ids, attention_mask=mask)
    finally:
        causal.generation_config = own
    found: list[list[int]] = out[:, width:].tolist()
    return found


def sample_token(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One id from logits [V]: the likeliest at temperature 0, else from the nucleus of mass `top_p`."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities, order = torch.softmax(logits.float() / temperature, -1).cpu().sort(descending=True)
    probabilities[probabilities.cumsum(0) - probabilities >= top_p] = 0  # the first one always stays
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


def stream_ids(
    step: Callable[[Tensor, Any], Any],
    prompt: Sequence[int],
    ends: frozenset[int],
    max_new_tokens: int,
    pick: Callable[[Tensor], int],
    device: torch.device,
) -> Iterator[int]:
    """Ids before the end token. `step(ids [1, L], cache)` runs the model on the ids that the cache lacks."""
    ids, cache = list(prompt), None
    for _ in range(max_new_tokens):
        out = step(torch.tensor([ids], device=device), cache)
        token = pick(out.logits[0, -1])
        if token in ends:
            return
        yield token
        ids, cache = [token], out.past_key_values


def stream_text(ids: Iterable[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """Pieces of text that end at character ends; together they are the text of all ids.

    Decodes from the start of the last piece, so that spaces and multi-byte characters join as in the whole.
    """
    kept: list[int] = []  # ids of the piece before, for context, and those not shown yet
    shown, context = "", 0
    for token in ids:
        kept.append(token)
        text = decode(kept)
        if len(text) > len(shown) and not text.endswith(REPLACEMENT):
            yield text[len(shown) :]
            kept = kept[context:]
            shown, context = decode(kept), len(kept)
    rest = decode(kept)[len(shown) :]
    if rest:
        yield rest
