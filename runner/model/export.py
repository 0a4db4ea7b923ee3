"""Export a trained model: a Hugging Face folder, or a PEFT adapter beside a base that others have.

    shards on every rank ──tensor by tensor──▶ whole on rank 0's CPU, nowhere else ──▶ a module without shards

Only an adapter is gathered like this; a sharded model, and one that an adapter is merged into, is written tensor by
tensor (`hf_state_dict`). While nothing is trained, LoRA may be merged into the weights: one matrix product
instead of three.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from runner.core.errors import RunnerError
from runner.core.progress_bars import no_peft_warnings, no_progress_bar
from runner.core.quantized_weight import QuantizedWeight
from runner.distributed.dtensor_utils import full_tensor
from runner.interfaces.media import images_of
from runner.model.initial_weights import WeightsSource
from runner.model.legacy_keys import add_legacy_keys


def write_model(module: Any, folder: Path) -> None:
    """Write a transformers module, or the adapter of a peft module, which lies whole in this process."""
    folder.mkdir(parents=True, exist_ok=True)
    # or peft would query the hub whether the embedding was resized
    options = {"save_embedding_layers": False} if hasattr(module, "get_base_model") else {}
    with no_progress_bar():
        module.save_pretrained(folder, **options)
        settings = getattr(module.get_base_model(), "generation_config", None) if options else None
        if settings is not None:  # a classifier has none; the base's own may not end a turn of the chat template
            settings.save_pretrained(folder)


def write_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Write tokenizer and chat template beside a model's config, both with the keys of older releases."""
    with no_progress_bar():
        tokenizer.save_pretrained(folder)
    add_legacy_keys(folder, tokenizer)


def write_tokenizer_and_verify(folder: Path, tokenizer: Any, num_trained: int) -> None:
    """Write tokenizer and chat template beside exported weights.

    Raises RunnerError if the files hold fewer numbers than are trainable, `num_trained`.
    """
    write_tokenizer(folder, tokenizer)
    found = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found += sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    if found < num_trained:
        raise RunnerError(
            f"{folder} has {found} values, but {num_trained} are trainable: the export is incomplete. The checkpoints "
            "are unchanged; report this with the model's name"
        )


def merge_reason(module: Any, source: WeightsSource) -> str | None:
    """Why an export of a peft model cannot be its adapter alone; None = it can."""
    if source.drawn is not None:
        return "only this run has its random base weights"
    if parameters := module.peft_config[module.active_adapter].target_parameters:
        names = ", ".join(sorted(parameters))
        return f"it adapts {names} (target_parameters), which peft below 0.17 and vLLM ignore without an error"
    return None


PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
UNREAD_FILE = "model-unread.safetensors"


def write_image_processor(source: WeightsSource, folder: Path, tokenizer: Any) -> None:
    """Write the image processor of the folder that a model came from, with the settings in use."""
    for file in (source.files / name for name in PROCESSOR_FILES) if source.files else ():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    if (images := images_of(tokenizer)) is not None:
        images.save(folder)


def copy_unused_tensors(source: WeightsSource, folder: Path) -> None:
    """Copy tensors of the model's source that its architecture does not have, byte for byte."""
    names = source.unread
    found: dict[str, Tensor] = {}
    for shard in sorted(source.files.glob("*.safetensors")) if source.files and names else ():
        with safe_open(shard, "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys() if name in names}  # noqa: SIM118
    if not found:
        return
    save_file(found, folder / UNREAD_FILE, {"format": "pt"})
    if (index := folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        content = json.loads(index.read_text())
        content["weight_map"] |= dict.fromkeys(found, UNREAD_FILE)
        index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def unmergeable_layers(module: nn.Module) -> list[str]:
    """The adapted layers whose adapter has a bias (lora_bias) that the layer itself lacks."""
    parts: dict[str, Any] = dict(module.named_modules())
    biased = [name for name, part in parts.items() if any(getattr(part, "lora_bias", {}).values())]
    return [name for name in biased if getattr(parts[name].get_base_layer(), "bias", None) is None]


MERGEABLE_TYPES = (torch.float32, torch.float64)  # in bfloat16 a small adapter would be lost in the rounding of the sum


@contextmanager
def merge_temporarily(module: nn.Module) -> Iterator[None]:
    """Merge adapters into `module` inside the block; it computes the same, up to rounding.

    The adapted weights exist twice meanwhile, and the first ones come back bit for bit. Nothing happens to a module
    without adapters, or where folding is not the same: coarse weights, weights that another layer shares, or a bias.
    """
    layers = _adapted_layers(module)
    bases = [p for layer in layers for p in layer.get_base_layer().parameters()]
    shares = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    unfit = (p.dtype not in MERGEABLE_TYPES or isinstance(p, QuantizedWeight) or shares[id(p)] > 1 for p in bases)
    if not layers or unmergeable_layers(module) or any(unfit):
        yield
        return
    kept: list[Tensor] = [p.data for p in bases]
    try:
        for p in bases:
            p.data = p.data.clone()
        for layer in layers:
            layer.merge()
        yield
    finally:
        for layer in layers:
            if layer.merged:
                layer.unmerge()  # for peft's books; its weights are a rounding away from the first ones
        for p, data in zip(bases, kept, strict=True):
            p.data = data


def _adapted_layers(module: nn.Module) -> list[Any]:
    if not hasattr(module, "get_base_model"):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]


def gather_adapter(module: Any, *, keep: bool) -> dict[str, Tensor]:
    """All parameters and persistent buffers of a peft model by name; empty where not `keep`. Collective.

    Tied tensors are one. Tensors outside the adapter have no values, on `meta`; those of it are on the CPU.
    """
    tensors = module.state_dict(keep_vars=True)
    wanted = {id(tensor) for tensor in adapter_state_dict(module, tensors).values()}
    found = meta_tensors(tensors) if keep else {}
    known: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in wanted:
            continue
        if id(tensor) not in known:
            full = full_tensor(tensor)
            known[id(tensor)] = full.cpu() if keep else full.new_empty(0)
        if keep:
            found[name] = known[id(tensor)]
    return found


def adapter_state_dict(module: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of a peft model's tensors that peft writes, under the names that it writes."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(
        module, state_dict=tensors, adapter_name=module.active_adapter, save_embedding_layers=False
    )


def meta_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the same types and shapes on `meta`, tied ones as one; parameters as such."""
    made: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in made:
            shape = getattr(tensor, "ds_shape", tensor.shape)  # of what DeepSpeed has taken away for a while
            blank = torch.empty(shape, dtype=tensor.dtype, device="meta")
            made[id(tensor)] = nn.Parameter(blank, False) if isinstance(tensor, nn.Parameter) else blank
    return {name: made[id(tensor)] for name, tensor in tensors.items()}


def rebuild_module(module: Any, inner: Any, tensors: dict[str, Tensor]) -> Any:
    """A module like `module` (the transformers model `inner`, or peft around it) with these tensors."""
    with torch.device("meta"):
        made: Any = type(inner)(inner.config)
    if inner.can_generate():  # a sequence classifier has none
        made.generation_config = inner.generation_config
    if hasattr(inner, "_weight_conversions"):  # transformers renames and cuts some weights when they are loaded
        made._weight_conversions = inner._weight_conversions
    if module is not inner:
        import peft

        with no_peft_warnings():
            active = module.active_adapter
            made = peft.get_peft_model(made, module.peft_config[active], active, low_cpu_mem_usage=True)
    made.load_state_dict(tensors, assign=True)
    made.tie_weights()
    return made
