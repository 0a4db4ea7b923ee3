"""The mesh: what fits so many processes, and what is said of what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3 import Qwen3Config

from runner.cli.job_builder import compose_job
from runner.core.errors import SpecError
from runner.core.rank_info import RankInfo
from runner.distributed.work_partition import SINGLE_PROCESS
from runner.model import hf
from runner.model.config import HfConfig
from runner.parallelism.config import (
    CpConfig,
    DdpConfig,
    EpConfig,
    FsdpConfig,
    HsdpConfig,
    PpConfig,
    SingleConfig,
    TpConfig,
)
from runner.parallelism.mesh import Mesh
from runner.parallelism.parallel_context import ParallelContext
from tests.parallelism.worlds import device, silent


@pytest.mark.parametrize(
    ("config", "world", "mesh"),
    [
        (SingleConfig(), 1, Mesh()),
        (DdpConfig(), 4, Mesh(dp_replicate=4)),
        (FsdpConfig(), 4, Mesh(dp_shard=4)),
        (HsdpConfig(), 8, Mesh(dp_replicate=2, dp_shard=4)),
        (HsdpConfig(dp_replicate=-1, dp_shard=3), 6, Mesh(dp_replicate=2, dp_shard=3)),
        (TpConfig(), 4, Mesh(tp=4)),
        (TpConfig(dp_replicate=-1, tp=2), 6, Mesh(dp_replicate=3, tp=2)),
        (DdpConfig(tp=2), 4, Mesh(dp_replicate=2, tp=2)),
        (FsdpConfig(tp=2), 4, Mesh(dp_shard=2, tp=2)),
        (HsdpConfig(tp=2), 8, Mesh(dp_replicate=2, dp_shard=2, tp=2)),
        (CpConfig(), 4, Mesh(cp=4)),
        (FsdpConfig(cp=2), 8, Mesh(dp_shard=4, cp=2)),
        (PpConfig(), 2, Mesh(pp=2)),
        (DdpConfig(pp=2), 8, Mesh(pp=2, dp_replicate=4)),
        (EpConfig(), 4, Mesh(dp_replicate=4, ep=4)),
        (EpConfig(cp=2, ep=2), 4, Mesh(dp_replicate=2, cp=2, ep=2)),
        (HsdpConfig(ep=-1), 8, Mesh(dp_replicate=2, dp_shard=4, ep=4)),
    ],
)
def test_a_preset_is_a_grid(config: Any, world: int, mesh: Mesh) -> None:
    assert config.mesh(world) == mesh


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
        ("parallelism=ddp", "launch.devices", "type parallelism=single for one device, or launch.devices=N"),
        ("launch.devices=2", "launch.devices", "parallelism=single runs one process, not 2; set launch.devices=1"),
        (
            "parallelism=hsdp parallelism.dp_replicate=3 launch.devices=4",
            "parallelism",
            "dp_replicate=3 × dp_shard=-1 does not make 4 processes (launch); "
            "possible: dp_shard=4; dp_replicate=2 × dp_shard=2; dp_replicate=4",
        ),
        (
            "parallelism=ddp launch.devices=6 parallelism.dp_replicate=4",
            "parallelism",
            "dp_replicate=4 does not make 6 processes (launch); possible: dp_replicate=6",
        ),
        (
            "parallelism=tp parallelism.tp=3 launch.devices=3",
            "parallelism.tp",
            "tp=3 does not divide model.heads=4, model.kv_heads=4 of the model; possible: 1, 2, 4",
        ),
        (
            "parallelism=ddp parallelism.tp=4 launch.devices=6",
            "parallelism",
            "dp_replicate=-1 × tp=4 does not make 6 processes (launch); "
            "possible: tp=6; dp_replicate=2 × tp=3; dp_replicate=3 × tp=2; dp_replicate=6",
        ),
        (
            "parallelism=cp parallelism.cp_backend=ulysses launch.devices=3",
            "parallelism.cp",
            "cp=3 does not divide the 4 heads of a tp rank (model.heads=4); possible: 1, 2, 4, or "
            "parallelism.cp_backend",
        ),
        ("parallelism=pp launch.devices=8", "parallelism.pp", "pp=8 needs 8 layers, but model.layers=4; possible: at"),
        (
            "parallelism=ddp launch.devices=2 parallelism.pp_virtual_stages=2",
            "parallelism.pp_virtual_stages",
            "not used with parallelism.pp=1",
        ),
        (
            "parallelism=ddp launch.devices=2 parallelism.cp_backend=ring",
            "parallelism.cp_backend",
            "not used with parallelism.cp=1",
        ),
        (
            "algorithm=distill algorithm.teacher=teacher parallelism=pp parallelism.pp_virtual_stages=2 "
            "launch.devices=2",
            "parallelism.pp_virtual_stages",
            "distill runs its teacher between its own passes; leave it out",
        ),
        ("parallelism=ep launch.devices=2", "parallelism.ep", "the model has no experts"),
        (
            "parallelism=ep parallelism.ep=3 launch.devices=4",
            "parallelism.ep",
            "ep=3 does not divide the 4 ranks of dp_replicate × cp; possible: 1, 2, 4",
        ),
        ("parallelism=tp launch.devices=2 adapter=lora adapter.dora=true", "adapter.dora", "leave it out"),
        (
            "parallelism=cp launch.devices=2 model.batch_layout=padded",
            "model.batch_layout",
            "parallelism.cp=2 needs packed batches; leave it out",
        ),
        (
            "parallelism=tp launch.devices=2 model.dtype=bfloat16 model.head_dtype=float32",
            "model.head_dtype",
            "with tp, embedding and head are cut or gathered in bfloat16",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(words: str, key: str, said: str) -> None:
    with pytest.raises(SpecError) as error:
        compose_job(["model=tiny", "data=demo", *words.split()])
    [problem] = error.value.problems
    assert problem.key == key and said in problem.message


def test_a_folder_whose_heads_do_not_divide_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    Qwen3Config(num_attention_heads=12, num_key_value_heads=4, intermediate_size=96).save_pretrained(tmp_path)
    world = ParallelContext(
        TpConfig(),
        device(),
        RankInfo(0, 3, 0, 3),
        Mesh(tp=3),
        None,
        SINGLE_PROCESS,
        SINGLE_PROCESS,
        SINGLE_PROCESS,
        SINGLE_PROCESS,
        SINGLE_PROCESS,
    )
    given: Any = {
        "tokenizer": None,
        "device": torch.device("cpu"),
        "seed": 0,
        "decide": silent,
        "admit": world.check_divisible,
    }
    with pytest.raises(SpecError) as error:
        hf.build(HfConfig(path=str(tmp_path)), **given)
    [problem] = error.value.problems
    assert problem.key == "parallelism.tp"
    assert "3 does not divide num_key_value_heads=4 of the model; possible: 1, 2, 4" in problem.message


@pytest.mark.parametrize(("tp", "data"), [(1, 6), (2, 3), (3, 2)])
def test_the_ranks_of_slices_are_one_data_rank(tp: int, data: int) -> None:
    mesh = TpConfig(dp_replicate=-1, tp=tp).mesh(6)
    assert mesh.dp_size == data and mesh.dp_size * mesh.tp == 6


@given(st.builds(Mesh, *[st.integers(1, 3)] * 5), st.data())
def test_families_are_the_ranks_that_differ_in_some_dimensions_only(mesh: Mesh, data: st.DataObject) -> None:
    names = data.draw(st.sets(st.sampled_from(list(mesh.dims))))
    families = mesh.rank_groups(*names)
    assert sorted(rank for one in families for rank in one) == list(range(mesh.world_size))
    places = np.stack(np.unravel_index(np.arange(mesh.world_size), tuple(mesh.dims.values())))
    for one in families:
        assert list(one) == sorted(one) and len(one) == np.prod([mesh.dims[name] for name in names])
        differing = {name for name, row in zip(mesh.dims, places[:, one], strict=True) if len(set(row)) > 1}
        assert differing <= names


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_experts_lie_over_neighbors_and_every_rank_is_once_in_each(ep: int) -> None:
    mesh = Mesh(pp=2, dp_replicate=2, cp=2, tp=2, ep=ep)
    shares, copies = mesh.expert_groups(), mesh.expert_replica_groups()
    for families in (shares, copies):
        assert sorted(rank for one in families for rank in one) == list(range(16))
    assert {len(one) for one in shares} == {ep} and {len(one) for one in copies} == {4 // ep}
    assert all(len(set(share) & set(copy)) <= 1 for share in shares for copy in copies)
