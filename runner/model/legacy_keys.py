"""Adds the keys that transformers 4 reads to an exported folder, which transformers 5 reads as before.

config.json             rope_parameters ─▶ rope_theta, rope_scaling, partial_rotary_factor, rope_local_base_freq
                        num_local_experts ─▶ num_experts        dtype ─▶ torch_dtype
tokenizer_config.json   TokenizersBackend ─▶ PreTrainedTokenizerFast        add_bos_token, add_eos_token
                        extra_special_tokens, a list ─▶ additional_special_tokens

Without them transformers 4.57 computes with rope_theta=10000, or does not load the folder, and vLLM below 0.23 needs
that release.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.core.fsync_io import atomic_write
from runner.model.model_folder import read_json

# their classes in transformers 4 add a start token unless the folder says that none is added
STARTS_BY_DEFAULT = ("CodeLlamaTokenizer", "CohereTokenizer", "GemmaTokenizer", "LlamaTokenizer")


def add_legacy_keys(folder: Path, tokenizer: Any) -> None:
    """Add the older keys to what transformers wrote of a model, if there is one, and of its tokenizer.

    Raises OSError.
    """
    if (path := folder / "config.json").is_file():
        _write(path, _legacy_config(read_json(path)))
    path = folder / "tokenizer_config.json"
    _write(path, _legacy_tokenizer_config(read_json(path), tokenizer))


def _write(path: Path, values: Mapping[str, Any]) -> None:
    atomic_write(path, (json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def _legacy_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's config, and those in it, with the older keys; a key that is there keeps its value."""
    inner = {k: _legacy_config(v) for k, v in config.items() if isinstance(v, dict) and "model_type" in v}
    older = {"num_experts": config.get("num_local_experts"), "torch_dtype": config.get("dtype")}
    older |= _legacy_rope(config.get("rope_parameters") or {})
    return {k: v for k, v in older.items() if v is not None} | {**config, **inner}


def _legacy_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The older keys of rotary embeddings: those of full attention, and the base of sliding windows."""
    full = parameters.get("full_attention", parameters)
    if not isinstance(full, dict) or "rope_theta" not in full:
        return {}
    own = ("rope_theta", "partial_rotary_factor")
    scaling = {name: value for name, value in full.items() if name not in own}
    local = parameters.get("sliding_attention") or {}
    return {name: full.get(name) for name in own} | {
        "rope_scaling": scaling if full.get("rope_type", "default") != "default" else None,
        "rope_local_base_freq": local.get("rope_theta"),
    }


def _legacy_tokenizer_config(config: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """A tokenizer's config as both releases read it."""
    made = dict(config)
    if made.get("tokenizer_class") == "TokenizersBackend":  # the same class, by its older name
        made["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(made.get("extra_special_tokens"), list):  # transformers 4 requires a mapping under this name
        made["additional_special_tokens"] = made.pop("extra_special_tokens")
    if made.get("tokenizer_class") in STARTS_BY_DEFAULT:
        ids = tokenizer("a")["input_ids"]
        made["add_bos_token"], made["add_eos_token"] = (
            id is not None and ids[at] == id for at, id in ((0, tokenizer.bos_token_id), (-1, tokenizer.eos_token_id))
        )
    return made
