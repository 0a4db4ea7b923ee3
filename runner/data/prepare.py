"""Sources of rows to the data of a job.

Source.rows ──FormatCheck──▶ Example ──Tokeniser──▶ Encoded ──Limit──▶ Table (cached) ──▶ TokenisedData
                  └──────────────── Problems ─────────────────┘   one DataError for all of a source's faults
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import tokenizers
import transformers

from runner.data import store
from runner.data.config import SourceConfig
from runner.data.dataset import HeldOut, TokenisedData
from runner.data.fingerprint import digest, tokenizer_digest
from runner.data.formats import FormatCheck
from runner.data.order import BySize, Mixture, Order
from runner.data.overlong import Limit, Tally
from runner.data.rows import Problems, Row
from runner.data.tokenise import Tokeniser
from runner.errors import DataError
from runner.protocols import Decide

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 512  # rows tokenised in one call


class Source(Protocol):
    """A place that rows come from; `key` is the option that named it, e.g. data.path."""

    @property
    def key(self) -> str: ...

    @property
    def name(self) -> str: ...

    def digest(self) -> str: ...  # sha256 of the contents

    def rows(self, problems: Problems) -> Iterator[Row]: ...


@dataclass(frozen=True)
class Preparation:
    """Turns a source into a table of tokens, by the job's options."""

    config: SourceConfig
    tokenizer: PreTrainedTokenizerBase
    decide: Decide
    cache_dir: Path

    def key(self, source: Source) -> str:
        """sha256 of everything that the source's items depend on."""
        options = {name: getattr(self.config, name) for name in ("max_length", "overlong", "loss_on")}
        return digest(source.digest(), tokenizer_digest(self.tokenizer), options)

    def table(self, source: Source, key: str) -> store.Table:
        """The source's table, from the cache where it is; what was found in the rows is said either way."""

        def fill(write: store.Write) -> store.Summary:
            return self._fill(source, write)

        if self.config.cache:  # the libraries may change what a template or a tokenizer does without changing its text
            folder = self.cache_dir / digest(key, transformers.__version__, tokenizers.__version__)[:32]
            table, summary = store.on_disk(folder, fill, self._say_damaged)
        else:
            table, summary = store.in_memory(fill)
        self._say(source, summary)
        return table

    def _fill(self, source: Source, write: store.Write) -> store.Summary:
        """Write every item of the source. Raises DataError with all that is wrong with it."""
        problems, tally = Problems(source.key, source.name), Tally()
        check = FormatCheck(problems)
        tokeniser = Tokeniser(self.tokenizer, self.config.loss_on)
        limit = Limit(self.config.max_length, self.config.overlong)
        examples = check.examples(source.rows(problems))
        while batch := list(islice(examples, BATCH)):
            self._refuse_split(check)
            encoded = tokeniser.encode(batch, problems)
            write([piece for row in encoded for piece in limit.apply(row, tally, problems)])
        problems.raise_if_any()
        if not tally.items:
            raise DataError(f"{source.key}={source.name}: no item is left; {limit.report(tally) or 'there is no row'}")
        return _summary(check, tokeniser, limit, tally)

    def _refuse_split(self, check: FormatCheck) -> None:
        if self.config.overlong == "split" and check.format is not None and check.format.kind != "text":
            raise DataError(
                f"data.overlong=split needs plain text, a column `text`; {check.first} has {check.format}\n"
                "  choose error, skip, truncate_left or truncate_right"
            )

    def _say(self, source: Source, summary: store.Summary) -> None:
        """Format, counts, and what was left out or could not be had."""
        where = f"{source.key}={source.name}"
        self._state("data.format", summary["format"], f"{where}: {summary['counts']}")
        if summary["ignored"]:
            self._state(
                "data.columns",
                f"not read: {', '.join(summary['ignored'])}",
                f"{where}: {summary['format']} has no use for them",
            )
        if summary["overlong"]:
            self._state("data.overlong", self.config.overlong, f"{where}: {summary['overlong']}")
        for note in summary["notes"]:
            self.decide("data.end_token", "learnt", "not learnt", f"{where}: {note}")

    def _say_damaged(self, what: str) -> None:
        self._state("data.cache", "made again", f"damaged: {what}")

    def _state(self, feature: str, value: str, reason: str) -> None:
        """Say something that is as it was wanted."""
        self.decide(feature, value, value, reason)


def _summary(check: FormatCheck, tokeniser: Tokeniser, limit: Limit, tally: Tally) -> dict[str, Any]:
    return {
        "format": str(check.format),
        "counts": str(tally),
        "ignored": sorted(check.ignored),
        "overlong": limit.report(tally),
        "notes": sorted(tokeniser.notes),
    }


def build_data(prepare: Preparation, sources: Sequence[Source], held_out: Source | None, seed: int) -> TokenisedData:
    """Tokenise (or read from the cache) all sources and put an order over them. Raises DataError, StorageError."""
    config = prepare.config
    keys = [prepare.key(source) for source in sources]
    tables = [prepare.table(source, key) for source, key in zip(sources, keys, strict=True)]
    sizes = [len(table) for table in tables]
    evaluation = None
    if held_out is not None:
        keys.append(prepare.key(held_out))
        evaluation = HeldOut(prepare.table(held_out, keys[-1]), config.eval_items)
        if len(evaluation) < len(evaluation.table):
            used = f"the first {len(evaluation)} of {len(evaluation.table)} held-out items"
            prepare.decide("data.eval_items", used, used, f"data.eval_items={config.eval_items}; null uses all")
    return TokenisedData(
        tables=tables,
        order=_order(config, sizes, seed),
        fingerprint=keys[0] if len(keys) == 1 else digest(keys, config.weights),
        tokenizer=prepare.tokenizer,
        evaluation=evaluation,
    )


def _order(config: SourceConfig, sizes: Sequence[int], seed: int) -> Order:
    if config.weights is None or len(sizes) == 1:
        return BySize(sizes, seed, config.shuffle)
    return Mixture(sizes, config.weights, seed, config.shuffle)
