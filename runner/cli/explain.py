"""`run explain KEY`: meaning, unit, type, range, default, current value and who set it.

Also `run explain loss` and `run explain chat`.
"""

from __future__ import annotations

import os
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from runner.algorithm.loss_registry import choices, functions
from runner.cli.args import UsageError, component_hint, is_override
from runner.cli.conf import BESIDE, scalar
from runner.cli.config_sources import GROUP, hydra_session, plain_default
from runner.cli.hydra_compose import group_options
from runner.cli.job_builder import JobDraft, decode_draft, draft
from runner.core.auto_choices import Decisions
from runner.core.errors import SpecError
from runner.core.media import MEDIA_ID
from runner.interfaces import LabeledCompletion, PreferencePair, Prompt, TokenizedExample
from runner.spec import suggest
from runner.spec.base import ComponentConfig, origin_of, value_at
from runner.spec.decode import decode_unchecked
from runner.spec.job import CallbacksConfig, JobSpec
from runner.spec.registry import Registry, default_registry, resolve
from runner.spec.schema import CALLBACKS, OptionIndex, groups_of, model_schema, sections
from runner.spec.suggest import TYPES, allowed_values
from runner.tracker.text import escape_for_terminal, print_text

# Units by the end of a key's name; a field may also say `json_schema_extra={"unit": …}`.
UNITS = {
    "_s": "seconds",
    "tokens": "tokens",
    "max_length": "tokens",
    "max_positions": "tokens",
    "steps": "steps",
    "epochs": "epochs over the items",
    "every": "steps",
}


def show(args: Namespace) -> int:
    """Explain the key, or list the options of the group, that the first word names."""
    keys = [word.rstrip("=.") for word in args.words if not is_override(word) or word.endswith("=")]
    registry = default_registry()
    keys = keys or _groups_in_words(args.words, registry)
    if keys in ([GROUP], ["recipes"]):
        raise UsageError(f"all recipes: run list {GROUP}; one of them in full: run --cfg job +{GROUP}=NAME")
    if len(keys) != 1:
        raise UsageError("run explain: expected one key, e.g. run explain optimizer.lr")
    now = draft([w for w in args.words if is_override(w) and not w.endswith("=")], args.config_dir)
    key = keys[0]
    if key == "loss":
        return _loss(now, registry)
    if key == "chat" and any(is_override(word) for word in args.words):
        print_text("\n".join(explain_chat(decode_draft(now, registry).spec)))
        return 0
    if key in (*groups_of(registry), *_parts(), CALLBACKS):
        with hydra_session(registry, args.config_dir) as loader:
            names = group_options(loader.get_sources(), key)
        _section(key, CallbacksConfig if key == CALLBACKS else _owner(key, now, registry), now, names)
    elif key.startswith(f"{CALLBACKS}.") and (owner := _owner(key, now, registry)):
        _section(key, owner, now, ())
    else:
        _key(key, now, registry)
    if key == "chat":
        print("\na row, token by token: run explain chat +recipe=sft_demo")
    _notes(now, registry)
    return 0


def _notes(now: JobDraft, registry: Registry) -> None:
    """What was chosen for the user, and what is wrong with the job that is explained."""
    for note in now.notes:
        print_text(f"\nnote: {note}")
    try:
        decode_draft(now, registry)
    except SpecError as error:
        print_text(f"\nnote: {error}")


def _groups_in_words(words: Sequence[str], registry: Registry) -> list[str]:
    """The groups that words choose, as in `run explain data=file`. Raises UsageError for a recipe."""
    names = [word.lstrip("+").partition("=")[0] for word in words]
    if GROUP in names:
        raise UsageError(f"to print a {GROUP}, type: run --cfg job {' '.join(words)}; all of them: run list {GROUP}")
    return [name for name in names if name in groups_of(registry)]


def _loss(now: JobDraft, registry: Registry) -> int:
    """Print the algorithm's loss with its current constants, also for a job that is not complete."""
    spec = None if "algorithm" in now.unsure else decode_unchecked(now.data, now.origins, registry)
    spec = spec or decode_draft(now, registry).spec  # which says what is wrong
    if spec.algorithm.explain_fn is None:
        raise UsageError(f"algorithm={spec.algorithm.name} has no description of its loss (no explain_fn)")
    print_text("\n".join(resolve(spec.algorithm.explain_fn)(spec.algorithm, spec)))
    _notes(now, registry)
    return 0


def _parts() -> dict[str, type[BaseModel]]:
    """The sections that are no group, those that a recipe alone may have included."""
    return sections() | BESIDE


def _owner(section: str, now: JobDraft, registry: Registry) -> type[BaseModel] | None:
    """The config class that a section has now."""
    if not section:
        return JobSpec
    if section in _parts():
        return _parts()[section]
    if section.startswith(f"{CALLBACKS}."):
        name = section.removeprefix(f"{CALLBACKS}.")
        chosen = now.data.get(CALLBACKS, {}).get(name, {"name": name})
        section = CALLBACKS
    else:
        chosen = now.data.get(section)
    return registry.classes(section).get(str(chosen.get("name"))) if isinstance(chosen, Mapping) else None


def _section(section: str, owner: type[BaseModel] | None, now: JobDraft, names: Sequence[str]) -> None:
    is_component = issubclass(owner or ComponentConfig, ComponentConfig)  # names of a section are sets to add to it
    if owner is not None:
        chosen = f"={now.data[section]['name']}" if names and is_component and section != CALLBACKS else ""
        print_text(f"{section}{chosen}: {' '.join((owner.__doc__ or '').split())}")
    if names:
        word = f"{section}=NAME" if is_component or section == CALLBACKS else f"+{section}=[NAME]"
        print_text(f"  choose with {word}: {', '.join(names)}")
    for name, info in owner.model_fields.items() if owner else ():
        if name != "name" or not issubclass(owner or JobSpec, ComponentConfig):
            value = _now(f"{section}.{name}", info, now)
            print_text(f"  {section}.{name}={value}\n      {info.description}")


def _key(key: str, now: JobDraft, registry: Registry) -> None:
    section, _, leaf = key.rpartition(".")
    known = ("", *groups_of(registry), *_parts())
    owner = _owner(section, now, registry) if section in known or section.startswith(f"{CALLBACKS}.") else None
    if owner is None or leaf not in owner.model_fields:
        members = {n: c for n, c in registry.classes(section).items() if leaf in c.model_fields}
        if not members:
            hint = _hint(section, leaf, registry) or component_hint(key) or "for all options: run help options"
            raise UsageError(f"no option named '{key}'; {hint}")
        owner = next(iter(members.values()))
        owners = ", ".join(f"{section}={name}" for name in members)
        standing = [("now", f"not used: an option of {owners}")]
    else:
        value = _now(key, owner.model_fields[leaf], now)
        standing = [("now", value), ("set by", origin_of(key, now.origins) or "the schema's default")]
        group, _, name = section.partition(".")
        if group == CALLBACKS and name not in now.data.get(CALLBACKS, {}):
            standing = [("now", f"not used: choose it with {CALLBACKS}={name}")]
    for label, text in [*_facts(key, leaf, owner), *standing]:
        print_text(f"{label.ljust(9)}{text}")
    for function in functions(choices(owner)[leaf]).values() if leaf in choices(owner) else ():
        print_text(f"  {leaf}={function.name}   {function.formula}   ({function.paper})")


def _hint(section: str, leaf: str, registry: Registry) -> str:
    """What the unknown key was probably meant to be, in full."""
    known = OptionIndex(registry).options
    own = {name for names in known.get(section, {}).values() for name in names} if section else ()
    if close := suggest.nearest_word(leaf, own):
        return f"did you mean '{section}.{close}'?"
    return suggest.suggest_key(section, "", leaf, known)


def _facts(key: str, leaf: str, owner: type[BaseModel]) -> list[tuple[str, str]]:
    info, schema = owner.model_fields[leaf], model_schema(owner)[leaf]
    default = "none: it must be set" if info.is_required() else _default(info)
    facts = [("key", key), ("meaning", info.description or ""), ("unit", _unit(leaf, info, schema))]
    facts += [("type", _type(schema)), ("range", allowed_values(schema)), ("default", default)]
    return [(label, text) for label, text in facts if text]


def _unit(leaf: str, info: FieldInfo, schema: Mapping[str, Any]) -> str:
    extra = info.json_schema_extra
    if isinstance(extra, Mapping) and "unit" in extra:
        return str(extra["unit"])
    numeric = {s.get("type") for s in schema.get("anyOf", [schema])} & {"integer", "number"}
    return next((unit for end, unit in UNITS.items() if leaf.endswith(end)), "") if numeric else ""


def _type(schema: Mapping[str, Any]) -> str:
    kinds = [str(s.get("type", "choice")) for s in schema.get("anyOf", [schema])]
    words = ["list" if kind == "array" else TYPES.get(kind, (kind,))[0] for kind in kinds]
    return " or ".join(word.removeprefix("a ").removeprefix("an ") for word in words)


def _default(info: FieldInfo) -> str:
    return scalar(plain_default(info.get_default(call_default_factory=True)))


def _now(key: str, info: FieldInfo, now: JobDraft) -> str:
    try:
        return scalar(value_at(now.data, key))
    except KeyError:
        return "???" if info.is_required() else _default(info)


WIDTH = 110
GREEN, PLAIN = "\033[32m", "\033[0m"
Part = tuple[str, Sequence[int], Sequence[float]]  # label, ids, weights: above 0 where a token is trained on


def explain_chat(spec: JobSpec) -> Iterator[str]:
    """The lines that show the first row. Raises what reading the data raises."""
    from runner.build.components import build_tokenizer
    from runner.build.data import build_data

    decide = Decisions(spec.strict)
    tokenizer = build_tokenizer(spec, decide)
    data = build_data(spec, tokenizer, decide)
    parts = row_parts(data.take(0, 1)[0])
    tokens, trained = sum(len(ids) for _, ids, _ in parts), sum(w > 0 for *_, weights in parts for w in weights)
    where = f"data={spec.data.name}, algorithm={spec.algorithm.name}"
    yield f"first row in the order of training ({where}): {tokens} tokens, {trained} trained on"
    yield from (str(entry) for entry in decide.entries)
    colored = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for label, ids, weights in parts:
        yield ""
        if label:
            yield f"{label}:"
        yield from _token_lines(tokenizer, ids, weights, colored)


def row_parts(item: Any) -> list[Part]:
    """The stretches of an item that are shown under a heading of their own."""
    if isinstance(item, TokenizedExample):
        edges = [0, *item.branches, len(item.ids)]
        labels = [""] if not item.branches else ["shared beginning", *(f"turn {n + 1}" for n in range(len(edges) - 2))]
        spans = zip(labels, pairwise(edges), strict=True)
        return [(label, item.ids[a:b], item.weights[a:b]) for label, (a, b) in spans]
    if isinstance(item, PreferencePair):
        answers = [("chosen", item.chosen), ("rejected", item.rejected)]
    elif isinstance(item, LabeledCompletion):
        answers = [("good" if item.good else "bad", item.completion)]
    else:
        assert isinstance(item, Prompt)
        return [("prompt of the policy", item.ids, [0.0] * len(item.ids))]
    parts = [("prompt", item.prompt, 0.0), *((label, ids, 1.0) for label, ids in answers)]
    return [(label, ids, [weight] * len(ids)) for label, ids, weight in parts]


def _token_text(tokenizer: Any, token: int) -> str:
    return "<image>" if token >= MEDIA_ID else escape_for_terminal(tokenizer.decode([token])) or f"<{token}>"


def _token_lines(tokenizer: Any, ids: Sequence[int], weights: Sequence[float], colored: bool) -> Iterator[str]:
    """Tokens with a dot between them; each stretch of context or of trained tokens begins a line."""
    for trained, stretch in groupby(zip(ids, weights, strict=True), key=lambda pair: pair[1] > 0):
        texts = [_token_text(tokenizer, token) for token, _ in stretch]
        shown = " · ".join(text.replace(" ", "␣") for text in texts)
        on, off = (GREEN, PLAIN) if colored and trained else ("", "")
        options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
        for at, line in enumerate(textwrap.wrap(shown, WIDTH - 9, **options)):
            label = ("trained" if trained else "context") if at == 0 else ""
            yield f"{label:<9}{on}{line}{off}"
