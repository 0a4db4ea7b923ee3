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

    def begins(name: str) -> NDArray[np.int64]:
        return _column(tables, spots, lambda table, rows: table.values(name)[0][rows])

    def read(units: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        found = places[units].tolist()
        cells = [ids[source][first : first + size] for source, first, _, size in found]
        masks = [loss_masks[source][first : first + size] for source, _, first, size in found]
        return np.concatenate(cells, dtype=np.int64), np.concatenate(masks, dtype=np.float32)

    is_branched = any(table.lengths("branches", spots[spots[:, 0] == at, 1]).any() for at, table in enumerate(tables))
    trained = np.concatenate(_cells(tables, "trained", spots)) if is_branched else _column(tables, spots, first_trained)
    sizes = _column(tables, spots, lambda table, rows: table.lengths("ids", rows))
    places = np.stack([spots[:, 0], begins("ids"), begins("loss_mask"), sizes], 1)
    ids, loss_masks = ([table.values(name)[1] for table in tables] for name in ("ids", "loss_mask"))
    return TokenizedExamples(
        sizes=sizes,
        media=_media(tables, spots),
        trained=trained.astype(np.int64),
        branches=[cell.tolist() for cell in _cells(tables, "branches", spots)] if is_branched else None,
        read=read,
    )


def _answers(
    tables: Sequence[TokenizedTable], spots: Spots, make: Callable[..., Any], label: str, answers: int
) -> TokenizedAnswers:
    """label: of the facts of each row; answers: their number behind each prompt."""

    def edges(side: int) -> NDArray[np.int64]:
        def of_table(table: TokenizedTable, rows: NDArray[np.int64]) -> NDArray[np.int64]:
            lists = table.values("answers")[0][rows, None] + np.arange(answers) + side
            return np.concatenate(
                [table.values("prompt")[0][rows + side, None], table.values("answers.item")[0][lists]], 1
            )

        return _column(tables, spots, of_table, answers + 1)

    begins = edges(0)
    sizes = edges(1) - begins
    values = [table.values(name)[1] for table in tables for name in ("prompt", "answers.item")]

    def read(places: NDArray[np.int64]) -> list[NDArray[np.integer]]:
        at, part = places.T
        first = begins[at, part]
        found = np.stack([2 * spots[at, 0] + (part > 0), first, first + sizes[at, part]], 1)
        return [values[source][first:last] for source, first, last in found.tolist()]

    return TokenizedAnswers(
        sizes=sizes,
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
