"""Regular expressions: what is refused before a run, and that no search lasts for ever."""

from __future__ import annotations

import pytest

from runner.interfaces.rewards import UnscorableError
from runner.reward import rules

NEVER_ENDS = ("(?:a|aa)+[bc]", "a" * 5000)


@pytest.mark.parametrize(
    ("pattern", "groups", "said"),
    [
        ("(", None, "not a regular expression: "),
        ("a", 1, "expected 1 capturing group (…), found 0"),
        ("(a)(b)", 1, "found 2"),
        ("(?:a)(b)", 1, None),
        ("(a)(b)", None, None),
    ],
)
def test_a_fault_is_found(pattern: str, groups: int | None, said: str | None) -> None:
    found = rules.pattern_fault(pattern, groups)
    assert found is None if said is None else found is not None and said in found


def test_the_last_match_counts_over_lines() -> None:
    assert rules.last_match("<a>(.*?)</a>", "<a>1</a> or <a>2\n3</a>") == "2\n3"
    assert rules.last_match("<a>(.*?)</a>", "nothing") is None
    assert rules.is_full_match("<a>.*</a>", "<a>\n</a>") and not rules.is_full_match("<a>.*</a>", "x<a></a>")


@pytest.mark.parametrize("search", [rules.is_full_match, lambda p, t: rules.last_match(f"({p})", t)])
def test_a_search_that_never_ends_is_ended(search, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "SEARCH_S", 0.1)
    with pytest.raises(UnscorableError, match=r"took over 0\.1 s on a text of 5000 characters") as caught:
        search(*NEVER_ENDS)
    assert caught.value.kind == "pattern too slow"
