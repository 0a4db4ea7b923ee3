"""Registry of the losses of `runner.interfaces.losses`, built-in and of plug-ins, as config values.

    functions of a kind ──RegisteredFunction▶ the values of an option            (`policy_loss: one of clip, cispo, …`)
                        ──with_options──────▶ the options of its functions       (`clip_low: null`)
                        ──selected_function─▶ the function that a config names, with its options

No torch is imported: a registered function imports it when it is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, Field, GetCoreSchemaHandler, create_model

from runner.core.errors import Problem, RunnerError, SpecError
from runner.core.package import load_plugins
from runner.interfaces.losses import Kind, Option, Registration, registration_of, result_fault

BUILT_IN = ("policy.losses", "policy.advantages", "policy.importance", "preference.losses", "kl_divergence")
ENTRY_POINT_GROUP = "runner.losses"

Functions = Mapping[Kind, Mapping[str, Registration]]  # kind → name → function
ALONE: tuple[Kind, ...] = ("preference_loss", "divergence")  # kinds beside which a config has no other
RESERVED: dict[str, set[str]] = {kind: set() for kind in get_args(Kind)}  # kind → options that are no function's


@cache
def built_in() -> Functions:
    """The functions of this package."""
    found: dict[Kind, dict[str, Registration]] = {kind: {} for kind in get_args(Kind)}
    for module in BUILT_IN:
        for one in _registrations(importlib.import_module(f"runner.algorithm.{module}")):
            assert one.name not in found[one.kind], f"{one.kind} {one.name} is registered twice"
            found[one.kind][one.name] = one
    return found


@cache
def plug_ins() -> Functions:
    """The functions of installed packages. A module that fails, or takes a name, is left out and named."""
    found: dict[Kind, dict[str, Registration]] = {kind: {} for kind in get_args(Kind)}

    def load(point: EntryPoint) -> list[Registration]:
        return _load(point.value, {kind: {**built_in()[kind], **found[kind]} for kind in found})

    for loaded in load_plugins(ENTRY_POINT_GROUP, load):
        for one in loaded:
            found[one.kind][one.name] = one
    return found


def _load(module: str, known: dict[Kind, dict[str, Registration]]) -> list[Registration]:
    """Add a plug-in's module to `known` and return it. Raises RunnerError where it does not fit."""
    loaded = []
    for one in _registrations(importlib.import_module(module)):
        if known[one.kind].get(one.name) is one:
            continue  # imported there to be built upon, or named twice
        if why := _conflict(one, known):
            raise RunnerError(why)
        known[one.kind][one.name] = one
        loaded.append(one)
    return loaded


@cache
def functions(kind: Kind) -> dict[str, Registration]:
    """All functions of a kind by name."""
    return {**built_in()[kind], **plug_ins()[kind]}


@dataclass(frozen=True)
class RegisteredFunction:
    """Type of an option whose values are registered functions: `Annotated[str, RegisteredFunction(kind)]`.

    others: values beside them; the schema is made when it is first needed, so that it knows the plug-ins' names.
    """

    kind: Kind
    others: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return handler.generate_schema(Literal[(*self.others, *functions(self.kind))])


C = TypeVar("C", bound=BaseModel)


def with_options(cls: type[C], functions: Callable[[Kind], Mapping[str, Registration]] | None = None) -> type[C]:
    """The config class with the options of all functions that it can choose, each after its choice.

    functions: those of a kind, by name; the built-in ones unless given
    """
    added: dict[str, Any] = {}
    order = list(cls.model_fields)
    for choice, kind in choices(cls).items():
        own = _options((functions(kind) if functions else built_in()[kind]).values())
        RESERVED[kind] |= cls.model_fields.keys() - own.keys()
        for name, uses in own.items():
            known, field = cls.model_fields.get(name), _field(uses)
            if known is None or known.description != field.description:
                added[name] = (uses[0][1].annotation | None, field)
        order = [name for name in order if name not in own]
        at = order.index(choice) + 1
        order[at:at] = own
    if added:
        cls = create_model(cls.__name__, __base__=cls, __module__=cls.__module__, __doc__=cls.__doc__, **added)
    for name in order:  # in place: pydantic makes the validator of a deferred class from this very dictionary
        cls.model_fields[name] = cls.model_fields.pop(name)
    return cls


@cache
def choices(cls: type[BaseModel]) -> dict[str, Kind]:
    """The options of a config class whose values are registered functions, each with its kind."""
    found = ((name, one) for name, info in cls.model_fields.items() for one in info.metadata)
    return {name: one.kind for name, one in found if isinstance(one, RegisteredFunction)}


def plug_in_options(cls: type[BaseModel]) -> set[str]:
    """The options of a config class that only functions of plug-ins read."""
    return {
        name
        for kind in choices(cls).values()
        for name in _options(plug_ins()[kind].values()).keys() - _options(built_in()[kind].values()).keys()
    }


def selected_function(config: BaseModel, choice: str) -> Registration:
    """The function that an option of a config names."""
    return functions(choices(type(config))[choice])[getattr(config, choice)]


def resolved_options(config: BaseModel, choice: str) -> dict[str, Any]:
    """The options of the function that is chosen, each with its value or the function's default."""
    given = {
        name: (getattr(config, name), option.default)
        for name, option in selected_function(config, choice).options.items()
    }
    return {name: default if value is None else value for name, (value, default) in given.items()}


def compute_selected(config: BaseModel, choice: str, offered: Mapping[str, Callable[[], Any]]) -> Any:
    """The value of the chosen function, with the inputs that it takes; others are not computed.

    Raises SpecError where a function of a plug-in raises, or returns something else than its kind promises.
    """
    chosen = selected_function(config, choice)
    inputs = {name: offered[name]() for name in chosen.inputs}
    if chosen is built_in()[chosen.kind].get(chosen.name):
        return chosen.function(**inputs, **resolved_options(config, choice))
    try:
        result = chosen.function(**inputs, **resolved_options(config, choice))
    except Exception as error:  # foreign code may raise anything
        if isinstance(error, RunnerError | MemoryError) or type(error).__name__ == "OutOfMemoryError":
            raise
        raise _plug_in_error(chosen, choice, f"{type(error).__name__}: {error}") from error
    mask = offered["mask"]() if "mask" in offered else None
    if fault := _fault(chosen, inputs, result, len(offered[SIZED[chosen.kind]]()), mask):
        raise _plug_in_error(chosen, choice, fault)
    return result


SIZED: Mapping[Kind, str] = {  # the input with an element for each number of the result
    "policy_loss": "mask", "advantage": "group", "kl_estimator": "logprobs", "aggregation": "mask",
    "correction": "mask", "preference_loss": "chosen_logprobs", "divergence": "student",
}  # fmt: skip
_FINITE: set[Callable[..., Any]] = set()  # functions whose first result was finite: looking again costs time


def _fault(one: Registration, inputs: Mapping[str, Any], result: Any, size: int, mask: Any) -> str | None:
    """What is wrong with the result of a plug-in's function; its values are looked at once in a process."""
    per_token = one.per_token or one.kind not in ("advantage", "preference_loss", "divergence")
    size = len(mask) if per_token and mask is not None else size
    if fault := result_fault(one, result, size):
        return fault
    value = result[0] if isinstance(result, tuple) else result
    if not value.requires_grad and any(getattr(x, "requires_grad", False) for x in inputs.values()):
        return "it has no gradient, although an input carries one (detach, no_grad)"
    if one.function in _FINITE:
        return None
    seen = value if mask is None or not per_token else value[mask != 0]
    if not bool(seen.isfinite().all()):
        return f"{int((~seen.isfinite()).sum())} of {len(seen)} numbers are not finite (NaN or infinity)"
    _FINITE.add(one.function)
    return None


def _plug_in_error(one: Registration, choice: str, fault: str) -> SpecError:
    code = one.function.__code__
    where = f"{code.co_filename}:{code.co_firstlineno}, {code.co_name}"
    text = f"{one.name} of a plug-in ({where}): {fault}; runner.testing.check_loss({code.co_name}) tests the function"
    return SpecError([Problem(f"algorithm.{choice}", text)])


def unused_options(config: BaseModel) -> Iterator[tuple[str, str]]:
    """(key, message) for each option that is set and that no chosen function reads."""
    for choice, kind in choices(type(config)).items():
        name = getattr(config, choice)
        for option, uses in _options(functions(kind).values()).items():
            readers = [one.name for one, _ in uses]
            if option not in RESERVED[kind] and getattr(config, option) is not None and name not in readers:
                text = f"not used with {choice}={name}; it belongs to {choice}={'|'.join(readers)}"
                yield f"algorithm.{option}", text


def _registrations(module: ModuleType) -> Iterator[Registration]:
    return filter(None, map(registration_of, vars(module).values()))


def _options(found: Any) -> dict[str, list[tuple[Registration, Option]]]:
    """Option → the functions that read it, each with its own default."""
    uses: dict[str, list[tuple[Registration, Option]]] = {}
    for one in found:
        for name, option in one.options.items():
            uses.setdefault(name, []).append((one, option))
    return uses


def _field(uses: list[tuple[Registration, Option]]) -> Any:
    """The option as a config has it: null, which stands for the default of the function that reads it."""
    by_default: dict[Any, list[str]] = {}
    for one, option in uses:
        by_default.setdefault(option.default, []).append(one.name)
    by_default.pop(None, None)  # the description has the meaning of null
    few = [f"{value} ({', '.join(names)})" if len(names) < 4 else f"{value}" for value, names in by_default.items()]
    null = f"; null = {', '.join(few)}." if few else "."
    return Field(default=None, description=uses[0][1].description.rstrip(".") + null)


def _conflict(one: Registration, known: Functions) -> str:
    """Why a function cannot be added to those that are known; empty if it can."""
    subject = f"the option '{{}}' of {one.kind} '{one.name}'"
    if one.name in known[one.kind]:
        return f"{one.kind} '{one.name}' exists already ({known[one.kind][one.name].function.__module__})"
    for name, option in one.options.items():
        if name in RESERVED[one.kind] | _options_of_other_kinds(one.kind, known):
            return f"{subject.format(name)} is an option of the algorithm; rename it"
        for other, same in _options(known[one.kind].values()).get(name, []):
            if same.annotation != option.annotation:
                return f"{subject.format(name)} has another type or range than that of '{other.name}'; rename it"
    return ""


def _options_of_other_kinds(kind: Kind, known: Functions) -> set[str]:
    """The options of other kinds that one config has beside this kind's: all of policy optimization."""
    if kind in ALONE:
        return set()
    others = [known[other].values() for other in known if other not in (kind, *ALONE)]
    return {name for found in others for name in _options(found)}
