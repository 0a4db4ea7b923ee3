"""The decoder of a model: the fastest one whose logits are those of whole rows, by trial."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from runner.core.errors import Problem, SpecError
from runner.interfaces import Decide
from runner.model.capability_probe import PROBE_ROWS, is_close
from runner.model.kv_cache import (
    ContinuousBatchDecoder,
    MakeDecoder,
    PromptIds,
    RecomputeBatchDecoder,
    WaveBatchDecoder,
)


def decoder_objection(causal: Any, make_decoder: MakeDecoder) -> str | None:
    """Why a decoder does not give the logits of whole rows, found out on a handful of tokens, or None."""
    try:
        return _trial_objection(causal, make_decoder)
    except Exception as error:  # a model's code may fail in any way on what it was not made for
        return f"it fails with {type(error).__name__}: {' '.join(str(error).split())[:160]}"


@torch.no_grad()
def _trial_objection(causal: Any, make_decoder: MakeDecoder) -> str | None:
    if (
        make_decoder is not RecomputeBatchDecoder
        and "past_key_values" not in inspect.signature(causal.forward).parameters
    ):
        return "its forward has no cache argument"
    if make_decoder is ContinuousBatchDecoder and (strange := _unsupported_layers(causal)):
        return f"its cache has layers of type {', '.join(strange)}"
    first, second = (tuple(row) for row in PROBE_ROWS)
    decoder = make_decoder(causal, 2)
    decoder.expect([first[:-1], second[:-1]])
    got = [*decoder.admit([first[:-1], second[:-1]], [0, 1]), *decoder.step([first[-1], second[-1]])]
    decoder.evict([0])
    got += decoder.step([first[0]])
    wanted = [_last_logits(causal, row) for row in (first[:-1], second[:-1], first, second, (*second, first[0]))]
    return None if all(map(is_close, got, wanted)) else "its logits differ from those of full sequences"


def _unsupported_layers(causal: Any) -> list[str]:
    made = DynamicCache(config=causal.config.get_text_config()).layers
    return sorted({type(x).__name__ for x in made if type(x) not in (DynamicLayer, DynamicSlidingWindowLayer)})


def _last_logits(causal: Any, row: PromptIds) -> Tensor:
    return causal(input_ids=torch.tensor([row], device=causal.device), use_cache=False).logits[0, -1]


def choose_decoder(causal: Any, decide: Decide) -> MakeDecoder:
    """The first of three decoders with the logits of whole rows; reports it where it is not the fastest.

    Raises SpecError if there is none.
    """
    against = decoder_objection(causal, ContinuousBatchDecoder)
    if against is None:
        return ContinuousBatchDecoder
    if (more := decoder_objection(causal, WaveBatchDecoder)) is None:
        decide("sampler", "continuous batching", "one batch at a time", against)
        return WaveBatchDecoder
    if (last := decoder_objection(causal, RecomputeBatchDecoder)) is None:
        reason = f"{against}; with its own cache: {more}"
        decide("sampler", "KV cache", "no KV cache: every token is recomputed, which is slow", reason)
        return RecomputeBatchDecoder
    name = type(causal).__name__
    raise SpecError([Problem("sampler", f"{name}: generation failed: {against}; without a cache: {last}")])
