"""data=hub and data=modelscope: data sets read with `datasets`; no code of theirs is ever run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]

from runner.core.errors import DataError, EnvironmentProblem
from runner.core.http_client import modelscope_site, site_fault
from runner.core.untrusted_text import without_nulls
from runner.data.cache_files import file_digest
from runner.data.config import HubConfig, ModelScopeConfig, RemoteConfig
from runner.data.readers import Problems, Row, SourceLocation

ANSWER_S = 5.0  # for ModelScope to answer


@dataclass(frozen=True)
class HubSource:
    """One split of a hub data set."""

    name: str  # with its split: owner/name[train]
    table: datasets.Dataset | datasets.IterableDataset
    key: str = "data.path"
    content: str = ""  # hash of a stream's files

    def digest(self, notes: Path | None = None) -> str:
        """sha256 over the Arrow files of `datasets` and the rows of the split; notes: see `file_digest`."""
        if isinstance(self.table, datasets.IterableDataset):
            return hashlib.sha256(f"{self.name} {self.content}".encode()).hexdigest()
        if not self.table.cache_files:  # held in memory: there is nothing but the rows
            rows = (json.dumps(row, sort_keys=True, default=str).encode() for row in self.table)
            return hashlib.sha256(b"\n".join(rows)).hexdigest()
        files = [file_digest(Path(file["filename"]), notes) for file in self.table.cache_files]
        parts = [files, self.name, len(self.table), self.table.column_names]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def image_folders(self) -> list[str]:
        """None: paths of its images are absolute, or begin at data.media_root."""
        return []

    def rows(self, problems: Problems) -> Iterator[Row]:
        """Rows as plain values; the nulls that Arrow fills missing keys with are taken out.

        Raises EnvironmentProblem where a stream ends before its end.
        """
        number = 0
        try:
            for number, value in enumerate(self.table, 1):
                yield Row(SourceLocation(self.name, number, "row"), without_nulls(value))
        except Exception as error:  # of a stream, which is downloaded and parsed here: hub and parsers raise any
            text = f"{self.key}={self.name}: cannot be read after row {number}: {type(error).__name__}: {error}"
            raise EnvironmentProblem(
                f"{text}\n  check the network and type `run resume`, or type data.streaming=false"
            ) from error
        if not number:
            problems.add_fault(self.name, "no rows; expected at least one")


def load_split(
    config: RemoteConfig, path: str, split: str, key: str = "data.path", streaming: bool = False
) -> HubSource:
    """Load or open a split.

    Raises EnvironmentProblem if the hub is unreachable, DataError if it has no such data.
    """
    if Path(path).expanduser().exists():  # `datasets` would read it, and turn text that looks like numbers into numbers
        raise DataError(f"{key}={path} is a file or folder on this machine; read it with: data=file data.path={path}")
    files = fetch_modelscope(path, config.revision, key) if isinstance(config, ModelScopeConfig) else path
    revision = config.revision if isinstance(config, HubConfig) else None  # of a folder there is one
    try:
        content = ""
        if streaming:
            builder = datasets.load_dataset_builder(files, config.subset, revision=revision)
            table, content = builder.as_streaming_dataset(split), builder.hash
        else:
            table = datasets.load_dataset(files, config.subset, split=split, revision=revision)
    except ConnectionError as error:
        raise EnvironmentProblem(
            f"{key}={path}: the hub cannot be reached, and the data set is not in the local cache ({error})\n"
            "  check the network (or HF_ENDPOINT, HF_HUB_OFFLINE), or use downloaded files: data=file "
            "data.path=..."
        ) from error
    except Exception as error:  # hub and parsers raise what they like; name and way out are what helps
        raise DataError(
            f"{key}={path}: cannot be loaded (subset {config.subset}, split {split}, revision {config.revision}): "
            f"{type(error).__name__}: {error}\n"
            "  check data.path, data.subset, data.split and data.revision, or use data=file"
        ) from error
    _keep_encoded(table.info.features)
    return HubSource(f"{path}[{split}]", table, key, content)


def _keep_encoded(feature: Any) -> None:
    """Let `datasets` give images and other media as {bytes, path}, in any column or part of one."""
    if hasattr(feature, "decode"):
        feature.decode = False
    for inner in feature.values() if isinstance(feature, dict) else [getattr(feature, "feature", None)]:
        if inner is not None:
            _keep_encoded(inner)


def fetch_modelscope(path: str, revision: str | None, key: str) -> str:
    """The folder that a data set of ModelScope is downloaded to; what is there is not fetched again.

    Raises EnvironmentProblem, within seconds where the site cannot be reached.
    """
    try:
        from modelscope import dataset_snapshot_download
    except ImportError as error:
        text = "data=modelscope needs the package modelscope: pip install 'posttrain-run[modelscope]'"
        raise EnvironmentProblem(text) from error
    site = modelscope_site(os.environ)
    download = f"modelscope download --dataset {path} --local_dir {path.rpartition('/')[2]}"
    hint = f"{download}  # where it can be reached; then copy the folder, and type data=file data.path=FOLDER"
    if fault := site_fault(site, ANSWER_S, os.environ):
        raise EnvironmentProblem(f"{key}={path}: {fault}\n  {hint}")
    try:
        return str(dataset_snapshot_download(path, revision=revision))
    except Exception as error:  # modelscope's own, requests', OSError
        raise EnvironmentProblem(f"{key}={path} cannot be downloaded from {site}: {error}\n  {hint}") from error


def load_sources(config: RemoteConfig) -> tuple[list[HubSource], HubSource | None]:
    """(training sources, held-out source). Raises DataError, EnvironmentProblem."""
    training = [load_split(config, path, config.split, streaming=config.streaming) for path in config.sources()]
    if config.eval_split is None:
        return training, None
    return training, load_split(config, config.sources()[0], config.eval_split, "data.eval_split of data.path")
