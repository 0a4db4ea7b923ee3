"""Options that all rewards share, and the parts of `reward=sum`.

    [{name: exact, weight: 1.0, …}, …]  ──decoded──▶  (0, RewardComponent(ExactConfig, 1.0)), …  and  (key, message), …

A problem of part 0 has the key reward.parts[0].OPTION. Knows every reward there is, those of plug-ins included,
because each is a subclass of RewardConfig.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import Field, ValidationError

from runner.core.errors import DataError, EnvironmentProblem, Problem, RunnerError, SecurityError, SpecError
from runner.spec import suggest
from runner.spec.base import ComponentConfig, Config, Dtype

ANSWER = "answer"  # the column that most data has the right answer in


class RewardConfig(ComponentConfig):
    """How sampled answers are scored."""

    group: ClassVar[str] = "reward"
    runs_model: ClassVar[bool] = False  # whether a model on the device scores
    summable: ClassVar[bool] = True  # whether it can be a part of a sum

    def with_dtype(self, dtype: Dtype) -> Self:
        """The same config; where it leaves the data type of a model open, with `dtype`."""
        return self

    def uses_device_model(self) -> bool:
        """Whether it, or a part of it, is a model on the device."""
        return self.runs_model

    def components(self) -> list[RewardConfig]:
        """This reward, and the parts of a sum."""
        return [self]

    def model_dtype(self) -> Dtype | None:
        """The data type of a model that scores; None = there is none, or it is left open."""
        return None

    def component_metrics(self) -> list[str]:
        """NAME of each metric reward/NAME that it adds to those of every reward."""
        return []

    def required_columns(self) -> list[tuple[str, str]]:
        """(option, column) of each column that it cannot score without; runs no code of the user's."""
        return []

    def answer_column(self) -> str | None:
        """The column whose very text is a right completion; None where there is none, as for a length."""
        return None

    def preflight(self) -> None:
        """Raise for what is wrong outside the spec (files, packages); imports nothing heavy."""


class PooledConfig(RewardConfig):
    """A reward that scores in worker processes of each rank."""

    workers: int = Field(default=1, ge=1, description="Number of processes that score groups in parallel.")
    timeout_s: float = Field(default=30.0, gt=0, description="Timeout in seconds for one group; then it has no score.")


Found = tuple[str, str]  # key, message
RESERVED_NAMES = ("mean", "std", "num_failed", "zero_variance")  # reward/… of every reward
MISSING = "???"  # what a config file writes where a value has to be given


class Weight(Config):
    """What a part has beside the options of its reward."""

    weight: float = Field(default=1.0, description="Weight of this part's score in the sum.")


@dataclass(frozen=True, slots=True)
class RewardComponent:
    """A reward and what its score is multiplied with."""

    config: RewardConfig
    weight: float


def require_components(parts: Sequence[Mapping[str, Any]]) -> list[RewardComponent]:
    """The parts. Raises SpecError with every problem."""
    good, found = decode_components(parts)
    if found:
        raise SpecError([Problem(key, message) for key, message in found])
    return [part for _, part in good]


def decode_components(parts: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[int, RewardComponent]], list[Found]]:
    """(index, part) of each sound part, and what is wrong with the others."""
    good: list[tuple[int, RewardComponent]] = []
    found: list[Found] = []
    for i, given in enumerate(parts):
        part = _decode_component(given, f"reward.parts[{i}]")
        if isinstance(part, RewardComponent):
            good.append((i, part))
        else:
            found += part
    return good, found


def dump_components(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The parts as plain data with every default filled in; one that is not sound as it was given."""
    good = dict(decode_components(parts)[0])
    return [
        component_record(good[i].config, good[i].weight) if i in good else dict(given) for i, given in enumerate(parts)
    ]


def component_names(components: Sequence[str]) -> list[str]:
    """The metric name of each component: its reward's name, with its index where names repeat."""
    clear = [components.count(name) == 1 and name not in RESERVED_NAMES for name in components]
    return [name if c else f"{name}[{i}]" for i, (name, c) in enumerate(zip(components, clear, strict=True))]


def component_record(config: RewardConfig, weight: float) -> dict[str, Any]:
    """A part as plain data."""
    options = config.model_dump(mode="json")
    return {"name": options.pop("name"), "weight": weight, **options}


def prefix_keys(found: Sequence[Found], index: int) -> list[Found]:
    """A member's own problems under the keys of the part that it is."""
    return [(_prefix_key(key, index), message) for key, message in found]


@contextmanager
def prefix_error_keys(index: int) -> Iterator[None]:
    """Gives a SpecError about reward.OPTION the key of the part."""
    try:
        yield
    except SpecError as error:
        raise SpecError([Problem(_prefix_key(p.key, index), p.message, p.origin) for p in error.problems]) from error


@contextmanager
def collect_errors(errors: list[RunnerError]) -> Iterator[None]:
    """Keep what is wrong with a part of a sum in `errors`, so that the other parts are tried too."""
    try:
        yield
    except (SpecError, EnvironmentProblem, DataError, SecurityError) as error:
        errors.append(error)


def raise_collected(errors: Sequence[RunnerError]) -> None:
    """Raise several errors as one, with the type of the highest exit code; nothing if there is none."""
    if len(errors) == 1:
        raise errors[0]
    of_spec = [error for error in errors if isinstance(error, SpecError)]
    if of_spec and len(of_spec) == len(errors):
        raise SpecError([problem for error in of_spec for problem in error.problems])
    if errors:
        worst = max((error for error in errors if not isinstance(error, SpecError)), key=lambda error: error.exit_code)
        raise type(worst)("\n".join(map(str, errors)))


def _prefix_key(key: str, index: int) -> str:
    own = key == "reward" or key.startswith("reward.")
    return f"reward.parts[{index}]{key.removeprefix('reward')}" if own else key


def _decode_component(given: Mapping[str, Any], key: str) -> RewardComponent | list[Found]:
    known = {cls.component_name(): cls for cls in _named_configs() if cls.summable}
    name = given.get("name")
    if not isinstance(name, str) or name not in known:
        return [(f"{key}.name", _describe_unknown_name(name, known))]
    options = {field: value for field, value in given.items() if field not in ("name", "weight") and value != MISSING}
    owner, others = f"reward={name}", {"reward": {one: (*c.model_fields, "weight") for one, c in known.items()}}
    config, found = _validate_options(known[name], options, key, owner, others)
    weight, wrong = _validate_options(Weight, {k: v for k, v in given.items() if k == "weight"}, key, owner, others)
    if weight is not None and weight.weight == 0:
        wrong = [(f"{key}.weight", "a weight of 0 disables the part; remove the part")]
    if config is None or weight is None or found or wrong:
        return [*found, *wrong]
    return RewardComponent(config, weight.weight)


def _validate_options(
    cls: type[Any], options: Mapping[str, Any], key: str, owner: str, others: suggest.Options
) -> tuple[Any, list[Found]]:
    try:
        return cls.model_validate(options), []
    except ValidationError as error:
        return None, list(suggest.option_faults(error, cls, options, key, owner, others))


def _describe_unknown_name(name: Any, known: Mapping[str, type[RewardConfig]]) -> str:
    names = ", ".join(sorted(known))
    if name is None:
        return f"each part needs the name of a reward: {{name: …}} ({names})"
    if name in (cls.component_name() for cls in _named_configs() if not cls.summable):
        return f"{name} cannot be a part of a sum ({names})"
    return suggest.unknown_name("reward", name, known)


def _named_configs(base: type[RewardConfig] = RewardConfig) -> Iterator[type[RewardConfig]]:
    """Every class below `base` that names a component."""
    for cls in base.__subclasses__():
        if isinstance(cls.model_fields["name"].default, str):
            yield cls
        yield from _named_configs(cls)


def pattern_problems(field: str, pattern: str | None, groups: int | None = None) -> list[tuple[str, str]]:
    from runner.reward.rules import pattern_fault

    message = pattern_fault(pattern, groups) if pattern is not None else None
    return [(f"reward.{field}", message)] if message else []
