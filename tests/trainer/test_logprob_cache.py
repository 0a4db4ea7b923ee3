"""Log-probabilities on disk: found again by what they are of, whole or found out, and asked for only once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from runner.algorithm.preference.learning import pack_pairs
from runner.core import fsync_io
from runner.core.batch import Batch, pack, select_units, unit_spans
from runner.core.errors import RunnerError, StorageError
from runner.interfaces import Outputs
from runner.trainer import reference_model as module
from runner.trainer.reference_model import FrozenModel, LogprobCache, PrecomputedReference, unit_keys
from tests.algorithm.preferences import CPU, model, pairs

LOGPROBS = frozenset({"logprobs"})


def quiet(damage: str) -> None:
    raise AssertionError(f"nothing is damaged, but: {damage}")


def rows(*lengths: int) -> Batch:
    """Rows of other ids each."""
    ids = [[10 * n + i for i in range(length)] for n, length in enumerate(lengths)]
    return pack(ids, [[1.0] * len(row) for row in ids])


def values_of(batch: Batch) -> list[Tensor]:
    """Numbers of each unit."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator) for *_, size in unit_spans(batch).tolist()]


def filled(folder: Path, batch: Batch) -> LogprobCache:
    kept = LogprobCache(folder, quiet)
    for key, values in zip(unit_keys(batch), values_of(batch), strict=True):
        kept.add(key, values)
    kept.write()
    return kept


def test_what_was_kept_is_found_again_bit_for_bit(tmp_path: Path) -> None:
    batch = rows(3, 1, 7)
    for kept in (filled(tmp_path, batch), LogprobCache(tmp_path, quiet)):
        for key, values in zip(unit_keys(batch), values_of(batch), strict=True):
            assert key in kept and torch.equal(kept[key], values)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_key_is_of_the_unit_and_not_of_its_place(lengths: list[int], random: Any) -> None:
    batch, order = rows(*lengths), list(range(len(lengths)))
    random.shuffle(order)
    keys = unit_keys(batch)
    assert unit_keys(select_units(batch, order)) == [keys[at] for at in order] and len(set(keys)) == len(keys)


def test_the_same_tokens_in_another_structure_are_another_unit() -> None:
    [pair] = pairs(1)
    shared, repeated = (pack_pairs([pair], share=share) for share in (True, False))
    one_row = pack([shared.tokens["ids"].tolist()], [[1.0] * shared.num_tokens])
    assert len({*unit_keys(shared), *unit_keys(repeated), *unit_keys(one_row)}) == 3


def test_many_units_are_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOKENS_PER_FILE", 5)
    batch = rows(3, 3, 4, 9, 1)
    kept = filled(tmp_path, batch)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3 == len(list(tmp_path.iterdir()))
    again = LogprobCache(tmp_path, quiet)
    for key, values in zip(unit_keys(batch), values_of(batch), strict=True):
        assert torch.equal(kept[key], values) and torch.equal(again[key], values)


@pytest.mark.parametrize("damage", ["changed", "cut", "empty"])
def test_a_damaged_file_is_said_and_its_units_are_unknown(damage: str, tmp_path: Path) -> None:
    batch, other = rows(3, 4), rows(1, 2, 5)
    filled(tmp_path, batch)
    [path] = tmp_path.iterdir()
    filled(tmp_path, select_units(other, [2]))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes({"changed": bytes(content), "cut": bytes(content[:-4]), "empty": b""}[damage])
    said: list[str] = []
    kept = LogprobCache(tmp_path, said.append)
    assert len(said) == 1 and path.name in said[0] and not path.exists()
    assert not any(key in kept for key in unit_keys(batch)) and unit_keys(other)[2] in kept


def test_a_damaged_file_that_another_process_removes_first(tmp_path: Path) -> None:
    filled(tmp_path, rows(3, 4))
    [path] = tmp_path.iterdir()
    path.write_bytes(b"")
    kept = LogprobCache(tmp_path, lambda _: path.unlink())
    assert not path.exists() and unit_keys(rows(3, 4))[0] not in kept


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot write log-probabilities"):
        LogprobCache(tmp_path / "file" / "below", quiet)


def test_what_a_killed_process_left_is_swept_away_and_what_one_is_writing_is_not(tmp_path: Path) -> None:
    old, young = tmp_path / ".staging-x.1", tmp_path / ".staging-x.2"
    for path in (old, young):
        path.touch()
    os.utime(old, (0, 0))
    LogprobCache(tmp_path, quiet)
    assert not old.exists() and young.exists()


def test_a_file_is_on_the_disk_under_its_name_once_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(fsync_io, "fsync_path", synced.append)
    filled(tmp_path, rows(3))
    assert synced == [tmp_path], "the folder's list of names, after the rename"


class Counting(FrozenModel):
    """A frozen model that counts what it is asked."""

    asked = 0

    def forward(self, batch: Batch, needs: frozenset[str]) -> Outputs:
        self.asked += 1
        return super().forward(batch, needs)


class CountingCache(PrecomputedReference, Counting):
    """The same behind a cache."""


def test_a_cached_model_says_what_the_model_says_and_asks_it_once(tmp_path: Path) -> None:
    made = model(6)
    plain = FrozenModel(made, budget=50, device=CPU)
    one, two = (pack_pairs(pairs(5, seed), share=True) for seed in (1, 2))
    cached = CountingCache(made, LogprobCache(tmp_path, quiet), {"drawn": "x"}, budget=50, device=CPU)
    assert [cached.precompute(batch) for batch in (one, two, one)] == [5, 5, 0] and cached.asked == 2
    cached.cache.write()
    torch.nn.init.normal_(made.module.lm_head.weight)  # it learns, and what was computed stays
    for batch in (one, two):
        assert not torch.equal(plain.forward(batch, LOGPROBS)["logprobs"], cached.forward(batch, LOGPROBS)["logprobs"])
    again = PrecomputedReference(model(6), LogprobCache(tmp_path, quiet), {}, budget=1, device=CPU)
    wanted = FrozenModel(model(6), budget=50, device=CPU)
    for batch in (one, two):
        assert torch.equal(again.forward(batch, LOGPROBS)["logprobs"], wanted.forward(batch, LOGPROBS)["logprobs"])
    mixed = select_units(one, [4, 0, 2])
    torch.testing.assert_close(again.forward(mixed, LOGPROBS), dict(wanted.forward(mixed, LOGPROBS)))
    assert again.base_fingerprint == {} and cached.base_fingerprint == {"drawn": "x"}


def test_a_cached_model_refuses_what_it_was_not_asked_beforehand(tmp_path: Path) -> None:
    cached = PrecomputedReference(model(6), LogprobCache(tmp_path, quiet), {}, budget=50, device=CPU)
    with pytest.raises(RunnerError, match="was not precomputed"):
        cached.forward(pack_pairs(pairs(1), share=True), LOGPROBS)
    with pytest.raises(RunnerError, match="not: entropy"):
        cached.forward(pack_pairs(pairs(1), share=True), frozenset({"entropy"}))
