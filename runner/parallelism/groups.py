"""The process groups of a mesh, made once, in the same order on every rank, each with the job's time-out.

    world ──for each set of dimensions──▶ families of ranks ──every rank makes each──▶ this rank's own group
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from runner.parallelism.mesh import COPIES, DATA, Family, Mesh, family

WEIGHTS = ("dp_replicate", "dp_shard", "tp")  # dimensions in which a stage's weights lie; cp ranks are among dp_shard


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups that this rank is in.

    of: `data`, `copies` (whose gradients add up), `cp`, `tp`, `pp`, `ep`, `expert_copies`, `dp_replicate`, `dp_shard`;
    one rank alone where a dimension has one
    """

    of: Mapping[str, Any]
    weights: DeviceMesh  # the ranks of this stage, by the names in WEIGHTS
    experts: DeviceMesh  # those over which this rank's experts lie


def made(mesh: Mesh, kind: str, backend: str, timeout: timedelta) -> Groups:
    """Make the groups of all ranks. Collective."""
    every = {
        "data": mesh.families(*DATA),
        "copies": mesh.families(*COPIES),
        "expert_copies": mesh.expert_copies(),
        "ep": mesh.experts(),
        "dp_shard": mesh.families("dp_shard", "cp"),
        **{name: mesh.families(name) for name in ("pp", "dp_replicate", "cp", "tp")},
    }
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
    return Groups(own, weights, DeviceMesh.from_group(own["ep"], kind, mesh_dim_names=("ep",)))
