"""What may be asked for: ids that the model has, and answers that it has room for."""

from __future__ import annotations

from runner.core.errors import DataError, Problem, SpecError
from runner.interfaces import Request
from runner.sampler.base import DrawingConfig


def check_ids(config: DrawingConfig, vocabulary: int) -> None:
    """Raise SpecError for ids and counts of ids outside the vocabulary."""
    found = [
        Problem("sampler.stop_tokens", f"the model has the ids 0 to {vocabulary - 1}, and no {token}")
        for token in config.stop_tokens
        if token >= vocabulary
    ]
    if config.top_k is not None and config.top_k > vocabulary:
        found.append(Problem("sampler.top_k", f"the model has {vocabulary} ids, not {config.top_k}; leave it out"))
    if found:
        raise SpecError(found)


def room(request: Request, most: int, longest: tuple[int, str] | None) -> int:
    """The most tokens of this answer, where one has at most `most` and both prompt and answer `longest` (and why).

    Raises ValueError where nothing is asked for, DataError where the prompt leaves no room.
    """
    limit, prompt = min(request.max_new_tokens, most), len(request.prompt)
    if limit < 1:
        raise ValueError(f"max_new_tokens={request.max_new_tokens}; an answer needs at least one token")
    if longest is not None and prompt + limit > longest[0]:
        raise DataError(
            f"a prompt of {prompt} tokens and {limit} new ones are more than {longest[0]}: {longest[1]}; "
            "lower sampler.max_new_tokens or data.max_length"
        )
    return limit
