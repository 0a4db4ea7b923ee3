"""Sources of rows to the data of a job; data=file, whose sources are the user's own files.

Source.rows ──FormatCheck──▶ Example ──Tokeniser──▶ Encoded | Answered ──Limit──▶ TokenizedTable ──▶ TokenisedData
                  └──────────────── Problems ──────────────────────────┘   one DataError for all of a source's faults

What the rows are read as (`Reading`) follows from the kind of items that the algorithm learns from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import tokenizers
import transformers

from runner.core.errors import DataError
from runner.data.config import ChatConfig, FileConfig, SourceConfig
from runner.data.dataset import (
    FORMAT,
    PROMPTS_WITH_ANSWERS,
    ROWS,
    HeldOut,
    Summary,
    TokenizedData,
    TokenizedTable,
    Write,
    build_in_memory,
    load_or_build,
)
from runner.data.examples import Reading, held_out_reading
from runner.data.files import find_sources
from runner.data.formats import Format, FormatCheck
from runner.data.holdout import Holdout, row_key
from runner.data.items import LengthLimit, TruncationCounts
from runner.data.readers import Problems, Row
from runner.data.sampling_order import ItemOrder, ProportionalOrder, RefillOrders, WeightedMixture
from runner.data.tokenization import ExampleTokenizer, digest, encode, tokenizer_digest
from runner.interfaces import Data, Decide
from runner.spec.base import ItemKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 512  # rows tokenised in one call


class RowSource(Protocol):
    """A place that rows come from; `key` is the option that named it, e.g. data.path."""

    @property
    def key(self) -> str: ...

    @property
    def name(self) -> str: ...

    def digest(self) -> str: ...  # sha256 of the contents

    def rows(self, problems: Problems) -> Iterator[Row]: ...


@dataclass(frozen=True)
class Portion:
    """Rows of a source that become one table: all of them, or those on one side of data.holdout."""

    source: RowSource
    reading: Reading
    holdout: Holdout | None = None
    held_out: bool = False

    @property
    def where(self) -> str:
        """The option that named the source, and the source."""
        named = f"{self.source.key}={self.source.name}"
        return f"held out of {named}" if self.holdout and self.held_out else named

    def keeps(self, form: Format, row: Row) -> bool:
        """Whether the row belongs to it."""
        return self.holdout is None or self.holdout.is_held_out(form, row) == self.held_out


@dataclass(frozen=True)
class SourcePreparation:
    """Turns a source into a table of tokens, by the job's options."""

    config: SourceConfig
    tokenizer: PreTrainedTokenizerBase
    decide: Decide
    cache_dir: Path
    kind: ItemKind
    chat: ChatConfig

    def key(self, portion: Portion) -> str:
        """sha256 of everything that the portion's items depend on."""
        source, reading = portion.source, portion.reading
        options = {name: getattr(self.config, name) for name in ("max_length", "truncation", "rename_columns")}
        side = [portion.holdout.fraction, portion.held_out] if portion.holdout else []
        chat = self.chat.model_dump(mode="json", exclude={"template"} | ({"train_on"} if reading != "sft" else set()))
        return digest(source.digest(), tokenizer_digest(self.tokenizer), reading, options, chat, *side)

    def table(self, portion: Portion, key: str) -> tuple[TokenizedTable, Summary]:
        """The portion's table, from the cache where it is; what was found in the rows is said either way."""

        def fill(write: Write) -> Summary:
            return self._fill(portion, write)

        schema = ROWS if portion.reading == "sft" else PROMPTS_WITH_ANSWERS
        if self.config.cache:  # the libraries may change what a template or a tokenizer does without changing its text
            versions = (FORMAT, transformers.__version__, tokenizers.__version__)
            folder = self.cache_dir / digest(key, *versions)[:32]
            table, summary = load_or_build(folder, schema, fill, self._report_damage)
        else:
            table, summary = build_in_memory(schema, fill)
        self._report_source(portion, summary)
        return table, summary

    def holdout(self, source: RowSource) -> Holdout | None:
        """The rule that data.holdout makes for a source; it reads the rows when it is first used."""
        if self.config.holdout is None:
            return None

        def read_keys() -> set[int]:
            keys: set[int] = set()

            def note(form: Format, row: Row) -> bool:
                keys.add(row_key(form, row))
                return False

            problems = Problems(source.key, source.name)  # faults are raised by who reads the rows to the end
            for _ in FormatCheck(problems, self.kind, self.config.rename_columns, note).examples(source.rows(problems)):
                pass
            return keys

        return Holdout(self.config.holdout, f"{source.key}={source.name}", read_keys)

    def _fill(self, portion: Portion, write: Write) -> Summary:
        """Write every item of the portion. Raises DataError with all that is wrong with it."""
        source, reading = portion.source, portion.reading
        problems, tally = Problems(source.key, source.name), TruncationCounts()
        check = FormatCheck(problems, reading, self.config.rename_columns, portion.keeps)
        tokeniser = ExampleTokenizer(self.tokenizer, self.chat, None if reading == "sft" else "completion")
        limit = LengthLimit(self.config.max_length, self.config.truncation, reading)
        examples = check.examples(source.rows(problems))
        while batch := list(islice(examples, BATCH)):
            self._refuse_split(check)
            encoded = encode(tokeniser, batch, problems)
            write([piece.record() for row in encoded for piece in limit.apply(row, tally, problems)])
        if hint := limit.way_out(tally):
            problems.add_hint(hint)
        problems.raise_if_any()
        if not tally.items:
            why = limit.report(tally) or (
                f"{check.num_identical_pairs} pairs with equal answers" if check.num_identical_pairs else "no row"
            )
            raise DataError(f"{source.key}={source.name}: no item is left; {why}")
        return _summary(check, tokeniser, limit, tally)

    def _refuse_split(self, check: FormatCheck) -> None:
        if self.config.truncation == "split" and check.format is not None and check.format.columns != ("text",):
            raise DataError(
                f"data.truncation=split needs plain text, a column `text`; {check.first} has {check.format}\n"
                "  choose error, skip, truncate_left or truncate_right"
            )

    def _report_source(self, portion: Portion, summary: Summary) -> None:
        """Format, counts, and what was left out or could not be had."""
        where, reading = portion.where, portion.reading
        made_of = f", messages made of {', '.join(summary['converted'])}" if summary["converted"] else ""
        self._record_fact("data.format", summary["format"], f"{where}: {summary['counts']}{made_of}")
        if not (portion.held_out and reading == self.kind):  # the columns of the training rows, said with these
            self._report_columns(where, reading, summary)
        if summary["alike"]:
            left_out = f"{summary['alike']} left out"
            self.decide("data.pairs", "all", left_out, f"{where}: pairs whose chosen and rejected are the same")
        if summary["several_turns"]:
            turns = f"in {summary['several_turns']} rows an answer has several turns; those of others count as well"
            self._record_fact("data.turns", "every token of an answer", f"{where}: {turns}")
        if summary["overlong"]:
            self._record_fact("data.truncation", self.config.truncation, f"{where}: {summary['overlong']}")
        for note in summary["notes"]:
            self.decide("data.end_token", "trained on", "not trained on", f"{where}: {note}")
        for note in summary["chat_notes"]:
            self._record_fact("chat", note, where)
        if summary["branches"]:
            self._record_fact("chat.train_on", "every assistant turn", f"{where}: {summary['branches']}")

    def _report_columns(self, where: str, reading: Reading, summary: Summary) -> None:
        ignored = f"not read: {', '.join(summary['ignored'])}"
        seen_by = {"prompts": "rewards", "questions": "environments"}.get(reading)
        if summary["ignored"] and seen_by:
            self.decide(
                "data.rename_columns", f"given to {seen_by}", ignored, f"{where}: they hold values that JSON cannot"
            )
        elif summary["ignored"]:
            self._record_fact("data.rename_columns", ignored, f"{where}: {summary['format']} has no use for them")
        if summary["given"]:
            untrained = "; the completion is not trained on" if "completion" in summary["given"] else ""
            self._record_fact(
                "data.rename_columns", f"for {seen_by}: {', '.join(summary['given'])}", f"{where}{untrained}"
            )

    def _report_damage(self, what: str) -> None:
        self._record_fact("data.cache", "made again", f"damaged: {what}")

    def _record_fact(self, feature: str, value: str, reason: str) -> None:
        """Say something that is as it was wanted."""
        self.decide(feature, value, value, reason)


def _summary(
    check: FormatCheck, tokeniser: ExampleTokenizer, limit: LengthLimit, tally: TruncationCounts
) -> dict[str, Any]:
    return {
        "format": str(check.format),
        "style": "chat" if check.format is not None and check.format.chat else "text",
        "counts": str(tally),
        "renamed": sorted(check.renaming.seen),
        "ignored": sorted(check.ignored),
        "converted": sorted(check.converted),
        "given": sorted(check.reward_columns),
        "alike": check.num_identical_pairs,
        "several_turns": check.num_several_turns,
        "overlong": limit.report(tally),
        "notes": sorted(tokeniser.notes),
        "chat_notes": sorted(tokeniser.chat_notes),
        "branches": tally.branches_text(),
    }


def build_data(
    prepare: SourcePreparation, sources: Sequence[RowSource], held_out: RowSource | None, seed: int
) -> TokenizedData:
    """Tokenize (or read from the cache) all sources and order them. Raises DataError, StorageError."""
    config, kind = prepare.config, prepare.kind
    portions = [Portion(source, kind, prepare.holdout(source)) for source in sources]
    if held_out is not None:
        portions.append(Portion(held_out, held_out_reading(kind)))
    portions += [Portion(p.source, held_out_reading(kind), p.holdout, held_out=True) for p in portions if p.holdout]
    keys = [prepare.key(portion) for portion in portions]
    built = [prepare.table(portion, key) for portion, key in zip(portions, keys, strict=True)]
    _refuse_unseen(config, [summary for _, summary in built])
    tables = [table for table, _ in built]
    training = tables[: len(sources)]
    return TokenizedData(
        kind=kind,
        tables=training,
        rounds=_rounds(config, [len(table) for table in training], seed),
        fingerprint=keys[0] if len(keys) == 1 else digest(keys, config.mixture_weights),
        prompt_style="chat" if "chat" in [summary["style"] for _, summary in built[: len(sources)]] else "text",
        tokenizer=prepare.tokenizer,
        columns=frozenset().union(*(summary["given"] for _, summary in built[: len(sources)])),
        evaluation=_held_out(prepare, tables[len(sources) :]),
    )


def _held_out(prepare: SourcePreparation, tables: Sequence[TokenizedTable]) -> HeldOut | None:
    """The held-out rows that are used, None if there are none; says so if these are not all."""
    if not tables:
        return None
    found = HeldOut(tables, prepare.config.max_eval_examples)
    if len(found) < found.total:
        used = f"the first {len(found)} of {found.total} held-out items"
        prepare.decide("data.max_eval_examples", used, used, f"data.max_eval_examples={found.limit}; null uses all")
    return found


def _refuse_unseen(config: SourceConfig, summaries: Sequence[Summary]) -> None:
    """Raise DataError for a renaming of a column that no row of any source has."""
    seen = {name for summary in summaries for name in summary["renamed"]}
    unseen = [name for name in config.rename_columns or () if name not in seen]
    if unseen:
        raise DataError(
            f"data.rename_columns: no row has a column {', '.join(unseen)}; check the name, or leave it out"
        )


def _rounds(config: SourceConfig, sizes: Sequence[int], seed: int) -> RefillOrders:
    def order(seed: int, shuffle: bool) -> ItemOrder:
        if config.mixture_weights is None or len(sizes) == 1:
            return ProportionalOrder(sizes, seed, shuffle)
        return WeightedMixture(sizes, config.mixture_weights, seed, shuffle)

    return RefillOrders(order, seed, config.shuffle)


def build(
    config: FileConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    decide: Decide,
    cache_dir: Path,
    kind: ItemKind,
    chat: ChatConfig | None = None,
) -> Data:
    """The data of the user's files. Raises DataError, StorageError."""
    training, held_out = find_sources(config.sources(), config.eval_path)
    for source in [*training, *([held_out] if held_out else [])]:
        if source.file_list.ignored:
            names = f"not read: {', '.join(source.file_list.ignored)}"
            decide("data.files", names, names, f"{source.key}={source.name}")
    prepare = SourcePreparation(config, tokenizer, decide, cache_dir, kind, chat or ChatConfig())
    return build_data(prepare, training, held_out, seed)
