"""The job's own model on the meta device: its parameters are counted, and one of its micro-batches is run.

    architecture ──meta──▶ model with its adapter ──▶ Weights             how many numbers learn, and how many do not
                                   └── forward, backward ──▶ Pass         the most memory beside the weights

Legend: T tokens of a micro-batch, H hidden size, d head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from runner.batch import Batch, pack
from runner.decisions import Decisions
from runner.device.npu_fused import fuse
from runner.errors import Problem, SpecError
from runner.model.build import DTYPES
from runner.model.causal import CausalLM
from runner.model.ragged import RaggedModel
from runner.model.scalar import ScalarModel
from runner.model.valued import ValuedLM
from runner.plan.operators import MetaOperators, fused_attention
from runner.plan.tracking import META, Kind, Tracker, keep_gradients
from runner.registry import default_registry
from runner.spec.base import Head
from runner.spec.job import JobSpec

MADE: dict[Head, tuple[Any, type[RaggedModel]]] = {
    "lm": (AutoModelForCausalLM, CausalLM),
    "scalar": (AutoModelForSequenceClassification, ScalarModel),
    "lm+value": (AutoModelForCausalLM, ValuedLM),
}
SAMPLES_OF_DEPTH = (3, 6)  # layers: a deeper model's pass is the straight line through these two


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers and bytes of a model's parameters. `layer`, `root`: bytes of its largest decoder layer, and of all that
    is in none; of both, `layer_trained` and `root_trained`: bytes that learn."""

    trained: int
    frozen: int
    trained_bytes: int
    frozen_bytes: int
    layer: int
    root: int
    layer_trained: int
    root_trained: int

    @property
    def total(self) -> int:
        """All its numbers."""
        return self.trained + self.frozen


Pass = Mapping[Kind, int]  # bytes by kind at the moment of a forward and backward pass that takes most


def weights(spec: JobSpec, head: Head, architecture: Any, trains: bool = True) -> Weights:
    """The parameters of a model of the job; without `trains`, of a frozen copy."""
    model = _made(spec, head, architecture, DTYPES[spec.model.dtype], adapted=trains)
    kept = [(p, trains and p.requires_grad) for p in model.module.parameters()]
    layers = [list(layer.parameters()) for layer in _layers(model.inner)]
    own = {id(p) for layer in layers for p in layer}
    outside = [(p, learns) for p, learns in kept if id(p) not in own]
    return Weights(
        trained=sum(p.numel() for p, learns in kept if learns),
        frozen=sum(p.numel() for p, learns in kept if not learns),
        trained_bytes=sum(p.nbytes for p, learns in kept if learns),
        frozen_bytes=sum(p.nbytes for p, learns in kept if not learns),
        layer=max(sum(p.nbytes for p in layer) for layer in layers),
        root=sum(p.nbytes for p, _ in outside),
        layer_trained=max(sum(p.nbytes for p in layer if trains and p.requires_grad) for layer in layers),
        root_trained=sum(p.nbytes for p, learns in outside if learns),
    )


def measured(spec: JobSpec, head: Head, architecture: Any, parts: int) -> Pass:
    """The pass of one micro-batch, where a rank keeps one part in `parts` of each gradient."""
    depth = architecture.get_text_config().num_hidden_layers
    if depth <= SAMPLES_OF_DEPTH[-1]:
        return _run(spec, head, architecture, parts)
    low, high = (_run(spec, head, _cut(architecture, layers), parts) for layers in SAMPLES_OF_DEPTH)
    more = (depth - SAMPLES_OF_DEPTH[-1]) / (SAMPLES_OF_DEPTH[-1] - SAMPLES_OF_DEPTH[0])
    return {kind: high[kind] + round((high[kind] - low[kind]) * more) for kind in high}


def _cut(architecture: Any, layers: int) -> Any:
    """The same shape with fewer layers."""
    shape = deepcopy(architecture)
    inner = shape.get_text_config()
    inner.num_hidden_layers = layers
    if getattr(inner, "layer_types", None):
        inner.layer_types = list(inner.layer_types)[:layers]
    return shape


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


def _run(spec: JobSpec, head: Head, architecture: Any, parts: int) -> Pass:
    model = _made(spec, head, architecture, DTYPES[spec.model.dtype])
    if spec.model.autocast != "none":
        mix(model.module, model.compute_type)
    model.attend_with(partial(fused_attention, dtype=model.compute_type), decide=Decisions())
    batch = micro_batch(spec)
    learning = list(model.trainable().values())
    tracker = Tracker([*model.module.parameters(), *model.module.buffers()], architecture.get_text_config().vocab_size)
    with ExitStack() as during:
        for handle in keep_gradients(learning, tracker, parts):
            during.callback(handle.remove)
        during.enter_context(tracker)
        _total(spec, head, model, batch).backward()
    return tracker.peak


def _total(spec: JobSpec, head: Head, model: Any, batch: Batch) -> Tensor:
    """What a loss of the algorithm's kind makes of the model's outputs."""
    if head == "lm" and spec.algorithm.items == "sft" and not spec.algorithm.samples:
        total: Tensor = model.linear(batch.to(META), torch.ones(batch.num_tokens))[0]
        return total
    outputs = model.outputs(batch.to(META), needs(spec, head))
    return torch.stack([value.sum() for value in outputs.values()]).sum()


def needs(spec: JobSpec, head: Head) -> frozenset[str]:
    """The outputs that the loss of a model with this head reads."""
    if head == "scalar":
        return frozenset({"values"} if spec.algorithm.samples else {"scores"})
    own = {"logprobs", "entropy"} if spec.algorithm.samples else {"logprobs"}
    return frozenset(own | ({"values"} if head == "lm+value" else set()))


def micro_batch(spec: JobSpec) -> Batch:
    """A full micro-batch of the longest rows."""
    budget = spec.algorithm.micro_batch_tokens
    longest = min(spec.data.max_length + spec.sampler.answer_tokens(), budget)
    lengths = [longest] * (budget // longest)
    if rest := budget - sum(lengths):
        lengths.append(rest)
    return pack([[0] * n for n in lengths], [[1.0] * n for n in lengths])


def _made(spec: JobSpec, head: Head, architecture: Any, dtype: torch.dtype, adapted: bool = True) -> Any:
    """The model on the meta device, with the job's adapter."""
    auto, kind = MADE[head]
    shape = deepcopy(architecture)
    if head == "scalar":
        shape.num_labels = 1
    with torch.device(META):
        module = auto.from_config(shape, dtype=dtype)
    quiet = Decisions()
    if fused := getattr(spec.device, "fused", ()):
        fuse(module, fused, MetaOperators(), quiet)
    model = kind(module, None, spec.model, seed=0, decide=quiet)
    if adapted:
        model = default_registry().factory(spec.adapter)(spec.adapter, model, decide=quiet)
        _refuse_wrapped_parameters(model.module)
    else:
        model.module.requires_grad_(False)
    return model


def _refuse_wrapped_parameters(module: nn.Module) -> None:
    """Raise SpecError for peft's adapters on bare parameters, which need a device that computes."""
    wrapped = sorted(
        {name.rpartition(".")[2] for name, part in module.named_modules() if isinstance(part, ParamWrapper)}
    )
    if wrapped:
        text = f"a plan cannot be made with an adapter on the experts ({', '.join(wrapped)})"
        raise SpecError(
            [Problem("adapter.targets", f"{text}; name layers, e.g. adapter.targets=[q_proj,k_proj,v_proj,o_proj]")]
        )


def _layers(inner: nn.Module) -> nn.ModuleList:
    """The decoder layers: the longest list of modules that there is."""
    lists = [module for module in inner.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda found: sum(p.numel() for p in found.parameters()))


def mix(module: nn.Module, dtype: torch.dtype) -> None:
    """Let the linear layers compute in `dtype`, as automatic mixed precision does, which torch has none of for the meta
    device: a layer's weight is cast once for the pass."""
    cast: dict[int, Tensor] = {}

    def low(parameter: Tensor) -> Tensor:
        if id(parameter) not in cast:
            cast[id(parameter)] = parameter.to(dtype)
        return cast[id(parameter)]

    def product(layer: nn.Linear, given: Tensor) -> Tensor:
        return F.linear(given.to(dtype), low(layer.weight), None if layer.bias is None else low(layer.bias))

    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = partial(product, layer)  # type: ignore[method-assign]
