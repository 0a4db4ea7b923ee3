"""Exports of models in pieces, slices, stages and experts: the files of one process, without the model on any host."""

from __future__ import annotations

import resource
import shutil
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers.core_model_loading import Chunk, WeightConverter

from runner.core.auto_choices import Decisions
from runner.core.errors import StorageError
from runner.launch.export import write_export
from runner.model import export, hf_state_dict
from runner.parallelism.config import EpConfig, FsdpConfig, MeshConfig, PpConfig, TpConfig
from runner.parallelism.mesh import Mesh
from tests.parallelism.forked import ranks
from tests.parallelism.test_fsdp import made
from tests.parallelism.test_weight_scatter import read, saved
from tests.parallelism.worlds import meshed

CPU = torch.device("cpu")
SLOW = pytest.mark.slow
LAYOUTS: dict[str, tuple[MeshConfig, Mesh]] = {
    "fsdp": (FsdpConfig(), Mesh(dp_shard=2)),
    "tp": (TpConfig(), Mesh(tp=2)),
    "pp": (PpConfig(), Mesh(pp=2)),
    "ep": (EpConfig(), Mesh(dp_replicate=2, ep=2)),
}
SMALL = 20_000  # bytes of a file, less than the embedding's
Make = Callable[[], Any]


def spread(layout: str, model: Any) -> Any:
    meshed(*LAYOUTS[layout]).shard(model, Decisions())
    return model


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def compare(root: Path, layout: str, make: Make) -> None:
    """In one file, and in many."""
    whole = make()
    whole.save(root / "one")
    whole.module.save_pretrained(root / "one many", max_shard_size=SMALL)

    def work(rank: int) -> None:
        model = spread(layout, make())
        model.save(root / "two" if rank == 0 else None)
        state = hf_state_dict.HfStateDict(model.module, model.inner)
        hf_state_dict.write_hf_folder(state, root / "two many" if rank == 0 else None, None, SMALL)

    ranks(LAYOUTS[layout][1].world_size, work)
    for kind in ("", " many"):
        one, two = contents(root / f"one{kind}"), contents(root / f"two{kind}")
        assert one.keys() == two.keys()
        assert [name for name in one if one[name] != two[name]] == []
    assert len(list((root / "two many").glob("model-*-of-*.safetensors"))) > 2


@pytest.mark.parametrize(
    ("kind", "layout", "tied"),
    [
        ("qwen3_moe", "ep", False),
        ("llama", "pp", True),
        *(
            pytest.param(kind, layout, tied, marks=pytest.mark.soak)
            for kind in ("qwen2", "qwen3", "llama", "qwen3_moe")
            for layout in LAYOUTS
            for tied in (False, True)
            if kind == "qwen3_moe" or layout != "ep"
        ),
    ],
)
def test_files_are_those_of_one_process(tmp_path: Path, kind: str, layout: str, tied: bool) -> None:
    compare(tmp_path, layout, lambda: made(kind, False, tie_word_embeddings=tied))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=SLOW)])
def test_of_a_folder_that_was_read(tmp_path: Path, dtype: str) -> None:
    folder = saved("qwen3_moe", tmp_path / "given")  # transformers remembers how it converted this one
    compare(tmp_path, "fsdp", lambda: read(folder, CPU, dtype=dtype))


def fused() -> Any:
    """A model of which gate and up are one tensor on the disk, as transformers describes such ones."""
    model = made("llama", False, num_hidden_layers=6)
    together = WeightConverter("mlp.gate_up_proj.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(0)])
    model.module._weight_conversions = [together]
    return model


@pytest.mark.parametrize("layout", ["tp", pytest.param("pp", marks=SLOW)])
def test_of_several_tensors_that_are_one_on_the_disk(tmp_path: Path, layout: str) -> None:
    compare(tmp_path, layout, fused)
    with safe_open(tmp_path / "two" / "model.safetensors", "pt") as file:
        assert tuple(file.get_tensor("model.layers.0.mlp.gate_up_proj.weight").shape) == (96, 32)


class Alive:
    """Counts the bytes of the tensors that some functions have given and that are still there."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[Tensor]] = []
        self.peak = self.calls = 0

    def watching(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any) -> Any:
            given = work(*arguments)
            self.calls += 1
            tensors = given.values() if isinstance(given, dict) else [given]
            self._seen = [one for one in self._seen if one() is not None] + [weakref.ref(one) for one in tensors]
            storages = [one().untyped_storage() for one in self._seen]  # type: ignore[union-attr]
            self.peak = max(self.peak, sum({s.data_ptr(): s.nbytes() for s in storages if s.device == CPU}.values()))
            return given

        return watched


def watched_save(rank: int, layout: str, make: Make, folder: Path) -> tuple[int, int]:
    model, alive = spread(layout, make()), Alive()
    watched = ((hf_state_dict, "full_tensor"), (hf_state_dict, "revert_weight_conversion"), (export, "full_tensor"))
    for place, name in watched:
        setattr(place, name, alive.watching(getattr(place, name)))  # in this rank's process alone
    model.save(folder if rank == 0 else None)
    return alive.peak, alive.calls


@pytest.mark.parametrize(
    ("kind", "layout", "most"),
    [
        ("qwen3", "fsdp", 1.0),
        pytest.param("qwen3", "tp", 1.0, marks=SLOW),
        pytest.param("qwen3", "pp", 1.5, marks=SLOW),  # gloo's thread lets go of one a moment after it has said so
        pytest.param("qwen3_moe", "ep", 2.0, marks=SLOW),  # experts' weights, and the same one by one
        pytest.param("fused", "fsdp", 2.0, marks=SLOW),  # a layer's
    ],
)
def test_a_host_holds_one_tensor_at_a_time(tmp_path: Path, kind: str, layout: str, most: float) -> None:
    def make() -> Any:
        return fused() if kind == "fused" else made(kind, False, num_hidden_layers=6)

    sizes = [p.nbytes for p in make().module.parameters()]
    assert sum(sizes) > 4 * max(sizes)  # so that a copy of all would show
    for peak, calls in ranks(2, watched_save, layout, make, tmp_path / "export"):
        assert calls >= len(sizes) and 0 < peak <= most * max(sizes)


def test_of_an_adapter_alone_the_base_stays_where_it_is(tmp_path: Path) -> None:
    def make() -> Any:
        return made("qwen3", True, num_hidden_layers=6)

    model = make()
    adapter, base = (sum(p.nbytes for p in model.module.parameters() if p.requires_grad is on) for on in (True, False))
    assert base > 4 * adapter
    for peak, calls in ranks(2, watched_save, "fsdp", make, tmp_path / "export"):
        assert calls > 0 and peak <= adapter


@pytest.mark.parametrize("when", ["full", pytest.param("gone", marks=SLOW)])
def test_a_disk_that_refuses_is_told_and_no_rank_waits(tmp_path: Path, when: str) -> None:
    def work(rank: int) -> str:
        model = spread("fsdp", made("qwen3", False))
        if rank > 0:
            model.save(None)
            return ""
        if when == "full":  # from the beginning
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, SMALL))
        else:  # while tensors come
            given, left = hf_state_dict.full_tensor, [3]

            def whole(tensor: Tensor) -> Tensor:
                left[0] -= 1
                if left[0] == 0:
                    shutil.rmtree(next(tmp_path.glob(".export.*")))
                return given(tensor)

            hf_state_dict.full_tensor = whole
        spec: Any = None  # which the card is made of, later
        with pytest.raises(StorageError) as error:
            write_export(model, tmp_path / "export", spec, 1, {})
        return str(error.value)

    said, nothing = ranks(2, work)
    assert said.startswith("cannot write the export") and said.endswith("then type: run export") and nothing == ""
    assert list(tmp_path.iterdir()) == []
