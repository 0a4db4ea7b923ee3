"""The shape of the job's model, without its weights: from a folder, the hub's cache, our own list, or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from runner.errors import EnvironmentProblem, Problem, SpecError
from runner.model import tiny
from runner.model.config import HfConfig, ModelConfig, SmallConfig
from runner.plan.published import PUBLISHED


def architecture(config: ModelConfig, key: str = "model") -> tuple[Any, str]:
    """The transformers config of a model, and where it was found.

    Raises EnvironmentProblem if it is nowhere, SpecError for a model that no plan can be made of.
    """
    if isinstance(config, SmallConfig):
        return tiny.architecture(config, tiny.tokenizer(config)), f"model={config.name}"
    if not isinstance(config, HfConfig):
        raise SpecError([Problem(key, f"a plan can be made for model=hf, tiny and tiny_moe, not for {config.name}")])
    if config.trust_remote_code:
        text = "a plan runs no code of a model's own; it can be made for the architectures that transformers has"
        raise SpecError([Problem(f"{key}.trust_remote_code", text)])
    return published(config.path, config.revision)


def published(path: str, revision: str | None = None) -> tuple[Any, str]:
    """The config of a folder or hub id, and where it was found; the hub itself is asked last, because it may be far."""
    if Path(path).expanduser().exists():
        return _read(str(Path(path).expanduser()), revision, local=True), "its folder"
    try:
        return AutoConfig.from_pretrained(path, revision=revision, local_files_only=True), "the hub's cache"
    except (OSError, ValueError):
        if (shape := PUBLISHED.get(path)) is not None:
            return AutoConfig.for_model(shape.kind, **shape.options()), "the list of published shapes"
    return _read(path, revision, local=False), "the hub"


def _read(path: str, revision: str | None, local: bool) -> Any:
    try:
        return AutoConfig.from_pretrained(path, revision=revision, local_files_only=local)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EnvironmentProblem(
            f"the shape of {path} is not known here: {reason}\n"
            "  give a folder with its config.json (the weights are not read): model.path=FOLDER"
        ) from error
