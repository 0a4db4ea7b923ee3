"""Attention over packed sequences (varlen attention), without a [T, T] mask.

    q, k, v [1, heads, T, d] ──cut at row ends──▶ causal attention per row, bucket of rows, or in one call of a kernel
                                                  for rows end to end ──▶ [1, T, heads, d]

Legend: N rows, T tokens in all rows, P tokens of all paths, d head size. The function is registered with
transformers under the name `ragged`; having no mask function of that name, transformers builds no mask, and the row
ends are passed as the keyword `ragged` through the model's forward. On the CPU each row is one kernel call, which is
fastest there (no copy, no padding). Elsewhere one call of the device's kernel does all rows; where it has none, rows
of like lengths share a call, because calls are what costs. Rows that continue a shared prompt (see
`runner.core.prefix_tree`) see its keys before their own: `runner.model.shared_prompt_attention` repeats nothing. With a
window or dropout, values narrower than keys, on an NPU, and on a GPU without a kernel, the keys are repeated here, and
the queries where there is no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from runner.core.batch import Batch
from runner.core.prefix_tree import Paths, contexts, paths, rows_as_paths
from runner.interfaces import SequenceLengths, VarlenAttention
from runner.model.shared_prompt_attention import SharedPrompts, merge_objection

PACKED_ATTENTION = "ragged"
# Keywords that models hand to an attention function and that do not change what is computed.
IGNORABLE_OPTIONS = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "output_router_logits"}
)


def text_attention(model: Any) -> str:
    """The name of the attention function of a transformers model's decoder."""
    return model.config.get_text_config()._attn_implementation


def set_text_attention(model: Any, name: str) -> None:
    """Replace the attention function of the decoder, and not that of a vision or sound encoder beside it."""
    text = model.config.get_text_config()
    key = next((key for key in model.config.sub_configs if getattr(model.config, key, None) is text), None)
    model.set_attn_implementation(name if key is None else {key: name})


class UnsupportedAttention(Exception):
    """The model needs attention that this function does not support; its text is the reason."""


class AttentionPlan(Protocol):
    """What knows the tokens of one pass, and attends for all of them; see `PackedRows.attend`."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, dropout: float, scale: float | None
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Where rows end.

    buckets: int64 on the CPU, [2 · n], the number of rows and the width of each of n buckets, whose rows are attended
    together; flat, as torch.compile makes another graph for a dimension of 1. index: int64, the batch's token at each
    place of the buckets, which are padded with the last of a row; inverse: int64 [T], undoes that. Without them each
    row is a bucket.
    With a kernel: the queries and keys of each row, and `key_index`, int64 [K], where the keys lie in the batch; None
    if each row sees itself alone. prompts: of rows that continue one, where their keys need not be repeated.
    """

    buckets: Tensor
    index: Tensor | None = None
    inverse: Tensor | None = None
    kernel: VarlenAttention | None = None
    queries: SequenceLengths | None = None
    keys: SequenceLengths | None = None
    key_index: Tensor | None = None
    prompts: SharedPrompts | None = None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, dropout: float, scale: float | None
    ) -> Tensor:
        """Causal attention inside each row, or along each path.

        query [1, heads, T, d]; key, value [1, kv heads, T, d]; window in tokens or None. Returns [1, T, heads, d].
        """
        if self.prompts is not None and window is None and not dropout and query.shape[-1] == value.shape[-1]:
            query, key, value = promote_to_common_dtype(query, key, value)
            return self.prompts.attend(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)
        if self.kernel is not None:
            return _attend_by_kernel(query, key, value, self, window, dropout, scale)
        if not torch.compiler.is_compiling():
            return attend_by_rows(query, key, value, self, window, dropout, scale)
        if dropout:  # the operator draws nothing
            from runner.model.attention_operator import attend_uncompiled

            return attend_uncompiled(query, key, value, self, window, dropout, scale)
        return torch.ops.runner.packed_attention(
            query, key, value, self.buckets, self.index, self.inverse, window, scale
        )


def plan_attention(batch: Batch, kernel: VarlenAttention | None = None) -> PackedRows:
    """The plan for one batch: by the kernel if there is one; else row by row on the CPU, else in buckets.

    Rows that share prompts are in buckets where they cannot be merged. It is made on the CPU; of a batch on a device
    nothing is read back.
    """
    device, lengths = batch.tokens["ids"].device, batch.structure.rows["lengths"]
    rows, prompts = separate_rows(lengths), SharedPrompts.of(batch)
    if prompts is not None and ((kernel is None) != (device.type == "cpu") or merge_objection(device) is not None):
        prompts = None
    if kernel is not None:
        queries = keys = SequenceLengths.of(lengths.tolist(), device)
        if (found := contexts(batch)) is not None:
            keys = SequenceLengths.of(found[0], device)
        index = None if found is None else _to_device(found[1], device)
        return replace(rows, kernel=kernel, queries=queries, keys=keys, key_index=index, prompts=prompts)
    shared = paths(batch)
    if shared is None and device.type == "cpu":
        return rows
    return replace(bucket_by_length(shared or rows_as_paths(batch), device), prompts=prompts)


def separate_rows(lengths: Tensor) -> PackedRows:
    """Rows of these lengths, int64 [N] on the CPU, each of which is attended alone."""
    # not a view: of a single row, the dimensions of its base would be guarded
    return PackedRows(torch.stack([torch.ones_like(lengths), lengths], 1).flatten().clone())


def bucket_by_length(paths: Paths, device: torch.device) -> PackedRows:
    """Group paths; none is shorter than half the longest of its bucket, so padding stays below 50 %."""
    lengths = paths.lengths
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    groups: list[list[int]] = []
    for row in order:
        if groups and lengths[row] * 2 >= lengths[groups[-1][0]]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return pad_into_buckets(paths, groups, device)


def pad_into_buckets(paths: Paths, groups: Sequence[Sequence[int]], device: torch.device) -> PackedRows:
    """A bucket for each group of paths, padded to its longest."""
    sizes = torch.tensor(paths.lengths)
    starts = torch.cumsum(sizes, 0) - sizes
    slots = torch.empty(sum(paths.lengths), dtype=torch.int64)  # of each place of the paths
    shapes, parts, offset = [], [], 0
    for group in groups:
        chosen = torch.tensor(group)
        last = sizes[chosen, None] - 1
        column = torch.arange(int(last.max()) + 1)
        source = starts[chosen, None] + torch.minimum(column, last)
        real = column <= last
        slots[source[real]] = offset + real.flatten().nonzero()[:, 0]
        shapes += [len(group), len(column)]
        parts.append(paths.index[source.flatten()])
        offset += source.numel()
    index, inverse = (_to_device(one, device) for one in (torch.cat(parts), slots[paths.inverse]))
    return PackedRows(torch.tensor(shapes), index, inverse)


def _to_device(index: Tensor, device: torch.device) -> Tensor:
    return index.to(device, non_blocking=True)


def _causal(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, dropout: float, scale: float | None
) -> Tensor:
    """[n, heads, L, d] → [n, L, heads, d]; a token sees the last `window` tokens, itself included, or all."""
    length = query.shape[2]
    mask = None
    if window is not None and length > window:
        ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
        mask = ones.tril().triu(1 - window)
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2)


def attend_by_rows(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, *options: Any) -> Tensor:
    """`PackedRows.attend` without a kernel: a call for each row or bucket."""
    shapes = rows.buckets.view(-1, 2).tolist()
    if rows.index is None or rows.inverse is None:
        # split, whose gradient is one concatenation, and not slices, whose gradient is N tensors of T tokens
        cut = [tensor.split([length for _, length in shapes], dim=2) for tensor in (query, key, value)]
        return torch.cat([_causal(q, k, v, *options) for q, k, v in zip(*cut, strict=True)], dim=1)
    flat, done = [tensor[0].transpose(0, 1) for tensor in (query, key, value)], []
    for shape, index in zip(shapes, rows.index.split([count * width for count, width in shapes]), strict=True):
        block = [f.index_select(0, index).unflatten(0, shape).transpose(1, 2) for f in flat]
        done.append(_causal(block[0], block[1], block[2], *options).flatten(0, 1))
    return torch.cat(done).index_select(0, rows.inverse)[None]


def _attend_by_kernel(
    query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, window: int | None, dropout: float, scale: float | None
) -> Tensor:
    assert rows.kernel is not None and rows.queries is not None and rows.keys is not None
    q, k, v = (tensor[0].transpose(0, 1) for tensor in promote_to_common_dtype(query, key, value))
    if rows.key_index is not None:
        k, v = k.index_select(0, rows.key_index), v.index_select(0, rows.key_index)
    return rows.kernel(
        q,
        k,
        v,
        queries=rows.queries,
        keys=rows.keys,
        window=window,
        dropout=dropout,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
    )[None]


def promote_to_common_dtype(*tensors: Tensor) -> list[Tensor]:
    """All in the widest type among them: rotary positions may have left some in float32."""
    wide = tensors[0].dtype
    for tensor in tensors[1:]:  # which torch.compile traces, unlike max with a key
        wide = torch.promote_types(wide, tensor.dtype)
    return [tensor.to(wide) for tensor in tensors]


def refuse_ignored_options(options: dict[str, Any], is_own_mask: bool) -> None:
    """Raise UnsupportedAttention for anything that would otherwise be ignored."""
    unknown = sorted(key for key, value in options.items() if value is not None and key not in IGNORABLE_OPTIONS)
    if unknown:
        raise UnsupportedAttention(f"its attention uses {', '.join(unknown)}")
    if is_own_mask:
        raise UnsupportedAttention("it builds its own attention mask")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    ragged: AttentionPlan | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every attention layer; see `PackedRows.attend` for shapes."""
    if "sliding_window" not in options and getattr(getattr(module, "config", None), "sliding_window", None):
        raise UnsupportedAttention("it does not pass its sliding window to the attention function")
    window = options.pop("sliding_window", None)
    refuse_ignored_options(options, is_own_mask=attention_mask is not None)
    if ragged is None:
        raise UnsupportedAttention("it does not pass keywords to its attention layers")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedAttention("its attention is not causal")
    return ragged.attend(query, key, value, window, dropout, scaling), None


ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention)
