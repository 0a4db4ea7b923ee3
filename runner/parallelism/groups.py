"""The process groups of a mesh, made once, in the same order on every rank, each with the job's time-out.

world ──for each set of dimensions──▶ families of ranks ──every rank makes each──▶ this rank's own group
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from runner.parallelism import borders
from runner.parallelism.borders import Borders
from runner.parallelism.mesh import COPIES, DATA, Family, Mesh, family

WEIGHTS = ("dp_replicate", "dp_shard", "tp")  # dimensions in which a stage's weights lie; cp ranks are among dp_shard


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups that this rank is in.

    of: `data`, `copies` (whose gradients add up), `cp`, `tp`, `pp`, `ep`, `expert_copies`, `expert_pieces`,
    `dp_replicate`, `dp_shard`; one rank alone where a dimension has one. Where there are stages: `stages`, the data
    ranks of all of them, and `ends`, the first and the last of `pp`
    """

    of: Mapping[str, Any]
    weights: DeviceMesh  # the ranks of this stage, by the names in WEIGHTS
    experts: DeviceMesh  # those of this stage and slice, by the names in `Mesh.expert_grid`
    borders: Borders | None = None  # to the stages beside this one


def made(mesh: Mesh, kind: str, backend: str, timeout: timedelta, chunks: int = 1) -> Groups:
    """Make the groups of all ranks; chunks: runs of layers on each stage. Collective."""
    every = {
        "data": mesh.families(*DATA),
        "copies": mesh.families(*COPIES),
        "expert_copies": mesh.expert_copies(),
        "expert_pieces": mesh.expert_pieces(),
        "ep": mesh.experts(),
        "dp_shard": mesh.families("dp_shard", "cp"),
        **{name: mesh.families(name) for name in ("pp", "dp_replicate", "cp", "tp")},
    }
    if mesh.pp > 1:
        every["stages"] = mesh.families("pp", *DATA)
        every["ends"] = [(stages[0], stages[-1]) for stages in mesh.families("pp")]
    rank = distributed.get_rank()
    known: dict[tuple[Family, ...], Any] = {}
    for families in every.values():
        if (key := tuple(families)) not in known:
            known[key], _ = distributed.new_subgroups_by_enumeration(
                [list(one) for one in families], timeout=timeout, backend=backend
            )
    own = {name: known[tuple(families)] for name, families in every.items()}
    stage = torch.tensor(family(mesh.families(*COPIES, "tp"), rank)).view(mesh.dp_replicate, mesh.pieces, mesh.tp)
    weights = DeviceMesh.from_group([own[name] for name in WEIGHTS], kind, stage, mesh_dim_names=WEIGHTS)
    experts = _experts(mesh, own, kind, family(mesh.families(*COPIES), rank))
    pair = partial(distributed.new_group, timeout=timeout, backend=backend)
    return Groups(own, weights, experts, borders.made(mesh.families("pp"), chunks, pair) if mesh.pp > 1 else None)


def _experts(mesh: Mesh, own: Mapping[str, Any], kind: str, copies: Family) -> DeviceMesh:
    named = {**own, "dp_shard": own["expert_pieces"]}
    names, ranks = tuple(mesh.expert_grid), torch.tensor(copies).view(*mesh.expert_grid.values())
    return DeviceMesh.from_group([named[name] for name in names], kind, ranks, mesh_dim_names=names)
