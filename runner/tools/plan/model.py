"""The shape of the job's model, without weights: from a folder, the hub's cache, our list, or the hub.

The job's own model on torch's meta device, as it would be built: shapes and data types, no numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from math import lcm
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem, Problem, SpecError
from runner.device.fused_modules import install_fused_ops
from runner.inference.model_source import resolve_model_path
from runner.model.auto_class import auto_class, refuse_other_kind
from runner.model.causal_lm import CausalLM
from runner.model.config import HfConfig, ModelConfig
from runner.model.hf import translate_errors
from runner.model.initial_weights import DTYPES, place_on_device
from runner.model.model_folder import adapter_base, is_adapter, is_hub_id
from runner.model.peft_adapter import attach_adapter
from runner.model.transformers_model import TransformersModel
from runner.model.value_head import PolicyWithValueHead, ScalarHeadModel
from runner.parallelism.mesh import model_sizes
from runner.spec.base import Head
from runner.spec.job import JobSpec
from runner.spec.registry import default_registry, resolve
from runner.tools.plan.known_models import KNOWN_MODELS
from runner.tools.plan.meta_memory_tracker import META, MetaOperators


def architecture(config: ModelConfig, key: str = "model") -> tuple[Any, str]:
    """The transformers config of a model, and where it was found.

    Raises EnvironmentProblem if it is nowhere, SpecError for a model that no plan can be made of.
    """
    factory = type(config).architecture_factory
    if factory is None:
        raise SpecError([Problem(key, f"run plan needs architecture_factory, which model={config.name} does not have")])
    if not isinstance(config, HfConfig):
        return resolve(factory)(config, resolve(config.tokenizer_factory)(config)), f"model={config.name}"
    if config.trust_remote_code:
        text = "run plan runs no code of a model folder; it supports the architectures in transformers"
        raise SpecError([Problem(f"{key}.trust_remote_code", text)])
    return published_config(config.path, config.revision, config.base)


def resolve_local_sources(spec: JobSpec) -> JobSpec:
    """The spec with the local folders that model.path and init_from mean; nothing is downloaded.

    Raises SpecError or CheckpointError for a run without an export or a damaged folder.
    """
    first = spec.init_from and _local_folder(spec.init_from, "init_from")
    return spec.model_copy(update={"model": spec.model.with_resolved_source(_local_folder), "init_from": first})


def _local_folder(path: str, key: str, base: str | None = None, *_: bool | str | None) -> str:
    """The folder that a run, an export or an adapter on this machine means; any other name as it is."""
    here = path == "latest" or Path(path).expanduser().exists()
    return resolve_model_path(path, key, base, needs_weights=False) if here else path


def published_config(path: str, revision: str | None = None, base: str | None = None) -> tuple[Any, str]:
    """The config of a folder or hub id, and where it was found; the hub itself is tried last.

    That of an adapter is its base's: `base`, or the one that the adapter names.
    """
    path = _local_folder(path, "model.path", base)
    if is_adapter(path):
        return published_config(base or adapter_base(path))
    if Path(path).exists():
        return _read_config(path, revision, local=True), "its folder"
    try:
        return _read_config(path, revision, local=True), "the hub's cache"
    except EnvironmentProblem:
        if (shape := KNOWN_MODELS.get(path)) is not None:
            return AutoConfig.for_model(**shape), "the list of published shapes"
    return _read_config(path, revision, local=False), "the hub"


def _read_config(path: str, revision: str | None, local: bool) -> Any:
    """Without code of the folder: transformers would ask on the terminal whether to run it."""
    try:
        with translate_errors(path):
            return AutoConfig.from_pretrained(path, revision=revision, local_files_only=local, trust_remote_code=False)
    except EnvironmentProblem as error:
        reason = str(error).partition("\n")[0].removeprefix(f"{path} cannot be loaded: ")
        reason = reason if Path(path).exists() or is_hub_id(path) else "no such folder"
        raise EnvironmentProblem(
            f"the shape of {path} is not known here: {reason}\n"
            "  type model.path=FOLDER with its config.json (the weights are not read), "
            f"or a known hub id such as {next(iter(KNOWN_MODELS))}"
        ) from error


MODEL_CLASSES: dict[Head, type[TransformersModel]] = {
    "lm": CausalLM,
    "scalar": ScalarHeadModel,
    "lm+value": PolicyWithValueHead,
}
LEAST_DEPTH = 3  # layers from which all grows by the same with each; a deeper model is drawn through two such depths


def build_meta_model(spec: JobSpec, head: Head, architecture: Any, adapted: bool = True) -> Any:
    """The model with the job's adapter; without `adapted`, a frozen copy."""
    kind = MODEL_CLASSES[head]
    shape = deepcopy(architecture)
    if head == "scalar":
        shape.num_labels = 1
    refuse_other_kind(shape, f"model.path={spec.model.source}", head)
    quiet, dtype = Decisions(), DTYPES[spec.stored_dtype(trains=adapted)]
    with torch.device(META):
        module = auto_class(shape, head).from_config(shape, dtype=dtype)
    module = place_on_device(module, dtype, META, quantization=spec.model.quantization, decide=quiet)
    if fused := spec.device.fused_operators:
        install_fused_ops(module, fused, MetaOperators(), quiet)
        if any(hasattr(part, "_is_expert_parallel") for part in module.modules()):
            module.set_experts_implementation("grouped_mm")  # one after the other they need numbers of tokens
    continued = next((path for path in (spec.init_from, spec.model.source) if path and is_adapter(path)), None)
    if adapted and continued is not None:
        module = attach_adapter(module, Path(continued), head=head)
    model = kind(module, None, spec.model, seed=0, decide=quiet)
    if adapted:
        model = default_registry().factory(spec.adapter)(spec.adapter, model, decide=quiet)
    else:
        model.module.requires_grad_(False)
    return model


def decoder_layers(model: Any) -> list[nn.Module]:
    """The decoder layers, or what comes closest to them in a model that does not name its own."""
    if blocks := model.transformer_blocks():
        return list(blocks)
    lists: list[nn.ModuleList] = [part for part in model.inner.modules() if isinstance(part, nn.ModuleList)]
    longest = max(lists, key=lambda found: sum(p.numel() for p in found.parameters()))
    return list(longest)


def with_depth(architecture: Any, depth: int) -> Any:
    """The same shape with so many layers."""
    shape = deepcopy(architecture)
    inner = shape.get_text_config()
    inner.num_hidden_layers = depth
    if getattr(inner, "layer_types", None):
        inner.layer_types = list(inner.layer_types)[:depth]
    return shape


def layer_period(architecture: Any, way: bool | int | str) -> int:
    """Number of layers after which their kinds repeat; way: of `model.gradient_checkpointing`.

    The first period has all leading dense layers.
    """
    inner = architecture.get_text_config()
    depth = inner.num_hidden_layers
    if getattr(inner, "mlp_only_layers", None):
        return int(depth)
    kinds = list(getattr(inner, "layer_types", None) or [0])[:depth]
    repeats = next(n for n in range(1, len(kinds) + 1) if kinds[n:] == kinds[:-n])
    recomputed = way if isinstance(way, int) else 1  # true is 1: every layer
    parts = list(
        getattr(inner, "mlp_layer_types", None) or ["dense"] * (getattr(inner, "first_k_dense_replace", 0) or 0)
    )
    dense = next((n for n, part in enumerate(parts) if part != "dense"), len(parts))
    steps = (recomputed, dense, getattr(inner, "decoder_sparse_step", None) or 1)
    return lcm(repeats, *(max(1, int(one)) for one in steps))


def sample_depths(depth: int, repeats: int) -> tuple[int, int]:
    """Two depths on the straight line of `depth`, where kinds of layers repeat after so many."""
    least = max(LEAST_DEPTH, 2 * repeats)
    low = least + (depth - least) % repeats
    return low, low + repeats * -(-LEAST_DEPTH // repeats)


def tensor_parallel_config(architecture: Any, slices: int) -> Any:
    """The config of one rank's part of a model with tensor parallelism over `slices` ranks.

    Fewer heads, narrower feed-forward layers, part of the vocabulary; experts are not split.
    """
    shape = deepcopy(architecture)
    inner = shape.get_text_config()
    inner.head_dim = getattr(inner, "head_dim", None) or inner.hidden_size // inner.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        setattr(inner, name, -(-getattr(inner, name) // slices))
    inner.pad_token_id = None  # it may lie in another slice of the vocabulary
    return shape


def expert_parallel_config(architecture: Any, ranks: int) -> Any:
    """The config of one of `ranks` under expert parallelism, with at least the experts that a token takes.

    Without group-limited routing, whose groups may need more experts than a rank has.
    """
    shape = deepcopy(architecture)
    inner = shape.get_text_config()
    if ranks > 1:
        name, experts = model_sizes(shape)["experts"]
        fewer = max(experts // ranks, getattr(inner, "num_experts_per_tok", None) or 1)
        changed = {name: fewer, "n_group": 1, "topk_group": 1}
        inner.update({key: value for key, value in changed.items() if getattr(inner, key, None)})
    return shape


@contextmanager
def allow_meta_autocast() -> Iterator[None]:
    """Allow autocast on the meta device inside the block: torch has none, and peft enters it."""
    known = torch.autocast

    def autocast_or_null(device_type: str, *more: Any, **named: Any) -> AbstractContextManager[Any]:
        return nullcontext() if device_type == META.type else known(device_type, *more, **named)

    torch.autocast = autocast_or_null  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.autocast = known  # type: ignore[misc]
