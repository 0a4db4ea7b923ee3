"""data=hub: data sets of the Hugging Face hub, through `datasets`; no code of a data set is ever run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import datasets  # type: ignore[import-untyped]

from runner.core.errors import DataError, EnvironmentProblem
from runner.data.config import ChatConfig, HubConfig
from runner.data.dataset import sha256
from runner.data.files import without_nulls
from runner.data.prepare import SourcePreparation, build_data
from runner.data.readers import Problems, Row, SourceLocation
from runner.spec.base import ItemKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from runner.interfaces import Data, Decide


@dataclass(frozen=True)
class HubSource:
    """One split of a hub data set."""

    name: str  # with its split: owner/name[train]
    table: datasets.Dataset
    key: str = "data.path"

    def digest(self) -> str:
        """sha256 over the Arrow files that `datasets` keeps, and the rows that the split takes from them."""
        if not self.table.cache_files:  # held in memory: there is nothing but the rows
            rows = (json.dumps(row, sort_keys=True, default=str).encode() for row in self.table)
            return hashlib.sha256(b"\n".join(rows)).hexdigest()
        files = [sha256(Path(file["filename"])) for file in self.table.cache_files]
        parts = [files, self.name, len(self.table), self.table.column_names]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def rows(self, problems: Problems) -> Iterator[Row]:
        """Rows as plain values; the nulls that Arrow fills missing keys with are taken out."""
        number = 0
        for number, value in enumerate(self.table, 1):
            yield Row(SourceLocation(self.name, number, "row"), without_nulls(value))
        if not number:
            problems.add_fault(self.name, "no rows; expected at least one")


def load_split(config: HubConfig, path: str, split: str, key: str = "data.path") -> HubSource:
    """Load a split. Raises EnvironmentProblem if the hub is unreachable, DataError if it has no such data."""
    if Path(path).expanduser().exists():  # `datasets` would read it, and turn text that looks like numbers into numbers
        raise DataError(f"{key}={path} is a file or folder on this machine; read it with: data=file data.path={path}")
    try:
        table = datasets.load_dataset(path, config.subset, split=split, revision=config.revision)
    except ConnectionError as error:
        raise EnvironmentProblem(
            f"{key}={path}: the hub cannot be reached, and the data set is not in the cache here ({error})\n"
            "  check the network (or HF_ENDPOINT, HF_HUB_OFFLINE), or fetch the files and use data=file data.path=..."
        ) from error
    except Exception as error:  # hub and parsers raise what they like; name and way out are what helps
        raise DataError(
            f"{key}={path}: cannot be loaded (subset {config.subset}, split {split}, revision {config.revision}): "
            f"{type(error).__name__}: {error}\n"
            "  check data.path, data.subset, data.split and data.revision, or use data=file"
        ) from error
    return HubSource(f"{path}[{split}]", table, key)


def build(
    config: HubConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    decide: Decide,
    cache_dir: Path,
    kind: ItemKind,
    chat: ChatConfig | None = None,
) -> Data:
    """The data of the hub's data sets. Raises DataError, EnvironmentProblem, StorageError."""
    training = [load_split(config, path, config.split) for path in config.sources()]
    held_out = None
    if config.eval_split is not None:
        held_out = load_split(config, config.sources()[0], config.eval_split, "data.eval_split of data.path")
    prepare = SourcePreparation(config, tokenizer, decide, cache_dir, kind, chat or ChatConfig())
    return build_data(prepare, training, held_out, seed)
