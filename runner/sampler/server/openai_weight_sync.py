"""How a server gets the trainer's weights: not at all, by an adapter, or by reading all of them again.

    load(weights, version) ─▶ a folder that the server can read ─▶ it receives the path ─▶ the folder before is removed

Each load has a name and a folder of its own, so that no cache of the server's takes new weights for old ones. Where the
server is on this machine that folder is on the shelf, whose files are linked, not copied, and which no end of a run
leaves behind. In another one a run always has the same place, and clears it before its first load.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file

from runner.core.errors import SamplerError, StorageError
from runner.core.fsync_io import error_reason
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


class AdapterSync(WeightSync):
    """The adapter alone, in a folder as PEFT writes it; the server has the base."""

    def __init__(self, server: OpenAiServer, folder: Path | None, blueprint: Path) -> None:
        """Raises EnvironmentProblem where the server takes no adapters."""
        super().__init__(server)  # its model, until the first adapter is there
        server.check_adapters()
        self._server, self._places = server, SyncFolders(folder, blueprint)
        self._settings = blueprint / "adapter" / "adapter_config.json"

    def load(self, weights: StoredWeights) -> None:
        """See `WeightSync`."""
        name, place = self._places.new(weights)
        with _explain_os_errors(place):
            shutil.copy2(self._settings, place / "adapter_config.json")
            tensors = {tensor: weights[tensor].contiguous() for tensor in sorted(weights.changed)}
            save_file(tensors, place / "adapter_model.safetensors", {"format": "pt"})
        self._server.load_adapter(name, place)
        self._forget()
        self.model = name
        self._places.keep(place)

    def close(self) -> None:
        """See `WeightSync`."""
        try:
            self._forget()
        except SamplerError as error:
            log.warning("could not unload the adapter %s from the server: %s", self.model, error)
        finally:
            self._places.close()

    def _forget(self) -> None:
        if self.model != self._server.model:
            self._server.unload_adapter(self.model)
            self.model = self._server.model


class ReloadSync(WeightSync):
    """All weights, in a folder with the files of a model."""

    def __init__(self, server: OpenAiServer, folder: Path | None, blueprint: Path) -> None:
        """Raises EnvironmentProblem where the server cannot read weights again."""
        super().__init__(server)
        server.check_development()
        self._server, self._places, self._blueprint = server, SyncFolders(folder, blueprint), blueprint

    def load(self, weights: StoredWeights) -> None:
        """See `WeightSync`."""
        _, place = self._places.new(weights)
        with _explain_os_errors(place):
            _link(weights.files, place, self._places.newest)
            (place / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights.file_names}))
            for file in self._blueprint.iterdir():
                if file.is_file():
                    shutil.copy2(file, place / file.name)
        self._server.reload(place)
        self._places.keep(place)

    def close(self) -> None:
        """See `WeightSync`; the server keeps the last weights."""
        self._places.close()


class SyncFolders:
    """A folder for each load, below `shared`, None = beside the weights; `newest`: the last one read.

    own: a folder of this run's, the same one after a resume, by which its place below `shared` is known
    """

    def __init__(self, shared: Path | None, own: Path) -> None:
        self._of_run = f"run-{hashlib.blake2b(os.fsencode(own.resolve()), digest_size=8).hexdigest()}"
        self._stem = f"run-{secrets.token_hex(4)}"  # another one after a resume: the server may know the old names
        self._shared, self._root, self._loads = shared, Path(), 0
        self.newest: Path | None = None

    def new(self, weights: StoredWeights) -> tuple[str, Path]:
        """A name that no load has had, and its folder, empty."""
        self._root = (self._shared or weights.files[0].parent) / self._of_run
        if not self._loads:
            shutil.rmtree(self._root, ignore_errors=True)  # of a process that was killed
        self._loads += 1
        name = f"{self._stem}-v{weights.version}-{self._loads}"
        place = self._root / name
        with _explain_os_errors(place):
            place.mkdir(parents=True)
        return name, place

    def keep(self, place: Path) -> None:
        """This one has been read: the others go."""
        for other in self._root.iterdir():
            if other != place:
                shutil.rmtree(other)
        self.newest = place

    def close(self) -> None:
        """Remove all."""
        if self._loads:
            shutil.rmtree(self._root, ignore_errors=True)


@contextmanager
def _explain_os_errors(place: Path) -> Iterator[None]:
    """Say where weights could not be written."""
    try:
        yield
    except OSError as error:
        text = f"weights for the server cannot be written to {place}: {error_reason(error)}"
        raise StorageError(f"{text}; free space, or set sampler.folder to a folder with space") from error


def _link(files: Iterable[Path], place: Path, before: Path | None) -> None:
    """Put the files in `place`: hard links on the same disk, else copies; unchanged copies are kept."""
    for file in files:
        unchanged = before is not None and file.name.startswith("fixed-") and (before / file.name).exists()
        source = before / file.name if before is not None and unchanged else file
        try:
            os.link(source, place / file.name)
        except OSError:
            shutil.copyfile(source, place / file.name)


def make_weight_sync(kind: str, server: OpenAiServer, folder: Path | None, blueprint: Path) -> WeightSync:
    """The way that sampler.weight_sync names; folder: sampler.folder."""
    if kind == "none":
        return WeightSync(server)
    return AdapterSync(server, folder, blueprint) if kind == "adapter" else ReloadSync(server, folder, blueprint)
