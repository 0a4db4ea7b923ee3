"""data=file: the user's own files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from runner.data.config import FileConfig
from runner.data.prepare import Preparation, build_data
from runner.data.sources import find_sources
from runner.interfaces import Data, Decide
from runner.spec.base import ItemKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build(
    config: FileConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    decide: Decide,
    cache_dir: Path,
    kind: ItemKind,
) -> Data:
    """The data of the user's files. Raises DataError, StorageError."""
    training, held_out = find_sources(config.sources(), config.eval_path)
    for source in [*training, *([held_out] if held_out else [])]:
        if source.list.ignored:
            names = f"not read: {', '.join(f.name for f in source.list.ignored)}"
            decide("data.files", names, names, f"{source.key}={source.name}: no data files")
    return build_data(Preparation(config, tokenizer, decide, cache_dir, kind), training, held_out, seed)
