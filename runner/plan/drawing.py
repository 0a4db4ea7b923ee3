"""The grid of ranks as it is printed: which rank holds which part of a model, and on which machine.

stage 0, copy 1:  rank [(4 5) (6 7)]     parts of a copy side by side; [ ] share each row's tokens, ( ) each layer
sampler 0:  device (8 9)                 one that only samples, over two devices
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runner.parallelism.mesh import Mesh
from runner.plan.sampling import Samplers

WIDEST = 16  # ranks in a row that are drawn one by one
LONGEST = 16  # rows that are drawn
BRACKETS = {
    "cp": ("[", "]", "share the tokens of each row (cp)"),
    "tp": ("(", ")", "share every layer (tp)"),
}


def drawn(mesh: Mesh, per_node: int | None, samplers: Samplers | None = None) -> Iterator[str]:
    """A row for each stage and copy of the model, in it the parts of the copy; where experts lie; what only samples.
    per_node: ranks of a machine, None where it is not known before somebody places them."""
    beside = f", and {samplers.devices} that only sample{'s' if samplers.devices == 1 else ''}" if samplers else ""
    yield f"mesh     {mesh}{beside}"
    if mesh.world > 1:
        yield from _ranks(mesh, per_node)
    elif samplers:
        yield "  copy 0:  rank 0"
    if samplers:
        yield from _samplers(mesh.world, samplers)


def _ranks(mesh: Mesh, per_node: int | None) -> Iterator[str]:
    rows = mesh.families("dp_shard", "cp", "tp")
    for at, ranks in enumerate(rows[:LONGEST]):
        where = f"   ({_machines(ranks, per_node)})" if per_node else ""
        yield f"  {_called(mesh, at)}:  rank {_parts(mesh, ranks)}{where}"
    if len(rows) > LONGEST:
        yield f"  … {_called(mesh, len(rows) - 1)}:  to rank {mesh.world - 1}"
    for name, (first, last, meaning) in BRACKETS.items():
        if mesh.dims[name] > 1:
            yield f"  {first} {last} {meaning}"
    if mesh.ep > 1:
        yield f"  experts of a layer lie over ranks {_listed(mesh.experts())}"


def _samplers(world: int, samplers: Samplers) -> Iterator[str]:
    """The devices after those of the ranks, with those in ( ) that share one sampler's layers."""
    for at in range(samplers.count)[:LONGEST]:
        first = world + at * samplers.cards
        devices = " ".join(str(first + part) for part in range(samplers.cards))
        yield f"  sampler {at}:  device {devices if samplers.cards == 1 else f'({devices})'}"
    if samplers.count > LONGEST:
        yield f"  … sampler {samplers.count - 1}:  to device {world + samplers.devices - 1}"


def _called(mesh: Mesh, at: int) -> str:
    stage, copy = divmod(at, mesh.dp_replicate)
    names = [f"stage {stage}"] if mesh.pp > 1 else []
    return ", ".join([*names, f"copy {copy}"] if mesh.dp_replicate > 1 or mesh.pp == 1 else names)


def _parts(mesh: Mesh, ranks: Sequence[int]) -> str:
    """`ranks` of one copy, in brackets where several share a part."""
    width = len(str(mesh.world - 1))
    shown = [str(rank).rjust(width) for rank in ranks[:WIDEST]]
    between = "  "
    for name, size in (("tp", mesh.tp), ("cp", mesh.cp)):
        if size > 1:
            first, last, _ = BRACKETS[name]
            shown = [f"{first}{' '.join(shown[at : at + size])}{last}" for at in range(0, len(shown), size)]
    return between.join(shown) + (f"  … {ranks[-1]}" if len(ranks) > WIDEST else "")


def _machines(ranks: Sequence[int], per_node: int) -> str:
    nodes = sorted({rank // per_node for rank in ranks})
    return f"machine {nodes[0]}" if len(nodes) == 1 else f"machines {nodes[0]} to {nodes[-1]}"


def _listed(families: Sequence[Sequence[int]]) -> str:
    said = [" ".join(map(str, ranks[:WIDEST])) + (" …" if len(ranks) > WIDEST else "") for ranks in families]
    return " | ".join(said[:LONGEST]) + (" | …" if len(said) > LONGEST else "")
