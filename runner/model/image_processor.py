"""A model's own image processor: image placeholder tokens in a prompt, and pixels.

transformers' processor classes insist on a video processor, which needs torchvision; images need pillow alone.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers import AutoImageProcessor, ProcessorMixin
from transformers.models.auto import processing_auto

from runner.core.errors import DataError, EnvironmentProblem, Problem, SpecError
from runner.interfaces.media import ProcessedImage

if TYPE_CHECKING:
    from PIL.Image import Image

PARTS = ("image_processor", "tokenizer", "video_processor", "feature_extractor", "chat_template")


class ImageProcessor:
    """Turns images into what a model takes of them.

    placeholder: what a chat template writes; token_id: what fills the places of an image in `ProcessedImage.text`; how:
    all that results depend on beside the image
    """

    def __init__(self, processor: Any, tokenizer: Any, placeholder: str, image_token_id: int) -> None:
        """processor: of transformers, or a stand-in for it."""
        self.placeholder, self.token_id = placeholder, image_token_id
        self._processor, self._id_text = processor, str(tokenizer.convert_ids_to_tokens(image_token_id))
        settings = json.loads(processor.image_processor.to_json_string())
        self.how = json.dumps([type(processor).__name__, transformers.__version__, settings], sort_keys=True)
        self._joins_rows = type(processor).__name__ == "LlavaOnevisionProcessor"

    def variant(self, *, several: bool) -> str:
        """All that `process` depends on beside the image."""
        return f"{self.how} {several and self._joins_rows}"

    def save(self, folder: Path) -> None:
        """Write its settings as transformers does, for the class with or without torchvision."""
        content = json.loads(self._processor.image_processor.to_json_string())
        content |= {
            "image_processor_type": str(content["image_processor_type"]).removesuffix("Pil"),
            "processor_class": type(self._processor).__name__,
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(content, indent=2) + "\n")
        whole = folder / "processor_config.json"  # where transformers 5 keeps them, and reads them first
        found = json.loads(whole.read_text()) if whole.is_file() else {}
        if "image_processor" in found:
            whole.write_text(json.dumps({**found, "image_processor": content}, indent=2) + "\n")

    def process(self, image: Image, *, several: bool = False) -> ProcessedImage:
        """One image; several: whether its row has others (LLaVA-OneVision then takes it without its parts).

        Raises DataError for an image that the processor refuses, by its size for example.
        """
        shown = [image, image] if several and self._joins_rows else [image]
        try:
            values, texts = self._processor._process_images([shown], **self._options)
        except (ValueError, ZeroDivisionError, IndexError) as error:
            raise DataError(f"{image.width} x {image.height} pixels: {' '.join(str(error).split())[:200]}") from error
        count = texts[0].count(self._id_text)
        made = {name: torch.as_tensor(value) for name, value in values.items() if isinstance(value, Tensor)}
        if self._joins_rows:
            made = {name: value[:1] for name, value in made.items()}
            made["batch_num_images"] = torch.tensor([len(shown)])
        return ProcessedImage(texts[0], count, made)

    @property
    def _options(self) -> dict[str, Any]:
        return {"return_tensors": "pt", **(getattr(self._processor, "images_kwargs", None) or {})}


class _Pixtral:
    """Pixtral's placeholders; its processor class cannot be imported without torchvision."""

    image_token, image_break_token, image_end_token = "[IMG]", "[IMG_BREAK]", "[IMG_END]"

    def __init__(self, image_processor: Any, tokenizer: Any, patch_size: int, spatial_merge_size: int = 1) -> None:
        self.image_processor, self._patch_size = image_processor, patch_size * spatial_merge_size

    def _process_images(self, images: list[list[Image]], **options: Any) -> tuple[Any, list[str]]:
        values = self.image_processor(images, patch_size=self._patch_size, **options)
        return values, [self._rows(*size) for size in values["image_sizes"].tolist()]

    def _rows(self, height: int, width: int) -> str:
        row = self.image_token * (width // self._patch_size)
        rows = self.image_break_token.join([row] * (height // self._patch_size))
        return f"{rows}{self.image_end_token}"


class _SmolVLM:
    """SmolVLM's placeholders; its processor class needs num2words, for videos."""

    image_token = "<image>"

    def __init__(self, image_processor: Any, tokenizer: Any, image_seq_len: int = 169) -> None:
        self.image_processor, self._length = image_processor, image_seq_len
        self._marks = {"fake_token_around_image": "<fake_token_around_image>", "global_image_token": "<global-img>"}

    def _process_images(self, images: list[list[Image]], **options: Any) -> tuple[Any, list[str]]:
        from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

        values, marks = self.image_processor(images, return_row_col_info=True, **options), self._marks
        sizes = zip(values["rows"][0], values["cols"][0], strict=True)
        return values, [
            get_image_prompt_string(*size, self._length, image_token=self.image_token, **marks) for size in sizes
        ]


STAND_INS = {"PixtralProcessor": _Pixtral, "SmolVLMProcessor": _SmolVLM}


def load_image_processor(
    path: str,
    revision: str | None,
    architecture: Any,
    tokenizer: Any,
    *,
    min_pixels: int | None,
    max_pixels: int | None,
) -> ImageProcessor:
    """The image processor of the model at `path`, whose config is `architecture`.

    Raises EnvironmentProblem where the folder or the installed packages have none, SpecError for limits of pixels that
    this processor does not have.
    """
    name = processing_auto.PROCESSOR_MAPPING_NAMES.get(architecture.model_type)  # type: ignore[attr-defined]
    if name is None or (token_id := image_token_id(architecture)) is None:
        raise EnvironmentProblem(f"{path}: {architecture.model_type} has no image processor; use data without images")
    try:
        images = AutoImageProcessor.from_pretrained(path, revision=revision, backend="pil")
        set_pixel_limits(images, min_pixels, max_pixels)
        settings, _ = ProcessorMixin.get_processor_dict(path, revision=revision)
        processor = make_processor(name, images, tokenizer, settings)
    except (OSError, ImportError, AttributeError) as error:
        why = " ".join(str(error).split())[:200]
        raise EnvironmentProblem(f"{path}: its image processor ({name}) cannot be loaded: {why}") from error
    return ImageProcessor(processor, tokenizer, processor.image_token, token_id)


def make_processor(name: str, images: Any, tokenizer: Any, settings: Mapping[str, Any]) -> Any:
    """transformers' processor of this class around an image processor, without one of videos."""
    kind: Any = STAND_INS.get(name)
    if kind is None:
        kind = getattr(transformers, name)
        if not hasattr(kind, "replace_image_token"):
            raise ImportError(f"transformers {transformers.__version__} is too old for images; install 5.23 or later")
        # there is no video processor
        unchecked = {"check_argument_for_proper_class": lambda self, name, argument: None}
        kind = type(name, (kind,), unchecked)
    known = inspect.signature(kind.__init__).parameters
    parts = {"image_processor": images, "tokenizer": tokenizer}
    parts |= {"video_processor": None} if "video_processor" in known else {}
    return kind(**parts, **{key: settings[key] for key in known if key in settings and key not in PARTS})


def image_token_id(architecture: Any) -> Any:
    """The token id of an image's places; None for a model that has none."""
    found = getattr(architecture, "image_token_id", None)
    return getattr(architecture, "image_token_index", None) if found is None else found


def set_pixel_limits(images: Any, least: int | None, most: int | None) -> None:
    """Change the limits of an image's pixels. Raises SpecError if the processor has none."""
    for key, edge, value in (("min_pixels", "shortest_edge", least), ("max_pixels", "longest_edge", most)):
        if value is None:
            continue
        if not hasattr(images, "merge_size") or edge not in images.size:
            text = f"{type(images).__name__} does not size images by their number of pixels; leave it out"
            raise SpecError([Problem(f"data.{key}", text)])
        images.size = replace(images.size, **{edge: value})
