"""A teacher: another frozen model for which the same ids have the same meaning."""

from __future__ import annotations

import json
from typing import Any

from runner.core.errors import EnvironmentProblem
from runner.interfaces.media import ImageReader, images_of
from runner.model import hf
from runner.model.config import HfConfig, ModelConfig
from runner.model.transformers_model import TransformersModel
from runner.spec.base import Dtype

SIZES = frozenset({"size", "min_pixels", "max_pixels"})  # of images, which the student decides


def build(
    path: str,
    revision: str | None,
    like: ModelConfig,
    *,
    tokenizer: Any,
    key: str,
    dtype: Dtype | None = None,
    **options: Any,
) -> TransformersModel:
    """The frozen model at `path`, a folder or hub id, computed like the student (config `like`).

    tokenizer: the student's; key: the option that has the path; dtype: to compute and store in, None = the student's;
    options: of `hf.build`.
    Raises what `hf.build` does, and EnvironmentProblem for another vocabulary.
    """
    how = {name: getattr(like, name) for name in ModelConfig.model_fields if name != "name"}
    how |= {"gradient_checkpointing": False, "activation_offloading": False, "compile": False}
    how |= {"dtype": dtype or like.compute_dtype, "quantization": None}
    config = HfConfig(path=path, revision=revision, **how)
    own = hf.tokenizer(config, key)
    refuse_other_vocabulary(path, key, own, tokenizer)
    if (reader := images_of(tokenizer)) and reader.is_used:
        refuse_other_images(path, key, hf.image_reader(config, own), reader)
    model = hf.build(config, tokenizer=tokenizer, key=key, **options)
    model.module.requires_grad_(False)
    return model


def refuse_other_vocabulary(path: str, key: str, teachers: Any, students: Any) -> None:
    """Raise EnvironmentProblem unless both tokenizers agree on the student's ids and on the end token.

    The teacher's may have more ids.
    """
    theirs, ours = ({i: token for token, i in one.get_vocab().items()} for one in (teachers, students))
    differing = sorted(i for i in ours if theirs.get(i) != ours[i])
    if differing:
        there, here = theirs.get(differing[0], ""), ours[differing[0]]
        what = f"{len(differing)} ids differ, e.g. {differing[0]} is {there!r} (teacher) and {here!r} (student)"
    elif teachers.eos_token_id != students.eos_token_id:
        what = f"the teacher's end of sequence is {teachers.eos_token!r}, the student's is {students.eos_token!r}"
    else:
        return
    raise EnvironmentProblem(
        f"{key}={path}: its tokenizer is not the student's: {what}\n"
        "  the loss compares probabilities of the same ids: choose a teacher with the student's tokenizer"
    )


def refuse_other_images(path: str, key: str, teachers: ImageReader | None, students: ImageReader) -> None:
    """Raise EnvironmentProblem unless the teacher takes the same pixels of an image, its size aside."""
    if teachers is None:
        raise EnvironmentProblem(f"{key}={path} reads text alone, but the data has images; choose an image-text model")
    theirs, ours = (json.loads(one.how or "[null, null, {}]")[2] for one in (teachers, students))
    names = sorted(name for name in (theirs.keys() | ours.keys()) - SIZES if theirs.get(name) != ours.get(name))
    if names:
        what = f"{names[0]} is {theirs.get(names[0])} (teacher) and {ours.get(names[0])} (student)"
        text = f"{key}={path}: its image processor is not the student's: {what}"
        raise EnvironmentProblem(f"{text}\n  both read the same pixels: choose a teacher of the student's family")
