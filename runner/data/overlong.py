"""What happens to examples above `data.max_length`, counted so that nothing disappears unsaid.

error            a problem that names row and length
skip             left out
truncate_left    the last max_length tokens stay        truncate_right    the first ones stay
split            pieces of max_length tokens, each beginning with the last token of the one before it,
                 which is context there: every token but the first is learnt exactly once
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from runner.data.rows import Problems
from runner.data.tokenise import Encoded

Rule = Literal["error", "skip", "truncate_left", "truncate_right", "split"]


@dataclass(slots=True)
class Tally:
    """Counts over one source; tokens are those of the items that stay."""

    rows: int = 0
    items: int = 0
    tokens: int = 0
    learnt: int = 0
    longest: int = 0  # tokens of the longest row before anything was cut
    overlong: int = 0
    cut_tokens: int = 0
    left_out: int = 0  # rows skipped, or cut so far that nothing to learn was left

    def __str__(self) -> str:
        return f"{self.items} items, {self.tokens} tokens, {self.learnt} of them learnt; longest row {self.longest}"


@dataclass(frozen=True, slots=True)
class Limit:
    """The longest item in tokens, and the rule for longer ones."""

    max_length: int
    rule: Rule

    def apply(self, row: Encoded, tally: Tally, problems: Problems) -> Iterator[Encoded]:
        """The items that a row becomes: one, none, or several; faults go to `problems`."""
        length = len(row.ids)
        tally.rows += 1
        tally.longest = max(tally.longest, length)
        if not any(row.learnt):
            problems.add(row.place, f"no token to learn in the {length} tokens of this row; expected at least one")
        elif length <= self.max_length:
            yield _counted(row, tally)
        elif self.rule == "error":
            problems.add(row.place, f"{length} tokens, above data.max_length={self.max_length}", self._way_out())
        else:
            yield from self._shortened(row, tally)

    def _shortened(self, row: Encoded, tally: Tally) -> Iterator[Encoded]:
        tally.overlong += 1
        pieces = [] if self.rule == "skip" else [p for p in self._pieces(row) if any(p.learnt)]
        tally.left_out += not pieces
        if pieces and self.rule != "split":
            tally.cut_tokens += len(row.ids) - self.max_length
        for piece in pieces:
            yield _counted(piece, tally)

    def _pieces(self, row: Encoded) -> list[Encoded]:
        length = len(row.ids)
        if self.rule == "truncate_right":
            return [_slice(row, 0, self.max_length)]
        if self.rule == "truncate_left":
            return [_slice(row, length - self.max_length, length)]
        return [_slice(row, at, at + self.max_length) for at in range(0, length - 1, self.max_length - 1)]

    def _way_out(self) -> str:
        return (
            "raise data.max_length, or set data.overlong to skip, truncate_left, truncate_right (or split: plain text)"
        )

    def report(self, tally: Tally) -> str:
        """What the rule did, in words; empty if no row was too long."""
        if not tally.overlong:
            return ""
        done = {"skip": "left out", "split": "split"}.get(self.rule, f"cut by {tally.cut_tokens} tokens in all")
        lost = (
            f", {tally.left_out} of them left out, as nothing to learn remained"
            if self.rule != "skip" and tally.left_out
            else ""
        )
        return f"{tally.overlong} of {tally.rows} rows were longer than data.max_length={self.max_length}: {done}{lost}"


def _counted(item: Encoded, tally: Tally) -> Encoded:
    tally.items += 1
    tally.tokens += len(item.ids)
    tally.learnt += sum(item.learnt)
    return item


def _slice(row: Encoded, start: int, stop: int) -> Encoded:
    """Tokens start … stop of a row; an answer that is not whole, or has no prompt left, is none."""
    ids, learnt = row.ids[start:stop], row.learnt[start:stop]
    learnt[:1] = [0]
    first, last = row.answer
    whole = start < first and last <= stop
    return replace(row, ids=ids, learnt=learnt, answer=(first - start, last - start) if whole else (0, 0))
