"""An engine's folder for temporary files: anybody can tell its path, and it goes with the memory that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.core.fsync_io import keep_rendezvous_names, remove_temporary_folder, temporary_folder


@pytest.mark.parametrize("ended", [False, True])
def test_a_folder_and_the_memory_that_is_called_after_its_files_go(ended: bool, tmp_path: Path) -> None:
    folder, memory = tmp_path / "run-engine", tmp_path / "memory"
    folder.mkdir()
    memory.mkdir()
    (folder / "vllm_dist_1f").touch()
    (folder / "other").touch()
    for name in ("vllm_dist_1f-tp:0-[0-1]-cpushm_0", "vllm_dist_2e-tp:0", "other"):
        (memory / name).touch()
    if ended:  # in peace: the file by which workers met goes, and what they shared stays
        keep_rendezvous_names(folder)
        (folder / "vllm_dist_1f").unlink()
    remove_temporary_folder(folder, memory)
    assert not folder.exists() and sorted(path.name for path in memory.iterdir()) == ["other", "vllm_dist_2e-tp:0"]
    remove_temporary_folder(folder, memory)


def test_each_folder_has_one_of_its_own_with_room_for_a_socket(tmp_path: Path) -> None:
    one, other = tmp_path / "ranks" / "0.engine", tmp_path / "samplers" / "0.engine"
    assert temporary_folder(one) == temporary_folder(one) != temporary_folder(other)
    assert len(temporary_folder(one).name) == len("run-engine-") + 16
