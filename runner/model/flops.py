"""Floating-point operations of a model's update, shared by metrics, `run plan` and `run bench`.

    matrix products   2 per weight and token, forward; as many for the gradient of what goes into it; as many for the
                      gradient of the weight, unless it is frozen
    attention         2 · (d of keys + d of values) per head and pair of tokens of which one sees the other, forward;
                      twice as many backward
    LM head           as a matrix product, for the tokens with weight alone
    vision part       as a matrix product, for the patches of images; frozen, forward alone

Counted is what a model needs, whatever computes it: a shared prompt once, a pair that the causal mask or a window hides
not at all, nothing for padding or for what is computed again (activation checkpointing). Left out are norms, activation
functions, softmax and the optimizer (less than a hundredth of it in models of ordinary width), and the recurrence of
layers that are no attention, and attention between patches. The gradient of inputs is counted of every layer, though
the first one's has no reader where the embedding is frozen. Of experts a token pays for those that it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from runner.core.batch import Batch
from runner.core.micro_batches import footprints
from runner.model.model_parts import part_finder

# how the kinds of layers begin that no pair of tokens meets in
NOT_ATTENTION = ("linear", "mamba", "conv", "recurrent")
UNUSED_MODULE = "original_module"  # what peft keeps of a module of which it trains a copy


@dataclass(frozen=True, slots=True)
class MatmulWeights:
    """Number of weights that a token is multiplied with, by trainable or frozen: of layers, of the head."""

    trained: float = 0
    frozen: float = 0
    head_trained: float = 0
    head_frozen: float = 0

    @property
    def total(self) -> float:
        """All of them."""
        return self.trained + self.frozen + self.head_trained + self.head_frozen

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: int) -> Self:
        return type(self)(*(getattr(self, f.name) * times for f in fields(self)))


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """The numbers that determine the operations of a model's passes.

    attention: for each window (None: every earlier token is visible) the sum over its layers of heads · (d of keys +
    d of values); vision: weights that a patch of an image is multiplied with, aligner included
    """

    weights: MatmulWeights = MatmulWeights()
    attention: tuple[tuple[int | None, int], ...] = ()
    vision: MatmulWeights = MatmulWeights()

    def update(
        self, tokens: float, predicted: float, pairs: Callable[[int | None], float], patches: float = 0
    ) -> float:
        """Operations of a forward and backward pass over `tokens` tokens with `predicted` predictions.

        pairs: by window, how many pairs of tokens attend to each other; patches: of images
        """
        weights = self.weights
        images = patches * (2 * self.vision.frozen + 6 * self.vision.trained)
        layers = tokens * (4 * weights.frozen + 6 * weights.trained)
        head = predicted * (4 * weights.head_frozen + 6 * weights.head_trained)
        return images + layers + head + 3 * self.attention_flops(pairs)

    def attention_flops(self, pairs: Callable[[int | None], float]) -> float:
        """Attention of a forward pass."""
        return 2 * sum(width * pairs(window) for window, width in self.attention)

    def batch_flops(self, batch: Batch) -> float:
        """The same of a batch that knows its totals."""
        start, lengths = (batch.structure.rows[name].numpy() for name in ("start", "lengths"))

        def pairs(window: int | None) -> int:
            return int((attention_pairs(start + lengths, window) - attention_pairs(start, window)).sum())

        patches = int(footprints(batch, padded=False).patches.sum())
        return self.update(batch.num_tokens, batch.totals["tokens"], pairs, patches)


Lengths = TypeVar("Lengths", int, NDArray[np.int64])


def attention_pairs(length: Lengths, window: int | None) -> Lengths:
    """The pairs of tokens of a row, or of each of several, that see each other or themselves."""
    reach = length if window is None else np.minimum(length, window)
    return reach * (reach + 1) // 2 + (length - reach) * reach


def model_flops(module: nn.Module, inner: Any) -> ModelFlops:
    """The count for a whole model before it is sharded: transformers model `inner` inside `module`."""
    return ModelFlops(matmul_weights(module, inner), attention_widths(inner.config), vision_weights(inner))


def vision_weights(inner: Any) -> MatmulWeights:
    """Those of the vision part and the aligner of `inner`."""
    found, part_of = MatmulWeights(), part_finder(inner)
    for name, p in inner.named_parameters():
        if p.ndim >= 2 and part_of(name) != "language":
            found += MatmulWeights(**{"trained" if p.requires_grad else "frozen": p.numel()})
    return found


def matmul_weights(part: nn.Module, inner: Any) -> MatmulWeights:
    """Those of a part of `inner`: its matrices, without the vision part and looked-up embeddings."""
    output = inner.get_output_embeddings()
    head = {id(p) for p in output.parameters()} if output is not None else set()
    embeddings = (m for m in part.modules() if isinstance(m, nn.Embedding))
    looked_up = {id(p) for m in embeddings for p in m.parameters(recurse=False)}
    part_of = part_finder(inner)
    looked_up |= {id(p) for name, p in inner.named_parameters() if part_of(name) != "language"}
    share = active_expert_fraction(inner.config.get_text_config())
    found = MatmulWeights()
    for name, p in part.named_parameters():
        if p.ndim < 2 or UNUSED_MODULE in name.split("."):
            continue
        if id(p) in head:
            found += MatmulWeights(**{"head_trained" if p.requires_grad else "head_frozen": p.numel()})
        elif id(p) not in looked_up:
            taken = p.numel() * (share if is_expert(name) else 1)
            found += MatmulWeights(**{"trained" if p.requires_grad else "frozen": taken})
    return found


def is_expert(name: str) -> bool:
    """Whether a parameter of this name is of a layer's experts, of which each token takes some."""
    return "experts" in name.split(".")


def active_expert_fraction(config: Any) -> float:
    """The share of a layer's experts that a token goes through."""
    experts = next(
        (n for key in ("num_experts", "num_local_experts", "n_routed_experts") if (n := _int_attribute(config, key))), 0
    )
    return _int_attribute(config, "num_experts_per_tok") / experts if experts else 1.0


def attention_widths(config: Any) -> tuple[tuple[int | None, int], ...]:
    """See `ModelFlops`; of a transformers config."""
    inner = config.get_text_config()
    if not _int_attribute(inner, "num_attention_heads"):  # a state-space model
        return ()
    width = _int_attribute(inner, "num_attention_heads") * key_value_size(inner)
    window = getattr(inner, "sliding_window", None)
    kinds = getattr(inner, "layer_types", None)
    windows = [window] * inner.num_hidden_layers
    if kinds:
        reach = {"sliding_attention": window, "chunked_attention": getattr(inner, "attention_chunk_size", None)}
        windows = [reach.get(kind) for kind in kinds if not kind.startswith(NOT_ATTENTION)]
    elif not getattr(inner, "use_sliding_window", True):
        windows = [None] * inner.num_hidden_layers
    return tuple((one, width * windows.count(one)) for one in dict.fromkeys(windows))


def key_value_size(inner: Any) -> int:
    """Features of the keys and the values of an attention head together."""
    size = head_size(inner)
    # of multi-head latent attention
    keys = _int_attribute(inner, "qk_nope_head_dim") + _int_attribute(inner, "qk_rope_head_dim")
    return (keys or size) + (_int_attribute(inner, "v_head_dim") or size)


def num_kv_heads(inner: Any) -> int:
    """Key-value heads of a layer: where the config names none, as many as there are heads."""
    return int(getattr(inner, "num_key_value_heads", None) or inner.num_attention_heads)


def head_size(inner: Any) -> int:
    """Features of an attention head; the most of a layer where layers differ, as those of Gemma 4 do."""
    if getattr(inner, "is_heterogeneous", False):
        return max(head_size(layer) for layer in inner.per_layer_config)
    return int(getattr(inner, "head_dim", None) or inner.hidden_size // inner.num_attention_heads)


def _int_attribute(config: Any, name: str) -> int:
    return int(getattr(config, name, None) or 0)
