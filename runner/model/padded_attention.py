"""Attention of padded rows by a device's kernel: for generation, scoring, and models without packing.

    q [B, heads, S, d], k, v [B, kv heads, L, d], mask of transformers ──kernel──▶ [B, S, heads, d]

Legend: B rows, S queries, L keys, d head size. Registered with transformers by the name `dense-DEVICE`, with the mask
that it makes for its own `sdpa`: True = seen, and none where causality says it all, or a single query sees every key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from runner.interfaces import Decide, DenseAttention
from runner.model.capability_probe import PROBE_ROWS, dense_objection, is_close
from runner.model.packed_attention import (
    UnsupportedAttention,
    promote_to_common_dtype,
    refuse_ignored_options,
    set_text_attention,
    text_attention,
)

FEATURE = "attention.padded"


def install_dense_attention(module: Any, kernel: DenseAttention, decide: Decide) -> None:
    """Let `module`, a transformers model, attend by `kernel`, unless it errs on a few tokens."""
    own, device = text_attention(module), module.device
    objection = dense_objection(kernel, module.config.get_text_config(), module.dtype, device)
    if objection is None:
        name = f"dense-{device.type}"
        ALL_ATTENTION_FUNCTIONS.register(name, _as_transformers_attention(kernel))
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)
        objection = _try_install(module, own, name)
    if objection is None:
        decide.record_fact(FEATURE, "fused", "the device's attention kernel for padded batches")
    else:
        decide(FEATURE, "fused", own, objection)


@torch.no_grad()
def _try_install(module: Any, own: str, name: str) -> str | None:
    """Replace the attention; returns why not, where the model needs more or its output changes."""
    wanted = _probe_outputs(module)
    try:
        set_text_attention(module, name)
        if text_attention(module) != name:
            return "its attention cannot be replaced"
        if all(is_close(g, w) for g, w in zip(_probe_outputs(module), wanted, strict=True)):
            return None
        reason = "its output for padded batches differs from its own attention's"
    except UnsupportedAttention as error:
        reason = str(error)
    set_text_attention(module, own)
    return reason


def _probe_outputs(module: Any) -> list[Tensor]:
    """Hidden states of two rows, padded on either side; and of a row that continues where a cache ends."""
    width, device, model = max(map(len, PROBE_ROWS)), module.device, module.base_model
    found = []
    for left in (True, False):
        gaps = [[0] * (width - len(row)) for row in PROBE_ROWS]
        pairs = [(gap, row) if left else (row, gap) for gap, row in zip(gaps, PROBE_ROWS, strict=True)]
        ids = torch.tensor([first + second for first, second in pairs], device=device)
        real = torch.arange(width, device=device) >= torch.tensor([[len(gap)] for gap in gaps], device=device)
        real = real if left else real.flip(1)
        out = model(input_ids=ids, attention_mask=real.long()).last_hidden_state
        found.append(out[real])
    if "past_key_values" in inspect.signature(model.forward).parameters:
        ids = torch.tensor(PROBE_ROWS[:1], device=device)
        cache = model(input_ids=ids[:, :2], use_cache=True).past_key_values
        for piece in (ids[:, 2:4], ids[:, 4:]):  # several queries on more keys, and one
            out = model(input_ids=piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.last_hidden_state)
    return found


def _as_transformers_attention(kernel: DenseAttention) -> Callable[..., tuple[Tensor, None]]:
    """`kernel` as transformers calls it in every attention layer."""

    def dense(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,  # in the mask already
        **options: Any,
    ) -> tuple[Tensor, None]:
        refuse_ignored_options(options, is_own_mask=attention_mask is not None and attention_mask.dtype != torch.bool)
        query, key, value = promote_to_common_dtype(query, key, value)
        queries = query.shape[2]
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = causal and queries > 1 and attention_mask is None
        if causal:  # a cache that is larger than what is in it
            key, value = key[:, :, :queries], value[:, :, :queries]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = kernel(query, key, value, mask=attention_mask, causal=causal, dropout=dropout, scale=scale)
        return out.transpose(1, 2).contiguous(), None

    return dense
