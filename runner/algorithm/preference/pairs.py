"""Pairs of answers as batches, and what every loss of pairs measures.

    Pair ──pack_pairs──▶ one tree: prompt, chosen (branch 0), rejected (branch 1); one unit, so it is never cut

Legend: N rows, T tokens, P pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from runner.algorithm.preference.losses import PairLosses
from runner.batch import Batch, split_rows, with_totals
from runner.metrics import Metrics
from runner.protocols import Pair
from runner.tree import Branch, Tree, pack_trees

CHOSEN, REJECTED = 0, 1  # the `branch` of each side


def pack_pairs(pairs: Sequence[Pair], *, share: bool, margins: bool = False) -> Batch:
    """One tree per pair on the CPU; weight 1 on every token of the answers, 0 on prompts.

    share: the prompt is a row of its own, computed once. margins: with a row channel `margin`, 0 where a pair has none.
    Raises ValueError for no pairs, an empty prompt or an empty answer.
    """
    return pack_trees([_tree(pair, margins) for pair in pairs], share=share)


def _tree(pair: Pair, margins: bool) -> Tree:
    rows = {"margin": pair.margin or 0.0} if margins else {}
    return Tree(pair.prompt, [Branch(ids, {"weight": [1.0] * len(ids)}, rows) for ids in (pair.chosen, pair.rejected)])


def sides(batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
    """What rows [N] say of the chosen and of the rejected answers, [P] each, in the order of the pairs."""
    branch = batch.structure.rows["branch"]
    chosen, rejected = ((branch == side).nonzero()[:, 0] for side in (CHOSEN, REJECTED))
    return rows[chosen.to(rows.device, non_blocking=True)], rows[rejected.to(rows.device, non_blocking=True)]


def mini_batches(batch: Batch, count: int) -> Iterator[Batch]:
    """`count` parts of whole units, each knowing its totals."""
    for part in split_rows(batch, count):
        yield with_totals(part, part.count())


def pair_metrics(found: PairLosses) -> Metrics:
    """train/loss, train/accuracy, reward/chosen, reward/rejected, reward/margin: means over pairs.

    A pair is right where the chosen answer's reward is the higher one; equal rewards are not.
    """
    losses, chosen, rejected = found
    metrics = Metrics()
    for name, values in (
        ("train/loss", losses.detach()),
        ("train/accuracy", chosen > rejected),
        ("reward/chosen", chosen),
        ("reward/rejected", rejected),
        ("reward/margin", chosen - rejected),
    ):
        metrics.add(name, values.sum(), len(values))
    return metrics
