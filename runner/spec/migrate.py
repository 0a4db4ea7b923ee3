"""Answers options of other frameworks, and old names of this project, with ours (migrate.yaml).

key=value ─▶ entry ─▶ its rule for the algorithm ─▶ for the value ─▶ words to type, or a sentence
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from runner.core.package import conf_dir, read_table
from runner.core.untrusted_text import NotArithmetic, evaluate
from runner.spec.suggest import NO_JOB, Job, Options

PATH = Path(__file__).with_name("migrate.yaml")
BRACES = re.compile(r"\{([^{}]*)\}")
NAME = re.compile(r"[A-Za-z_][\w.]*(?:\|[\w.]+)*")
WORD = re.compile(r"[a-z_]+(?:[.@][a-z_]+)*=\S+")
PLAIN = re.compile(r"[\w./:@%+,\[\]-]+")
OURS = "ours"  # the page of options of older versions
RENAMED = "renamed: "
LEAVE_OUT = "leave it out"
IT = "it"  # the value itself, in an expression
TEXT = "text:"  # an expression that is a name, not arithmetic
WHOLE = "int:"  # an expression that is rounded up
UNKNOWN = "…"
ROUNDS = 4  # algorithm, its options, a formula of them, a formula of that
MOST_OWNERS = 3  # that are named of those that have an option
Rule = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """One option of another framework: its spellings, a value as an example (YAML), and its rule."""

    keys: tuple[str, ...]
    example_text: str
    rule: Rule

    @property
    def example(self) -> Any:
        """The example's value; None where there is none."""
        return yaml.safe_load(self.example_text) if self.example_text else None


@dataclass(frozen=True, slots=True)
class Answer:
    """What to type instead, or why nothing fits; `algorithms`: those it is for, all where empty."""

    words: tuple[str, ...]
    formulas: tuple[str, ...]  # of values that other options decide which are not given
    sentence: str
    algorithms: str
    item: Any = None  # of a list, whose items have different answers

    def __str__(self) -> str:
        typed = "".join([f"type {' '.join(self.words)}" if self.words else "", *(f", {f}" for f in self.formulas)])
        said = f"{typed} ({self.sentence})" if typed and self.sentence else typed or self.sentence
        item = "" if self.item is None else f"{format_value(self.item)}: "
        return item + said + (f" (algorithm={self.algorithms.replace(' ', ', ')})" if self.algorithms else "")


class MigrationTable:
    """The parsed table; `entries` and `metrics` are looked up by key, `pages` has the order of the docs."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.pages: dict[str, tuple[str, tuple[Entry, ...]]] = {}
        self.entries: dict[str, Entry] = {}
        self.choices: dict[str, dict[str, str]] = content["choices"]
        self.absent: dict[str, str] = content["absent"]
        self.metrics: dict[str, str] = content["metrics"]
        self.flags = {name: say for names, say in content["flags"].items() for name in _spellings(names)}
        self.commands: dict[str, str] = content["commands"]
        self.verbs: dict[str, str] = {word: hint for words, hint in content["verbs"].items() for word in words.split()}
        for name, page in content["pages"].items():
            entries = tuple(_entry(*item) for item in (page.get("keys") or {}).items())
            self.pages[name] = (page["about"], entries)
            for entry in entries:
                for key in entry.keys:
                    assert key not in self.entries, f"{key} is in {PATH.name} twice"
                    self.entries[key] = entry

    def find(self, key: str) -> Entry | None:
        """The entry of a key: the key's own, or that of `part.*` for all keys below a part."""
        key = key.lower()
        parts = key.split(".")
        below = (".".join([*parts[:depth], "*"]) for depth in range(len(parts), 0, -1))
        return next((self.entries[name] for name in (key, *below) if name in self.entries), None)

    def successors(self, key: str, value: Any) -> dict[str, Any] | None:
        """Our options for an option of an older version, with their values; {} = none needed, None = unknown."""
        entry = self.older_entry(key)
        if entry is None:
            return None
        to, sentence = _parts(_matching_rules(entry.rule, value, NO_JOB)[0][1])
        if sentence.startswith(RENAMED):
            to = f"{sentence.removeprefix(RENAMED)}={{}}"
        elif sentence and not to and not sentence.startswith(LEAVE_OUT):  # no successor for this value
            return None
        found = dict[str, Any]()
        for word in _split(to):
            name, _, text = word.partition("=")
            as_it_is = text == "{}" or value is None
            filled = "" if as_it_is else self._fill_word(word, value, NO_JOB, [])
            found[name] = value if as_it_is else yaml.safe_load(filled.partition("=")[2])
        return found

    def older_entry(self, key: str) -> Entry | None:
        """The entry of an option that an older version had."""
        return next((entry for entry in self.pages[OURS][1] if key in entry.keys), None)

    def answers(self, entry: Entry, value: Any, job: Job) -> list[Answer]:
        """What to say to an entry typed with a value (None = no value), for each algorithm and item of a list."""
        found = []
        for algorithms, rule, item in _matching_rules(entry.rule, value, job):
            to, sentence = _parts(rule)
            formulas: list[str] = []
            words = tuple(self._fill_word(word, item, job, formulas) for word in _split(to))
            shown = item if isinstance(value, list) and len(value) > 1 and item != value else None
            found.append(Answer(words, tuple(formulas), sentence, algorithms, shown))
        return found

    def with_typed(self, job: Job) -> Job:
        """The job as it would be with the words that its typed keys become.

        What one key becomes may depend on another's: all are looked up again until that is settled. A word that cannot
        be computed makes its option unknown.
        """
        context = job
        for _ in range(ROUNDS):
            made = dict[str, str | None]()
            for key, value in job.typed.items():
                entry = self.find(key)
                picked = _matching_rules(entry.rule, value, context) if entry else []
                for word in _split(_parts(picked[0][1])[0]) if len(picked) == 1 else ():
                    formulas: list[str] = []
                    name, _, text = self._fill_word(word, value, context, formulas).strip("'").partition("=")
                    made[name] = None if formulas else text
            algorithm = made.get("algorithm") or job.chosen.get("algorithm", "")
            preset = _options_of_preset("algorithm", algorithm)
            data = {**{f"algorithm.{name}": value for name, value in preset.items()}, **job.data, **made}
            if "steps" not in made or data.get("epochs") is not None:  # not the number of steps that the user's job has
                data.pop("steps", None)
            context = Job({**job.chosen, "algorithm": preset.get("name", algorithm)}, data, job.typed)
        return context

    def _fill_word(self, word: str, value: Any, job: Job, formulas: list[str]) -> str:
        """A word of a rule with its values; of those that cannot be computed the formula goes to `formulas`."""

        def fill(match: re.Match[str]) -> str:
            inner = match[1]
            if not inner:
                return UNKNOWN if value is None else format_value(value)
            if inner.startswith(TEXT):
                return str(self._value(inner.removeprefix(TEXT), value, job) or UNKNOWN)
            computed = self._compute(inner, value, job)
            if computed:
                return computed
            shown = NAME.sub(lambda name: _name_shown(name[0], value), inner.removeprefix(WHOLE)).replace("*", "×")
            letter = "NMK"[len(formulas)]
            formulas.append(f"{letter} = {shown.strip()}")
            return letter

        return quote_word(BRACES.sub(fill, word))

    def _compute(self, expression: str, value: Any, job: Job) -> str:
        names = {name: self._value(name, value, job) for name in NAME.findall(expression.removeprefix(WHOLE))}
        try:
            numbers = {name: Fraction(str(number)) for name, number in names.items()}
            text = NAME.sub(lambda name: f"({numbers[name[0]]})", expression.removeprefix(WHOLE))
            result = evaluate(text)[0]
        except (NotArithmetic, ValueError):
            return ""
        whole = result.denominator == 1 or expression.startswith(WHOLE)
        return str(ceil(result)) if whole else f"{float(result):g}"

    def _value(self, name: str, value: Any, job: Job) -> Any:
        """The value of a name: what was typed, what that makes of our options, what the job has, its default."""
        name, _, default = name.partition("|")
        if name == IT:
            return value
        found = job.typed.get(name, job.data.get(name))
        if found is None and default:
            return default if not NAME.fullmatch(default) else self._value(default, value, job) or default
        return found


@cache
def table() -> MigrationTable:
    """The table of this package, read when it is first needed."""
    return MigrationTable(read_table(__file__, PATH.name))


def answer(key: str, value: Any, job: Job, options: Options) -> str:
    """What to type instead of another framework's key, or why nothing; empty for an unknown key."""
    entry = table().find(key)
    found = table().answers(entry, value, job) if entry else []
    return "; ".join(f"{_without_choices(one, job, options)}{_owners(one, job, options)}" for one in found)


def _without_choices(found: Answer, job: Job, options: Options) -> Answer:
    """The answer without the choices of components whose options the job has anyway."""
    chosen, settings = _choices_and_settings(found)
    groups = {group for group, _ in settings} - {"algorithm"}  # whose typed one may be that of this very answer
    needless = {f"{group}={member}" for group, member in chosen.items() if group in groups}
    for group, leaf in settings:
        if leaf not in options.get(group, {}).get(job.chosen.get(group, ""), ()):
            needless.discard(f"{group}={chosen.get(group)}")
    return replace(found, words=tuple(word for word in found.words if word not in needless))


def _owners(found: Answer, job: Job, options: Options) -> str:
    """Which components have an option of the answer that the job's do not have."""
    chosen, settings = _choices_and_settings(found)
    if found.algorithms:
        return ""
    for group, leaf in settings:
        members = [member for member, names in options.get(group, {}).items() if leaf in names]
        other = set(options.get(group, {})) - set(members)
        if group not in chosen and job.chosen.get(group) in other:
            shown = members if len(members) <= MOST_OWNERS else [*members[:MOST_OWNERS], "…"]
            return f" (an option of {group}={', '.join(shown)})"
    return ""


def _choices_and_settings(found: Answer) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Of an answer's words: group → member, and (group, option)."""
    keys = [(word.strip("'").partition("=")[0], word.partition("=")[2]) for word in found.words]
    chosen = {key: value for key, value in keys if "." not in key}
    return chosen, [(key.partition(".")[0], key.partition(".")[2]) for key, _ in keys if "." in key]


def renamed_metric(name: str) -> str | None:
    """What a metric of another framework, or of an older version, is called here."""
    return table().metrics.get(name)


def format_value(value: Any) -> str:
    """A value as it is typed on the command line: true, null, [a,b]."""
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_value, value))}]"
    return str(value)


def quote_word(word: str) -> str:
    """A word in quotes where a shell, or Hydra's grammar, would read it otherwise."""
    key, equals, value = word.partition("=")
    plain = PLAIN.fullmatch(value) or value == UNKNOWN
    if value.startswith("{"):  # a section, not a text
        return f"'{word}'"
    if value.startswith("[") and not plain:
        items = (item if PLAIN.fullmatch(item) else f'"{item}"' for item in value[1:-1].split(","))
        return f"'{key}=[{','.join(items)}]'"
    return word if plain or not equals else f"'{key}=\"{value}\"'"


@cache
def _options_of_preset(group: str, name: str) -> Mapping[str, Any]:
    """The shipped options of a choice, with those of the component that it is a preset of; {} if unknown."""
    file = conf_dir() / group / f"{name}.yaml"
    options = yaml.safe_load(file.read_text(encoding="utf-8")) if name and file.is_file() else {}
    bases = [base for base in options.pop("defaults", ()) if base != "_self_"]
    return {**(_options_of_preset(group, bases[0]) if bases else {}), **options}


def _entry(spelled: str, rule: Rule) -> Entry:
    names, _, example = spelled.partition("=")
    return Entry(tuple(names.lower().split()), example, rule)


def _spellings(names: str) -> list[str]:
    """`--run -r` are two flags; `--cfg hydra` is a flag with its value."""
    return names.split() if all(name.startswith("-") for name in names.split()) else [names]


def _matching_rules(rule: Rule, value: Any, job: Job) -> list[tuple[str, Rule, Any]]:
    """The rules that hold in a job for a value or items of a list: algorithms, rule, value or items."""
    if isinstance(rule, str):
        return [("", rule, value)]
    if "by" in rule:
        own = [inner for names, inner in rule["by"].items() if job.chosen.get("algorithm", "") in names.split()]
        if own:
            return _matching_rules(own[0], value, job)
        found = [(names, _matching_rules(inner, value, job)) for names, inner in rule["by"].items()]
        return [(names, one, item) for names, matching in found for _, one, item in matching]
    for settings, inner in rule.get("with", {}).items():
        if any(_has_setting(job, setting) for setting in settings.split()):
            return _matching_rules(inner, value, job)
    values = {name: inner for names, inner in rule.get("values", {}).items() for name in format_value(names).split()}
    items = value if isinstance(value, list) else [value]
    rules = [(item, values.get(format_value(item).lower()) if item is not None else None) for item in items]
    known = [one for item, inner in rules if inner is not None for one in _matching_rules(inner, item, job)]
    others = [item for item, inner in rules if inner is None]
    if known and not others:
        return known
    if values and not rule.keys() & {"to", "say"}:
        rule = {"say": "; ".join(f"{name} → {inner}" for name, inner in values.items())}
    return [*known, ("", rule, others if known else value)]


def _has_setting(job: Job, setting: str) -> bool:
    """Whether a job has key=value, or any value of a key, among the keys that were typed and our options."""
    key, equals, wanted = setting.partition("=")
    found = job.typed.get(key, job.data.get(key))
    return found is not None and (not equals or format_value(found).lower() == wanted)


def _parts(rule: Rule) -> tuple[str, str]:
    """What a rule has to type, and its sentence."""
    if not isinstance(rule, str):
        return rule.get("to", ""), rule.get("say", "")
    words = _split(rule)
    return (rule, "") if all(WORD.fullmatch(BRACES.sub("x", word)) for word in words) else ("", rule)


def _split(text: str) -> list[str]:
    """Words at blanks, but not at those within braces."""
    return re.findall(r"(?:\{[^{}]*\}|\S)+", text)


def _name_shown(name: str, value: Any) -> str:
    name = name.partition("|")[0]
    return (UNKNOWN if value is None else format_value(value)) if name == IT else name
