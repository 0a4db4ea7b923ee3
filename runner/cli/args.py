"""The words of a command line: verb, the options with dashes of that verb, and everything else.

run infer latest --seed 3 device=cpu "a prompt" -- "steps=4 is a prompt, too"
    verb  words…  option   words…                  literal…
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NoReturn

from runner.cli import arg_types
from runner.cli.verbs import EXAMPLES, RESOURCE_NAMES, VERBS, VERBS_GROUP, options_of
from runner.core.errors import RunnerError
from runner.core.package import LEFT_OUT, conf_dir, load_plugins, recipes_dir

TYPES: dict[str, Any] = {"int": int, "float": float, **vars(arg_types)}  # by their names in verbs.yaml
FLAGS = {"--help", "-h", "--version", "--debug", "--multirun", "-m", "--shell-completion", "-sc"}


class UsageError(RunnerError):
    """The command line is not one of the forms that `run --help` lists."""

    exit_code = 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        hint = flag_hint(message, self) if "unrecognized" in message else _about_value(message)
        hint = hint or self._missing_value(message)
        raise UsageError(f"{self.prog}: {message}{hint}\n  see: run --help")

    def _missing_value(self, message: str) -> str:
        """What the option takes that stands without a value."""
        flag = message.removeprefix("argument ").partition(": expected ")[0]
        meant = [a for a in self._actions if "/".join(a.option_strings) == flag and message.endswith("argument")]
        typed = [f"{a.option_strings[0]} {a.metavar or a.dest.upper()} ({a.help})" for a in meant]
        return "".join(f"; type {one}" for one in typed)


def _about_value(message: str) -> str:
    """What does the same as a value that a flag has in Hydra."""
    from runner.spec.migrate import table

    wrong = re.match(r"argument (--\w+)\S*: invalid choice: '([^']*)'", message)
    said = table().flags.get(f"{wrong[1]} {wrong[2]}") if wrong else None
    return f"; {said}" if said else ""


def near_flag(word: str, parser: argparse.ArgumentParser) -> str | None:
    """The option with two dashes that an unknown word probably means."""
    from runner.spec.suggest import nearest_word

    known = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    return nearest_word(word.replace("_", "-").partition("=")[0], known, cutoff=0.8)


def flag_hint(message: str, parser: argparse.ArgumentParser) -> str:
    """What to type instead of the first unknown word with dashes that argparse names."""
    near = next(filter(None, (near_flag(word, parser) for word in message.split())), None)
    return f"; did you mean {near}?" if near else "; options of a job are written without dashes: key=value"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """`verb`, `words`, `literal` (the words after `--`) and the options of that verb. Raises UsageError."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    verb, rest = split_verb(argv[:end])
    parser = parser_of(verb)
    if (literal := list(argv[end + 1 :])) and verb not in ("infer", "serve", "eval"):
        verbs = "run infer, run serve and run eval"
        parser.error(f"'{literal[0]}' is not supported here: only {verbs} take words after --")
    return parser.parse_intermixed_args(rest, argparse.Namespace(verb=verb, literal=literal, config_dir=None))


def parser_of(verb: str) -> argparse.ArgumentParser:
    """What a verb takes."""
    parser = _Parser(prog=f"run {verb}" if verb != "run" else "run", add_help=False, allow_abbrev=False)
    parser.register("action", "boolean", argparse.BooleanOptionalAction)
    for option in options_of(verb):
        settings = {"help": argparse.SUPPRESS} | {name: value for name, value in option.items() if name != "flags"}
        if "type" in option:
            settings["type"] = TYPES[option["type"]]
        parser.add_argument(*option["flags"].split(), **settings)
    parser.add_argument("words", nargs="*", help=RESOURCE_NAMES.get(verb, argparse.SUPPRESS))
    return parser


def flags_of(verb: str) -> list[str]:
    """The options with two dashes of a verb."""
    shown = (a for a in parser_of(verb)._actions if a.help != argparse.SUPPRESS)
    return [flag for action in shown for flag in action.option_strings if flag.startswith("--")]


def split_verb(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The verb (`run` where none is given) and the other words. Raises UsageError for an unknown verb."""
    words = list(argv)
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        if word.startswith("-") or (before.startswith("-") and before not in FLAGS):
            continue  # an option, or the value of one; an unknown option is the parser's to judge
        if is_override(word):
            break
        if word not in VERBS:
            raise UsageError(_unknown_verb(word))
        return word, words[:index] + words[index + 1 :]
    return "run", words


Verb = Callable[[list[str]], int]


@cache
def plugin_verbs() -> dict[str, Verb]:
    """The verbs of installed packages, by name."""

    def load(point: EntryPoint) -> tuple[str, Verb]:
        if point.name in VERBS:
            raise RunnerError(f"the verb '{point.name}' exists already")
        function = point.load()
        if not callable(function):
            raise RunnerError("it is not a function")
        return point.name, function

    return dict(load_plugins(VERBS_GROUP, load))


def plugin_verb(words: Sequence[str]) -> Verb | None:
    """The verb of a plug-in that a command line begins with."""
    first = words[0] if words else "-"
    return None if first in VERBS or first.startswith("-") or is_override(first) else plugin_verbs().get(first)


def all_verbs() -> dict[str, str]:
    """Every verb with its line of help; that of a plug-in is the first of its function's docstring."""
    about = {name: (verb.__doc__ or "").strip().partition("\n")[0] for name, verb in plugin_verbs().items()}
    return VERBS | about


def is_override(word: str) -> bool:
    """Whether a word sets or chooses something."""
    return "=" in word or word.startswith(("+", "~"))


def _unknown_verb(word: str) -> str:
    if as_recipe := _recipe_hint(word):
        return f"no verb named '{word}'; {as_recipe}"
    from runner.spec.job import JobSpec

    if "." in word or (word in JobSpec.model_fields and not (conf_dir() / word).is_dir()):
        return f"no verb named '{word}'; to set the option: run {word}=VALUE; to read about it: run explain {word}"
    if (why := LEFT_OUT.get((VERBS_GROUP, word))) is not None:
        return f"no verb named '{word}'; {why}"
    verbs = all_verbs()
    if instead := verb_hint(word, {verb: EXAMPLES.get(verb, f"run {verb}") for verb in verbs}):
        return f"no verb named '{word}'; {instead}\n  see: run --help"
    width = max(map(len, verbs))
    return "\n".join([f"no verb named '{word}'", *(f"  {v.ljust(width)}  {about}" for v, about in verbs.items())])


def verb_hint(word: str, verbs: Mapping[str, str]) -> str:
    """What to type instead of `word`; empty where nothing is near. verbs: name → example."""
    from runner.spec.migrate import table
    from runner.spec.suggest import nearest_word

    of_other_tools = table().verbs
    if (known := of_other_tools.get(word.lower().replace("_", "-"))) is not None:
        return known
    if (conf_dir() / word).is_dir():
        more = "\n  a row token by token, and what is trained on: run explain chat data=file data.path=FILE"
        named = f"'{word}' is a group; its options: run list {word}; to choose one: run {word}=NAME"
        return named + (more if word in ("data", "chat") else "")
    if of_component := component_hint(word):
        return of_component
    meant = nearest_word(word, [*verbs, *of_other_tools])
    if meant is None:
        return ""
    return f"did you mean '{meant}'? {'e.g. ' + verbs[meant] if meant in verbs else of_other_tools[meant]}"


def component_hint(word: str) -> str:
    """How to choose a component by its name; empty where it is none."""
    groups = sorted(path.parent.name for path in conf_dir().glob("*/*.yaml") if path.stem == word.lower())
    demo = f"; a demo: run +recipe={word}_demo" if (recipes_dir() / f"{word}_demo.yaml").is_file() else ""
    return f"to choose it: run {' or '.join(f'{g}={word.lower()}' for g in groups)} …{demo}" if groups else ""


def _recipe_hint(word: str) -> str:
    """How to run a recipe that was typed as a verb; empty where it is none."""
    by_name = any((place / f"{word}.yaml").is_file() for place in (Path("recipes"), recipes_dir()))
    if by_name or Path(word).suffix in (".yaml", ".yml"):
        return f"to run a recipe (a name, or the path of a file): run +recipe={word}"
    return ""
