"""The job's own model on torch's meta device, as it would be built: shapes and data types, no numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from math import lcm
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from runner.decisions import Decisions
from runner.device.npu_fused import fuse
from runner.model.build import DTYPES
from runner.model.causal import CausalLM
from runner.model.ragged import RaggedModel
from runner.model.scalar import ScalarModel
from runner.model.valued import ValuedLM
from runner.plan.operators import MetaOperators
from runner.plan.tracking import META
from runner.registry import default_registry
from runner.spec.base import Head
from runner.spec.job import JobSpec

MADE: dict[Head, tuple[Any, type[RaggedModel]]] = {
    "lm": (AutoModelForCausalLM, CausalLM),
    "scalar": (AutoModelForSequenceClassification, ScalarModel),
    "lm+value": (AutoModelForCausalLM, ValuedLM),
}
LEAST_DEPTH = 3  # layers from which all grows by the same with each; a deeper model is drawn through two such depths


def made(spec: JobSpec, head: Head, architecture: Any, adapted: bool = True) -> Any:
    """The model with the job's adapter; without `adapted`, a frozen copy."""
    auto, kind = MADE[head]
    shape = deepcopy(architecture)
    if head == "scalar":
        shape.num_labels = 1
    with torch.device(META):
        module = auto.from_config(shape, dtype=DTYPES[spec.stored_dtype(trains=adapted)])
    quiet = Decisions()
    if fused := getattr(spec.device, "fused", ()):
        fuse(module, fused, MetaOperators(), quiet)
    model = kind(module, None, spec.model, seed=0, decide=quiet)
    if adapted:
        model = default_registry().factory(spec.adapter)(spec.adapter, model, decide=quiet)
    else:
        model.module.requires_grad_(False)
    return model


def layers(model: Any) -> list[nn.Module]:
    """The decoder layers, or what comes closest to them in a model that does not name its own."""
    if blocks := model.blocks():
        return list(blocks)
    lists: list[nn.ModuleList] = [part for part in model.inner.modules() if isinstance(part, nn.ModuleList)]
    longest = max(lists, key=lambda found: sum(p.numel() for p in found.parameters()))
    return list(longest)


def cut(architecture: Any, depth: int) -> Any:
    """The same shape with so many layers."""
    shape = deepcopy(architecture)
    inner = shape.get_text_config()
    inner.num_hidden_layers = depth
    if getattr(inner, "layer_types", None):
        inner.layer_types = list(inner.layer_types)[:depth]
    return shape


def period(architecture: Any, way: bool | int | str) -> int:
    """After how many layers their kinds repeat themselves; way: that of `model.gradient_checkpointing`."""
    inner = architecture.get_text_config()
    depth = inner.num_hidden_layers
    if getattr(inner, "mlp_only_layers", None):
        return int(depth)
    kinds = list(getattr(inner, "layer_types", None) or [0])[:depth]
    repeats = next(n for n in range(1, len(kinds) + 1) if kinds[n:] == kinds[:-n])
    recomputed = way if isinstance(way, int) else 1  # true is 1: every layer
    return lcm(repeats, max(1, int(recomputed)), int(getattr(inner, "decoder_sparse_step", None) or 1))


def samples(depth: int, repeats: int) -> tuple[int, int]:
    """Two depths on the straight line of `depth`, where kinds of layers repeat after so many."""
    least = max(LEAST_DEPTH, 2 * repeats)
    low = least + (depth - least) % repeats
    return low, low + repeats * -(-LEAST_DEPTH // repeats)


def sliced(architecture: Any, slices: int) -> Any:
    """The shape of what one rank has of a model whose layers are cut in `slices`: fewer heads, narrower feed-forward
    layers, part of the vocabulary; experts are not cut."""
    shape = deepcopy(architecture)
    inner = shape.get_text_config()
    inner.head_dim = getattr(inner, "head_dim", None) or inner.hidden_size // inner.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        setattr(inner, name, -(-getattr(inner, name) // slices))
    inner.pad_token_id = None  # it may lie in another slice of the vocabulary
    return shape


def of_experts(architecture: Any, ranks: int) -> Any:
    """The shape of what one of `ranks` has over which experts lie; no fewer experts than a token takes."""
    shape = deepcopy(architecture)
    inner = shape.get_text_config()
    if ranks > 1:
        inner.num_experts = max(inner.num_experts // ranks, inner.num_experts_per_tok)
    return shape


@contextmanager
def unmixed() -> Iterator[None]:
    """While automatic mixed precision may be asked of the meta device, where torch knows none; peft asks for none."""
    known = torch.autocast

    def asked(device_type: str, *more: Any, **named: Any) -> AbstractContextManager[Any]:
        return nullcontext() if device_type == META.type else known(device_type, *more, **named)

    torch.autocast = asked  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.autocast = known  # type: ignore[misc]
