"""Regular expressions of the user's, run on text of the model's: each search has a deadline, because some never end."""

from __future__ import annotations

from collections import deque

import regex  # type: ignore[import-untyped]  # Python's own `re` cannot be stopped

from runner.reward.scorer import Unscorable

SEARCH_S = 2.0


def fault(pattern: str, groups: int | None = None) -> str | None:
    """What is wrong with a pattern that has to have `groups` groups; None if nothing is."""
    try:
        found = regex.compile(pattern, regex.DOTALL).groups
    except regex.error as error:
        return f"no regular expression: {error}"
    if groups is not None and found != groups:
        return f"expected {groups} group in brackets, found {found}; (?:…) makes brackets that are no group"
    return None


def matches(pattern: str, text: str) -> bool:
    """Whether the whole text matches. Raises Unscorable after SEARCH_S seconds."""
    try:
        return regex.compile(pattern, regex.DOTALL).fullmatch(text, timeout=SEARCH_S) is not None
    except TimeoutError as error:
        raise _too_slow(pattern, text) from error


def last(pattern: str, text: str) -> str | None:
    """The group of the last match; None if there is no match. Raises Unscorable after SEARCH_S seconds."""
    try:
        found = deque(regex.compile(pattern, regex.DOTALL).finditer(text, timeout=SEARCH_S), maxlen=1)
    except TimeoutError as error:
        raise _too_slow(pattern, text) from error
    return found[0].group(1) if found else None


def _too_slow(pattern: str, text: str) -> Unscorable:
    where = f"a text of {len(text)} characters"
    return Unscorable("pattern too slow", f"the pattern {pattern!r} took over {SEARCH_S:g} s on {where}; simplify it")
