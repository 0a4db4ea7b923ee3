"""A model that somebody has, by one notation that every verb and option takes, and how it is loaded.

text ─parse_source─▶ ModelSource ─load_source─▶ LoadedModel        parsing imports no torch

latest, a run's folder                 a checkpoint of a run
a folder with config.json              an export, or any Hugging Face model
a folder with adapter_config.json      a PEFT adapter; its base is the one it names, or the one given
OWNER/NAME                             a model of the Hugging Face hub
modelscope:OWNER/NAME                  a model of ModelScope
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from runner.core.errors import EnvironmentProblem
from runner.model.hub_access import check, is_hub_id
from runner.run_dir.folder import display_path, find_trained_run
from runner.run_dir.resume_compatibility import PromptStyle

if TYPE_CHECKING:  # it brings torch, which may be broken
    from runner.interfaces import GenerativeModel

MODELSCOPE = "modelscope:"
ADAPTER_CONFIG = "adapter_config.json"
Checkpoint = int | Literal["best", "last"]


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """A PEFT adapter's folder, and the name that requests choose it by."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that somebody has.

    text: as typed; name: what clients call it; path: the run's folder, the model's folder or its hub id; with
    `adapters`, that of their base; checkpoint: of a run; revision: of a hub id.
    """

    text: str
    kind: Literal["run", "folder", "hub", "modelscope"]
    name: str
    path: str
    checkpoint: Checkpoint = "last"
    adapters: tuple[AdapterSource, ...] = ()
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode, ready for requests.

    adapters: the names that a request may choose; the first one is active. chat_template: None = the tokenizer has
    none. prompt_style: `text` where the model was trained on plain text, so that prompts are not rendered as chats.
    """

    name: str
    model: GenerativeModel
    tokenizer: Any
    chat_template: str | None
    prompt_style: PromptStyle
    adapters: tuple[str, ...] = ()
    step: int | None = None  # of a run's checkpoint


def parse_source(
    text: str, *, checkpoint: Checkpoint = "last", base: str | None = None, adapters: Sequence[str] = ()
) -> ModelSource:
    """The model that `text` means. Reads folder names and small configs only.

    base: the base of an adapter, where its own config names none or another one; adapters: more of them, each
    `FOLDER` or `NAME=FOLDER`. Raises EnvironmentProblem where there is no such model.
    """
    raise NotImplementedError


def load_source(
    source: ModelSource,
    *,
    dtype: Literal["float32", "bfloat16"] | None = None,
    device: str | Mapping[str, Any] = "auto",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """The model that a source means, on the device, in evaluation mode.

    dtype: None = bfloat16 on cuda and npu, float32 on cpu; device: a name, or its section of a spec. A run keeps its
    own dtype. Raises EnvironmentProblem, CheckpointError or SecurityError where it cannot be loaded.
    """
    raise NotImplementedError
