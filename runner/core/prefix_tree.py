"""Trees of rows: several continuations of one prompt, with the prompt stored and computed once.

    prompt  a b c            ─▶  row 0:  a b c      branch -1
    branches  d e | f g h        row 1:  d e        branch 0, its first token's parent is c
                                 row 2:  f g h      branch 1, its first token's parent is c

Legend: N rows, T tokens, P tokens of all paths. A *path* is a branch with its prompt before it: what a model reads
that knows no trees. A tree is one unit unless it is split by repeating its prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from runner.core.batch import Batch, Row, flatten_rows, prefixes, ranges, token_layout

SHARED = -1  # the `branch` of a prompt that several branches share


@dataclass(frozen=True, slots=True)
class Branch:
    """One continuation. tokens: channels of its tokens, each as long as `ids`; rows: channels of its row."""

    ids: Row
    tokens: Mapping[str, Row] = field(default_factory=dict)
    rows: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tree:
    """A prompt and what continues it."""

    prompt: Row
    branches: Sequence[Branch]


@dataclass(frozen=True, slots=True)
class Paths:
    """Every root-to-leaf path of a batch, laid end to end.

    index: int64 [P], the batch's token at each place of the paths; inverse: int64 [T], a place of each token.
    """

    lengths: tuple[int, ...]
    index: Tensor
    inverse: Tensor


def pack_trees(trees: Sequence[Tree], *, share: bool = True, most_tokens: int | None = None) -> Batch:
    """Lay trees end to end.

    share=False repeats the prompt before every branch. With `most_tokens` a tree above it becomes several units,
    each repeating the prompt; without, a tree is one unit. Token channels are those of the branches (all alike),
    0 on prompts; row channels beside `lengths` and `unit`: `branch`, `tree` and those of the branches (0 on prompts).
    Float channels are float32, `branch` and `tree` int64. Branches of an empty prompt are rows of their own. Raises
    ValueError for an empty branch, and for a channel of another length.
    """
    if not trees or any(not t.branches or any(not len(b.ids) for b in t.branches) for t in trees):
        raise ValueError("a batch needs at least one tree, and every branch at least one token")
    names, extra = trees[0].branches[0].tokens, trees[0].branches[0].rows
    rows = list[tuple[float, ...]]()  # lengths, unit, start, branch, tree, those of the branches
    channels: dict[str, list[Row]] = {name: [] for name in ("ids", *names)}
    units = 0
    for number, tree in enumerate(trees):
        prompt, zeros = np.asarray(tree.prompt, np.int64), np.zeros(len(tree.prompt))
        joined = share and len(prompt) > 0
        for part in _parts(tree, share, most_tokens):
            if joined:
                rows.append((len(prompt), units, 0, SHARED, number, *(0.0 for _ in extra)))
                _append(channels, Branch(prompt, dict.fromkeys(names, zeros)))
            for at in part:
                branch = tree.branches[at]
                start, length = (len(prompt), len(branch.ids)) if joined else (0, len(prompt) + len(branch.ids))
                rows.append((length, units, start, at, number, *(branch.rows[name] for name in extra)))
                if not joined:
                    _append(channels, Branch(prompt, dict.fromkeys(names, zeros)))
                _append(channels, branch)
            units += 1
    kinds = {name: torch.int64 for name in ("lengths", "unit", "start", "branch", "tree")}
    kinds |= dict.fromkeys(extra, torch.float32)
    layout = {
        name: torch.tensor(column, dtype=kind)
        for (name, kind), column in zip(kinds.items(), zip(*rows, strict=True), strict=True)
    }
    tokens = {n: flatten_rows(v, np.int64 if n == "ids" else np.float32) for n, v in channels.items()}
    return Batch({**tokens, **token_layout(layout)}, layout)


def _append(channels: Mapping[str, list[Row]], part: Branch) -> None:
    """Add a part of a row to each channel."""
    for name, column in channels.items():
        values = part.ids if name == "ids" else part.tokens[name]
        if len(values) != len(part.ids):
            raise ValueError(f"channel {name} has {len(values)} values for {len(part.ids)} tokens")
        kind = np.int64 if name == "ids" else np.float32
        column.append(np.asarray(values, kind))


def _parts(tree: Tree, share: bool, most_tokens: int | None) -> list[range]:
    """The branches of each unit of a tree."""
    if most_tokens is None:
        return [range(len(tree.branches))]
    parts, tokens = [range(0)], 0
    for number, branch in enumerate(tree.branches):
        alone = len(tree.prompt) + len(branch.ids)
        more = len(branch.ids) if share else alone
        if parts[-1] and tokens + more <= most_tokens:
            parts[-1], tokens = range(parts[-1].start, number + 1), tokens + more
        else:
            parts, tokens = [*parts, range(number, number + 1)], alone
    return parts[1:]


def paths(batch: Batch) -> Paths | None:
    """The batch's paths, on the CPU; None if no row continues another, so that the rows are the paths."""
    before = prefixes(batch)
    if not bool((before >= 0).any()):
        return None
    leaves = torch.ones_like(before, dtype=torch.bool).index_fill_(0, before[before >= 0], False).nonzero()[:, 0]
    lengths, index = _concatenate_rows(batch, torch.stack([before[leaves], leaves], 1))
    inverse = torch.empty(batch.num_tokens, dtype=torch.int64)
    inverse[index] = torch.arange(len(index))
    return Paths(lengths, index, inverse)


def contexts(batch: Batch) -> tuple[tuple[int, ...], Tensor] | None:
    """The tokens that each row attends to: the row that it continues, if any, and its own.

    Returns the lengths [N] and, int64 on the CPU, the batch's token indices end to end; None if every row sees
    itself alone.
    """
    before = prefixes(batch)
    if not bool((before >= 0).any()):
        return None
    return _concatenate_rows(batch, torch.stack([before, torch.arange(len(before))], 1))


def continued_prompts(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """The tokens that continue prompts and the prompts' own; how many of both each prompt has.

    int64 on the CPU, the tokens as indices of the batch's; None if no row continues another.
    """
    before, lengths = prefixes(batch), batch.structure.rows["lengths"].cpu()
    rows = (before >= 0).nonzero()[:, 0]
    if not len(rows):
        return None
    starts = torch.cumsum(lengths, 0) - lengths
    prompts, of_row = torch.unique_consecutive(before[rows], return_inverse=True)
    behind, tokens = (ranges(starts[some].numpy(), lengths[some].numpy()) for some in (rows, prompts))
    return behind, tokens, torch.zeros_like(prompts).index_add_(0, of_row, lengths[rows]), lengths[prompts]


def _concatenate_rows(batch: Batch, parts: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Concatenate pairs [n, 2] of rows (-1: none): the length of each pair, and the token at each place."""
    lengths = batch.structure.rows["lengths"].cpu().numpy()
    flat = parts.flatten().numpy()
    sizes = np.where(flat < 0, 0, lengths[flat])
    return tuple(sizes.reshape(-1, 2).sum(1).tolist()), ranges((np.cumsum(lengths) - lengths)[flat], sizes)


def rows_as_paths(batch: Batch) -> Paths:
    """Every row as a path of its own: the paths of a batch of which no row continues another."""
    every = torch.arange(batch.num_tokens)
    return Paths(tuple(batch.structure.rows["lengths"].tolist()), every, every)
