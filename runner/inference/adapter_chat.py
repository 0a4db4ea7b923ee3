"""Checks that adapters served over one base share a chat template and an end token."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem
from runner.data.config import ChatConfig
from runner.inference.model_source import ModelSource, fetch_source
from runner.model.model_folder import has_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMPARED = {"chat template": "chat_template", "end token": "eos_token_id"}


def check_shared_chat(source: ModelSource, trust_remote_code: bool, base_name: str | None) -> str | None:
    """The folder whose tokenizer the adapters share; None = the base's, or one like it.

    base_name: by which requests choose the base; a line says that it is rendered with another template. Raises
    EnvironmentProblem where adapters differ.
    """
    folders = [adapter.path for adapter in source.adapters if has_tokenizer(adapter.path)]
    if not folders:
        return None
    base = fetch_source(source).path
    loaded = load_tokenizer(folders[0], trust_remote_code)
    for adapter in source.adapters:
        check_chat(loaded, adapter.path, base, trust_remote_code, f"the adapter {folders[0]}")
    if Path(base).is_dir() and not has_tokenizer(base):
        return folders[0]
    if not (difference := _difference(loaded, load_tokenizer(base, trust_remote_code))):
        return None
    if base_name is not None:
        print(f"the base {base_name} is served with the {difference} of its adapters, which differs", file=sys.stderr)
    return folders[0]


def check_chat(
    loaded: PreTrainedTokenizerBase, folder: str, base: str | None, trust_remote_code: bool, whose: str
) -> None:
    """Compare an adapter's chat template and end token with those of `loaded`.

    base: whose tokenizer an adapter without one uses, None = `loaded`. Raises EnvironmentProblem where they differ.
    """
    path = folder if has_tokenizer(folder) else base
    if path is not None and (difference := _difference(loaded, load_tokenizer(path, trust_remote_code))):
        raise EnvironmentProblem(
            f"the adapter {folder} has another {difference} than {whose}; adapters served together share one\n"
            f"  serve it alone: run serve {folder}\n  or merge it: run export {folder} --merge --out FOLDER"
        )


def load_tokenizer(path: str, trust_remote_code: bool) -> Any:
    """The tokenizer of a folder or hub id, with the chat template that prompts are rendered with."""
    from runner.data.chat_template import install_template
    from runner.model import hf
    from runner.model.config import HfConfig

    tokenizer = hf.tokenizer(HfConfig(path=path, tokenizer=path, trust_remote_code=trust_remote_code))
    install_template(tokenizer, ChatConfig(), Decisions())
    return tokenizer


def _difference(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> str:
    return " and ".join(text for text, name in COMPARED.items() if getattr(one, name) != getattr(other, name))
