"""Many tokenized rows of which the lengths are known before they are read.

Legend: U rows of data; N rows of a batch, of which a row of data with branches is several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from runner.core.media import MEDIA_ID
from runner.interfaces.sampling import LabeledCompletion, PreferencePair, TokenizedExample

T = TypeVar("T")
Numbers = Sequence[float] | NDArray[np.generic]


class UnreadRows(Sequence[T]):
    """Rows of data that are read one by one; equal to any sequence of the same rows."""

    sizes: NDArray[np.int64]

    def row(self, at: int) -> T:
        """The row at `at`, which is not negative."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self.row(one) for one in range(*at.indices(len(self)))]
        return self.row(range(len(self))[at])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


@dataclass(frozen=True, eq=False, repr=False)
class TokenizedExamples(UnreadRows[TokenizedExample]):
    """Tokenized rows that are read when they are needed; what is known of all of them before.

    sizes: tokens of each, int64 [U]; media: how many of these are places of images, int64 [U]
    trained: tokens with a weight but the first, of each row or, where it has branches, of its beginning and of each of
    them, int64 [N]; branches: see `TokenizedExample`, None if no row has any
    read: rows → ids and weights of all their tokens end to end, in arrays of their own
    """

    sizes: NDArray[np.int64]
    media: NDArray[np.int64]
    trained: NDArray[np.int64]
    branches: Sequence[Sequence[int]] | None
    read: Callable[[NDArray[np.int64]], tuple[NDArray[np.int64], NDArray[np.float32]]]

    @classmethod
    def of(cls, items: Sequence[TokenizedExample]) -> TokenizedExamples:
        """The same of rows that are in memory."""
        edges = [(0, *item.branches, len(item.ids)) for item in items]
        weights = [(0.0, *item.weights[1:]) for item in items]
        trained = [
            sum(map(bool, row[a:b])) for row, edge in zip(weights, edges, strict=True) for a, b in pairwise(edge)
        ]
        return cls(
            sizes=np.array([len(item.ids) for item in items]),
            media=np.array([sum(one >= MEDIA_ID for one in item.ids) for item in items]),
            trained=np.array(trained),
            branches=[item.branches for item in items],
            read=lambda units: (
                np.concatenate([items[at].ids for at in units], dtype=np.int64),
                np.concatenate([items[at].weights for at in units], dtype=np.float32),
            ),
        )

    def row(self, at: int) -> TokenizedExample:
        ids, weights = self.read(np.array([at]))
        branches = tuple(self.branches[at]) if self.branches else ()
        return TokenizedExample(tuple(ids.tolist()), tuple(weights.tolist()), branches)


@dataclass(frozen=True, eq=False, repr=False)
class TokenizedAnswers(UnreadRows[Any]):
    """Prompts with answers, preference pairs or labeled completions, that are read when they are needed.

    sizes: tokens of the prompt and of each answer, int64 [U, 1 + answers]; media: as in `TokenizedExamples`
    label: the margin of a pair, whether a completion is good
    read: (row, part of it) of each, int64 [n, 2] → the ids of each; part 0 is the prompt
    make: the item of these and the label
    """

    sizes: NDArray[np.int64]
    media: NDArray[np.int64]
    label: Callable[[int], float | None]
    read: Callable[[NDArray[np.int64]], Sequence[Numbers]]
    make: Callable[..., PreferencePair | LabeledCompletion]

    @classmethod
    def of(cls, items: Sequence[PreferencePair | LabeledCompletion]) -> TokenizedAnswers:
        """The same of items that are in memory."""
        parts = [
            (i.prompt, i.chosen, i.rejected) if isinstance(i, PreferencePair) else (i.prompt, i.completion)
            for i in items
        ]
        labels = [item.margin if isinstance(item, PreferencePair) else item.good for item in items]
        return cls(
            sizes=np.array([list(map(len, one)) for one in parts]),
            media=np.array([sum(one >= MEDIA_ID for ids in row for one in ids) for row in parts]),
            label=labels.__getitem__,
            read=lambda places: [parts[row][part] for row, part in places.tolist()],
            make=type(items[0]),
        )

    def row(self, at: int) -> PreferencePair | LabeledCompletion:
        places = np.array([(at, part) for part in range(self.sizes.shape[1])])
        return self.make(*(tuple(map(int, ids)) for ids in self.read(places)), self.label(at))
