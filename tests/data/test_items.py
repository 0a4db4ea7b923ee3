"""Nothing too long disappears unsaid, and what stays is exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.data.examples import Reading
from runner.data.items import LengthLimit, OverlongRule, TruncationCounts
from runner.data.readers import Problems, SourceLocation
from runner.data.tokenization import EncodedAnswers, EncodedExample, EncodedRows

HERE = SourceLocation("a.jsonl", 7)


def row(length: int, context: int = 1) -> EncodedExample:
    """`length` tokens, the first `context` of them given; the rest is the answer."""
    learnt = [0] * context + [1] * (length - context)
    return EncodedExample(HERE, list(range(length)), learnt, (context, length))


def apply(
    rule: OverlongRule, given: EncodedExample, most: int
) -> tuple[list[EncodedExample], TruncationCounts, Problems]:
    tally, problems = TruncationCounts(), Problems("data.path", "a.jsonl")
    return list(LengthLimit(most, rule).apply(given, tally, problems)), tally, problems


@pytest.mark.parametrize("rule", ["error", "skip", "truncate_left", "truncate_right", "split"])
def test_what_fits_stays_as_it_is(rule: OverlongRule) -> None:
    items, tally, problems = apply(rule, row(8, 3), 8)
    assert items == [row(8, 3)]
    assert (tally.items, tally.tokens, tally.trained_tokens, tally.overlong, problems.count) == (1, 8, 5, 0, 0)


def test_without_max_length_the_model_is_the_limit() -> None:
    limit = LengthLimit(None, "error", "sft", (8, "the model has 8 positions"))
    tally, problems = TruncationCounts(), Problems("data.path", "a.jsonl")
    assert list(limit.apply(row(8), tally, problems)) == [row(8)]
    assert list(limit.apply(row(9), tally, problems)) == []
    assert "a.jsonl:7: 9 tokens, above 8 (data.max_length: the model has 8 positions)" in str(problems.error())
    assert limit.truncation_hint(tally) == (
        "1 row is too long; type data.truncation=skip, truncate_left or truncate_right (split: of plain text)"
    )
    assert list(LengthLimit(None, "error").apply(row(99), tally, problems)) == [row(99)]
    assert (tally.longest_item, tally.longest) == (99, 99)


def test_error_names_row_and_length_and_what_to_do() -> None:
    items, tally, problems = apply("error", row(9), 8)
    assert items == []
    assert "a.jsonl:7: 9 tokens, above data.max_length=8" in str(problems.error())
    assert LengthLimit(8, "error").truncation_hint(tally) == (
        "1 row is too long; type data.max_length=9 to keep all, or data.truncation=skip, truncate_left or "
        "truncate_right (split: of plain text)"
    )
    assert LengthLimit(8, "skip").truncation_hint(tally) == ""


def test_skip_leaves_out_and_counts() -> None:
    items, tally, _ = apply("skip", row(9), 8)
    assert (items, tally.left_out, tally.longest) == ([], 1, 9)
    assert LengthLimit(8, "skip").report(tally) == "1 of 1 rows were longer than data.max_length=8: left out"


@given(st.integers(2, 30), st.integers(1, 29), st.integers(2, 30))
def test_truncation_keeps_an_end_and_never_the_first_weight(length: int, context: int, most: int) -> None:
    given_row = row(length, min(context, length - 1))
    for rule, kept in (("truncate_left", given_row.ids[-most:]), ("truncate_right", given_row.ids[:most])):
        items, tally, problems = apply(rule, given_row, most)  # type: ignore[arg-type]
        assert problems.count == 0
        assert len(items) + tally.left_out == 1
        if not items:
            assert sum(given_row.loss_mask[:most]) == 0
            continue
        [item] = items
        assert item.ids == kept
        assert item.loss_mask[0] == 0
        assert item.loss_mask[1:] == [given_row.loss_mask[token] for token in kept[1:]]
        first, last = item.answer
        if last:  # a whole answer after a prompt that is not empty
            assert first > 0
            assert item.ids[first:last] == given_row.ids[given_row.answer[0] :]
        else:
            assert rule == "truncate_right" or most <= length - given_row.answer[0]
        assert tally.cut_tokens == max(length - most, 0)


def test_truncate_left_keeps_what_a_sequence_begins_with() -> None:
    bos = EncodedExample(HERE, [500, 501, *range(10)], [0, 0, 0, 0, *[1] * 8], (4, 12))
    pair = EncodedAnswers(HERE, [500, 501, 1, 2, 3, 4], [[7, 8], [9]])
    limit = LengthLimit(6, "truncate_left", starts=frozenset({500, 501}))
    tally, problems = TruncationCounts(), Problems("data.path", "a.jsonl")
    [item] = limit.apply(bos, tally, problems)
    assert item == EncodedExample(HERE, [500, 501, 6, 7, 8, 9], [0, 0, 0, 1, 1, 1])
    assert tally.cut_tokens == 6
    limit = replace(limit, reading="pairs")
    assert list(limit.apply(pair, tally, problems)) == [replace(pair, prompt=[500, 501, 3, 4])]
    assert list(replace(limit, max_length=4).apply(pair, tally, problems)) == []  # no prompt but its beginning


def test_a_row_whose_answer_is_cut_off_entirely_is_left_out_and_said() -> None:
    items, tally, _ = apply("truncate_right", row(9, 8), 8)
    assert items == []
    assert "1 of them skipped, as no token to train on remained" in LengthLimit(8, "truncate_right").report(tally)


@given(st.integers(2, 200), st.integers(2, 20))
def test_split_learns_every_token_but_the_first_exactly_once(length: int, most: int) -> None:
    text = EncodedExample(HERE, list(range(length)), [0] + [1] * (length - 1))
    items, tally, _ = apply("split", text, most)
    learnt = [token for item in items for token, flag in zip(item.ids, item.loss_mask, strict=True) if flag]
    assert learnt == text.ids[1:]
    assert all(2 <= len(item.ids) <= most for item in items)
    assert (tally.trained_tokens, tally.left_out, tally.items) == (length - 1, 0, len(items))


def test_a_row_without_a_token_to_learn_is_an_error() -> None:
    problems = apply("error", EncodedExample(HERE, [5], [0]), 8)[2]
    assert "a.jsonl:7: no token to train on in the 1 tokens of this row" in str(problems.error())


def tree(prompt: int, *answers: int) -> EncodedAnswers:
    """A prompt of so many tokens, 100, 101, …, with answers of so many."""
    return EncodedAnswers(HERE, list(range(100, 100 + prompt)), [list(range(n)) for n in answers], {"k": 1})


def cut(
    rule: OverlongRule, given: EncodedAnswers, most: int, reading: Reading
) -> tuple[list[EncodedAnswers], TruncationCounts, Problems]:
    tally, problems = TruncationCounts(), Problems("data.path", "a.jsonl")
    return list(LengthLimit(most, rule, reading).apply(given, tally, problems)), tally, problems  # type: ignore[arg-type]


def test_a_pair_is_as_long_as_its_prompt_and_longer_answer() -> None:
    items, tally, _ = cut("error", tree(4, 2, 6), 10, "pairs")
    assert items == [tree(4, 2, 6)]
    assert (tally.longest, tally.tokens, tally.trained_tokens) == (10, 12, 8)
    _, tally, problems = cut("error", tree(4, 2, 6), 9, "pairs")
    assert "a.jsonl:7: 10 tokens, above data.max_length=9" in str(problems.error())
    assert (
        LengthLimit(9, "error", "pairs")
        .truncation_hint(tally)
        .endswith("data.truncation=skip or truncate_left (of the prompt)")
    )


@given(st.integers(1, 20), st.lists(st.integers(1, 20), min_size=1, max_size=2), st.integers(2, 30))
def test_only_the_beginning_of_a_prompt_is_cut(prompt: int, answers: list[int], most: int) -> None:
    given_row = tree(prompt, *answers)
    items, tally, problems = cut("truncate_left", given_row, most, "pairs")
    excess = prompt + max(answers) - most
    assert problems.count == 0
    assert (tally.overlong, tally.left_out) == (excess > 0, excess >= prompt)
    if excess >= prompt:
        assert items == []
        assert "1 of them skipped, as no prompt token remained" in LengthLimit(most, "truncate_left", "pairs").report(
            tally
        )
    else:
        assert items == [EncodedAnswers(HERE, given_row.prompt[max(excess, 0) :], given_row.answers, {"k": 1})]
        assert tally.cut_tokens == max(excess, 0)


@pytest.mark.parametrize("reading", ["prompts", "questions"])
def test_a_prompt_to_be_answered_is_measured_alone(reading: Reading) -> None:
    assert cut("error", tree(4, 50), 4, reading)[0] == [tree(4, 50)]
    [item] = cut("truncate_left", tree(5), 4, reading)[0]
    assert item.prompt == [101, 102, 103, 104]
    assert cut("skip", tree(5), 4, reading)[:1] == ([],)
    assert "5 tokens, above" in str(cut("error", tree(5), 4, reading)[2].error())


@pytest.mark.parametrize("empty", [tree(0), tree(0, 3), tree(3, 0), tree(3, 2, 0)])
def test_a_prompt_or_an_answer_without_a_token_is_an_error(empty: EncodedAnswers) -> None:
    assert "expected at least one" in str(cut("skip", empty, 8, "pairs")[2].error())


def turns(*answers: int) -> EncodedRows:
    """Rows that begin with the same 10 tokens; each has two tokens of its own and an answer of so many tokens."""
    rows = []
    for at, size in enumerate(answers):
        ids = [*range(10), 100 + at, 200 + at, *[300 + at] * size]
        rows.append(EncodedExample(HERE, ids, [0] * 12 + [1] * size, (12, 12 + size)))
    return EncodedRows(rows)


def test_rows_of_a_conversation_share_their_beginning_within_max_length() -> None:
    for most, sizes in ((100, [25]), (20, [20, 15]), (15, [15, 15, 15])):
        tally, problems = TruncationCounts(), Problems("data.path", "a.jsonl")
        items = list(LengthLimit(most, "error").apply(turns(3, 3, 3), tally, problems))
        assert [len(item.ids) for item in items] == sizes and not problems.count
        assert (tally.rows, tally.items, sum(sum(item.loss_mask) for item in items)) == (1, len(sizes), 9)
        first, last = items[-1].answer
        assert items[-1].ids[first:last] == [302, 302, 302]
        assert tally.branches_text().startswith("1 of 1 rows: generation sees other tokens of earlier turns")
        assert f"{sum(sizes) / 15:.2g} times" in tally.branches_text()


def test_a_row_of_a_conversation_that_is_too_long_follows_the_rule() -> None:
    tally, problems = TruncationCounts(), Problems("data.path", "a.jsonl")
    assert [len(i.ids) for i in LengthLimit(15, "error").apply(turns(3, 9), tally, problems)] == [15]
    assert "a.jsonl:7: 21 tokens, above data.max_length=15" in str(problems.error())
    tally, problems = TruncationCounts(), Problems("data.path", "a.jsonl")
    assert list(LengthLimit(14, "error").apply(turns(3, 9, 5), tally, problems)) == []
    assert problems.count == 1 and "a.jsonl:7: 21 tokens, above" in str(problems.error()), (
        "one problem for all branches"
    )
    tally = TruncationCounts()
    assert not list(LengthLimit(15, "skip").apply(turns(3, 9), tally, Problems("data.path", "a")))
    assert LengthLimit(15, "skip").report(tally) == "1 of 1 rows were longer than data.max_length=15: left out"
    assert not tally.branches_text()
    tally, cut = TruncationCounts(), LengthLimit(15, "truncate_right")
    late = EncodedExample(HERE, list(range(18)), [0] * 15 + [1] * 3, (15, 18))  # its answer is cut off entirely
    assert len(list(cut.apply(EncodedRows([*turns(3).rows, late]), tally, Problems("data.path", "a")))) == 1
    assert cut.report(tally) == "1 of 1 rows were longer than data.max_length=15: truncated by 3 tokens in total"
