"""Test what a model supports, on a few tokens at startup.

    head_objection     may the LM head be applied to the backbone's hidden states in chunks?
    packed_objection   does the packed layout give what the model's own attention gives?
    kernel_objection   does a device's kernel give what attention is defined as?
    dense_objection    the same of a kernel for rows side by side

All answer with the reason why not, or None. No weight, mode or random stream is changed.
"""

from __future__ import annotations

import inspect
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from runner.core.batch import pack
from runner.core.tolerance import tolerance_of
from runner.interfaces import DenseAttention, SequenceLengths, VarlenAttention
from runner.interfaces.model import VarlenOptions
from runner.model.batch_layout import run_packed
from runner.model.flops import head_size, num_kv_heads
from runner.model.media import MediaInputs
from runner.model.packed_attention import (
    PACKED_ATTENTION,
    UnsupportedAttention,
    set_text_attention,
    text_attention,
)

PROBE_ROWS = ([3, 1, 4, 1, 5], [2, 6, 5])
PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})


def forget_positions(inner: Any) -> None:
    """Remove the rotary state that a model has kept of the last row that it was tried on."""
    if getattr(inner.base_model, "rope_deltas", None) is not None:
        inner.base_model.rope_deltas = None


def is_close(got: Tensor, wanted: Tensor) -> bool:
    """Whether `got` is `wanted` but for the rounding of its data type."""
    limit = tolerance_of(_matmul_dtype(wanted)).values * float(wanted.abs().max())
    return got.shape == wanted.shape and float((got - wanted).abs().max()) <= limit


def _matmul_dtype(tensor: Tensor) -> str:
    """The data type that what gave a tensor has multiplied in."""
    low = tensor.is_cuda and tensor.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if low else str(tensor.dtype).removeprefix("torch.")


@torch.no_grad()
def head_objection(causal: Any, device: torch.device) -> str | None:
    """Why logits are not simply head(hidden); None where they are.

    Replaces the head's output by a ramp for one call: whatever the model does to its logits (soft cap, scale) or to the
    head's input becomes visible, also on small weights.
    """
    head = causal.get_output_embeddings()
    if head is None or causal.base_model is causal:
        return "the model does not expose its backbone and its LM head"
    if device.type == "meta":  # where nothing is computed, nothing can be tried
        return None
    seen: list[Tensor] = []

    def replace(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen.append(inputs[0])
        return torch.linspace(-100, 100, output.numel(), device=output.device).view_as(output).to(output.dtype)

    ids = torch.tensor([PROBE_ROWS[0]], device=device)
    handle = head.register_forward_hook(replace)
    try:
        logits = causal(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    ramp = torch.linspace(-100, 100, logits.numel(), device=device).view_as(logits)
    if not seen or not torch.allclose(logits.float(), ramp, rtol=1e-2, atol=1e-2):
        return "the model changes its logits after the LM head"
    hidden = causal.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return None if is_close(seen[0], hidden) else "the model changes the hidden states before the LM head"


def _static_objection(causal: Any) -> str | None:
    parameters = inspect.signature(causal.base_model.forward).parameters
    if "position_ids" not in parameters or not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return "its forward does not accept position_ids and further keywords"
    strange = set(getattr(causal.config.get_text_config(), "layer_types", None) or ()) - PACKABLE_LAYERS
    if strange:
        return f"it has layers of type {', '.join(sorted(strange))}"
    set_text_attention(causal, PACKED_ATTENTION)
    return None if text_attention(causal) == PACKED_ATTENTION else "its attention cannot be replaced"


@torch.no_grad()
def packed_objection(causal: Any, device: torch.device, media: MediaInputs | None = None) -> str | None:
    """Why the packed layout does not work. On None it leaves the attention function `ragged` in place.

    media: of an image-text model; its rows with images are tried too
    """
    own = text_attention(causal)
    if causal.base_model is causal:
        return "the model does not expose its backbone"
    if device.type == "meta":
        return _static_objection(causal)

    def forward(**keywords: Any) -> Tensor:
        return causal.base_model(use_cache=False, **keywords).last_hidden_state

    rows = [*PROBE_ROWS, *(media.probe_rows() if media else ())]
    wanted = torch.cat([forward(input_ids=torch.tensor([row], device=device))[0] for row in rows])
    reason = _static_objection(causal)
    if reason is None:
        batch = pack(rows, [[1.0] * len(row) for row in rows]).to(device)
        try:
            got = run_packed(forward, media.prepare(batch) if media else batch)
            reason = None if is_close(got, wanted) else "its output changes when sequences are packed"
        except UnsupportedAttention as error:
            reason = str(error)
    if reason is not None:
        set_text_attention(causal, own)
    return reason


def kernel_objection(kernel: VarlenAttention, config: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why `kernel` does not work for a model of this config: its value or gradient is not attention."""
    # the second sequence continues another one
    queries, keys = (SequenceLengths.of(lengths, device) for lengths in ((3, 2, 5), (3, 6, 5)))
    heads, kv_heads, size = _head_shape(config)
    drawn = _random_inputs([(10, heads, size), *[(14, kv_heads, size)] * 2], dtype, device)
    for window in (None, 2):
        options = {"queries": queries, "keys": keys, "window": window, "dropout": 0.0, "scale": size**-0.5}
        if reason := _kernel_difference(kernel, _reference_varlen, drawn, options):
            return reason + f" with a window of {window}" * bool(window)
    return None


def dense_objection(kernel: DenseAttention, config: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """The same for padded rows: causal; a mask with a query that sees nothing; one query on all keys."""
    heads, kv_heads, size = _head_shape(config)
    mask = torch.ones(2, 1, 4, 6, dtype=torch.bool).tril(2)
    mask[1, :, :, :3] = False
    for queries, keys, seen in ((4, 4, None), (4, 6, mask.to(device)), (1, 6, None)):
        drawn = _random_inputs([(2, heads, queries, size), *[(2, kv_heads, keys, size)] * 2], dtype, device)
        options = {"mask": seen, "causal": queries == keys, "dropout": 0.0, "scale": size**-0.5}
        if reason := _kernel_difference(kernel, _reference_dense, drawn, options):
            return f"{reason}, for {queries} queries on {keys} keys"
    return None


def _head_shape(config: Any) -> tuple[int, int, int]:
    """Of queries, of keys, and their size. An encoder has as many of both."""
    return config.num_attention_heads, num_kv_heads(config), head_size(config)


def _random_inputs(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    stream = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=stream).to(device, dtype).requires_grad_() for shape in shapes]


def _kernel_difference(kernel: Any, defined: Any, drawn: list[Tensor], options: dict[str, Any]) -> str | None:
    """Whether value or gradient of `kernel` differ from those of `defined`, computed in float32 or better."""
    if drawn[0].device.type == "meta":
        return None
    wide = torch.promote_types(drawn[0].dtype, torch.float32)
    try:
        got = _with_gradients(kernel, drawn, **options)
    except (RuntimeError, TypeError, ValueError) as error:  # of whatever kind a foreign kernel refuses with
        return f"its kernel fails: {str(error).strip().splitlines()[0]}"
    wanted = _with_gradients(defined, [t.detach().to(wide).requires_grad_() for t in drawn], **options)
    if all(is_close(g, w.to(g.dtype)) for g, w in zip(got, wanted, strict=True)):
        return None
    return "its kernel differs from the definition of attention"


@torch.enable_grad()
def _with_gradients(attend: Any, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """The output and the gradients of the sum of its squares."""
    out: Tensor = attend(*tensors, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), tensors)]


def _reference_varlen(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[VarlenOptions]) -> Tensor:
    """Attention by its definition without dropout, sequence by sequence; see `VarlenAttention`."""
    done, lengths = [], options["keys"].lengths
    cut = (query.split(options["queries"].lengths), key.split(lengths), value.split(lengths))
    for q, k, v in zip(*cut, strict=True):
        place = torch.arange(len(k), device=k.device)
        behind = place[-len(q) :, None] - place
        mask = (behind >= 0) & (behind < (options["window"] or len(k)))
        rows = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
        done.append(_reference_dense(*rows, mask=mask, causal=False, scale=options["scale"])[0].transpose(0, 1))
    return torch.cat(done)


def _reference_dense(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, causal: bool, scale: float, dropout: float = 0.0
) -> Tensor:
    """Attention by its definition, row by row; see `DenseAttention`."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scale
    seen = torch.ones_like(scores, dtype=torch.bool)
    seen = seen.tril() if causal else seen if mask is None else seen & mask
    scores = scores.masked_fill(~seen, -torch.inf)
    top = scores.detach().amax(-1, keepdim=True)
    weights = (scores - top.masked_fill(top.isinf(), 0)).exp()  # all 0 where nothing is seen
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny) @ value
