"""What every config is: frozen, strict, and made of fields that explain themselves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

Dtype = Literal["float32", "bfloat16"]  # of weights and of what is computed
# a language model, the same backbone with a reward or value head, or with both
Head = Literal["lm", "scalar", "lm+value"]
ItemKind = Literal["sft", "pairs", "judged", "prompts"]  # what an algorithm learns from

ITEM_COLUMNS: dict[ItemKind, str] = {
    "sft": "columns messages, or prompt and completion, or text",
    "pairs": "preference pairs: columns prompt, chosen and rejected",
    "judged": "labeled completions: columns prompt, completion and label",
    "prompts": "a column prompt, and the columns that the reward needs",
}


# of an option's value, the option, the base of an adapter, whether its weights are needed, and the revision
ResolveSource = Callable[[str, str, str | None, bool, str | None], str]


class Config(BaseModel):
    """A frozen record of plain values; an unknown key, a wrong type, NaN or infinity is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=False, defer_build=True
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other values, not validated. Raises TypeError for a name that is no option."""
        if unknown := set(update or ()) - type(self).model_fields.keys():
            raise TypeError(f"{type(self).__name__} has no option {', '.join(sorted(unknown))}")
        return super().model_copy(update=update, deep=deep)

    def mapping_options(self) -> Iterator[str]:
        """The dotted keys of the options whose values are mappings with keys of the user's own."""
        for name, value in self:
            if isinstance(value, Config):
                yield from (f"{name}.{key}" for key in value.mapping_options())
            elif isinstance(value, Mapping):
                yield name

    def problems(self, job: Any) -> list[tuple[str, str]]:
        """Contradictions between this part and the rest of the job, as (key, message)."""
        return []


class ComponentConfig(Config):
    """The config of a registered component: its type picks the factory.

    A subclass per group sets `group`; a subclass of that per component narrows `name` to a
    `Literal` and names its factory lazily as `"module:attribute"`, so that reading a config
    never imports what it configures.
    """

    group: ClassVar[str]
    factory: ClassVar[str]
    models: ClassVar[Mapping[str, Mapping[str, str]]] = {}  # option that takes a model: a model's option → our own
    name: str = Field(description="Which registered component of this group to use.")

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Raise TypeError for an option with the name of a method or class attribute of the base class."""
        known = {*dir(cls.__base__), *getattr(cls.__base__, "__class_vars__", ())}
        if hidden := [option for option in cls.model_fields if option in known]:
            raise TypeError(f"the option {hidden[0]} of {cls.__name__} hides an attribute of its base class; rename it")

    @classmethod
    def component_name(cls) -> str:
        """The one name that selects this component."""
        return str(cls.model_fields["name"].default)

    def with_absolute_paths(self) -> Self:
        """The same config with the paths of local files and folders made absolute."""
        return self

    def with_user_files(self, change: Callable[[Path], Path]) -> Self:
        """The same config with the paths of the user's own code changed, of which a run keeps copies."""
        return self

    def with_resolved_source(self, resolve: ResolveSource) -> Self:
        """The same config with the folder or hub id that a model's path means."""
        return self

    @classmethod
    def with_plugin_options(cls) -> type[Self]:
        """This class with the options that installed packages add to it."""
        return cls


def absolute_if_local(path: str) -> str:
    """An absolute path without links for a path that exists here; a hub id stays as it is.

    `outputs/latest` moves, so links are resolved.
    """
    return os.path.realpath(path) if os.path.exists(path) else path


def address_problem(url: str, path: str = "") -> str | None:
    """What is wrong with a web address that is to end in something like `path`; None = nothing."""
    try:
        found = urlsplit(url)
        plain = url.isascii() and not any(char.isspace() for char in url)
        right = plain and found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:  # a port that is no number, half a bracket
        right = False
    if not right:
        return f"expected http://HOST{path} or https://HOST{path}, got '{url}'"
    if "@" in found.netloc:
        return "the run folder would contain this password; remove it from the URL"
    return None


# YAML and command lines have lists only; a tuple field accepts one.
FloatPair = Annotated[tuple[float, float], Field(strict=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]
Numbers = Annotated[tuple[float, ...], Field(strict=False)]


LOOPBACK = ("127.0.0.1", "::1", "localhost")
COMMAND_LINE = "command line"


def iter_leaves(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its dotted key; lists are leaves, an empty section is one too."""
    if isinstance(data, Mapping) and (data or not prefix):
        for name, value in data.items():
            yield from iter_leaves(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, data


def origin_of(key: str, origins: Mapping[str, str]) -> str:
    """Who set `key`, or the part of it, or the whole that it is in; empty if it is the schema's default."""
    key = key.partition("[")[0]  # a list is one value
    if key in origins:
        return origins[key]
    inside = [who for other, who in origins.items() if other.startswith(f"{key}.")]
    if inside:
        return origins.get(f"{key}.name", inside[-1])
    parent, _, leaf = key.rpartition(".")
    return origin_of(parent, origins) if leaf and parent in origins else ""


def value_at(data: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key. Raises KeyError where there is none."""
    value: Any = data
    for name in key.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(key)
        value = value[name]
    return value


class CallbackConfig(ComponentConfig):
    """What sees the start, each finished step and the end of a run; a job has any number of them."""

    group: ClassVar[str] = "callbacks"

    def required_metrics(self) -> list[tuple[str, str]]:
        """(option, metric) of each metric that a job with it must measure."""
        return []
