"""What a user can set of the data."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from runner.core.errors import DataError
from runner.spec.base import ComponentConfig, Config, ItemKind, Names, Numbers, absolute_if_local

MOST_DIGITS = 18  # of all numbers of a sum together: its questions are numbered in 64 bits
TRAINING_TEMPLATES = {"deepseek_r1": "<｜Assistant｜><think>"}  # name of a file in templates/ → mark of its family
DropPart = Literal["reasoning", "system", "tools"]  # of a conversation: thoughts, system prompts, schemas of tools
TREE_RULES = ("error", "skip", "truncate_left")  # of data.truncation, where a prompt and its answers are apart


class ChatConfig(Config):
    """How conversations become tokens in training, rollouts, environments, evaluation and `run infer`."""

    template: str | None = Field(
        default=None,
        min_length=1,
        description="A jinja file, or the name of a training template of this project; null = the tokenizer's own.",
    )
    kwargs: dict[str, bool | int | float | str] | None = Field(
        default=None, description="Variables for the template, e.g. {enable_thinking: false}; null = none."
    )
    train_on: Literal["assistant", "answers", "last", "all"] = Field(
        default="assistant",
        description="What sft trains on: every assistant turn, these without their reasoning (answers), the last turn, "
        "or all tokens.",
    )
    drop: Annotated[tuple[DropPart, ...], Field(strict=False)] = Field(
        default=(), description="Parts of conversations to leave out because the template cannot write them."
    )

    def with_absolute_paths(self) -> Self:
        """The same config with the path of a template file made absolute."""
        file = self.template_file()
        return self.model_copy(update={"template": absolute_if_local(str(file))}) if file else self

    def template_file(self) -> Path | None:
        """The user's own template; None for the tokenizer's and for a training template of this project."""
        return None if self.template is None or self.template in TRAINING_TEMPLATES else Path(self.template)

    def preflight(self) -> None:
        """Raise DataError for a template that is not there; imports no tokenizer."""
        file = self.template_file()
        if file and not file.is_file():
            named = ", ".join(TRAINING_TEMPLATES)
            raise DataError(f"chat.template={file}: no such file; expected a jinja file, or one of: {named}")

    def problems(self, job: Any) -> list[tuple[str, str]]:
        if self.train_on == "assistant" or job.algorithm.item_kind == "sft":
            return []
        why = f"algorithm={job.algorithm.name} decides itself which tokens it trains on; leave it out"
        return [("chat.train_on", f"is for sft and cpt; {why}")]


class DataConfig(ComponentConfig):
    """Items, how they become tokens, and in which order they come."""

    group: ClassVar[str] = "data"
    renames_columns: ClassVar[bool] = False  # whether it has the option data.rename_columns
    max_length: int = Field(
        default=1024,
        ge=2,
        description="Longest tokenised item (prompt and longest answer; in rollouts, prompt) in tokens.",
    )
    truncation: Literal["error", "skip", "truncate_left", "truncate_right", "split"] = Field(
        default="error",
        description="What happens to an item above max_length (split: plain text only; truncate_left: of pairs, judged "
        "answers and prompts, the prompt's beginning); what was cut is counted and said.",
    )
    shuffle: bool = Field(default=True, description="A new order in each epoch, from the seed; false = as in the file.")

    def with_absolute_paths(self) -> Self:
        """The same config with the paths of local files made absolute."""
        return self

    def as_held_out(self) -> Self:
        """The config of an evaluation set: all rows are held out unless it names held-out ones itself."""
        return self

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


class DemoConfig(DataConfig):
    """Generated on this machine: digits to sort, or numbers to add. Held-out questions are not trained on."""

    factory: ClassVar[str] = "runner.data.demo:build"
    name: Literal["demo"] = "demo"
    task: Literal["sort", "sum"] = Field(
        default="sort",
        description="sort the digits of a number, or sum numbers with a calculator (environment=calculator).",
    )
    digits: int = Field(default=4, ge=2, le=12, description="Digits to sort, or of each number to add.")
    terms: int | None = Field(default=None, ge=2, le=9, description="Numbers to add under task=sum; null = 2.")
    items: int = Field(default=4000, ge=16, description="Training conversations.")
    held_out: int = Field(default=256, ge=1, description="Held-out conversations for evaluation.")

    @property
    def numbers_to_add(self) -> int:
        """`terms` as it is used."""
        return 2 if self.terms is None else self.terms

    def example_prompt(self) -> str:
        number = "503149276814"[: self.digits]
        return f'"sort {number}"' if self.task == "sort" else f'"sum {" ".join([number] * self.numbers_to_add)}"'

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = self._sum_problems(job) if self.task == "sum" else self._sort_problems()
        if self.truncation != "error":
            found.append(
                ("data.truncation", "data=demo makes its items as long as its options say; only error applies")
            )
        return found

    def _sort_problems(self) -> list[tuple[str, str]]:
        found = []
        if self.items + self.held_out > 10**self.digits:
            space = f"the {10**self.digits} numbers of data.digits={self.digits}; ask for fewer"
            found.append(("data.items", f"{self.items} and data.held_out={self.held_out} are more than {space}"))
        if self.terms is not None:
            found.append(("data.terms", "not used with task=sort; it belongs to task=sum"))
        return found

    def _sum_problems(self, job: Any) -> list[tuple[str, str]]:
        found = []
        terms = self.numbers_to_add
        space = (9 * 10 ** (self.digits - 1)) ** terms
        if self.items + self.held_out > space:
            few = f"the {space} questions of {terms} numbers with data.digits={self.digits}; ask for fewer"
            found.append(("data.items", f"{self.items} and data.held_out={self.held_out} are more than {few}"))
        if terms * self.digits > MOST_DIGITS:
            text = f"{terms} numbers of data.digits={self.digits} are more than {MOST_DIGITS} digits; lower one of them"
            found.append(("data.terms", text))
        if job.algorithm.item_kind not in ("sft", "prompts"):
            why = (
                f"algorithm={job.algorithm.name} compares whole answers, and the calculator's words would count as one"
            )
            found.append(("data.task", f"sum is answered in several turns; {why}; type data.task=sort"))
        return found


class SourceConfig(DataConfig):
    """What file and hub have in common."""

    renames_columns: ClassVar[bool] = True

    mixture_weights: Numbers | None = Field(
        default=None, description="Share of each source in a mixture, e.g. [0.7,0.3]; null = by their sizes."
    )
    rename_columns: dict[str, str] | None = Field(
        default=None, description="Columns to rename, {old: new}, e.g. {question: prompt}; null = none."
    )
    holdout: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Fraction of the rows held out for evaluation, e.g. 0.05, chosen by their contents; null = none.",
    )
    max_eval_examples: int | None = Field(
        default=256, ge=1, description="Most held-out items used per evaluation; null = all."
    )
    cache: bool = Field(default=True, description="Keep the tokenised data on disk and use it again.")

    @property
    def is_mixture(self) -> bool:
        return bool(self.mixture_weights)

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
        ]

    def _holdout_problems(self) -> list[tuple[str, str]]:
        other = self.eval_option()
        if self.holdout is None or other is None:
            return []
        return [("data.holdout", f"{self.holdout:g}, and {other} names the held-out rows; leave one of them out")]

    def _weights_problems(self) -> list[tuple[str, str]]:
        if self.mixture_weights is None:
            return []
        if len(self.mixture_weights) != len(self.sources()):
            return [
                (
                    "data.mixture_weights",
                    f"{len(self.mixture_weights)} weights for {len(self.sources())} sources; give one each",
                )
            ]
        if min(self.mixture_weights) <= 0:
            return [("data.mixture_weights", "every weight must be above 0; leave out a source that is not wanted")]
        return []

    def _columns_problems(self) -> list[tuple[str, str]]:
        names = list((self.rename_columns or {}).values())
        twice = sorted({name for name in names if names.count(name) > 1})
        return [("data.rename_columns", f"two columns cannot both be called {', '.join(twice)}")] if twice else []

    def _kind_problems(self, algorithm: Any) -> list[tuple[str, str]]:
        """Options that items of the algorithm's kind have no use for."""
        if algorithm.item_kind == "sft":
            return []
        found = []
        if self.truncation not in TREE_RULES:
            why = f"algorithm={algorithm.name} needs whole answers"
            found.append(
                ("data.truncation", f"{why}, so {self.truncation} is not possible; choose {', '.join(TREE_RULES)}")
            )
        return found


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
                "path": paths[0] if isinstance(self.path, str) else paths,
                "eval_path": self.eval_path and absolute_if_local(self.eval_path),
            }
        )

    def preflight(self, kind: ItemKind) -> None:
        """Raise DataError for a missing file, and for what is wrong with the first 10,000 rows of each."""
        from runner.data.formats import validate_files

        validate_files(self.sources(), self.eval_path, kind, self.rename_columns)

    def eval_option(self) -> str | None:
        return None if self.eval_path is None else f"data.eval_path={self.eval_path}"

    def sources(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path


class HubConfig(SourceConfig):
    """Data sets of the Hugging Face hub, loaded with `datasets` (no script of the data set is run)."""

    factory: ClassVar[str] = "runner.data.hub:build"
    name: Literal["hub"] = "hub"
    path: str | Annotated[Names, Field(min_length=1)] = Field(
        description="A hub name, e.g. openai/gsm8k, or a list of them (a mixture)."
    )
    subset: str | None = Field(default=None, description="The data set's configuration name, e.g. main.")
    split: str = Field(default="train", min_length=1, description="Split to train on.")
    eval_split: str | None = Field(default=None, description="Split to evaluate on; null = no evaluation.")
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


COMPONENTS = (DemoConfig, FileConfig, HubConfig)
