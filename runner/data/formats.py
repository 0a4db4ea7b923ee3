"""Sources of rows to examples: which of TRL's formats the data has, and whether every row has it.

Files are checked before anything heavy is loaded: no torch, no tokenizer.

    sft        messages  |  prompt + completion  |  segments  |  text             pairs      prompt + chosen + rejected
    judged     prompt + completion + label                                                   chosen + rejected
    prompts    prompt, and any columns for rewards                                questions  prompt + answer

The first row decides; each later row must have the same format. `text` is text and `messages` a conversation;
the others may be either. A conversation may have a column `tools`, a pair a `margin`. Rows of other projects' formats
(ShareGPT, Alpaca, query/response) are converted first; see runner/data/conversions.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from runner.core.columns import column_value, json_type_name, nested_names
from runner.data.conversions import VERL, Conversion, find_conversion, segments_example
from runner.data.examples import (
    AnswersExample,
    Example,
    Reading,
    RowError,
    chat_example,
    completion_example,
    held_out_reading,
    implicit_pair_example,
    is_messages,
    labeled_example,
    pair_example,
    prompt_example,
    question_example,
    text_example,
)
from runner.data.files import find_sources
from runner.data.images import COLUMNS as IMAGE_COLUMNS
from runner.data.images import place_images
from runner.data.message_keys import unused_keys
from runner.data.readers import Problems, Row, SourceLocation
from runner.spec.base import ItemKind


class Renaming:
    """`data.rename_columns`: name in the data → known name; `seen`: the names that occurred.

    A dotted name is read inside an object, which stays as it is.
    """

    def __init__(self, columns: Mapping[str, str] | None) -> None:
        self.columns = dict(columns or {})
        self.seen: set[str] = set()

    def apply(self, rows: Iterable[Row], problems: Problems) -> Iterator[Row]:
        """Each row with its new names; a row that has one of them already is a problem."""
        for row in rows:
            inner = {old: column_value(row.value, old) for old in self.columns if old not in row.value}
            nested = {old: value for old, value in inner.items() if value is not None}
            self.seen |= nested.keys() | (self.columns.keys() & row.value.keys())
            named = [*row.value.items(), *nested.items()]
            value = {self.columns.get(name, name): content for name, content in named}
            if len(value) == len(named):
                yield replace(row, value=value)
            else:
                problems.add_fault(row.place, self._collision(dict(named)))

    def _collision(self, value: Mapping[str, Any]) -> str:
        old, new = next((o, n) for o, n in self.columns.items() if o in value and n in value and n not in self.columns)
        return f"data.rename_columns renames `{old}` to `{new}`, but the row already has `{new}`; rename that one too"


def is_json(value: Any) -> bool:
    """Whether `value` can be written as JSON: no dates, bytes or NaN, which Parquet and the hub may hold."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


Columns = tuple[str, ...]
Parse = Callable[[Row, bool], Example]
# In this order: a row with `messages` and `prompt` is a conversation, and one with `prompt` has no implicit prompt.
# Rows of other projects' formats become the first one.
FORMATS: dict[Reading, dict[Columns, Parse]] = {
    "sft": {
        ("messages",): chat_example,
        ("prompt", "completion"): completion_example,
        ("segments",): segments_example,
        ("text",): text_example,
    },
    "pairs": {("prompt", "chosen", "rejected"): pair_example, ("chosen", "rejected"): implicit_pair_example},
    "judged": {("prompt", "completion", "label"): labeled_example},
    "prompts": {("prompt",): prompt_example},
    "questions": {("prompt", "answer"): question_example},
}
NEEDS: dict[Reading, str] = {
    "sft": "expected the columns `messages`, or `prompt` and `completion`, or `segments`, or `text`",
    "pairs": (
        "this algorithm trains on preference pairs: expected the columns `prompt`, `chosen` and `rejected` (or "
        "`chosen` and `rejected` with a common start)"
    ),
    "judged": (
        "this algorithm trains on labeled completions: expected the columns `prompt`, `completion` and `label` (true "
        "or false)"
    ),
    "prompts": "this algorithm samples completions: expected a column `prompt` (others are for rewards)",
    "questions": "completions of held-out prompts are compared: expected the columns `prompt` and `answer`",
}
LIKELY_KINDS: dict[Reading, str] = {  # what the data is, in order of likelihood, where the job needs something else
    "pairs": "chosen and rejected are preference pairs (algorithm=dpo, rm)",
    "judged": "with a label, these are labeled completions (algorithm=kto)",
    "sft": "these are completions for algorithm=sft",
}
OTHER_TYPES = ("label", "answer", "segments")  # columns that are neither text nor messages
OPTIONAL: dict[Reading, Columns] = {"pairs": ("margin",)}
USUAL_NAMES = {
    "chosen": ("chosen_response", "preferred_output"),
    "rejected": ("rejected_response", "non_preferred_output"),
    "messages": ("conversation", "dialog", "dialogue"),
    "prompt": ("question", "query", "problem", "instruction", "input", "context_messages"),
    "completion": ("answer", "response", "output", "solution"),
}


@dataclass(frozen=True, slots=True)
class Format:
    """What every row of a source has in common."""

    columns: Columns
    chat: bool  # made of messages, not of text
    conversion: Conversion | None = None  # from the format of another project

    def __str__(self) -> str:
        name = "+".join(self.columns)
        name = name if name in ("messages", "segments", "text") else f"{name} ({'messages' if self.chat else 'text'})"
        return f"{self.conversion.name} → {name}" if self.conversion else name


class FormatCheck:
    """Detects the format from the first row and holds the others to it.

    ignored: columns that are not read; reward_columns: those that rewards (held out: environments) see, or that some
    algorithms read; converted: those that a conversion made messages of; unread: keys of messages, and columns, that
    nothing reads;
    num_identical_pairs: pairs left out because their answers are the same;
    num_several_turns: rows whose answers are more than one message
    """

    def __init__(
        self,
        problems: Problems,
        reading: Reading,
        columns: Mapping[str, str] | None = None,
        keep: Callable[[Format, Row], bool] = lambda form, row: True,
        media_root: str | None = None,
    ) -> None:
        """keep: whether a row becomes an example; media_root: see `place_images`."""
        self.problems, self.reading, self.keep, self.media_root = problems, reading, keep, media_root
        self.renaming = Renaming(columns)
        self.format: Format | None = None
        self.first: SourceLocation | None = None
        self.ignored: set[str] = set()
        self.reward_columns: set[str] = set()
        self.converted: set[str] = set()
        self.unread: set[str] = set()
        self.num_identical_pairs = self.num_several_turns = 0

    def examples(self, rows: Iterable[Row]) -> Iterator[Example]:
        """An example for each sound row; faults go to `problems`. An unknown format ends the reading."""
        for row in self.renaming.apply(rows, self.problems):
            if self.format is None:
                self.format, self.first = detect_format(row.value, self.reading), row.place
            if self.format is None:
                text = f"{NEEDS[self.reading]}; found {_columns(row.value)}{_hint(row.value, self.reading)}"
                self.problems.add_fault(row.place, text)
                return
            try:
                row = self._convert(self.format, row)
                if not self.keep(self.format, row):  # by paths of images as they are written, in any folder
                    continue
                row = self._select_columns(self.format, place_images(row, self.format.chat, self.media_root))
                example = self._example(self.format, row)
            except RowError as fault:
                said = f" (read as {self.format.conversion.name})" if self.format.conversion else ""
                self.problems.add_fault(row.place, f"{fault}{said}")
                continue
            if not self._count_identical_pair(example):
                yield example

    def _count_identical_pair(self, example: Example) -> bool:
        """Whether the example teaches nothing and is only counted."""
        if not isinstance(example, AnswersExample):
            return False
        self.num_several_turns += example.has_several_turns()
        self.num_identical_pairs += example.is_identical_pair()
        return example.is_identical_pair()

    def _convert(self, form: Format, row: Row) -> Row:
        """The row in the columns of this project; notes the columns that it was made of."""
        if form.conversion is None:
            return row
        value, used = form.conversion.convert(row.value, self.reading)
        self.converted.update(used)
        if form.conversion is VERL and row.value.get("answer", value["answer"]) != value["answer"]:
            self.unread.add(f"answer (replaced by {used[0]})")
        return replace(row, value=value)

    def _select_columns(self, form: Format, row: Row) -> Row:
        """The row as it is parsed; notes which of its columns are not."""
        if self.reading not in ("prompts", "questions"):
            of_chat, optional = ("tools", *VARIABLE_COLUMNS) if form.chat else (), OPTIONAL.get(self.reading, ())
            self.ignored |= row.value.keys() - {*form.columns, *of_chat, *optional}
            self.reward_columns |= row.value.keys() & {*optional}
            return row
        known = {name: value for name, value in row.value.items() if name in form.columns or is_json(value)}
        self.ignored |= row.value.keys() - known.keys()
        self.reward_columns |= known.keys() - {*form.columns}
        if row.place == self.first:  # of one row: objects may have other keys in each
            self.reward_columns |= {path for name, value in known.items() for path in nested_names(name, value)}
        return replace(row, value=known)

    def _example(self, form: Format, row: Row) -> Example:
        like = "" if row.place == self.first else f" as at {self.first}"
        missing = [name for name in form.columns if name not in row.value]
        if missing:
            found = _columns(row.value)
            raise RowError(f"no column {', '.join(missing)}; expected {form}{like}, found {found}")
        for name in form.columns:
            value = row.value[name]
            if name in OTHER_TYPES:
                continue
            if not (is_messages(value) if form.chat else isinstance(value, str)):
                wanted = "a list of messages" if form.chat else "text"
                raise RowError(f"column {name}: expected {wanted}{like}, found {json_type_name(value)}")
            if form.chat:
                self.unread |= {f"{name}[].{key}" for key in unused_keys(value)}
        example = FORMATS[self.reading][form.columns](row, form.chat)
        if form.chat and (variables := template_variables(row.value)):
            self.unread |= {f"{VARIABLES}{name}" for name in variables}
            example = _with_variables(example, variables)
        return example


VARIABLES = "variable of the chat template: "  # before the name of one in `FormatCheck.unread`
# Columns with variables of the chat template: TRL's, an object; verl's, one of them
VARIABLE_COLUMNS = ("chat_template_kwargs", "enable_thinking")


def template_variables(value: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of the chat template that a row has, as chat.kwargs has them. Raises RowError."""
    found = value.get("chat_template_kwargs", {})
    if not isinstance(found, dict):
        raise RowError(f"column chat_template_kwargs: expected an object, found {json_type_name(found)}")
    of_column = {name: value[name] for name in VARIABLE_COLUMNS[1:] if name in value}
    for name, one in (*found.items(), *of_column.items()):
        if not isinstance(one, bool | int | float | str) or of_column.get(name, one) != one:
            raise RowError(f"chat_template_kwargs.{name}: expected one text, number, true or false, found {one!r:.60}")
    return {**found, **of_column}


def _with_variables(example: Any, variables: Mapping[str, Any]) -> Any:
    """An example made of conversations, each with the variables."""
    if isinstance(example, AnswersExample):
        return replace(example, answers=tuple(_with_variables(answer, variables) for answer in example.answers))
    return replace(example, variables=variables)


def detect_format(value: Mapping[str, Any], reading: Reading) -> Format | None:
    """The format of a row, by its columns and the type of the first of them; None for an unknown one.

    Text beside a column of images is read as messages.

    A prompt in words beside answers that are whole conversations is left to these, which begin with it. Formats of
    other projects come after those with `prompt` and before `text` and answers that begin alike: Alpaca's own data have
    a column `text` too.
    """
    found, conversion = _detect_own_format(value, reading), find_conversion(value, reading)
    if (
        found is not None
        and conversion is not VERL
        and (found.columns[0] == "prompt" or _has_implicit_prompt(value, found))
    ):
        return found
    if conversion is None:
        return found
    chat = conversion is not VERL or is_messages(value["prompt"])
    return Format(next(iter(FORMATS[reading])), chat, conversion)


def _detect_own_format(value: Mapping[str, Any], reading: Reading) -> Format | None:
    for columns in FORMATS[reading]:
        if all(name in value for name in columns):
            if columns[1:2] == ("chosen",) and is_messages(value["chosen"]) and isinstance(value["prompt"], str):
                continue
            if columns == ("chosen", "rejected") and _has_question(value):
                continue
            is_chat = is_messages(value[columns[0]]) or any(name in value for name in IMAGE_COLUMNS)
            return Format(columns, columns == ("messages",) or (columns[0] not in ("text", "segments") and is_chat))
    return None


def _has_implicit_prompt(value: Mapping[str, Any], found: Format) -> bool:
    """Whether a pair is two conversations with their prompt, and no other column has one."""
    others = [name for name in ("messages", "conversations", "conversation") if is_messages(value.get(name))]
    return (
        found.chat
        and found.columns == ("chosen", "rejected")
        and not others
        and any(turn.get("role") in ("system", "developer", "user") for turn in value["chosen"][:1])
    )


def _has_question(value: Mapping[str, Any]) -> bool:
    """Whether two texts have a question in a column that is not read, and not as their start."""
    asked = [value[name] for name in USUAL_NAMES["prompt"] if isinstance(value.get(name), str)]
    return any(text.strip() not in value["chosen"] for text in asked if isinstance(value["chosen"], str))


def _columns(value: Mapping[str, Any]) -> str:
    return ", ".join(map(str, value)) or "no column"


def _hint(value: Mapping[str, Any], reading: Reading) -> str:
    """What the row may be, and what to type."""
    if "input_ids" in value:
        return (
            "; rows of token ids (input_ids) are not read, as they fit one tokenizer alone: use their text or messages"
        )
    renamed = {
        next((n for n in names if n in value), ""): new for new, names in USUAL_NAMES.items() if new not in value
    }
    renamed = {old: new for old, new in renamed.items() if old and any(new in c for c in FORMATS[reading])}
    for items in [*([item] for item in renamed.items()), list(renamed.items())]:
        if items and detect_format({**value, **{new: "" for _, new in items}}, reading):
            pairs = ", ".join(f"{old}: {new}" for old, new in items)
            return f"; type 'data.rename_columns={{{pairs}}}' if these columns mean the same"
    other = next((known for known in LIKELY_KINDS if known != reading and detect_format(value, known)), None)
    if other:
        return f"; {LIKELY_KINDS[other]}"
    return "; `prompt` alone has no completion to train on" if "prompt" in value else ""


PREFLIGHT_ROWS = 10_000  # of each file: all of a small one, and a fraction of a second of a large one


def validate_files(
    paths: Sequence[str],
    eval_path: str | None,
    kind: ItemKind,
    columns: Mapping[str, str] | None = None,
    media_root: str | None = None,
) -> None:
    """Check that files exist and their first 10,000 rows are valid, without torch or a tokenizer.

    Raises DataError with everything wrong with the first faulty source. `build` checks the remaining rows.
    """
    training, held_out = find_sources(paths, eval_path)
    readings = [(source, kind) for source in training]
    for source, reading in [*readings, *([(held_out, held_out_reading(kind))] if held_out else [])]:
        problems = Problems(source.key, source.name)
        for _ in FormatCheck(problems, reading, columns, media_root=media_root).examples(
            source.rows(problems, PREFLIGHT_ROWS)
        ):
            pass
        problems.raise_if_any()
