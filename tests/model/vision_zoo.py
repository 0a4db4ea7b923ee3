"""A tiny image-text model of each family that is supported, with random weights, and its image processor's settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from runner.model.tiny import byte_tokenizer

IMAGE = 300
TEXT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SQUARE = VISION | {"image_size": 16, "patch_size": 4, "initializer_range": 0.3}
QWEN = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2} | {
    "temporal_patch_size": 2,
    "initializer_range": 0.3,
}
QWEN_OUT = QWEN | {"out_hidden_size": 32, "intermediate_size": 48}
QWEN3 = QWEN_OUT | {"num_position_embeddings": 16}
IDS = {"image_token_id": IMAGE, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def _rope(*sections: int, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)} | more
    return TEXT | {"rope_parameters": rope}


def _config(kind: str, **options: Any) -> Any:
    return CONFIG_MAPPING[kind](**options)


CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen2_vl": lambda: _config(
        "qwen2_vl", text_config=_rope(1, 1, 2), vision_config=QWEN | {"embed_dim": 32, "mlp_ratio": 2}, **IDS
    ),
    "qwen2_5_vl": lambda: _config(
        "qwen2_5_vl",
        text_config=_rope(1, 1, 2),
        vision_config=QWEN_OUT | {"window_size": 16, "fullatt_block_indexes": [1]},
        **IDS,
    ),
    "qwen3_vl": lambda: _config(
        "qwen3_vl",
        text_config=_rope(2, 1, 1, mrope_interleaved=True),
        vision_config=QWEN3 | {"deepstack_visual_indexes": [0]},
        **IDS,
    ),
    "qwen3_vl_moe": lambda: _config(
        "qwen3_vl_moe",
        text_config=_rope(2, 1, 1, mrope_interleaved=True)
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        vision_config=QWEN3 | {"deepstack_visual_indexes": [0]},
        **IDS,
    ),
    "qwen3_5": lambda: _config(
        "qwen3_5",
        text_config=_rope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=1.0)
        | LINEAR
        | {"layer_types": ["linear_attention", "full_attention"]},
        vision_config=QWEN3,
        **IDS,
    ),
    "gemma3": lambda: _config(
        "gemma3",
        text_config=TEXT
        | {"query_pre_attn_scalar": 8, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config=SQUARE | {"vision_use_head": False},
        mm_tokens_per_image=4,
        boi_token_index=302,
        eoi_token_index=303,
        image_token_index=IMAGE,
    ),
    "internvl": lambda: _config(
        "internvl",
        text_config=TEXT | {"model_type": "qwen2"},
        vision_config=SQUARE | {"image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=IMAGE,
        image_seq_length=4,
    ),
    "llava_onevision": lambda: _config(
        "llava_onevision",
        text_config=TEXT | {"model_type": "qwen2"},
        vision_config=SQUARE | {"model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=IMAGE,
        video_token_index=301,
        image_grid_pinpoints=[[16, 16], [16, 32], [32, 16], [32, 32]],
        vision_feature_layer=-1,
    ),
    "mistral3": lambda: _config(
        "mistral3",
        text_config=TEXT | {"model_type": "mistral"},
        vision_config=VISION | {"model_type": "pixtral", "head_dim": 16, "image_size": 32, "patch_size": 4},
        image_token_index=IMAGE,
        spatial_merge_size=2,
        vision_feature_layer=-1,
    ),
    "smolvlm": lambda: _config(
        "smolvlm",
        text_config=TEXT | {"model_type": "llama"},
        vision_config=SQUARE,
        image_token_id=IMAGE,
        scale_factor=2,
    ),
    "glm4v": lambda: _config(
        "glm4v",
        text_config=_rope(1, 1, 2),
        vision_config=QWEN_OUT | {"image_size": 16},
        image_start_token_id=304,
        image_end_token_id=305,
        video_start_token_id=306,
        video_end_token_id=307,
        image_token_id=IMAGE,
        video_token_id=301,
    ),
}


def write_folder(kind: str, folder: Path) -> Path:
    """A model folder of this family."""
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(CONFIGS[kind]()).save_pretrained(folder)
    byte_tokenizer(512).save_pretrained(folder)
    return folder
