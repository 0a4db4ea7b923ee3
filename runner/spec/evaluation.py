"""Options of held-out evaluation: when, how questions are answered, and named sets.

    evaluation.sets.gsm8k={data: {name: file, path: test.jsonl}, reward: {name: numeric}, samples: 4}

A set names components as a job's groups do. A problem of one has the key evaluation.sets.NAME.OPTION.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from runner.core.errors import DataError, EnvironmentProblem, Problem, SpecError
from runner.spec import suggest
from runner.spec.base import ComponentConfig, Config

SET_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,39}")
COMPONENTS = ("data", "reward", "environment")  # groups of which a set may have its own component
LOW, HIGH = "_ci_low", "_ci_high"  # suffixes of the bounds of a metric's 95 % interval
RESERVED = ("reward",)  # eval/reward/… are metrics of the job's own rows


class AnswersConfig(Config):
    """How held-out questions are answered, and which answers pass."""

    samples: int = Field(
        default=0, ge=0, description="Completions sampled per question, for pass@k; 0 = one greedy completion."
    )
    temperature: float = Field(default=1.0, gt=0, description="Temperature of sampled completions.")
    max_new_tokens: int = Field(
        default=64, ge=1, description="Maximum tokens of a completion; fewer where the model's positions end."
    )
    pass_threshold: float = Field(
        default=1.0, description="Lowest reward of a completion that passes; without a reward, an exact match passes."
    )

    def answer_problems(self, key: str) -> list[tuple[str, str]]:
        """What is set of sampled answers where none is sampled."""
        if self.samples == 0 and self.temperature != 1.0:
            return [(f"{key}.temperature", f"greedy decoding has no temperature; set {key}.samples=N, or leave it out")]
        return []


class EvaluationSetConfig(AnswersConfig):
    """One named set; a component that is left out is the job's."""

    data: dict[str, Any] | None = Field(default=None, description="Data of the questions; null = the job's.")
    reward: dict[str, Any] | None = Field(default=None, description="Reward of the completions; null = the job's.")
    environment: dict[str, Any] | None = Field(default=None, description="Environment of episodes; null = the job's.")
    limit: int | None = Field(default=None, ge=1, description="Maximum number of questions; null = all held-out ones.")
    choices: str | None = Field(
        default=None,
        min_length=1,
        description="Column with the options of a multiple choice; the most likely one is scored. null = completions.",
    )


HELD_OUT = "held_out"  # the set of a run's own held-out rows


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """A decoded set: its options, and its own components by group."""

    name: str
    options: EvaluationSetConfig
    components: Mapping[str, ComponentConfig]


class EvaluationConfig(AnswersConfig):
    """When and how the model is evaluated on held-out questions."""

    every: int = Field(
        default=50, ge=0, description="Steps between evaluations; one more at the end of the run. 0 = never."
    )
    at_start: bool = Field(default=True, description="Also evaluate before the first step.")
    batch_size: int = Field(default=64, ge=1, description="Maximum number of concurrent completions, per rank.")
    logged_samples: int = Field(
        default=8, ge=0, description="Completions per evaluation and set that are written to samples.jsonl."
    )
    sets: dict[str, dict[str, Any]] = Field(
        default={},
        description="Evaluation sets in addition to the job's held-out rows: name → "
        "{data, reward, environment, samples, temperature, max_new_tokens, pass_threshold, limit, choices}; metrics "
        "are eval/NAME/….",
    )

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = [*self._unused_problems(job), *self.answer_problems("evaluation")]
        if self.sets and not self.every:
            found.append(("evaluation.sets", "not evaluated, because evaluation.every=0; leave one of them out"))
        for name, given in self.sets.items():
            one = decode_set(name, given)
            found += _set_problems(one, job) if isinstance(one, EvaluationSet) else one
        from runner.spec.metric_check import required_metric_problems

        return found or list(required_metric_problems(job))

    def _unused_problems(self, job: Any) -> list[tuple[str, str]]:
        """Options of completions where the job's own rows have none; sets share only batch_size.

        max_new_tokens stays: a limit that nothing reaches, which recipes set for every algorithm.
        """
        if not self.every or not measures_only_loss(job):
            return []
        why = f"changes nothing: held-out rows of algorithm={job.algorithm.name} have a loss, but no completions"
        found = []
        for name in ("samples", "temperature", "pass_threshold", *([] if self.sets else ["batch_size"])):
            if getattr(self, name) != type(self).model_fields[name].default:
                way = f"; for a set, type evaluation.sets.NAME.{name}=…" if self.sets else ""
                found.append((f"evaluation.{name}", f"{why}; leave it out{way}"))
        return found

    def decoded_sets(self) -> list[EvaluationSet]:
        """The sets, in the order given. Raises SpecError with every problem of theirs."""
        decoded = [decode_set(name, given) for name, given in self.sets.items()]
        if found := [problem for one in decoded if isinstance(one, list) for problem in one]:
            raise SpecError([Problem(key, message) for key, message in found])
        return [one for one in decoded if isinstance(one, EvaluationSet)]

    def with_absolute_paths(self) -> EvaluationConfig:
        """The same config with the paths of local files made absolute."""
        return self._with_parts(COMPONENTS, lambda component: component.with_absolute_paths())

    def with_resolved_source(self, resolve: Any) -> EvaluationConfig:
        """The same config with the folder or hub id that a set's reward model means."""
        return self._with_parts(("reward",), lambda component: component.with_resolved_source(resolve))

    def with_user_files(self, change: Callable[[Path], Path]) -> EvaluationConfig:
        """The same config with the paths of the user's own code changed."""
        return self._with_parts(("reward", "environment"), lambda component: component.with_user_files(change))

    def _with_parts(self, groups: Sequence[str], change: Callable[[Any], ComponentConfig]) -> EvaluationConfig:
        """The same config with components of these groups changed. Raises SpecError with the set's keys."""
        sets = dict[str, dict[str, Any]]()
        for one in self.decoded_sets():
            sets[one.name] = one.options.model_dump(mode="json")
            with prefix_set_errors(one.name):
                own = {group: change(part) for group, part in one.components.items() if group in groups}
            sets[one.name] |= {group: part.model_dump(mode="json") for group, part in own.items()}
        return self.model_copy(update={"sets": sets})

    def preflight(self) -> None:
        """Raise what the data and rewards of sets find wrong with files and packages; imports no torch."""
        for one in self.decoded_sets():
            with prefix_set_errors(one.name):
                for group in ("reward", "environment"):
                    if (component := one.components.get(group)) is not None:
                        component.preflight()  # type: ignore[attr-defined]
                if (data := one.components.get("data")) is not None:
                    data.as_held_out().preflight("prompts")  # type: ignore[attr-defined]


def measures_only_loss(job: Any) -> bool:
    """Whether the job's held-out rows have only a loss, and no completions; pairs of data=demo have some."""
    makes_text = next(iter(job.algorithm.trained_models().values())) != "scalar"
    return not makes_text or (job.algorithm.item_kind in ("pairs", "judged") and job.data.renames_columns)


Found = tuple[str, str]  # key, message


def decode_set(name: str, given: Mapping[str, Any]) -> EvaluationSet | list[Found]:
    """The set with its components, or what is wrong with it."""
    key = f"evaluation.sets.{name}"
    if not SET_NAME.fullmatch(name) or name in RESERVED:
        return [(key, f"cannot be a set's name: letters, digits, _ and -, and none of {', '.join(RESERVED)}")]
    try:
        options = EvaluationSetConfig.model_validate(given)
    except ValidationError as error:
        return list(suggest.option_faults(error, EvaluationSetConfig, given, key, "a set", {}))
    found, components = list[Found](), dict[str, ComponentConfig]()
    for group in COMPONENTS:
        if (record := getattr(options, group)) is not None:
            component = _decode_component(group, record, f"{key}.{group}")
            if isinstance(component, ComponentConfig):
                components[group] = component
            else:
                found += component
    return found or EvaluationSet(name, options, components)


def _decode_component(group: str, record: Mapping[str, Any], key: str) -> ComponentConfig | list[Found]:
    from runner.spec.registry import default_registry

    known = default_registry().classes(group)
    name = record.get("name")
    if not isinstance(name, str) or name not in known:
        return [(f"{key}.name", suggest.unknown_name(group, name or "null", known))]
    try:
        return known[name].model_validate({k: v for k, v in record.items() if v != "???"})
    except ValidationError as error:
        return list(suggest.option_faults(error, known[name], record, key, f"{group}={name}", {}))


def without_bounds(metrics: Iterable[str]) -> list[str]:
    """The metrics without the bounds of intervals."""
    return [name for name in metrics if not name.endswith((LOW, HIGH))]


def ks_of(samples: int) -> list[int]:
    """The k of pass@k: powers of two above 1 and below n, and n; pass@1 is mean@n."""
    powers = (2**i for i in range(1, samples.bit_length()))
    return sorted({k for k in powers if k < samples} | {samples}) if samples > 1 else []


def _set_problems(one: EvaluationSet, job: Any) -> list[Found]:
    """Contradictions inside a set, each component judged as a part of this job."""
    key = f"evaluation.sets.{one.name}"
    inside = job.model_copy(update=dict(one.components))
    found = one.options.answer_problems(key)
    if one.options.choices is not None:
        unused = [name for name in ("reward", "environment") if name in one.components]
        unused += ["samples"] if one.options.samples else []
        why = f"not used with {key}.choices, which samples no completion; leave it out"
        found += [(f"{key}.{name}", why) for name in unused]
    if isinstance(getattr(one.components.get("data"), "source", ""), tuple):
        found.append((f"{key}.data.path", "a set has one source; define one set per source"))
    for component in one.components.values():
        found += [(f"{key}.{name}", message) for name, message in component.problems(inside)]
    return found


@contextmanager
def prefix_set_errors(name: str) -> Iterator[None]:
    """Gives an error about a component the name of the set that it belongs to."""
    key = f"evaluation.sets.{name}"
    try:
        yield
    except SpecError as error:
        raise SpecError([Problem(f"{key}.{p.key}", p.message, p.origin) for p in error.problems]) from error
    except (DataError, EnvironmentProblem) as error:
        kind = DataError if isinstance(error, DataError) else EnvironmentProblem
        raise kind(f"{key}: {error}") from error
