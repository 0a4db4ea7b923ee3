"""Rows of tables as items: sizes come from the index, tokens are read when they are needed.

Legend: U rows, each a spot (table, row of the table): int64 [U, 2].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runner.data.items import ANSWERS, rollout_prompt
from runner.interfaces import TokenizedAnswers, TokenizedExamples
from runner.spec.base import ItemKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from runner.data.dataset import TokenizedTable

Spots = NDArray[np.int64]


def rows_of_tables(
    kind: ItemKind, tables: Sequence[TokenizedTable], spots: Spots, tokenizer: PreTrainedTokenizerBase
) -> Sequence[Any]:
    """The items at the spots, in that order."""
    if kind == "sft":
        return _examples(tables, spots)
    if kind == "prompts":
        cells = zip(_cells(tables, "prompt", spots), _facts(tables, spots), strict=True)
        return [rollout_prompt(ids.tolist(), facts, tokenizer) for ids, facts in cells]
    return _answers(tables, spots, *ANSWERS[kind])


def _examples(tables: Sequence[TokenizedTable], spots: Spots) -> TokenizedExamples:
    def first_trained(table: TokenizedTable, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        offsets, values = table.values("trained")
        return values[offsets[rows]]

    is_branched = any(table.lengths("branches", spots[spots[:, 0] == at, 1]).any() for at, table in enumerate(tables))
    trained = np.concatenate(_cells(tables, "trained", spots)) if is_branched else _column(tables, spots, first_trained)
    return TokenizedExamples(
        sizes=_column(tables, spots, lambda table, rows: table.lengths("ids", rows)),
        media=_media(tables, spots),
        trained=trained.astype(np.int64),
        branches=[cell.tolist() for cell in _cells(tables, "branches", spots)] if is_branched else None,
        read=lambda units: (_cells(tables, "ids", spots[units]), _cells(tables, "loss_mask", spots[units])),
    )


def _answers(
    tables: Sequence[TokenizedTable], spots: Spots, make: Callable[..., Any], label: str, answers: int
) -> TokenizedAnswers:
    """label: of the facts of each row; answers: their number behind each prompt."""

    def sizes(table: TokenizedTable, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        first, ends = table.values("answers")[0][rows], table.values("answers.item")[0]
        lengths = [ends[first + at + 1] - ends[first + at] for at in range(answers)]
        return np.stack([table.lengths("prompt", rows), *lengths], 1)

    def read(at: int) -> list[NDArray[np.integer]]:
        source, row = spots[at].tolist()
        table = tables[source]
        first, (ends, ids) = table.values("answers")[0][row], table.values("answers.item")
        return [table.cell("prompt", row), *(ids[ends[i] : ends[i + 1]] for i in range(first, first + answers))]

    return TokenizedAnswers(
        sizes=_column(tables, spots, sizes, answers + 1),
        media=_media(tables, spots),
        label=lambda at: _facts(tables, spots[at : at + 1])[0][label],
        read=read,
        make=make,
    )


def _media(tables: Sequence[TokenizedTable], spots: Spots) -> NDArray[np.int64]:
    """How many tokens of each row are places of images."""
    return _column(tables, spots, lambda table, rows: 0 if table.media is None else table.media[rows])


def _facts(tables: Sequence[TokenizedTable], spots: Spots) -> list[dict[str, Any]]:
    return [json.loads(tables[source].text("facts", row)) for source, row in spots.tolist()]


def _cells(tables: Sequence[TokenizedTable], name: str, spots: Spots) -> list[NDArray[np.integer]]:
    """The list of each row in a column of lists."""
    return [tables[source].cell(name, row) for source, row in spots.tolist()]


def _column(
    tables: Sequence[TokenizedTable],
    spots: Spots,
    compute: Callable[[TokenizedTable, NDArray[np.int64]], NDArray[np.int64] | int],
    *shape: int,
) -> NDArray[np.int64]:
    """What `compute` gives for the rows of each table, int64 [U, *shape]."""
    found = np.empty((len(spots), *shape), np.int64)
    for source, table in enumerate(tables):
        here = spots[:, 0] == source
        found[here] = compute(table, spots[here, 1])
    return found
