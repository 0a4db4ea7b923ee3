"""Writing text: answers to many prompts at once, greedy ones, and a stream of text for one.

    prompts ──join──▶ live rows ◀──step── logits ──choose──▶ ids; a row that ends makes room for the next prompt
    prompts ──left-pad──▶ generate ──cut at end of sequence──▶ ids                     (where no cache of ours fits)
    prompt  ──token by token with a cache──▶ ids ──whole characters only──▶ text

Functions here expect a transformers causal LM in evaluation mode with its own attention (see `causal`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from runner.model.decoding import Decoder, Prompt, Way
from runner.model.positions import longest_row

REPLACEMENT = "\ufffd"  # what a decoder shows for the bytes of an unfinished character


# Logits [n, V] after the rows of the prompts with these indices → the next id of each, None where the answer has ended.
Choose = Callable[[Tensor, Sequence[int]], Sequence[int | None]]


class Writer:
    """Writes many answers at once: a row that ends leaves its place to the next prompt.

    ends: every id that ends an answer; longest: most tokens of prompt and answer together, and why; None = no limit
    """

    def __init__(
        self, causal: Any, ends: frozenset[int], way: Way, writing: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """writing: the context in which the model writes, see `CausalLM`."""
        self.ends = ends
        self.vocabulary: int = causal.config.get_text_config().vocab_size
        self.longest = longest_row(causal.config)
        self._causal, self._way, self._writing = causal, way, writing

    def write(self, prompts: Sequence[Sequence[int]], choose: Choose, rows: int) -> None:
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
            _write(decoder, asked, deque(order), choose, rows)


def _write(decoder: Decoder, prompts: Sequence[Prompt], waiting: deque[int], choose: Choose, rows: int) -> None:
    live: list[int] = []  # whose row it is
    tokens: list[int | None] = []  # what it goes on with; None = it is over
    while waiting or live:
        over = [row for row, token in enumerate(tokens) if token is None]
        room = rows - len(live) + len(over)
        if waiting and room and (decoder.open or not live):
            new = [waiting.popleft() for _ in range(min(room, len(waiting)))]
            places = [*over, *range(len(live), rows)][: len(new)]
            chosen = choose(decoder.join([prompts[i] for i in new], places), new)
            for place, index, token in zip(places, new, chosen, strict=True):
                live[place : place + 1], tokens[place : place + 1] = [index], [token]
        elif over:
            left = decoder.drop(over)
            live, tokens = [live[row] for row in left], [tokens[row] for row in left]
        else:
            tokens = [*choose(decoder.step([token for token in tokens if token is not None]), live)]


def end_ids(causal: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer, from the generation config and the tokenizer."""
    declared = causal.generation_config.eos_token_id if causal.generation_config is not None else None
    several = declared if isinstance(declared, list) else [declared]
    return frozenset(int(i) for i in [*several, tokenizer.eos_token_id] if i is not None)


def likeliest(writer: Writer, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """The likeliest next id, again and again; the new ids of each prompt up to but excluding the end.

    Raises ValueError for an empty prompt.
    """
    answers: list[list[int]] = [[] for _ in prompts]

    def choose(logits: Tensor, asked: Sequence[int]) -> list[int | None]:
        return [extended(answers[row], token) for row, token in zip(asked, logits.argmax(-1).tolist(), strict=True)]

    def extended(answer: list[int], token: int) -> int | None:
        if token in writer.ends:
            return None
        answer.append(token)
        return token if len(answer) < max_new_tokens else None

    if prompts:
        writer.write(prompts, choose, len(prompts))
    return answers


def greedy(causal: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """The same with the model's own `generate`, for a model that no `Writer` fits. Raises ValueError as well."""
    if not prompts:
        return []
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a prompt needs at least one token")
    ends = end_ids(causal, tokenizer)
    width = max(map(len, prompts))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0  # hidden by the mask
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=causal.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=causal.device)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=sorted(ends) or None, pad_token_id=pad
    )
    own, causal.generation_config = causal.generation_config, config  # or its sampling options would be mixed in
    try:
        out = causal.generate(input_ids=ids, attention_mask=mask)
    finally:
        causal.generation_config = own
    return [_before_end(row, ends) for row in out[:, width:].tolist()]


def _before_end(ids: Sequence[int], ends: frozenset[int]) -> list[int]:
    for place, token in enumerate(ids):
        if token in ends:
            return list(ids[:place])
    return list(ids)


def draw(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One id from logits [V]: the likeliest at temperature 0, else from the nucleus of mass `top_p`."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities, order = torch.softmax(logits.float() / temperature, -1).cpu().sort(descending=True)
    probabilities[probabilities.cumsum(0) - probabilities >= top_p] = 0  # the first one always stays
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


def sampled_ids(
    step: Callable[[Tensor, Any], Any],
    prompt: Sequence[int],
    ends: frozenset[int],
    max_new_tokens: int,
    pick: Callable[[Tensor], int],
    device: torch.device,
) -> Iterator[int]:
    """Ids up to but excluding the end. `step(ids [1, L], cache)` runs the model on the ids that the cache lacks."""
    ids, cache = list(prompt), None
    for _ in range(max_new_tokens):
        out = step(torch.tensor([ids], device=device), cache)
        token = pick(out.logits[0, -1])
        if token in ends:
            return
        yield token
        ids, cache = [token], out.past_key_values


def whole_characters(ids: Iterable[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
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
