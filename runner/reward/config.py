"""What a user can set of a reward."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_serializer

from runner.core.errors import EnvironmentProblem, RunnerError
from runner.reward.base import (
    ANSWER,
    PooledConfig,
    collect_errors,
    component_names,
    component_record,
    decode_components,
    dump_components,
    pattern_problems,
    prefix_error_keys,
    prefix_keys,
    raise_collected,
    require_components,
)
from runner.reward.base import RewardConfig as RewardConfig
from runner.spec.base import Dtype, ResolveSource, absolute_if_local, address_problem
from runner.user_code.config import UserCodeConfig

# YAML and command lines have lists only; what a part may hold is decided by the component that it names.
Parts = Annotated[tuple[dict[str, Any], ...], Field(strict=False, min_length=1)]


class NoRewardConfig(RewardConfig):
    """No reward: for algorithms that train on a data set."""

    factory: ClassVar[str] = "runner.reward.rules:build_none"
    summable: ClassVar[bool] = False
    name: Literal["none"] = "none"


class FallibleConfig(RewardConfig):
    """A reward that may be unable to score a sample."""

    max_failures: int = Field(
        default=8, ge=1, description="Stop the run after this many consecutive groups without a score on one rank."
    )


class ColumnConfig(FallibleConfig):
    """A reward that compares with a column of the data."""

    column: str = Field(default=ANSWER, min_length=1, description="Column of the data with the correct answer.")

    def required_columns(self) -> list[tuple[str, str]]:
        return [("reward.column", self.column)]

    def answer_column(self) -> str | None:
        return self.column


class ExtractConfig(FallibleConfig):
    """A reward that reads the answer, or a part of it."""

    extract: str | None = Field(
        default=None,
        description="Regular expression with one capturing group; its last match is the answer. null = the whole text.",
    )

    def problems(self, job: Any) -> list[tuple[str, str]]:
        return pattern_problems("extract", self.extract, groups=1)

    def answer_column(self) -> str | None:
        return super().answer_column() if self.extract is None else None


class ExactConfig(ExtractConfig, ColumnConfig):
    """1 if the completion, without spaces around it, equals a column, else 0."""

    factory: ClassVar[str] = "runner.reward.rules:build_exact"
    name: Literal["exact"] = "exact"
    ignore_case: bool = Field(default=False, description="Ignore uppercase and lowercase.")


class NumericConfig(ExtractConfig, ColumnConfig):
    """1 if the last number of the completion equals the last number of a column, else 0."""

    factory: ClassVar[str] = "runner.reward.rules:build_numeric"
    name: Literal["numeric"] = "numeric"
    tolerance: float = Field(default=1e-6, ge=0, description="Largest absolute difference that counts as equal.")


class FormatConfig(FallibleConfig):
    """1 if the whole text matches a regular expression, else 0."""

    factory: ClassVar[str] = "runner.reward.rules:build_format"
    name: Literal["format"] = "format"
    pattern: str = Field(
        min_length=1, description="Regular expression that must match the whole text; the dot also matches line breaks."
    )

    def problems(self, job: Any) -> list[tuple[str, str]]:
        return pattern_problems("pattern", self.pattern)


class IfevalConfig(FallibleConfig):
    """1 if a completion follows all checkable instructions of an IFEval row, else 0."""

    factory: ClassVar[str] = "runner.reward.ifeval:build"
    name: Literal["ifeval"] = "ifeval"

    def preflight(self) -> None:
        """Raise EnvironmentProblem where langdetect, which finds the language of an answer, is not installed."""
        if importlib.util.find_spec("langdetect") is None:
            raise EnvironmentProblem('reward=ifeval needs langdetect\n  pip install "posttrain-run[ifeval]"')

    def required_columns(self) -> list[tuple[str, str]]:
        return [("reward.name", name) for name in ("instruction_id_list", "kwargs")]


class EnvironmentRewardConfig(FallibleConfig):
    """The score that the environment gives an episode, by its method score()."""

    factory: ClassVar[str] = "runner.reward.rules:build_environment"
    name: Literal["environment"] = "environment"

    def problems(self, job: Any) -> list[tuple[str, str]]:
        if job.environment.has_score:
            return []
        return [("reward", f"environment={job.environment.name} gives no score; type environment=function")]


class LengthConfig(RewardConfig):
    """A score for the length of completions, in tokens: DAPO's soft overlong penalty, or a target."""

    factory: ClassVar[str] = "runner.reward.rules:build_length"
    name: Literal["length"] = "length"
    max_length: int | None = Field(
        default=None,
        ge=1,
        description="Longest completion in tokens: 0 up to max_length - overlong_buffer_len, then linear to -1 at "
        "max_length, -1 above.",
    )
    overlong_buffer_len: int | None = Field(
        default=None, ge=1, description="Tokens below max_length where the penalty grows (DAPO)."
    )
    target: int | None = Field(
        default=None,
        ge=1,
        description="Target length: score 0 there, linear to -1 at 0 tokens and at twice the target.",
    )

    def problems(self, job: Any) -> list[tuple[str, str]]:
        if self.target is not None:
            given = [name for name in ("max_length", "overlong_buffer_len") if getattr(self, name) is not None]
            return [(f"reward.{name}", "not used together with reward.target; leave one of them out") for name in given]
        longest, buffer = self.max_length, self.overlong_buffer_len
        if longest is None and buffer is None:
            return [("reward.max_length", "set reward.max_length and reward.overlong_buffer_len, or reward.target")]
        if longest is None or buffer is None:
            key = "reward.max_length" if longest is None else "reward.overlong_buffer_len"
            return [(key, f"must be set, because the other of the two is: {key}=…")]
        if buffer > longest:
            return [("reward.overlong_buffer_len", f"{buffer} is above reward.max_length={longest}")]
        return []


class MathConfig(ColumnConfig, PooledConfig):
    """1 if the completion is mathematically equal to a column, by math-verify, else 0."""

    factory: ClassVar[str] = "runner.reward.math:build"
    name: Literal["math"] = "math"
    workers: int = Field(default=1, ge=1, description="Number of processes that compare answers.")
    timeout_s: float = Field(default=5.0, gt=0, description="Timeout in seconds for one answer; then it has no score.")

    def preflight(self) -> None:
        """Raise EnvironmentProblem where math-verify is not installed."""
        if importlib.util.find_spec("math_verify") is None:
            raise EnvironmentProblem('reward=math needs math-verify\n  pip install "posttrain-run[math]"')


class CountdownConfig(ExtractConfig):
    """1 if the completion is an arithmetic expression of the given numbers that equals the target, else 0."""

    factory: ClassVar[str] = "runner.reward.rules:build_countdown"
    name: Literal["countdown"] = "countdown"
    numbers: str = Field(default="numbers", min_length=1, description="Column with the list of integers.")
    target: str = Field(default="target", min_length=1, description="Column with the target number.")
    use_all: bool = Field(default=True, description="true = use each number exactly once; false = at most once.")

    def required_columns(self) -> list[tuple[str, str]]:
        return [("reward.numbers", self.numbers), ("reward.target", self.target)]


class FunctionConfig(UserCodeConfig, FallibleConfig, PooledConfig):
    """Your own Python function, which runs in separate processes."""

    factory: ClassVar[str] = "runner.reward.function:build"
    path_example: ClassVar[str] = "my_reward.py:score"
    name: Literal["function"] = "function"

    def answer_column(self) -> str | None:
        return ANSWER

    def required_columns(self) -> list[tuple[str, str]]:
        from runner.reward.preflight import required_columns

        return [("reward.path", name) for name in required_columns(self.file, self.function)]


class CodeConfig(ColumnConfig, ExtractConfig, PooledConfig):
    """1 if the Python code of the completion passes the tests of a column in a sandbox, else 0."""

    factory: ClassVar[str] = "runner.reward.code:build"
    name: Literal["code"] = "code"
    column: str = Field(
        default="tests", min_length=1, description="Column with the tests: Python code, or a form of docs/rewards.md."
    )
    extract: str | None = Field(
        default=None,
        description="Regular expression with one capturing group; its last match is the code. null = the last fenced "
        "block of Python.",
    )
    url: str | None = Field(
        default=None,
        description="URL of a SandboxFusion service that runs the code; null = bubblewrap, or else Landlock, here.",
    )
    workers: int = Field(default=1, ge=1, description="Number of groups that are scored in parallel.")
    timeout_s: float = Field(default=10.0, gt=0, description="Timeout in seconds for one execution; then it fails.")
    memory_bytes: int = Field(default=1 << 30, ge=1 << 26, description="Memory limit of a process, and of all files.")
    output_bytes: int = Field(
        default=1 << 20, ge=1, description="Limit of the output, and of each file; not with reward.url."
    )
    processes: int = Field(default=16, ge=1, description="Maximum processes and threads; not with reward.url.")

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if self.url is None:
            return found
        wrong, why = address_problem(self.url), "the service of reward.url has its own limit; leave it out"
        changed = (n for n in ("output_bytes", "processes") if getattr(self, n) != type(self).model_fields[n].default)
        return [*found, *([("reward.url", wrong)] if wrong else []), *((f"reward.{name}", why) for name in changed)]

    def answer_column(self) -> str | None:
        return None

    def preflight(self) -> None:
        """Raise EnvironmentProblem where no sandbox can be made."""
        from runner.reward.code import find_sandbox

        if self.url is None:
            find_sandbox(self)


class HttpConfig(FallibleConfig):
    """A service that receives completions by HTTP POST and returns their scores."""

    factory: ClassVar[str] = "runner.reward.http:build"
    name: Literal["http"] = "http"
    max_failures: int = Field(
        default=32, ge=1, description="Stop the run after this many consecutive groups without a score on one rank."
    )
    url: str = Field(min_length=1, description="URL of the service, e.g. http://localhost:8000/score.")
    workers: int = Field(default=4, ge=1, description="Number of concurrent requests; each has one group.")
    timeout_s: float = Field(default=30.0, gt=0, description="Timeout in seconds for one request.")
    retries: int = Field(default=5, ge=0, description="Retries after no response, or after status 429 or 500 to 599.")
    backoff_s: float = Field(default=0.5, gt=0, description="Seconds before the first retry; each wait doubles.")

    def problems(self, job: Any) -> list[tuple[str, str]]:
        wrong = address_problem(self.url, "/PATH")
        return [] if wrong is None else [("reward.url", wrong)]

    def answer_column(self) -> str | None:
        return ANSWER


class ModelRewardConfig(FallibleConfig):
    """A trained reward model: a sequence classifier with one label, which scores prompt and completion."""

    factory: ClassVar[str] = "runner.reward.model:build"
    models: ClassVar[Mapping[str, Mapping[str, str]]] = {"path": {"path": "path", "dtype": "dtype"}}
    runs_model: ClassVar[bool] = True
    name: Literal["model"] = "model"
    path: str = Field(
        min_length=1, description="The reward model: a folder, a run, an adapter folder, or a hub id; safetensors only."
    )
    dtype: Dtype | None = Field(default=None, description="Data type of the reward model; null = model.dtype.")
    batch_size: int = Field(default=16, ge=1, description="Number of completions in one forward pass.")
    score_position: Literal["end_of_turn", "last_token"] | None = Field(
        default=None,
        description="Token with the score: end_of_turn = that which ends the completion; last_token = the last of the "
        "conversation, as in Transformers, TRL and verl; null = as stored with the model, else last_token. Not for "
        "encoders.",
    )

    def with_dtype(self, dtype: Dtype) -> Self:
        return self.model_copy(update={"dtype": self.dtype or dtype})

    def model_dtype(self) -> Dtype | None:
        return self.dtype

    def with_absolute_paths(self) -> Self:
        return self.model_copy(update={"path": absolute_if_local(self.path)})

    def with_resolved_source(self, resolve: ResolveSource) -> Self:
        return self.model_copy(update={"path": resolve(self.path, "reward.path", None, True, None)})

    def preflight(self) -> None:
        """Raise EnvironmentProblem for a folder that is no reward model."""
        from runner.reward.preflight import check_folder

        check_folder(self.path)


class SumConfig(RewardConfig):
    """A weighted sum of other rewards; a completion that one of them cannot score has no score."""

    factory: ClassVar[str] = "runner.reward.sum:build"
    summable: ClassVar[bool] = False
    name: Literal["sum"] = "sum"
    parts: Parts = Field(
        description="Rewards to add, e.g. [{name: exact, weight: 1.0, column: answer}, {name: length, target: 100}]: "
        "the name of a reward, its weight (default 1.0) and its options."
    )

    @field_serializer("parts")
    def _serialize_parts(self, parts: Parts) -> list[dict[str, Any]]:
        """The parts with every default filled in."""
        return dump_components(parts)

    def problems(self, job: Any) -> list[tuple[str, str]]:
        parts, found = decode_components(self.parts)
        return found + [entry for i, part in parts for entry in prefix_keys(part.config.problems(job), i)]

    def with_dtype(self, dtype: Dtype) -> Self:
        if decode_components(self.parts)[1]:  # reported by `problems`
            return self
        return self._with_parts(lambda config: config.with_dtype(dtype))

    def with_absolute_paths(self) -> Self:
        return self._with_parts(lambda config: config.with_absolute_paths())

    def with_resolved_source(self, resolve: ResolveSource) -> Self:
        return self._with_parts(lambda config: config.with_resolved_source(resolve))

    def with_user_files(self, change: Callable[[Path], Path]) -> Self:
        return self._with_parts(lambda config: config.with_user_files(change))

    def _with_parts(self, change: Callable[[RewardConfig], RewardConfig]) -> Self:
        parts = (component_record(change(part.config), part.weight) for part in require_components(self.parts))
        return self.model_copy(update={"parts": tuple(parts)})

    def components(self) -> list[RewardConfig]:
        return [self, *(part.config for part in require_components(self.parts))]

    def uses_device_model(self) -> bool:
        return any(part.config.uses_device_model() for part in require_components(self.parts))

    def component_metrics(self) -> list[str]:
        return component_names([part.config.component_name() for part in require_components(self.parts)])

    def required_columns(self) -> list[tuple[str, str]]:
        parts = require_components(self.parts)
        return [entry for i, part in enumerate(parts) for entry in prefix_keys(part.config.required_columns(), i)]

    def preflight(self) -> None:
        """Raise what is wrong with all parts, as one error."""
        errors: list[RunnerError] = []
        for i, part in enumerate(require_components(self.parts)):
            with collect_errors(errors), prefix_error_keys(i):
                part.config.preflight()
        raise_collected(errors)


COMPONENTS = (
    NoRewardConfig,
    ExactConfig,
    EnvironmentRewardConfig,
    NumericConfig,
    FormatConfig,
    IfevalConfig,
    LengthConfig,
    MathConfig,
    CountdownConfig,
    CodeConfig,
    FunctionConfig,
    HttpConfig,
    ModelRewardConfig,
    SumConfig,
)
