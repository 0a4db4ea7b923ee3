"""Small models from random weights, for demos and tests: no download, no account.

Their tokenizer: one token per byte, three special ones, a ChatML template; built in memory.

    text ──UTF-8──▶ bytes, in an order of their own ──▶ ids 0 … 255      <|pad|> 256   <|im_start|> 257   <|im_end|> 258

An id is not the value of its byte: "!" is 0, "a" is 64, a space is 220. Bytes have the order of the characters that
byte-level BPE writes for them. The tokenizer has no merges, so any UTF-8 text survives encode and decode, and no file
has to be shipped. Of an export, AutoTokenizer takes the class of the model's architecture: the same ids, but it first
composes accents that stand apart.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification
from transformers.models.qwen2_vl import Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoeForSequenceClassification

from runner.core.errors import UnsupportedModelError
from runner.interfaces import Decide
from runner.model.batch_layout import check_row_length, max_row_length
from runner.model.causal_lm import model_class_for_head
from runner.model.config import ModelConfig, SmallConfig, TinyMoeConfig, TinyVlConfig
from runner.model.image_processor import ImageProcessor, make_processor, set_pixel_limits
from runner.model.image_reader import FileImageReader
from runner.model.initial_weights import (
    DTYPES,
    CheckArchitecture,
    InstallFusedOps,
    WeightsSource,
    init_with_seed,
    load_folder,
    load_renamed,
    place_on_device,
)
from runner.model.transformers_model import TransformersModel
from runner.spec.base import Dtype, Head

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"

# What the model has to write itself (content, tool calls and the end mark) stands between the generation markers.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>tools\\n' + tools | tojson + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] or '' }}
            {%- for call in message['tool_calls'] or [] %}
                {{- '<tool_call>' + (call['function'] or call) | tojson + '</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- (message['content'] or '') + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def template_with_images(place: str) -> str:
    """The chat template with `place` where an image stands between the texts of a user's message."""
    parts = (
        "{%- for part in message['content'] %}{{- '"
        + place
        + "' if part['type'] == 'image' else part['text'] }}{%- endfor %}"
    )
    text = "{{- (message['content'] or '') + '<|im_end|>' }}"
    several = f"{{%- if message['content'] is string or not message['content'] %}}{text}{{%- else %}}{parts}"
    return CHAT_TEMPLATE.replace(text, several + "{{- '<|im_end|>' }}{%- endif %}")


def byte_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer of 259 ids: the 256 bytes, <|pad|>, <|im_start|>, <|im_end|> (end of sequence).

    `max_length` is the longest sequence, in tokens, of the model that it belongs to.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, START, END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        unk_token=PAD,  # no byte is unknown; where none is named, the class that AutoTokenizer takes adds an id
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


VISION_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")


def tokenizer(config: SmallConfig) -> PreTrainedTokenizerFast:
    """One id per byte and three special tokens, or seven with images, whatever the size of the model."""
    made = byte_tokenizer(config.max_positions)
    if isinstance(config, TinyVlConfig):
        made.add_special_tokens(
            {"additional_special_tokens": [START, *VISION_TOKENS]}, replace_extra_special_tokens=False
        )
        made.chat_template = template_with_images("".join(VISION_TOKENS[:3]))
    return made


def image_reader(
    config: TinyVlConfig, tokenizer: Any, min_pixels: int | None = None, max_pixels: int | None = None
) -> FileImageReader:
    """The reader of images for the model."""
    return FileImageReader(partial(_image_processor, config, tokenizer, min_pixels, max_pixels))


def _image_processor(config: TinyVlConfig, tokenizer: Any, least: int | None, most: int | None) -> ImageProcessor:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tile = (2 * config.patch_size) ** 2
    size = {"shortest_edge": tile, "longest_edge": 64 * tile}
    images = Qwen2VLImageProcessorPil(patch_size=config.patch_size, merge_size=2, temporal_patch_size=1, size=size)
    set_pixel_limits(images, least, most)
    processor = make_processor("Qwen2VLProcessor", images, tokenizer, {})
    token = VISION_TOKENS[1]
    return ImageProcessor(processor, tokenizer, token, tokenizer.convert_tokens_to_ids(token))


def architecture(config: SmallConfig, tokenizer: Any, init_from: str | None = None, head: Head = "lm") -> Any:
    """The shape of the model, as transformers has it. UnsupportedModelError without such a head."""
    if head == "scalar" and isinstance(config, TinyVlConfig):
        raise UnsupportedModelError(f"model={config.name} has no value head or reward head")
    common = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if isinstance(config, TinyVlConfig):
        return _vision_architecture(config, tokenizer, common)
    if not isinstance(config, TinyMoeConfig):
        return Qwen2Config(**common)
    return Qwen3MoeConfig(
        **common,
        moe_intermediate_size=config.intermediate_size,
        num_experts=config.experts,
        num_experts_per_tok=config.experts_per_token,
        norm_topk_prob=True,
    )


def _vision_architecture(config: TinyVlConfig, tokenizer: Any, common: dict[str, Any]) -> Any:
    half = config.hidden_size // config.heads // 2  # rotary pairs, for time, height and width
    sections = [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    ids = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    vision = {"depth": config.vision_layers, "embed_dim": 64, "hidden_size": config.hidden_size, "num_heads": 4}
    vision |= {"mlp_ratio": 2, "patch_size": config.patch_size, "spatial_merge_size": 2, "temporal_patch_size": 1}
    tokens = dict(
        zip(("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id"), ids, strict=True)
    )
    return Qwen2VLConfig(text_config=common | {"rope_parameters": rope}, vision_config=vision, **tokens)


def build(
    config: SmallConfig,
    *,
    tokenizer: Any,
    device: torch.device,
    seed: int,
    decide: Decide,
    head: Head = "lm",
    init_from: str | None = None,
    longest: int = 0,
    fit: InstallFusedOps | None = None,
    admit: CheckArchitecture | None = None,
    stored: Dtype | None = None,
) -> TransformersModel:
    """The model with weights from `seed`, or those of the folder `init_from`.

    head="scalar" scores rows, head="lm+value" has a value head beside the LM head. `fit` gets the module first (see
    `place_on_device`), `admit` its config before that; `stored` is the data type of its weights, None = the one it
    computes in. Raises SpecError if rows of `longest` tokens are too long for it.
    """
    shape = architecture(config, tokenizer, head=head)
    if head == "scalar":
        shape.num_labels = 1
    check_row_length(longest, max_row_length(shape))
    if admit is not None:
        admit(shape)
    kind, made = _KINDS[type(shape)][head == "scalar"], model_class_for_head(head)
    module: Any = init_with_seed(lambda: kind(shape), seed)
    source = WeightsSource(drawn=f"from seed {seed} for {_architecture_text(config)}")
    if init_from is not None:
        if isinstance(config, TinyVlConfig):
            load_renamed(module, init_from)
        else:
            load_folder(module, init_from)
        source = WeightsSource(folder=Path(init_from))
    compute = DTYPES[config.compute_dtype]
    kept = DTYPES[stored] if stored else compute
    module = place_on_device(module, kept, device, fit, compute, config.quantization, decide)
    return made(module, tokenizer, config, seed=seed, decide=decide, source=source)


def _architecture_text(config: SmallConfig) -> str:
    """What random weights depend on beside their seed."""
    own = config.model_dump(exclude=set(ModelConfig.model_fields))
    return " ".join(f"{name}={value}" for name, value in own.items())


# of a language model, and of one with a reward head instead
_KINDS: dict[type, tuple[Any, Any]] = {
    Qwen2Config: (Qwen2ForCausalLM, Qwen2ForSequenceClassification),
    Qwen3MoeConfig: (Qwen3MoeForCausalLM, Qwen3MoeForSequenceClassification),
    Qwen2VLConfig: (Qwen2VLForConditionalGeneration, None),
}
