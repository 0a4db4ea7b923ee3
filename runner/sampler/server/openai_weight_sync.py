"""Send the trainer's weights to a running server: none, an adapter, or all of them.

    load(weights, version) ─▶ a folder that the server can read ─▶ it receives the path ─▶ the folder before is removed

Each load has a name and a folder of its own, so that no cache of the server confuses new weights with old ones. For a
server on this machine the folder is in the weight store: its files are linked, not copied, and removed however a run
ends. Below sampler.folder a run always uses the same folder, and clears it before its first load.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file

from runner.core.errors import SamplerError
from runner.core.fsync_io import storage_errors
from runner.sampler.server.openai_server import OpenAiServer
from runner.weight_sync.weight_store import StoredWeights

INDEX = "model.safetensors.index.json"  # without it transformers finds no files but model.safetensors
log = logging.getLogger("runner")


class WeightSync:
    """The server's weights are what they are. model: the name that requests have to give."""

    def __init__(self, server: OpenAiServer) -> None:
        self.model = server.model

    def load(self, weights: StoredWeights) -> None:
        """Nothing is sent."""

    def close(self) -> None:
        """Remove what was left behind, as far as the server is there."""


class FolderSync(WeightSync):
    """A folder for each load, below `shared`, None = beside the weights.

    own: a folder of this run's, the same one after a resume, by which its place below `shared` is known; it has the
    files of a model without weights
    """

    def __init__(self, server: OpenAiServer, shared: Path | None, own: Path) -> None:
        super().__init__(server)
        self._server, self._shared, self._own = server, shared, own
        self._of_run = f"run-{hashlib.blake2b(os.fsencode(own.resolve()), digest_size=8).hexdigest()}"
        self._stem = f"run-{secrets.token_hex(4)}"  # another one after a resume: the server may know the old names
        self._root, self._num_loads = Path(), 0
        self._newest: Path | None = None  # the last one read

    def load(self, weights: StoredWeights) -> None:
        """See `WeightSync`. Raises StorageError where they cannot be written."""
        self._root = (self._shared or weights.files[0].parent) / self._of_run
        if not self._num_loads:
            shutil.rmtree(self._root, ignore_errors=True)  # of a process that was killed
        self._num_loads += 1
        place = self._root / f"{self._stem}-v{weights.version}-{self._num_loads}"  # a name that no load has had
        remedy = "; free space, or set sampler.folder to a folder with space"
        with storage_errors(f"weights for the server cannot be written to {place}", remedy):
            place.mkdir(parents=True)
            self._write(weights, place)
        self._send(place)
        for other in self._root.iterdir():
            if other != place:
                shutil.rmtree(other)
        self._newest = place

    def close(self) -> None:
        """See `WeightSync`; the server keeps the last weights."""
        if self._num_loads:
            shutil.rmtree(self._root, ignore_errors=True)

    def _write(self, weights: StoredWeights, place: Path) -> None:
        """Write what the server reads into an empty folder. Raises OSError."""
        raise NotImplementedError

    def _send(self, place: Path) -> None:
        """Make the server read the folder. Raises SamplerError."""
        raise NotImplementedError


class AdapterSync(FolderSync):
    """The adapter alone, in a folder as PEFT writes it; the server has the base."""

    def _write(self, weights: StoredWeights, place: Path) -> None:
        shutil.copy2(self._own / "adapter" / "adapter_config.json", place / "adapter_config.json")
        tensors = {tensor: weights[tensor].contiguous() for tensor in sorted(weights.changed)}
        save_file(tensors, place / "adapter_model.safetensors", {"format": "pt"})

    def _send(self, place: Path) -> None:
        self._server.load_adapter(place.name, place)
        self._forget()
        self.model = place.name

    def close(self) -> None:
        """See `WeightSync`."""
        try:
            self._forget()
        except SamplerError as error:
            log.warning("could not unload the adapter %s from the server: %s", self.model, error)
        finally:
            super().close()

    def _forget(self) -> None:
        if self.model != self._server.model:
            self._server.unload_adapter(self.model)
            self.model = self._server.model


class ReloadSync(FolderSync):
    """All weights, in a folder with the files of a model."""

    def _write(self, weights: StoredWeights, place: Path) -> None:
        _link(weights.files, place, self._newest)
        (place / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights.file_names}))
        for file in self._own.iterdir():
            if file.is_file():
                shutil.copy2(file, place / file.name)

    def _send(self, place: Path) -> None:
        self._server.reload(place)


def _link(files: Iterable[Path], place: Path, before: Path | None) -> None:
    """Put the files in `place`: hard links on the same disk, else copies; unchanged copies are kept."""
    for file in files:
        unchanged = before is not None and file.name.startswith("fixed-") and (before / file.name).exists()
        source = before / file.name if before is not None and unchanged else file
        try:
            os.link(source, place / file.name)
        except OSError:
            shutil.copyfile(source, place / file.name)


def make_weight_sync(kind: str, server: OpenAiServer, folder: Path | None, own: Path) -> WeightSync:
    """The way that sampler.weight_sync names; folder: sampler.folder.

    Raises EnvironmentProblem where the server does not take weights in this way.
    """
    if kind == "adapter":
        server.check_adapters()
        return AdapterSync(server, folder, own)
    if kind == "reload":
        server.check_development()
        return ReloadSync(server, folder, own)
    return WeightSync(server)
