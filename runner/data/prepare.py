"""Sources of rows to the data of a job.

Source.rows ──FormatCheck──▶ Example ──ExampleTokenizer──▶ Encoded… ──LengthLimit──▶ TokenizedTable ──▶ TokenizedData
                 └────────────────────── Problems ─────────────────────────┘   one DataError for a source's faults

What the rows are read as (`Reading`) follows from the kind of items that the algorithm learns from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
import tokenizers
import transformers

from runner.core.errors import DataError
from runner.data.chat import TrainOn
from runner.data.chat_template import free_variables, reads_date
from runner.data.config import ChatConfig, FileConfig, RemoteConfig, SourceConfig, today
from runner.data.control_tokens import assistant_tokens
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
    schema_with_images,
)
from runner.data.examples import Example, Reading, held_out_reading
from runner.data.files import FileSource, find_sources
from runner.data.formats import VARIABLES, Format, FormatCheck
from runner.data.holdout import Holdout, row_key
from runner.data.items import LengthLimit, TruncationCounts
from runner.data.parallel_tokenization import TokenizerOptions, num_processes, show_progress, tokenize_batches
from runner.data.readers import Problems, Row
from runner.data.sampling_order import ItemOrder, ProportionalOrder, RefillOrders, WeightedMixture
from runner.data.tokenization import bos_and_eos, digest, tokenizer_digest
from runner.interfaces import Data, Decide
from runner.interfaces.media import images_of
from runner.spec.base import ItemKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 512  # rows tokenized in one call


class RowSource(Protocol):
    """A place that rows come from; `key` is the option that named it, e.g. data.path."""

    @property
    def key(self) -> str: ...

    @property
    def name(self) -> str: ...

    def digest(self, notes: Path | None = None) -> str: ...  # sha256 of the contents; notes: see `file_digest`

    def image_folders(self) -> list[str]: ...  # where relative paths of images begin, of each file

    def rows(self, problems: Problems) -> Iterator[Row]: ...


@dataclass(frozen=True)
class DataSplit:
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
    length_limit: tuple[int, str] | None = None  # the most tokens of an item that the model allows, and why

    def limit(self, reading: Reading) -> LengthLimit:
        """How long an item may be."""
        starts = frozenset(bos_and_eos(self.tokenizer)[0]) | {self.tokenizer.bos_token_id} - {None}
        limits = (self.config.max_length, self.config.truncation, reading, self.length_limit)
        return LengthLimit(*limits, starts, images_of(self.tokenizer))

    def options(self, portion: DataSplit) -> TokenizerOptions:
        """What tokenizes the portion's examples."""
        reading, source = portion.reading, portion.source
        train_on: TrainOn | None = None if reading == "sft" else "completion"
        schema, limit = self._schema(reading), self.limit(reading)
        processes = num_processes(sharing_ranks=not self.config.cache)
        where = (source.key, source.name, processes)
        return TokenizerOptions(self.tokenizer, self.chat, train_on, limit, schema, *where)

    def key(self, portion: DataSplit) -> str:
        """sha256 of everything that the portion's items depend on."""
        source, reading = portion.source, portion.reading
        options = {name: getattr(self.config, name) for name in ("truncation", "rename_columns")}
        options |= {"max_length": self.limit(reading).most, "special_tokens": assistant_tokens(self.tokenizer)}
        rule = portion.holdout
        side = [rule.fraction, rule.group, rule.content, portion.held_out] if rule else []
        unused = {"template", "date", "special_tokens", *(() if reading == "sft" else ("train_on",))}
        chat = self.chat.model_dump(mode="json", exclude=unused)
        if reads_date(self.tokenizer):
            chat["date"] = self.chat.date or today()
        images = [reader.how, self.config.media_root] if (reader := images_of(self.tokenizer)) else []
        contents = (self._source_digest(source), tokenizer_digest(self.tokenizer))
        return digest(*contents, reading, options, chat, *side, *images)

    def table(self, portion: DataSplit, key: str) -> tuple[TokenizedTable, Summary]:
        """The portion's table, from the cache where it is; what was found in the rows is said either way."""
        schema, fill = self._schema(portion.reading), partial(self._fill, portion)
        if self.config.cache:  # the libraries may change what a template or a tokenizer does without changing its text
            versions = (FORMAT, transformers.__version__, tokenizers.__version__)
            own_folders = images_of(self.tokenizer) and not self.config.media_root  # rows have absolute paths of images
            images = portion.source.image_folders() if own_folders else []
            folder = self.cache_dir / digest(key, *versions, *images)[:32]
            report_damage = partial(self.decide.record_fact, "data.cache", "made again")
            table, summary = load_or_build(folder, schema, fill, report_damage)
        else:
            table, summary = build_in_memory(schema, fill)
        if reader := images_of(self.tokenizer):
            reader.register(table.images)
        self.report_source(portion, summary, portion.where)
        return table, summary

    def holdout(self, sources: Sequence[RowSource]) -> Holdout | None:
        """The rule that data.holdout makes for the sources; it reads the rows when it is first used."""
        config = self.config
        if config.holdout is None:
            return None
        keys = {f"{source.key}={source.name}": partial(self._row_keys, source) for source in sources}
        content = digest([self._source_digest(source) for source in sources])
        return Holdout(config.holdout, keys, content, config.holdout_group)

    def _source_digest(self, source: RowSource) -> str:
        return source.digest(self.cache_dir / "digests" if self.config.cache else None)

    def _row_keys(self, source: RowSource) -> set[int]:
        """The keys of all rows of a source, by which data.holdout chooses."""
        keys: set[int] = set()

        def note(form: Format, row: Row) -> bool:
            keys.add(row_key(form, row, self.config.holdout_group))
            return False

        problems = Problems(source.key, source.name)  # faults are raised by who reads the rows to the end
        check = FormatCheck(problems, self.kind, self.config.rename_columns, note)
        for _ in check.examples(source.rows(problems)):
            pass
        return keys

    def _fill(self, portion: DataSplit, write: Write) -> Summary:
        """Write every item of the portion. Raises DataError with all that is wrong with it."""
        source, reading = portion.source, portion.reading
        problems, tally = Problems(source.key, source.name), TruncationCounts()
        check = FormatCheck(problems, reading, self.config.rename_columns, portion.keeps, self.config.media_root)
        limit, notes, chat_notes = self.limit(reading), set[str](), set[str]()
        batches = tokenize_batches(self._batches(check, source.rows(problems)), self.options(portion))
        for batch in show_progress(batches, source.name):
            write(batch.items)
            tally.add(batch.counts)
            problems.extend(batch.problems)
            notes |= batch.notes
            chat_notes |= batch.chat_notes
        if hint := limit.truncation_hint(tally):
            problems.add_hint(hint)
        problems.raise_if_any()
        if not tally.items:
            raise no_item_error(source, check, limit, tally)
        return summarize(check, limit, tally) | {"notes": sorted(notes), "chat_notes": sorted(chat_notes)}

    def _batches(self, check: FormatCheck, rows: Iterator[Row]) -> Iterator[list[Example]]:
        examples = check.examples(rows)
        while batch := list(islice(examples, BATCH)):
            self._refuse_split(check)
            yield batch

    def _refuse_split(self, check: FormatCheck) -> None:
        if self.config.truncation == "split" and check.format is not None and check.format.columns != ("text",):
            raise DataError(
                f"data.truncation=split needs plain text, a column `text`; {check.first} has {check.format}\n"
                "  choose error, skip, truncate_left or truncate_right"
            )

    def report_source(self, portion: DataSplit, summary: Summary, where: str) -> None:
        """Say format, counts, and what was left out or could not be had."""
        reading = portion.reading
        made_of = f", made of {', '.join(summary['converted'])}" if summary["converted"] else ""
        self.decide.record_fact("data.format", summary["format"], f"{where}: {summary['counts']}{made_of}")
        unsaid = summary
        if portion.held_out and reading == self.kind:  # the columns of the training rows, said with these
            unsaid = summary | {"ignored": [], "given": [], "unread": []}
        self.report_rows(reading, unsaid, where)
        if summary["alike"]:
            left_out = f"{summary['alike']} skipped"
            self.decide("data.pairs", "all", left_out, f"{where}: pairs whose chosen and rejected are the same")
        if summary["several_turns"]:
            turns = f"in {summary['several_turns']} rows a completion has several turns; turns of other roles count too"
            self.decide.record_fact("data.turns", "every token of a completion", f"{where}: {turns}")
        if summary["overlong"]:
            self.decide.record_fact("data.truncation", self.config.truncation, f"{where}: {summary['overlong']}")
        if summary["branches"]:
            self.decide.record_fact("chat.train_on", "every assistant turn", f"{where}: {summary['branches']}")

    def report_rows(self, reading: Reading, summary: Summary, where: str) -> None:
        """Say which columns and keys are not read or given to rewards, and the notes on rows."""
        for note in summary["notes"]:
            self.decide("data.end_token", "trained on", "not trained on", f"{where}: {note}")
        for note in summary["chat_notes"]:
            self.decide.record_fact("chat", note, where)
        template = str(self.tokenizer.chat_template or "")
        names = [(key, re.escape(key.rpartition("[].")[2])) for key in summary["unread"]]
        names = [(key, name) for key, name in names if not re.search(rf"\b{name}\b", template)]
        if unread := [key for key, _ in names if key.removeprefix(VARIABLES) not in free_variables(self.tokenizer)]:
            why = f"{where}: neither the program nor the chat template reads them"
            self.decide("data.columns", "every key read", f"not read: {', '.join(unread)}", why)
        ignored = f"not read: {', '.join(summary['ignored'])}"
        seen_by = {"prompts": "rewards", "questions": "environments"}.get(reading)
        if summary["ignored"] and seen_by:
            why = f"{where}: some values have no JSON form"
            self.decide("data.rename_columns", f"given to {seen_by}", ignored, why)
        elif summary["ignored"]:
            self.decide.record_fact(
                "data.rename_columns", ignored, f"{where}: the format {summary['format']} does not use them"
            )
        if summary["given"] and seen_by:
            untrained = "; the completion is not trained on" if "completion" in summary["given"] else ""
            self.decide.record_fact(
                "data.rename_columns", f"for {seen_by}: {', '.join(summary['given'])}", f"{where}{untrained}"
            )

    def held_out(self, tables: Sequence[TokenizedTable]) -> HeldOut | None:
        """The held-out rows that are used, None if there are none; says so if these are not all."""
        if not tables:
            return None
        found = HeldOut(tables, self.config.max_eval_examples)
        if len(found) < found.total:
            used = f"the first {len(found)} of {found.total} held-out items"
            self.decide.record_fact(
                "data.max_eval_examples", used, f"data.max_eval_examples={found.limit}; null uses all"
            )
        return found

    def _schema(self, reading: Reading) -> pa.Schema:
        schema = ROWS if reading == "sft" else PROMPTS_WITH_ANSWERS
        return schema_with_images(schema) if images_of(self.tokenizer) else schema


def no_item_error(source: RowSource, check: FormatCheck, limit: LengthLimit, tally: TruncationCounts) -> DataError:
    """The error for a source whose rows are all left out."""
    pairs = f"{check.num_identical_pairs} pairs with equal completions" if check.num_identical_pairs else "no row"
    return DataError(f"{source.key}={source.name}: no item remains; {limit.report(tally) or pairs}")


def summarize(check: FormatCheck, limit: LengthLimit, tally: TruncationCounts) -> Summary:
    """What was found in the rows that were read."""
    return {
        "format": str(check.format),
        "style": "chat" if check.format is not None and check.format.chat else "text",
        "counts": str(tally),
        "longest": tally.longest_item,
        "renamed": sorted(check.renaming.seen),
        "ignored": sorted(check.ignored),
        "converted": sorted(check.converted),
        "unread": sorted(check.unread),
        "given": sorted(check.reward_columns),
        "alike": check.num_identical_pairs,
        "several_turns": check.num_several_turns,
        "overlong": limit.report(tally),
        "branches": tally.branches_text(),
    }


def build_data(
    prepare: SourcePreparation, sources: Sequence[RowSource], held_out: RowSource | None, seed: int
) -> TokenizedData:
    """Tokenize (or read from the cache) all sources and order them. Raises DataError, StorageError."""
    config, kind = prepare.config, prepare.kind
    if config.streaming:
        from runner.data.streaming import build_stream

        return build_stream(prepare, sources[0], held_out, seed)
    holdout = prepare.holdout(sources)
    portions = [DataSplit(source, kind, holdout) for source in sources]
    if held_out is not None:
        portions.append(DataSplit(held_out, held_out_reading(kind)))
    portions += [DataSplit(p.source, held_out_reading(kind), p.holdout, held_out=True) for p in portions if p.holdout]
    keys = [prepare.key(portion) for portion in portions]
    built = [prepare.table(portion, key) for portion, key in zip(portions, keys, strict=True)]
    refuse_unseen(config, [summary for _, summary in built])
    tables = [table for table, _ in built]
    training = tables[: len(sources)]
    return TokenizedData(
        kind=kind,
        tables=training,
        rounds=order_of_tables(config, [len(table) for table in training], seed),
        fingerprint=fingerprint(keys, config, tables),
        prompt_style="chat" if "chat" in [summary["style"] for _, summary in built[: len(sources)]] else "text",
        tokenizer=prepare.tokenizer,
        columns=frozenset().union(*(summary["given"] for _, summary in built[: len(sources)])),
        longest=max(summary["longest"] for _, summary in built),
        evaluation=prepare.held_out(tables[len(sources) :]),
    )


def fingerprint(keys: Sequence[str], config: SourceConfig, tables: Sequence[TokenizedTable]) -> str:
    """sha256 of all that the items depend on, the contents of images included."""
    images = [sorted(image.id for image in table.images) for table in tables]
    own = keys[0] if len(keys) == 1 else digest(keys, config.mixture_weights)
    return digest(own, images) if any(images) else own


def refuse_unseen(config: SourceConfig, summaries: Sequence[Summary]) -> None:
    """Raise DataError for a renaming of a column that no row of any source has."""
    seen = {name for summary in summaries for name in summary["renamed"]}
    unseen = [name for name in config.rename_columns or () if name not in seen]
    if unseen:
        raise DataError(
            f"data.rename_columns: no row has a column {', '.join(unseen)}; check the name, or leave it out"
        )


def order_of_tables(config: SourceConfig, sizes: Sequence[int], seed: int) -> RefillOrders:
    """The order of the items of tables of these sizes."""

    def order(seed: int, shuffle: bool) -> ItemOrder:
        if config.mixture_weights is None or len(sizes) == 1:
            return ProportionalOrder(sizes, seed, shuffle)
        return WeightedMixture(sizes, config.mixture_weights, seed, shuffle)

    return RefillOrders(order, seed, config.shuffle)


def build(
    config: FileConfig | RemoteConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    decide: Decide,
    cache_dir: Path,
    kind: ItemKind,
    chat: ChatConfig | None = None,
    length_limit: tuple[int, str] | None = None,
) -> Data:
    """The data of the user's files, or of a hub's data sets.

    Raises DataError, EnvironmentProblem or StorageError.
    """
    training: Sequence[RowSource]
    held_out: RowSource | None
    if isinstance(config, RemoteConfig):
        from runner.data.hub import load_sources  # `datasets` is imported for these alone

        training, held_out = load_sources(config)
    else:
        training, held_out = _file_sources(config, decide)
    prepare = SourcePreparation(config, tokenizer, decide, cache_dir, kind, chat or ChatConfig(), length_limit)
    return build_data(prepare, training, held_out, seed)


def _file_sources(config: FileConfig, decide: Decide) -> tuple[list[FileSource], FileSource | None]:
    """(training sources, held-out source); says which files beside them are not read. Raises DataError."""
    training, held_out = find_sources(config.sources(), config.eval_path, streamed=config.streaming)
    if training[0].is_sampled:
        text = "names, sizes, modification times, first and last MiB of each file"
        decide.record_fact("data.fingerprint", text, "the stream is above 1 GiB; a run resumes with the same data only")
    for source in [*training, *([held_out] if held_out else [])]:
        if source.file_list.ignored:
            names = f"not read: {', '.join(source.file_list.ignored)}"
            decide.record_fact("data.files", names, f"{source.key}={source.name}")
    return training, held_out
