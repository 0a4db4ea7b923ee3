"""The weight store: versions of weights in files, their digest, where they lie, and that nothing of them stays."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from runner.core.errors import EnvironmentProblem, StorageError
from runner.weight_sync import store_dir, weight_checksum, weight_store
from runner.weight_sync.store_dir import reserve_dir, store_dirs
from runner.weight_sync.weight_checksum import weights_digest
from runner.weight_sync.weight_store import StoredWeights, WeightStore

Named = dict[str, Tensor]


def weights(seed: int = 0) -> Named:
    """Of many types and shapes, one of them larger than a file's usual size."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(300, 100, generator=generator),
        "a.scalar": torch.tensor(3.0 + seed),
        "b.half": torch.randn(7, 5, generator=generator).bfloat16(),
        "c.empty": torch.zeros(0, 4),
        "d.ids": torch.arange(9),
        "e.across": torch.randn(6, 4, generator=generator).T,
        "f.flags": torch.tensor([True, False]),
    }


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def shelved(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightStore]:
    monkeypatch.setattr(weight_store, "FILE_BYTES", 1000)
    monkeypatch.setattr(weight_checksum, "PIECE_BYTES", 4096)
    made = WeightStore(reserve_dir(tmp_path / "run", 0, memory))
    yield made
    made.close()
    assert list(memory.iterdir()) == []


def same(one: Named, other: Named) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one
    )


def test_what_is_put_is_read_elsewhere_byte_for_byte(shelved: WeightStore) -> None:
    fixed, first, second = {"base": torch.randn(9)}, weights(1), weights(2)
    shelved.keep(fixed.items())
    for version, tensors in ((3, first), (4, second)):
        made = shelved.put(version, tensors.items())
        again = StoredWeights(made.files, version)  # from paths alone
        assert same(dict(again), fixed | tensors) and again.changed == tensors.keys()
        assert again.digest == made.digest == weights_digest(fixed | tensors) == again.compute_digest()
        assert len(made.files) == 3
        assert set().union(*(load_file(path) for path in made.files)) == (fixed | tensors).keys()
        assert made.num_changed_bytes < sum(path.stat().st_size for path in made.files)
    assert shelved.get(3).digest != shelved.get(4).digest
    held = dict(shelved.get(3))
    shelved.drop_below(4)
    assert same(held, fixed | first), "who has it mapped keeps it"
    assert same(dict(shelved.get(4)), fixed | second)
    assert not any(path.name.startswith("v3") for path in shelved.folder.iterdir())


def test_of_versions_nothing_is_remembered(shelved: WeightStore) -> None:
    weight_store._file_digests.cache_clear()
    shelved.keep({"base": torch.randn(9)}.items())
    for version in range(3):
        StoredWeights(shelved.put(version, weights(version).items()).files, version).compute_digest()
        shelved.drop_below(version)
    assert weight_store._file_digests.cache_info().currsize == 1, "the file of what all versions share"


def test_a_digest_knows_every_bit_name_type_and_shape_and_no_order() -> None:
    tensors = weights()
    digest = weights_digest(tensors)
    assert digest == weights_digest(dict(reversed(tensors.items())))
    others = [
        tensors
        | {"large": tensors["large"].clone().index_put_((torch.tensor(299), torch.tensor(99)), torch.tensor(0.0))},
        tensors | {"large": tensors["large"].reshape(100, 300)},
        tensors | {"d.ids": tensors["d.ids"].view(torch.uint64)},
        {**{name: one for name, one in tensors.items() if name != "a.scalar"}, "a.scala": tensors["a.scalar"]},
        {name: one for name, one in tensors.items() if name != "c.empty"},
    ]
    assert len({digest, *(weights_digest(one) for one in others)}) == 1 + len(others)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=8), cut=st.integers(1, 3000))
def test_the_digest_does_not_depend_on_files(shelved: WeightStore, shapes: list[list[int]], cut: int) -> None:
    tensors = {f"t{at}": torch.randn(shape) for at, shape in enumerate(shapes)}
    weight_store.FILE_BYTES = cut  # the fixture puts it back
    made = shelved.put(0, tensors.items())
    assert made.digest == weights_digest(tensors) == StoredWeights(made.files, 0).digest
    shelved.drop_below(1)


def test_bytes_that_were_changed_are_found(shelved: WeightStore) -> None:
    made = shelved.put(0, weights().items())
    path = next(path for path in made.files if "large" in load_file(path))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert made.compute_digest() != made.digest == weights_digest(weights())


def test_no_more_is_held_than_a_file_and_a_tensor(shelved: WeightStore) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for at in range(40):
            tensor = torch.zeros(50)  # 200 bytes; five to a file
            alive.append(weakref.ref(tensor))
            most = max(most, sum(one() is not None for one in alive))
            yield f"t{at}", tensor
            del tensor

    made = shelved.put(0, tensors())
    assert len(made) == 40 and len(made.files) == 8 and most <= 7


@pytest.mark.parametrize("when", [0, 1])
def test_without_room_all_tensors_are_taken_and_the_words_say_where(
    shelved: WeightStore, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    taken: list[str] = []
    write, calls = weight_store.write_file, []

    def full(*arguments: object) -> dict[str, bytes]:
        calls.append(arguments)
        if len(calls) > when:
            raise OSError(28, "No space left on device")
        return write(*arguments)  # type: ignore[arg-type]

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights().items():
            taken.append(name)
            yield name, tensor

    monkeypatch.setattr(weight_store, "write_file", full)
    with pytest.raises(StorageError, match=r"the weights v7 .*the disk is full.*--shm-size.*run resume"):
        shelved.put(7, tensors())
    assert taken == list(weights()), "other ranks hold pieces of all of them"
    assert [path.name for path in shelved.folder.iterdir()] == [store_dir.RUN]


def test_what_was_said_to_stay_may_not_change(shelved: WeightStore) -> None:
    shelved.keep(weights().items())
    with pytest.raises(ValueError, match=r"version 1 .* declared constant: a\.scalar"):
        shelved.put(1, [("a.scalar", torch.tensor(0.0))])


def test_the_folder_is_for_this_user_and_says_whose_it_is(tmp_path: Path, memory: Path) -> None:
    made = reserve_dir(tmp_path / "run", 0, memory)
    assert made.folder == store_dirs(tmp_path / "run", memory)[0] and made.folder.parent == memory
    assert made.folder.stat().st_mode & 0o777 == 0o700
    assert (made.folder / store_dir.RUN).read_text() == str(tmp_path / "run")
    with pytest.raises(EnvironmentProblem, match="another process publishes"):
        reserve_dir(tmp_path / "run", 0, memory)
    made.release()
    assert list(memory.iterdir()) == []


def test_where_there_is_no_room_the_run_folder_is_taken_and_that_is_said(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = reserve_dir(tmp_path / "run", 2**60, memory)
    assert made.folder.is_relative_to(tmp_path / "run" / "weights")
    assert "1.15e+06 TB needed" in caplog.text
    made.release()


def test_a_network_disk_that_locks_no_folders_will_do(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(handle: int, operation: int) -> None:
        raise OSError(errno.EBADF, "as NFS says of a folder, which cannot be opened to be written")

    monkeypatch.setattr(store_dir.fcntl, "flock", refused)
    first = reserve_dir(tmp_path / "run", 2**60, memory)
    (first.folder / "v1-0000.safetensors").touch()
    os.close(first.handle)  # as a killed process does
    made = reserve_dir(tmp_path / "run", 2**60, memory)
    assert made.folder == first.folder and not (made.folder / "v1-0000.safetensors").exists()
    made.release()
    assert not made.folder.exists()


def test_a_link_that_somebody_put_there_is_not_followed(tmp_path: Path, memory: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    store_dirs(tmp_path / "run", memory)[0].symlink_to(elsewhere)
    made = reserve_dir(tmp_path / "run", 0, memory)
    assert made.folder.is_relative_to(tmp_path / "run") and list(elsewhere.iterdir()) == []
    made.release()


def publish_until_killed(root: Path, memory: Path, written: object) -> None:
    made = WeightStore(reserve_dir(root, 0, memory))
    made.put(1, weights().items())
    written.set()  # type: ignore[attr-defined]
    for version in range(2, 10**6):
        made.put(version, weights(version).items())
        made.drop_below(version)


def test_the_next_run_removes_what_a_killed_process_left(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = multiprocessing.get_context("fork")
    written = context.Event()
    process = context.Process(target=publish_until_killed, args=(tmp_path / "run", memory, written))
    process.start()
    try:
        assert written.wait(300)
        other = reserve_dir(tmp_path / "other", 0, memory)  # the run is alive: nothing of it is touched
        assert store_dirs(tmp_path / "run", memory)[0].is_dir() and not caplog.text
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    other.release()
    assert len(list(memory.iterdir())) == 1
    reserve_dir(tmp_path / "other", 0, memory).release()
    assert f"of {tmp_path / 'run'})" in caplog.text and "removed weights that a dead run left" in caplog.text
    assert list(memory.iterdir()) == []
