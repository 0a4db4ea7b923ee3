"""The transformers class that loads a model of a config; other kinds are refused by name."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from runner.core.errors import EnvironmentProblem, UnsupportedModelError
from runner.spec.base import Head


def auto_class(architecture: Any, head: Head) -> Any:
    """The transformers class that loads the whole model, with its vision part where it has one."""
    if head == "scalar":
        return AutoModelForSequenceClassification
    return AutoModelForImageTextToText if is_image_text(architecture) else AutoModelForCausalLM


def auto_class_name(module: Any) -> str:
    """The name of the class that loads a transformers module that was saved."""
    name: str = auto_class(module.config, "scalar" if hasattr(module, "score") else "lm").__name__
    return name


def is_image_text(architecture: Any) -> bool:
    """Whether a transformers config is of a model with a vision part."""
    return type(architecture) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and hasattr(architecture, "vision_config")


_OTHER_KINDS: dict[Any, str] = {  # of those that AutoModelForCausalLM lacks; the first that has it says what it is
    AutoModelForImageTextToText: "a model of images and text",
    AutoModelForSpeechSeq2Seq: "a model of speech",
    AutoModelForSeq2SeqLM: "an encoder-decoder",
    AutoModelForMaskedLM: "an encoder",
    AutoModelForCausalLM: "a causal language model",
    AutoModelForMultimodalLM: "a model of text, images, sound and video, of which sound and video are not supported",
}


def refuse_other_kind(config: Any, source: str, head: Head) -> None:
    """Raise EnvironmentProblem where transformers has no language model, or classifier, for a config."""
    auto = auto_class(config, head)
    # transformers has a head for each token of these too, which would see the tokens that it predicts
    encodes = type(config) in AutoModelForMaskedLM._model_mapping and not (
        config.is_encoder_decoder or getattr(config, "is_decoder", True)
    )
    hears = config.model_type.endswith("_thinker")  # of Qwen-Omni; its backbone takes no pixels, but features
    known = type(config) in auto._model_mapping and not encodes and not hears
    if known or auto.__name__ in (getattr(config, "auto_map", None) or {}):
        return
    kinds = [what for other, what in _OTHER_KINDS.items() if type(config) in other._model_mapping]
    what = _OTHER_KINDS[AutoModelForMultimodalLM] if hears else next(iter(kinds), "no language model")
    text = f"{source} has model_type={config.model_type}, which is {what}"
    if head == "scalar" and (type(config) in AutoModelForCausalLM._model_mapping or is_image_text(config)):
        lacks = f"transformers {version('transformers')} has no sequence classifier for it"
        raise UnsupportedModelError(f"{text}; {lacks}\n  choose another model; for ppo type algorithm.critic=shared")
    raise EnvironmentProblem(
        f"{text}, not a causal language model or image-text model of transformers {version('transformers')}\n"
        f"  set the folder or hub id of such a model: {source.partition('=')[0]}=…"
    )
