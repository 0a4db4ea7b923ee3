"""Whether a mesh has as many ranks as there are processes, and divides a model; and what would.

Sizes that are -1 are what the others leave. Every refusal shows its arithmetic and a proposal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import gcd, prod
from typing import Any

from runner.core.errors import Problem, SpecError
from runner.parallelism.mesh import Mesh

Sizes = Mapping[str, tuple[str, int]]  # heads, kv_heads, features, layers, experts → what says it, and how many
SLICED = ("heads", "kv_heads", "features")  # what slices of a layer divide
PROPOSALS = 6  # at most, so that a line can be read
NAMES = {  # transformers' own, of what is divided
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "features": "intermediate_size",
    "layers": "num_hidden_layers",
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # which of them it is differs


def sizes_of(architecture: Any) -> Sizes:
    """What a transformers config says of these, as far as it does."""
    text = architecture.get_text_config()
    names = NAMES | {"experts": next((name for name in EXPERTS if getattr(text, name, None)), EXPERTS[0])}
    named = {kind: (name, getattr(text, name, None)) for kind, name in names.items()}
    return {kind: (name, size) for kind, (name, size) in named.items() if size}


def fitted(said: Mapping[str, int], world: int, own: str) -> Mesh:
    """The mesh of these sizes (see `Mesh`) with `world` ranks; own: the word that asked for it. Raises SpecError."""
    dims = {name: size for name, size in said.items() if name != "ep"}
    if 0 in said.values() or list(dims.values()).count(-1) > 1:
        text = f"{own} with {_product(said, ', ')}; give sizes from 1, and at most one -1"
        raise SpecError([Problem("parallelism", text)])
    known = prod(size for size in dims.values() if size != -1)
    if world % known or (-1 not in dims.values() and world != known):
        text = f"{_product(dims)} does not make {world} processes (launch); what fits: {_proposals(dims, world)}"
        raise SpecError([Problem("parallelism", text)])
    mesh = Mesh(**{name: world // known if size == -1 else size for name, size in dims.items()})
    return mesh._replace(ep=_experts(said["ep"], mesh))


def _experts(said: int, mesh: Mesh) -> int:
    """Over how many ranks experts lie: where a copy is in pieces, among those that have the pieces of one copy."""
    most = _expert_ranks(mesh)
    if said == -1:
        return most
    if most % said:
        where = "dp_shard × cp" if mesh.dp_shard > 1 else "dp_replicate × cp"
        text = f"ep={said} does not divide the {most} ranks of {where}; what fits: {_listed(_divisors(most))}"
        raise SpecError([Problem("parallelism.ep", text)])
    return said


def _expert_ranks(mesh: Mesh) -> int:
    return mesh.pieces if mesh.dp_shard > 1 else mesh.copies


def _product(sizes: Mapping[str, int], between: str = " × ") -> str:
    return between.join(f"{name}={size}" for name, size in sizes.items() if size != 1) or "one process"


def _proposals(said: Mapping[str, int], world: int) -> str:
    """Meshes of so many ranks; what is 1 stays so if it can."""
    grids = list(_grids(len(said), world))
    for at, size in enumerate(said.values()):
        grids = [grid for grid in grids if size != 1 or grid[at] == 1] or grids
    shown = [_product(dict(zip(said, grid, strict=True))) for grid in grids[:PROPOSALS]]
    return "; ".join([*shown, "…"] if len(grids) > PROPOSALS else shown)


def _grids(dims: int, world: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `world` as a product of so many factors, in order."""
    if dims == 1:
        yield (world,)
        return
    for first in _divisors(world):
        yield from ((first, *rest) for rest in _grids(dims - 1, world // first))


def misfits(mesh: Mesh, sizes: Sizes, *, chunks: int, ulysses: bool) -> list[Problem]:
    """What of a model of these sizes does not divide as the mesh needs it; what is not in `sizes` is not known yet.

    chunks: runs of layers on each stage; ulysses: whether cp ranks are to share out the heads
    """
    found = [*_slices(mesh, sizes), *_stages(mesh, sizes, chunks), *_expert_shares(mesh, sizes)]
    if ulysses and "heads" in sizes and not found:
        found += _head_shares(mesh, *sizes["heads"])
    return found


def _slices(mesh: Mesh, sizes: Sizes) -> Iterator[Problem]:
    cut = [sizes[kind] for kind in SLICED if kind in sizes]
    uneven = [f"{name}={size}" for name, size in cut if size % mesh.tp]
    if uneven:
        fits = _listed(_divisors(gcd(*(size for _, size in cut))))
        text = f"{mesh.tp} slices do not divide {', '.join(uneven)} of the model; what fits: {fits}"
        yield Problem("parallelism.tp", text)


def _head_shares(mesh: Mesh, name: str, heads: int) -> Iterator[Problem]:
    own = heads // mesh.tp
    if own % mesh.cp:
        text = f"cp={mesh.cp} does not divide the {own} heads of a slice ({name}={heads}); what fits: "
        yield Problem("parallelism.cp", f"{text}{_listed(_divisors(own))}, or parallelism.cp_style=ring")


def _stages(mesh: Mesh, sizes: Sizes, chunks: int) -> Iterator[Problem]:
    name, layers = sizes.get("layers", ("", mesh.pp * chunks))
    if mesh.pp * chunks > layers:
        runs = f"pp={mesh.pp} × pp_chunks={chunks}" if chunks > 1 else f"pp={mesh.pp}"
        fits = f"at most {layers // chunks} stages" if layers >= chunks else f"pp_chunks of at most {layers}"
        text = f"{runs} takes {mesh.pp * chunks} layers, and {name}={layers}; what fits: {fits}"
        yield Problem("parallelism.pp", text)


def _expert_shares(mesh: Mesh, sizes: Sizes) -> Iterator[Problem]:
    if mesh.ep == 1 or not sizes:
        return
    name, experts = sizes.get("experts", ("", 0))
    if not experts:
        text = "the model has no experts; type parallelism.ep=1, or take one that has, as model=tiny_moe"
        yield Problem("parallelism.ep", text)
    elif experts % mesh.ep:
        ranks = _expert_ranks(mesh)
        here = f", of which these {ranks} ranks: {_listed(_divisors(gcd(experts, ranks)))}"
        text = f"{mesh.ep} ranks do not divide {name}={experts} of the model; what fits: {_listed(_divisors(experts))}"
        yield Problem("parallelism.ep", text + (here if ranks % experts else ""))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
