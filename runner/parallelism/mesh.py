"""The ranks of a job as a grid (device mesh), and whether it fits the processes and the model.

rank = (((pp · R + dp_replicate) · S + dp_shard) · C + cp) · T + tp      ranks of the last dimension are neighbors

A size of -1 is inferred from the others. Every refusal shows its arithmetic and a proposal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import gcd, prod
from typing import Any, NamedTuple

from runner.core.errors import Problem, SpecError

DATA_DIMS = ("dp_replicate", "dp_shard")  # the dimensions over whose ranks the work is partitioned
REPLICA_DIMS = (*DATA_DIMS, "cp")  # those whose ranks find parts of the same weights' gradients
RankGroup = tuple[int, ...]  # ranks that belong together, in order


class Mesh(NamedTuple):
    """The number of ranks in each dimension.

    pp: pipeline stages; dp_replicate: replicas of the model; dp_shard: shards of a replica; cp: context-parallel ranks;
    tp: tensor-parallel ranks; ep: over how many ranks of the middle three dimensions a layer's experts are distributed,
    which is not a dimension
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def dims(self) -> dict[str, int]:
        """The dimensions by name, outermost first; their product is the number of ranks."""
        return {name: size for name, size in self._asdict().items() if name != "ep"}

    @property
    def world_size(self) -> int:
        """All ranks."""
        return prod(self.dims.values())

    @property
    def dp_size(self) -> int:
        """Number of ranks that the work is partitioned over; the others share one part of the work."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_shard_cp_size(self) -> int:
        """Number of shards of a replica: cp ranks have shards, too."""
        return self.dp_shard * self.cp

    @property
    def model_parallel_size(self) -> int:
        """Number of parts of the model's structure; above 1, modules differ between ranks."""
        return self.pp * self.tp * self.ep

    @property
    def dp_cp_size(self) -> int:
        """Number of ranks that compute parts of the gradients of the same weights."""
        return self.dp_size * self.cp

    def rank_groups(self, *names: str) -> list[RankGroup]:
        """All sets of ranks that differ only in the dimensions of these names, each in the order of ranks."""
        free = [range(size) if name in names else [0] for name, size in self.dims.items()]
        bound = [[0] if name in names else range(size) for name, size in self.dims.items()]
        offsets = [self._rank(place) for place in product(*free)]
        return [tuple(self._rank(place) + offset for offset in offsets) for place in product(*bound)]

    def expert_groups(self) -> list[RankGroup]:
        """All sets of ranks over which a layer's experts are distributed."""
        replicas = self.rank_groups(*REPLICA_DIMS)
        return [copies[at : at + self.ep] for copies in replicas for at in range(0, len(copies), self.ep)]

    def expert_replica_groups(self) -> list[RankGroup]:
        """All sets of ranks with the same experts."""
        return [copies[at :: self.ep] for copies in self.rank_groups(*REPLICA_DIMS) for at in range(self.ep)]

    @property
    def expert_grid(self) -> dict[str, int]:
        """The grid of `copies` for a layer's experts, outermost first.

        Replicas of the experts, if a replica of the model is sharded; shards of each expert (`dp_shard`); and the ranks
        over which the experts are distributed.
        """
        copies = {"dp_replicate": self.dp_replicate} if self.dp_shard > 1 < self.dp_replicate else {}
        return {**copies, "dp_shard": self.dp_cp_size // prod(copies.values()) // self.ep, "ep": self.ep}

    def expert_shard_groups(self) -> list[RankGroup]:
        """All sets of ranks with shards of the same experts."""
        size = self.expert_grid["dp_shard"]
        return [held[at : at + size] for held in self.expert_replica_groups() for at in range(0, len(held), size)]

    def groups(self) -> dict[str, list[RankGroup]]:
        """The sets of ranks of each process group, by name."""
        return {
            "data": self.rank_groups(*DATA_DIMS),
            "copies": self.rank_groups(*REPLICA_DIMS),
            "expert_copies": self.expert_replica_groups(),
            "expert_pieces": self.expert_shard_groups(),
            "ep": self.expert_groups(),
            "dp_shard": self.rank_groups("dp_shard", "cp"),
            **{name: self.rank_groups(name) for name in ("pp", "dp_replicate", "cp", "tp")},
        }

    def _rank(self, place: Sequence[int]) -> int:
        rank = 0
        for at, size in zip(place, self.dims.values(), strict=True):
            rank = rank * size + at
        return rank

    def __str__(self) -> str:
        sizes = [f"{name}={size}" for name, size in self._asdict().items() if size > 1]
        return " × ".join(sizes) or "one process"


# what to type where a model does not support a dimension
WITHOUT_DIM = {
    "pp": "parallelism.pp=1, with parallelism=fsdp or tp",
    "tp": "parallelism.tp=1, with parallelism=ddp or fsdp",
    "cp": "parallelism.cp=1, with parallelism=fsdp or tp",
    "ep": "parallelism.ep=1",
}


def parallelism_error(dim: str, why: str, instead: str = "") -> SpecError:
    """The error of a model that does not support a dimension of the mesh; instead: another remedy."""
    return SpecError([Problem(f"parallelism.{dim}", f"{why}; type {instead or WITHOUT_DIM[dim]}")])


def group_of_rank(families: Sequence[RankGroup], rank: int) -> RankGroup:
    """The group that has `rank`."""
    return next(one for one in families if rank in one)


Sizes = Mapping[str, tuple[str, int]]  # heads, kv_heads, features, layers, experts → what says it, and how many
TP_SIZES = ("heads", "kv_heads", "features")  # sizes that tp must divide
MAX_SUGGESTIONS = 6  # at most, so that a line can be read
CONFIG_NAMES = {  # names in transformers' configs
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "features": "intermediate_size",
    "layers": "num_hidden_layers",
}
EXPERT_COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")  # differs between models


def model_sizes(architecture: Any) -> Sizes:
    """The sizes in a transformers config, as far as it has them."""
    text = architecture.get_text_config()
    experts = next((name for name in EXPERT_COUNT_NAMES if getattr(text, name, None)), EXPERT_COUNT_NAMES[0])
    names = CONFIG_NAMES | {"experts": experts}
    named = {kind: (name, getattr(text, name, None)) for kind, name in names.items()}
    return {kind: (name, size) for kind, (name, size) in named.items() if size}


def fit_mesh(sizes: Mapping[str, int], world: int, option: str) -> Mesh:
    """The mesh of these sizes (see `Mesh`) with `world` ranks. Raises SpecError that names `option`."""
    dims = {name: size for name, size in sizes.items() if name != "ep"}
    if 0 in sizes.values() or list(dims.values()).count(-1) > 1:
        text = f"{option} with {_product(sizes, ', ')}; sizes must be at least 1, and at most one may be -1"
        raise SpecError([Problem("parallelism", text)])
    known = prod(size for size in dims.values() if size != -1)
    if world % known or (-1 not in dims.values() and world != known):
        text = f"{_product(dims)} does not make {world} processes (launch); possible: {_suggestions(dims, world)}"
        raise SpecError([Problem("parallelism", text)])
    mesh = Mesh(**{name: world // known if size == -1 else size for name, size in dims.items()})
    return mesh._replace(ep=_ep_size(sizes["ep"], mesh))


def _ep_size(size: int, mesh: Mesh) -> int:
    """Number of ranks over which experts are distributed: with sharded replicas, ranks of one replica."""
    most = _max_ep_size(mesh)
    if size == -1:
        return most
    if most % size:
        where = "dp_shard × cp" if mesh.dp_shard > 1 else "dp_replicate × cp"
        text = f"ep={size} does not divide the {most} ranks of {where}; possible: {_comma_list(_divisors(most))}"
        raise SpecError([Problem("parallelism.ep", text)])
    return size


def _max_ep_size(mesh: Mesh) -> int:
    return mesh.dp_shard_cp_size if mesh.dp_shard > 1 else mesh.dp_cp_size


def _product(sizes: Mapping[str, int], between: str = " × ") -> str:
    return between.join(f"{name}={size}" for name, size in sizes.items() if size != 1) or "one process"


def _suggestions(sizes: Mapping[str, int], world: int) -> str:
    """Meshes of `world` ranks; sizes of 1 stay if possible."""
    grids = list(_grids(len(sizes), world))
    for at, size in enumerate(sizes.values()):
        grids = [grid for grid in grids if size != 1 or grid[at] == 1] or grids
    shown = [_product(dict(zip(sizes, grid, strict=True))) for grid in grids[:MAX_SUGGESTIONS]]
    return "; ".join([*shown, "…"] if len(grids) > MAX_SUGGESTIONS else shown)


def _grids(dims: int, world: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `world` as an ordered product of `dims` factors."""
    if dims == 1:
        yield (world,)
        return
    for first in _divisors(world):
        yield from ((first, *rest) for rest in _grids(dims - 1, world // first))


def divisibility_problems(mesh: Mesh, sizes: Sizes, *, chunks: int, ulysses: bool) -> list[Problem]:
    """Errors for sizes of a model that the mesh does not divide; missing sizes are unknown yet.

    chunks: virtual stages per pp rank; ulysses: whether cp ranks split the heads
    """
    found = [*_tp_problems(mesh, sizes), *_pp_problems(mesh, sizes, chunks), *_ep_problems(mesh, sizes)]
    if ulysses and "heads" in sizes and not found:
        found += _cp_problems(mesh, *sizes["heads"])
    return found


def _tp_problems(mesh: Mesh, sizes: Sizes) -> Iterator[Problem]:
    cut = [sizes[kind] for kind in TP_SIZES if kind in sizes]
    uneven = [f"{name}={size}" for name, size in cut if size % mesh.tp]
    if uneven:
        fits = _comma_list(_divisors(gcd(*(size for _, size in cut))))
        text = f"tp={mesh.tp} does not divide {', '.join(uneven)} of the model; possible: {fits}"
        yield Problem("parallelism.tp", text)


def _cp_problems(mesh: Mesh, name: str, heads: int) -> Iterator[Problem]:
    own = heads // mesh.tp
    if own % mesh.cp:
        text = f"cp={mesh.cp} does not divide the {own} heads of a tp rank ({name}={heads}); possible: "
        yield Problem("parallelism.cp", f"{text}{_comma_list(_divisors(own))}, or parallelism.cp_backend=ring")


def _pp_problems(mesh: Mesh, sizes: Sizes, chunks: int) -> Iterator[Problem]:
    name, layers = sizes.get("layers", ("", mesh.pp * chunks))
    if mesh.pp * chunks > layers:
        runs = f"pp={mesh.pp} × pp_virtual_stages={chunks}" if chunks > 1 else f"pp={mesh.pp}"
        fits = f"at most {layers // chunks} stages" if layers >= chunks else f"pp_virtual_stages of at most {layers}"
        text = f"{runs} needs {mesh.pp * chunks} layers, but {name}={layers}; possible: {fits}"
        yield Problem("parallelism.pp", text)


def _ep_problems(mesh: Mesh, sizes: Sizes) -> Iterator[Problem]:
    if mesh.ep == 1 or not sizes:
        return
    name, experts = sizes.get("experts", ("", 0))
    if not experts:
        text = "the model has no experts; type parallelism.ep=1, or choose a mixture-of-experts model"
        yield Problem("parallelism.ep", f"{text}, e.g. model=tiny_moe")
    elif experts % mesh.ep:
        ranks = _max_ep_size(mesh)
        here = f"; with these {ranks} ranks: {_comma_list(_divisors(gcd(experts, ranks)))}"
        fits = _comma_list(_divisors(experts)) + (here if ranks % experts else "")
        text = f"ep={mesh.ep} does not divide {name}={experts} of the model; possible: {fits}"
        yield Problem("parallelism.ep", text)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _comma_list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
