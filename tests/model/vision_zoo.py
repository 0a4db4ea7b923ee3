"""A tiny image-text model of each family that is supported, with random weights, and its image processor's settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from runner.model.tiny import byte_tokenizer, template_with_images

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


Q, M, G, S = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"
QWEN_TOKENS = {300: M, 301: S, 302: Q, 303: G}
QWEN_IMAGES = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 64}}
QWEN_IMAGES["size"]["longest_edge"] = 1024
BASE16 = {"size": {"height": 16, "width": 16}}
# of each family: its added tokens, the tokenizer's names of some, the image processor's settings, the processor's
PROCESSORS: dict[str, tuple[dict[int, str], dict[str, str], dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (QWEN_TOKENS, {}, QWEN_IMAGES, {}),
    "qwen2_5_vl": (QWEN_TOKENS, {}, QWEN_IMAGES, {}),
    "qwen3_vl": (QWEN_TOKENS, {}, QWEN_IMAGES, {}),
    "qwen3_vl_moe": (QWEN_TOKENS, {}, QWEN_IMAGES | {"image_processor_type": "Qwen2VLImageProcessor"}, {}),
    "qwen3_5": (QWEN_TOKENS, {}, QWEN_IMAGES, {}),
    "gemma3": (
        {300: "<image_soft_token>", 302: "<start_of_image>", 303: "<end_of_image>"},
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        BASE16,
        {"image_seq_length": 4},
    ),
    "internvl": (
        {300: "<IMG_CONTEXT>", 301: "<video>", 302: "<img>", 303: "</img>"},
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        BASE16 | {"max_patches": 3},
        {"image_seq_length": 4},
    ),
    "llava_onevision": (
        {300: "<image>", 301: "<video>"},
        {},
        BASE16 | {"image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 32]]},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "mistral3": (
        {300: "[IMG]", 301: "[IMG_BREAK]", 302: "[IMG_END]"},
        {},
        {"size": {"longest_edge": 32}, "patch_size": {"height": 4, "width": 4}},
        {"patch_size": 4, "spatial_merge_size": 2},
    ),
    "smolvlm": (
        {300: "<image>", 301: "<video>", 302: "<fake_token_around_image>", 303: "<global-img>"},
        {},
        {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}},
        {"image_seq_len": 4},
    ),
    "glm4v": (
        {300: "<|image|>", 301: "<|video|>", 304: "<|begin_of_image|>", 305: "<|end_of_image|>"},
        {},
        QWEN_IMAGES,
        {},
    ),
}
# what the chat template writes for an image, where it is not the image token alone
PLACES = {kind: f"{Q}{M}{G}" for kind in PROCESSORS if "qwen" in kind} | {
    "gemma3": "<start_of_image>",
    "glm4v": "<|begin_of_image|><|image|><|end_of_image|>",
}


def tokenizer(kind: str) -> Any:
    """The byte tokenizer with the family's tokens; others fill the ids between."""
    added, names, *_ = PROCESSORS[kind]
    made = byte_tokenizer(1024)
    tokens = [added.get(i, f"<|unused{i}|>") for i in range(259, 310)]
    made.add_special_tokens({"additional_special_tokens": tokens}, replace_extra_special_tokens=False)
    made._set_model_specific_special_tokens(names)
    made.chat_template = template_with_images(PLACES.get(kind, added[IMAGE]))
    return made


def write_folder(kind: str, folder: Path) -> Path:
    """A model folder of this family, with its image processor."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIGS[kind]())
    for parameter in model.parameters():
        if not parameter.any() and parameter.ndim > 1:  # Gemma 3's projection begins with zeros
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer(kind).save_pretrained(folder)
    *_, images, more = PROCESSORS[kind]
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get("pixtral" if kind == "mistral3" else kind) or {}
    settings = {"image_processor_type": str(names.get("torchvision"))} | images
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "processor_config.json").write_text(json.dumps(more | {"processor_class": PROCESSOR_MAPPING_NAMES[kind]}))
    return folder
