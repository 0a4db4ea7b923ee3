"""What a user can set of the data."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from runner.data.chat_config import TRAINING_TEMPLATES as TRAINING_TEMPLATES
from runner.data.chat_config import ChatConfig as ChatConfig
from runner.data.chat_config import today as today
from runner.spec.base import ComponentConfig, ItemKind, Names, Numbers, absolute_if_local

MOST_DIGITS = 18  # of all numbers of a sum together: its questions are numbered in 64 bits
TREE_RULES = ("error", "skip", "truncate_left")  # of data.truncation, where a prompt and its answers are apart


class DataConfig(ComponentConfig):
    """Items, how they become tokens, and in which order they come."""

    group: ClassVar[str] = "data"
    renames_columns: ClassVar[bool] = False  # whether it has the option data.rename_columns
    keeps_images: ClassVar[bool] = False  # whether images that rows contain are kept in files
    max_length: int | None = Field(
        default=None,
        ge=2,
        description="Maximum tokens of an item (prompt and longest completion; for rollouts, the prompt); null = "
        "the longest item of the data, up to the model's limit.",
    )
    truncation: Literal["error", "skip", "truncate_left", "truncate_right", "split"] = Field(
        default="error",
        description="What happens to an item above max_length (split: plain text only; truncate_left: for pairs, "
        "labeled completions and prompts, the start of the prompt); the run prints what it removed.",
    )
    shuffle: bool = Field(default=True, description="Shuffle in each epoch, by the seed; false = file order.")

    def as_held_out(self) -> Self:
        """The config of an evaluation set: all rows are held out unless it names held-out ones itself."""
        return self

    @property
    def holds_out(self) -> bool:
        """Whether some of its rows are for evaluation."""
        return True

    def pixel_limits(self) -> dict[str, int | None]:
        """min_pixels and max_pixels of an image; empty without these options."""
        return {}

    def example_prompt(self) -> str:
        """A question, in quotes, to try a trained model with."""
        return '"…"'

    def preflight(self, kind: ItemKind) -> None:
        """Raise DataError for what can be seen without reading far; imports neither torch nor a tokenizer.

        `kind` is what the algorithm learns from.
        """

    @property
    def source(self) -> str | tuple[str, ...]:
        """Where the rows come from, in a word."""
        return self.name

    @property
    def is_mixture(self) -> bool:
        """Whether its sources are drawn from by weight, each at a pace of its own."""
        return False

    @property
    def is_stream(self) -> bool:
        """Whether its rows are read as steps need them, so that nobody knows how many there are."""
        return False


class DemoConfig(DataConfig):
    """Questions made on this machine: digits to sort and others; those held out are not trained on."""

    factory: ClassVar[str] = "runner.data.demo:build"
    name: Literal["demo"] = "demo"
    task: Literal["sort", "sum", "vault", "arithmetic", "reverse", "format", "shapes"] = Field(
        default="sort",
        description="sort the digits of a number; sum numbers with a calculator (environment=calculator); vault: "
        "call two tools in turn (environment=vault); or, in plain words, arithmetic with two numbers, reverse a "
        "word, format (a number between two tags); shapes: count and name what an image shows (model=tiny_vl).",
    )
    digits: int = Field(default=4, ge=2, le=12, description="Digits of each number, or letters of a word.")
    terms: int | None = Field(default=None, ge=2, le=9, description="Numbers to add with task=sum; null = 2.")
    items: int = Field(default=4000, ge=16, description="Training conversations.")
    held_out: int = Field(default=256, ge=1, description="Held-out conversations for evaluation.")

    @property
    def numbers_to_add(self) -> int:
        """`terms` as it is used."""
        return 2 if self.terms is None else self.terms

    @property
    def num_questions(self) -> int:
        """How many different questions there are."""
        numbers = 9 * 10 ** (self.digits - 1)  # without leading 0
        others = {"sum": numbers**self.numbers_to_add, "arithmetic": 3 * numbers**2, "reverse": 26**self.digits}
        others["shapes"] = 10**9  # each draws another image
        return others.get(self.task, 10**self.digits)

    def example_prompt(self) -> str:
        number = "503149276814"[: self.digits]
        if self.task in ("sort", "sum"):
            return f'"sort {number}"' if self.task == "sort" else f'"sum {" ".join([number] * self.numbers_to_add)}"'
        return super().example_prompt()

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = []
        if self.items + self.held_out > self.num_questions:
            text = f"the {self.num_questions} questions of data.task={self.task} with data.digits={self.digits}"
            found.append(
                ("data.items", f"{self.items} and data.held_out={self.held_out} are more than {text}; set fewer")
            )
        if self.terms is not None and self.task != "sum":
            found.append(("data.terms", f"not used with task={self.task}; it belongs to task=sum"))
        numbers = {"sum": self.numbers_to_add, "arithmetic": 2}.get(self.task, 1)
        if numbers * self.digits > MOST_DIGITS:
            options = "data.digits or data.terms" if self.task == "sum" else "data.digits"
            text = f"{numbers} numbers of data.digits={self.digits} are more than {MOST_DIGITS} digits; lower {options}"
            found.append(("data.digits", text))
        if self.task not in ("sort", "shapes") and job.algorithm.item_kind not in ("sft", "prompts"):
            why = f"algorithm={job.algorithm.name} needs wrong completions too, which only sort and shapes have"
            if self.task == "sum":
                why = f"sum is answered in several turns; algorithm={job.algorithm.name} compares completions, "
                why += "but the calculator's messages are in between"
            found.append(("data.task", f"{why}; type data.task=sort"))
        if self.truncation != "error":
            found.append(
                ("data.truncation", "the options of data=demo set the length of its items; only error is supported")
            )
        return found


class SourceConfig(DataConfig):
    """What file and hub have in common."""

    renames_columns: ClassVar[bool] = True
    keeps_images: ClassVar[bool] = True

    mixture_weights: Numbers | None = Field(
        default=None, description="Sampling weight of each source in a mixture, e.g. [0.7,0.3]; null = by size."
    )
    rename_columns: dict[str, str] | None = Field(
        default=None, description="Columns to rename, {old: new}, e.g. {question: prompt}; null = none."
    )
    media_root: str | None = Field(
        default=None, description="Folder that paths of images are relative to; null = the folder of the data file."
    )
    max_pixels: int | None = Field(
        default=None, ge=1, description="Maximum pixels of an image, which is scaled down; null = the model's own."
    )
    min_pixels: int | None = Field(
        default=None, ge=1, description="Minimum pixels of an image, which is scaled up; null = the model's own."
    )
    holdout: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Fraction of the distinct prompts or groups held out for evaluation, e.g. 0.05, chosen by their "
        "contents; null = none.",
    )
    holdout_group: str | None = Field(
        default=None,
        min_length=1,
        description="Column whose equal values keep rows on one side of data.holdout, e.g. user_id; null = the prompt.",
    )
    max_eval_examples: int | None = Field(
        default=256, ge=1, description="Maximum held-out items per evaluation; null = all."
    )
    cache: bool = Field(default=True, description="Cache the tokenized data on disk; of a stream, the held-out rows.")
    streaming: bool = Field(
        default=False, description="Read and tokenize training rows when steps need them, without a cache."
    )
    shuffle_buffer: int | None = Field(
        default=None, ge=1, description="Size of the shuffle buffer of a stream, in rows; null = 1000."
    )

    def pixel_limits(self) -> dict[str, int | None]:
        return {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}

    @property
    def is_mixture(self) -> bool:
        return bool(self.mixture_weights)

    @property
    def is_stream(self) -> bool:
        return self.streaming

    @property
    def holds_out(self) -> bool:
        return self.holdout is not None or self.eval_option() is not None

    def sources(self) -> tuple[str, ...]:
        """The places the training items come from."""
        raise NotImplementedError

    def eval_option(self) -> str | None:
        """The option that names held-out rows of their own, with its value; None if it is not set."""
        raise NotImplementedError

    def problems(self, job: Any) -> list[tuple[str, str]]:
        return [
            *self._holdout_problems(),
            *self._weights_problems(),
            *self._columns_problems(),
            *self._kind_problems(job.algorithm),
            *self._streaming_problems(job),
        ]

    def _streaming_problems(self, job: Any) -> list[tuple[str, str]]:
        if not self.streaming:
            text = "is for streams; type data.streaming=true, or leave it out: all rows are shuffled together"
            return [] if self.shuffle_buffer is None else [("data.shuffle_buffer", text)]
        refused = {
            "data.path": (len(self.sources()) > 1, "set one source"),
            "data.holdout": (self.holdout is not None, "set separate held-out rows (data.eval_path)"),
            "data.truncation": (self.truncation == "split", "type error, skip, truncate_left or truncate_right"),
            "epochs": (job.epochs is not None, "the number of rows is unknown; set steps"),
            "data.shuffle": (
                not self.shuffle and self.shuffle_buffer is not None,
                "shuffle=false has no shuffle_buffer",
            ),
        }
        return [(key, f"not with data.streaming=true: {what}") for key, (is_set, what) in refused.items() if is_set]

    def _holdout_problems(self) -> list[tuple[str, str]]:
        other = self.eval_option()
        if self.holdout is None and self.holdout_group is not None:
            return [("data.holdout_group", "is used only by data.holdout; set data.holdout=0.05 too, or leave it out")]
        if self.holdout is None or other is None:
            return []
        return [("data.holdout", f"{self.holdout:g}, but {other} sets the held-out rows too; leave one of them out")]

    def _weights_problems(self) -> list[tuple[str, str]]:
        weights, count = self.mixture_weights, len(self.sources())
        if weights is None or (len(weights) == count and min(weights) > 0):
            return []
        text = "every weight must be above 0; leave out a source that you do not need"
        if len(weights) != count:
            text = f"{len(weights)} weights for {count} sources; set one per source"
        return [("data.mixture_weights", text)]

    def _columns_problems(self) -> list[tuple[str, str]]:
        names = list((self.rename_columns or {}).values())
        twice = sorted({name for name in names if names.count(name) > 1})
        return [("data.rename_columns", f"two columns cannot both be named {', '.join(twice)}")] if twice else []

    def _kind_problems(self, algorithm: Any) -> list[tuple[str, str]]:
        """Options that items of the algorithm's kind have no use for."""
        if algorithm.item_kind == "sft" or self.truncation in TREE_RULES:
            return []
        why = f"algorithm={algorithm.name} needs complete completions, so {self.truncation} is not supported"
        return [("data.truncation", f"{why}; choose {', '.join(TREE_RULES)}")]


class FileConfig(SourceConfig):
    """Local files: JSONL, JSON, CSV, TSV, text, Parquet, Arrow, or a folder of them."""

    factory: ClassVar[str] = "runner.data.prepare:build"
    name: Literal["file"] = "file"
    path: str | Annotated[Names, Field(min_length=1)] = Field(
        description="A file, a folder, a data set saved with save_to_disk, or a list of them (a mixture)."
    )
    eval_path: str | None = Field(default=None, description="Held-out file or folder; null = no evaluation.")

    def as_held_out(self) -> Self:
        if self.holdout is not None:
            return self
        return self.model_copy(update={"eval_path": self.eval_path or self.sources()[0], "path": self.sources()[0]})

    @property
    def source(self) -> str | tuple[str, ...]:
        return self.path

    def with_absolute_paths(self) -> Self:
        paths = tuple(absolute_if_local(p) for p in self.sources())
        return self.model_copy(
            update={
                "media_root": self.media_root and absolute_if_local(self.media_root),
                "path": paths[0] if isinstance(self.path, str) else paths,
                "eval_path": self.eval_path and absolute_if_local(self.eval_path),
            }
        )

    def preflight(self, kind: ItemKind) -> None:
        """Raise DataError for a missing file, and for what is wrong with the first 10,000 rows of each."""
        from runner.data.formats import validate_files

        validate_files(self.sources(), self.eval_path, kind, self.rename_columns, self.media_root)

    def eval_option(self) -> str | None:
        return None if self.eval_path is None else f"data.eval_path={self.eval_path}"

    def sources(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path


class RemoteConfig(SourceConfig):
    """What hub and modelscope have in common."""

    factory: ClassVar[str] = "runner.data.prepare:build"
    path: str | Annotated[Names, Field(min_length=1)] = Field(
        description="A data set, OWNER/NAME, e.g. openai/gsm8k, or a list of them (a mixture)."
    )
    subset: str | None = Field(default=None, description="The data set's configuration name, e.g. main.")
    split: str = Field(default="train", min_length=1, description="Split to train on.")
    eval_split: str | None = Field(
        default=None, description="Split to evaluate on, of the first data set of a mixture; null = no evaluation."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit; null = the default branch.")

    def as_held_out(self) -> Self:
        if self.holdout is not None:
            return self
        return self.model_copy(update={"eval_split": self.eval_split or self.split})

    @property
    def source(self) -> str | tuple[str, ...]:
        return self.path

    def sources(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path

    def eval_option(self) -> str | None:
        return None if self.eval_split is None else f"data.eval_split={self.eval_split}"


class HubConfig(RemoteConfig):
    """Data sets of the Hugging Face hub, loaded with `datasets` (no script of the data set is run)."""

    name: Literal["hub"] = "hub"


class ModelScopeConfig(RemoteConfig):
    """Data sets of ModelScope, downloaded with `modelscope` and read with `datasets` (no script is run)."""

    name: Literal["modelscope"] = "modelscope"


class NoDataConfig(DataConfig):
    """No rows: clients of `run tinker` send what is trained on."""

    factory: ClassVar[str] = "runner.data.dataset:no_data"
    name: Literal["none"] = "none"

    def problems(self, job: Any) -> list[tuple[str, str]]:
        unused = [
            name for name in ("max_length", "truncation", "shuffle") if name in self.model_dump(exclude_defaults=True)
        ]
        found = [(f"data.{name}", "data=none has no rows; leave it out") for name in unused]
        text = f"algorithm={job.algorithm.name} needs rows; type data=file data.path=FILE"
        return found if job.algorithm.serves else [*found, ("data", text)]


COMPONENTS = (DemoConfig, FileConfig, HubConfig, ModelScopeConfig, NoDataConfig)
