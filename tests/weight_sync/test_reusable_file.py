"""Files of the weight store that are written over: only if nobody has them, by every way, with the same result."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from runner.weight_sync import weight_store
from runner.weight_sync.store_dir import reserve_dir
from runner.weight_sync.weight_checksum import weights_digest
from runner.weight_sync.weight_store import StoredWeights, WeightStore, supports_leases, write_file

DEADLINE_S = 60.0


@pytest.fixture
def shelved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightStore]:
    monkeypatch.setattr(weight_store, "FILE_BYTES", 1000)
    (tmp_path / "shm").mkdir()
    if not supports_leases(tmp_path):
        pytest.skip("this disk knows no supports_leases")
    made = WeightStore(reserve_dir(tmp_path / "run", 0, tmp_path / "shm"))
    yield made
    made.close()


def weights(version: int, count: int = 4) -> dict[str, Tensor]:
    """To each tensor its file."""
    return {f"t{at}": torch.full((200 + at,), float(10 * version + at)) for at in range(count)}


def inodes(of: StoredWeights) -> set[int]:
    return {path.stat().st_ino for path in of.files}


@pytest.mark.parametrize("count", [4, 2, 6])
def test_a_dropped_version_is_written_over(shelved: WeightStore, count: int) -> None:
    first = inodes(shelved.put(1, weights(1).items()))
    shelved.drop_below(2)
    second = shelved.put(2, weights(2, count).items())
    assert inodes(second) <= first if count <= 4 else inodes(second) >= first
    assert {name: tensor.tolist() for name, tensor in StoredWeights(second.files, 2).items()} == {
        name: tensor.tolist() for name, tensor in weights(2, count).items()
    }
    assert StoredWeights(second.files, 2).digest == second.digest == weights_digest(weights(2, count))
    assert len(list(shelved.folder.iterdir())) == 1 + count, "nothing else stays"


def test_what_was_loaded_and_let_go_is_written_over(shelved: WeightStore) -> None:
    first = shelved.put(1, weights(1).items())
    old = inodes(first)
    read = StoredWeights(first.files, 1)
    loaded = {name: tensor.clone() for name, tensor in read.items() if read.digest == first.digest}
    del read
    shelved.drop_below(2)
    assert inodes(shelved.put(2, weights(2).items())) == old and weights_digest(loaded) == weights_digest(weights(1))


@contextmanager
def mapped(path: Path) -> Iterator[None]:
    with safe_open(path, "pt") as file:
        tensor = file.get_tensor("t0")
    yield
    assert tensor.tolist() == weights(1)["t0"].tolist(), "was written over"


def read_late(path: Path, here: Any, go: Any, found: Any) -> None:
    with safe_open(path, "pt") as file:
        tensor = file.get_tensor("t0")
    here.set()
    go.wait(DEADLINE_S)
    found.put(tensor.tolist())


@contextmanager
def mapped_elsewhere(path: Path) -> Iterator[None]:
    context = multiprocessing.get_context("fork")
    here, go, found = context.Event(), context.Event(), context.Queue()
    process = context.Process(target=read_late, args=(path, here, go, found))
    process.start()
    try:
        assert here.wait(DEADLINE_S)
        yield
        go.set()
        assert found.get(timeout=DEADLINE_S) == weights(1)["t0"].tolist(), "was written over"
    finally:
        process.kill()
        process.join()


@contextmanager
def opened(path: Path) -> Iterator[None]:
    with path.open("rb") as file:
        content = path.read_bytes()
        yield
        assert file.read() == content, "was written over"


@contextmanager
def digested(path: Path) -> Iterator[None]:
    weights = StoredWeights([path], 1)
    digest = weights.digest
    yield
    assert weights_digest(dict(weights)) == digest, "was written over"


@contextmanager
def linked(path: Path) -> Iterator[None]:
    other = path.with_name("of-a-server")
    os.link(path, other)
    content = path.read_bytes()
    yield
    assert other.read_bytes() == content, "was written over"
    other.unlink()


@pytest.mark.parametrize("has", [mapped, mapped_elsewhere, opened, digested, linked])
def test_what_somebody_has_is_not_written_over(shelved: WeightStore, has: Any) -> None:
    first = shelved.put(1, weights(1).items())
    old = inodes(first)
    with has(first.files[0]):
        shelved.drop_below(2)
        second = shelved.put(2, weights(2).items())
        assert len(inodes(second) & old) == 3, "the other files are"
        assert second.compute_digest() == second.digest == weights_digest(weights(2))


def test_who_comes_upon_a_file_that_is_written_waits_for_its_end(tmp_path: Path) -> None:
    if not supports_leases(tmp_path):
        pytest.skip("this disk knows no supports_leases")
    path = tmp_path / "file"
    path.write_bytes(b"old")
    handle = os.open(path, os.O_RDWR)
    assert weight_store._take_lease(handle)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    with ExitStack() as ending:
        ending.callback(reader.join, DEADLINE_S)
        ending.callback(weight_store._release, handle)
        reader.start()
        reader.join(0.3)
        assert reader.is_alive() and not read  # and this process has outlived the signal that told it
        os.write(handle, b"new")
    assert read == [b"new"]


@pytest.mark.parametrize("granted", [True, False])
def test_a_disk_whose_leases_mean_nothing_gets_new_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, granted: bool
) -> None:
    def lease(handle: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETLEASE and not granted:
            raise OSError(22, "no supports_leases here")
        return 0  # as in a container, whose files lie in layers: what is mapped is forgotten

    (tmp_path / "shm").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(weight_store.fcntl, "fcntl", lease)
        assert not supports_leases(tmp_path)
        made = WeightStore(reserve_dir(tmp_path / "run", 0, tmp_path / "shm"))
        old = dict(made.put(1, weights(1).items()))
        made.drop_below(2)
        assert not any(path.suffix for path in made.folder.iterdir()), "given back at once"
        new = made.put(2, weights(2).items())
    assert old["t0"].tolist() == weights(1)["t0"].tolist() and new.compute_digest() == weights_digest(weights(2))
    made.close()


def test_a_file_is_where_safetensors_itself_would_put_it(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(5.0), "a": torch.tensor(2.0), "c": torch.zeros(0, 3)}
    write_file(tmp_path / "file", tensors, {"runner": "changed"}, None)
    with safe_open(tmp_path / "file", "pt") as file:
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {  # noqa: SIM118
            name: tensor.tolist() for name, tensor in tensors.items()
        }
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
