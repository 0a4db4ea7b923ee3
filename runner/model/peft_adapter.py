"""Load PEFT adapters trained here or elsewhere (TRL, ms-swift). Only LoRA, only safetensors.

base model + adapter_config.json + adapter_model.safetensors ─▶ a peft model, its adapter trainable and in float32
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from runner.core.errors import CheckpointError
from runner.core.progress_bars import no_peft_warnings
from runner.model.initial_weights import refuse_nonfinite_weights
from runner.model.model_folder import ADAPTER_WEIGHTS, read_adapter_config, read_header
from runner.spec.base import Head


def attach_adapter(inner: Any, folder: Path, *, head: Head = "lm", name: str = "default") -> Any:
    """`inner`, a transformers or peft model, with the adapter of `folder` as `name`, trainable.

    On the meta device no weights are read. Raises CheckpointError if the adapter does not fit the base or lacks
    tensors, EnvironmentProblem if it is not LoRA or a weight is NaN or infinite.
    """
    import peft

    read_adapter_config(folder)
    on_meta = next(inner.parameters()).is_meta
    with no_peft_warnings(), torch.random.fork_rng(devices=[]):
        settings: Any = peft.PeftConfig.from_pretrained(str(folder))
        settings.inference_mode = False
        settings.base_model_name_or_path = None  # peft then writes the base that it is attached to
        settings.task_type = "SEQ_CLS" if head == "scalar" else "CAUSAL_LM"
        try:
            if hasattr(inner, "get_base_model"):
                module = inner
                module.add_adapter(name, settings, low_cpu_mem_usage=on_meta)
            else:
                module = peft.get_peft_model(inner, settings, adapter_name=name, low_cpu_mem_usage=on_meta)
        except ValueError as error:
            raise _unfit(folder, str(error)) from error
    own = {key: p for key, p in module.named_parameters() if f".{name}." in key}
    if not on_meta:
        _load_weights(module, folder, name, own.keys())
    for parameter in own.values():
        parameter.data = parameter.data.float()
    return module


def _load_weights(module: Any, folder: Path, name: str, own: Collection[str]) -> None:
    import peft

    read_header(folder / ADAPTER_WEIGHTS)  # which names the damage of a file that is not whole
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    refuse_nonfinite_weights(tensors, f"the adapter {folder}")
    rows = {key: value.shape[0] for key, value in tensors.items() if "embed_tokens" in key and value.ndim == 2}
    inner = module.get_base_model().get_input_embeddings()
    for key, count in rows.items():
        if ".lora_" not in key and ".trainable_tokens_" not in key and count != inner.weight.shape[0]:
            text = f"{key} has {count} rows, but the base's embedding {inner.weight.shape[0]}: it was resized"
            raise _unfit(folder, text)
    try:
        with no_peft_warnings():
            result: Any = peft.set_peft_model_state_dict(module, tensors, adapter_name=name)
    except (RuntimeError, KeyError) as error:
        raise _unfit(folder, " ".join(str(error).split())[:300]) from error
    if unplaced := sorted(result.unexpected_keys):
        raise _unfit(folder, f"the base has no module for {len(unplaced)} of its tensors, e.g. {unplaced[0]}")
    if missing := sorted({*own} & {*result.missing_keys}):
        raise _unfit(folder, f"it lacks {len(missing)} tensors that its config names, e.g. {missing[0]}")


def _unfit(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"the adapter {folder} does not fit its base: {why}\n  set the base that it was trained on: model.base=FOLDER"
    )


def merge_into_base(module: Any, inner: nn.Module) -> Any:
    """The transformers model `inner` with the adapter merged in float32; each weight keeps its type."""
    dtypes = {name.replace(".base_layer.", "."): p.dtype for name, p in inner.named_parameters()}
    merged = module.float().merge_and_unload()
    for name, parameter in merged.named_parameters():
        parameter.data = parameter.data.to(dtypes.get(name, parameter.dtype))
    return merged
