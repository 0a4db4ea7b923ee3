"""The grid of ranks as it is printed: which rank holds which part of a model, and on which machine.

stage 0, copy 1:  rank [(4 5) (6 7)]     parts of a copy side by side; [ ] share each row's tokens, ( ) each layer
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runner.parallelism.mesh import Mesh

WIDEST = 16  # ranks in a row that are drawn one by one
LONGEST = 16  # rows that are drawn
BRACKETS = {
    "cp": ("[", "]", "share the tokens of each row (cp)"),
    "tp": ("(", ")", "share every layer (tp)"),
}


def drawn(mesh: Mesh, per_node: int) -> Iterator[str]:
    """A row for each stage and copy of the model, in it the parts of the copy; and where experts lie."""
    yield f"mesh     {mesh}"
    if mesh.world == 1:
        return
    rows = mesh.families("dp_shard", "cp", "tp")
    for at, ranks in enumerate(rows[:LONGEST]):
        yield f"  {_called(mesh, at)}:  rank {_parts(mesh, ranks)}   ({_machines(ranks, per_node)})"
    if len(rows) > LONGEST:
        yield f"  … {_called(mesh, len(rows) - 1)}:  to rank {mesh.world - 1}"
    for name, (first, last, meaning) in BRACKETS.items():
        if mesh.dims[name] > 1:
            yield f"  {first} {last} {meaning}"
    if mesh.ep > 1:
        yield f"  experts of a layer lie over ranks {_listed(mesh.experts())}"


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
