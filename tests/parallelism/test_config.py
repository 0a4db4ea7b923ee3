"""The mesh: what fits so many processes, and what is said of what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3 import Qwen3Config

from runner.cli.compose import compose_job
from runner.errors import SpecError
from runner.model import hf
from runner.model.config import HfConfig
from runner.parallelism.config import DdpConfig, FsdpConfig, HsdpConfig, Mesh, SingleConfig, TpConfig
from runner.parallelism.world import World
from runner.place import Place
from runner.sharing import ALONE
from tests.parallelism.worlds import device, silent


@pytest.mark.parametrize(
    ("config", "world", "mesh"),
    [
        (SingleConfig(), 1, (1, 1)),
        (DdpConfig(), 4, (4, 1)),
        (FsdpConfig(), 4, (1, 4)),
        (HsdpConfig(), 8, (2, 4)),
        (HsdpConfig(dp_replicate=-1, dp_shard=3), 6, (2, 3)),
        (TpConfig(), 4, (1, 1, 4)),
        (TpConfig(dp_replicate=-1, tp=2), 6, (3, 1, 2)),
        (DdpConfig(tp=2), 4, (2, 1, 2)),
        (FsdpConfig(tp=2), 4, (1, 2, 2)),
        (HsdpConfig(tp=2), 8, (2, 2, 2)),
    ],
)
def test_a_preset_is_a_grid(config: Any, world: int, mesh: tuple[int, int]) -> None:
    assert config.mesh(world) == Mesh(*mesh)


@given(st.integers(2, 64), st.integers(-1, 64), st.integers(-1, 64))
def test_a_mesh_has_every_process_once_or_is_refused(world: int, replicate: int, shard: int) -> None:
    config = HsdpConfig(dp_replicate=replicate, dp_shard=shard)
    try:
        mesh = config.mesh(world)
    except SpecError:
        fits = [a for a in range(1, world + 1) if world % a == 0 and replicate in (-1, a) and shard in (-1, world // a)]
        assert 0 in (replicate, shard) or (replicate, shard) == (-1, -1) or not fits
    else:
        assert mesh.dp_replicate * mesh.dp_shard == world
        assert replicate in (-1, mesh.dp_replicate) and shard in (-1, mesh.dp_shard)


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        ("parallelism=ddp", "launch.devices", "type launch.devices=N, one for each device"),
        ("launch.devices=2", "launch.devices", "parallelism=single runs one process, not 2; set launch.devices=1"),
        (
            "parallelism=hsdp parallelism.dp_replicate=3 launch.devices=4",
            "parallelism",
            "dp_replicate=3 × dp_shard=-1 × tp=1 does not make 4 processes (launch); "
            "what fits, dp_replicate × dp_shard × tp: 1 × 4 × 1, 2 × 2 × 1, 4 × 1 × 1",
        ),
        (
            "parallelism=ddp launch.devices=6 parallelism.dp_replicate=4",
            "parallelism",
            "what fits, dp_replicate × dp_shard × tp: 6 × 1 × 1",
        ),
        (
            "parallelism=tp parallelism.tp=3 launch.devices=3",
            "parallelism.tp",
            "3 slices do not divide model.heads=4, model.kv_heads=4 of the model; what fits: 1, 2, 4",
        ),
        (
            "parallelism=ddp parallelism.tp=4 launch.devices=6",
            "parallelism",
            "dp_replicate=-1 × dp_shard=1 × tp=4 does not make 6 processes (launch); what fits, "
            "dp_replicate × dp_shard × tp: 1 × 1 × 6, 2 × 1 × 3, 3 × 1 × 2, 6 × 1 × 1",
        ),
        ("parallelism=tp launch.devices=2 adapter=lora adapter.dora=true", "adapter.dora", "leave it out"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(words: str, key: str, said: str) -> None:
    with pytest.raises(SpecError) as error:
        compose_job(["model=tiny", "data=demo", *words.split()])
    [problem] = error.value.problems
    assert problem.key == key and said in problem.message


def test_a_folder_whose_heads_do_not_divide_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    Qwen3Config(num_attention_heads=12, num_key_value_heads=4, intermediate_size=96).save_pretrained(tmp_path)
    world = World(TpConfig(), device(), Place(0, 3, 0, 3), Mesh(1, 1, 3), ALONE, ALONE, ALONE)
    given: Any = {"tokenizer": None, "device": torch.device("cpu"), "seed": 0, "decide": silent, "admit": world.admit}
    with pytest.raises(SpecError) as error:
        hf.build(HfConfig(path=str(tmp_path)), **given)
    [problem] = error.value.problems
    assert problem.key == "parallelism.tp"
    assert "3 slices do not divide num_key_value_heads=4 of the model; what fits: 1, 2, 4" in problem.message


@pytest.mark.parametrize(("tp", "data"), [(1, 6), (2, 3), (3, 2)])
def test_the_ranks_of_slices_are_one_data_rank(tp: int, data: int) -> None:
    mesh = TpConfig(dp_replicate=-1, tp=tp).mesh(6)
    assert mesh.data == data and mesh.data * mesh.tp == 6
