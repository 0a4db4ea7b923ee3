"""Tab completion: Hydra's own, with our groups, keys and recipes, with our verbs in front.

eval "$(run -sc install=bash)"        and the shell then asks: run -sc query=bash
"""

from __future__ import annotations

import glob
import io
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.completion_plugin import CompletionPlugin, DefaultCompletionPlugin
from omegaconf.errors import OmegaConfBaseException

from runner.algorithm.loss_registry import plug_ins
from runner.cli.args import UsageError, all_verbs, flags_of, is_override
from runner.cli.conf import BESIDE
from runner.cli.config_sources import GROUP, SUFFIXES, hydra_session
from runner.cli.hydra_compose import group_options
from runner.cli.verbs import ACTIONS, TOPICS, VERBS
from runner.spec.job import JobSpec
from runner.spec.registry import default_registry
from runner.spec.schema import CALLBACKS, EVALUATION, MODEL, groups_of, model_schema, second_model_keys, sections
from runner.tracker.text import print_text

COMMANDS = ("install", "uninstall", "query")
# Verbs that name a run, or a sweep
NAMING = ("resume", "status", "infer", "chat", "serve", "eval", "export", "report", "diff", "sweep")


def answer(args: Namespace) -> int:
    """`run -sc install=SHELL | uninstall=SHELL | query=SHELL`; a query reads the line from COMP_LINE."""
    command, _, shell = (args.words or [""])[0].partition("=")
    plugins = {cls.provides(): cls for cls in _shells()}
    if command not in COMMANDS or shell not in plugins:
        raise UsageError(f"type: run -sc install={'|'.join(sorted(plugins))}")
    with hydra_session(default_registry(), args.config_dir) as loader:
        plugin = plugins[shell](loader)
        if command != "query":
            getattr(plugin, command)()
            return 0
        line = os.environ.get("COMP_LINE", "run ")
        word, sources = line.split(" ")[-1], loader.get_sources()
        found = _values(word) or query(plugin, line) + _recipes(word, group_options(sources, GROUP))
        found += _second_model_options(word, group_options(sources, MODEL)) + _plugin_loss_options(word)
    print_text(("\n" if shell == "fish" else " ").join(sorted(set(found))))
    return 0


def _shells() -> list[type[CompletionPlugin]]:
    found = Plugins.instance().discover(CompletionPlugin)
    return [p for p in found if issubclass(p, CompletionPlugin) and p is not DefaultCompletionPlugin]


def query(plugin: CompletionPlugin, line: str) -> list[str]:
    """Completions of the last word of `line`: verbs at the front, then groups, keys and values from Hydra."""
    command, *words = line.split(" ")
    first, *others = words or [""]
    if first == "list" and others:
        groups = (*groups_of(default_registry()), CALLBACKS, EVALUATION, GROUP)
        return [name for name in groups if name.startswith(others[-1])]
    if first == "help" and others:
        return [topic for topic in (*TOPICS, *all_verbs()) if topic.startswith(others[-1])]
    if first == "sweep" and len(others) == 1:
        return [action for action in ACTIONS if action.startswith(others[0])]
    named = others[1:] if first == "sweep" else others
    if first in NAMING and (len(named) == 1 or first == "diff") and "latest".startswith((named or [""])[-1]):
        return ["latest"]
    if (others or [first])[-1].startswith("--"):
        verb = first if first in VERBS else "run"
        return [flag for flag in flags_of(verb) if flag.startswith((others or [first])[-1])]
    verbs = [verb for verb in all_verbs() if not others and verb.startswith(first)]
    asked = words if first not in VERBS else [w for w in others[:-1] if is_override(w)] + others[-1:]
    before = os.environ.get("COMP_LINE")
    os.environ["COMP_LINE"] = " ".join([command, *asked]) if asked else f"{command} "
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            plugin.query("job")
    except (HydraException, OmegaConfBaseException):
        return verbs  # a line that does not compose has no keys to offer
    finally:
        if before is None:
            del os.environ["COMP_LINE"]
        else:
            os.environ["COMP_LINE"] = before
    found = [word for word in printed.getvalue().split() if not word.lstrip("+").startswith("hydra")]
    # Hydra leaves it open whether a group with folders continues `=` or `/`; ours always continues `=`.
    return verbs + [f"{word}=" if word.lstrip("+") == GROUP else word for word in found]


def _values(word: str) -> list[str]:
    """`key=value` for every value of an option that takes one of a few."""
    key, equals, start = word.partition("=")
    section, _, leaf = key.lstrip("+").rpartition(".")
    if section in BESIDE and not equals:
        return [f"{section}.{name}=" for name in BESIDE[section].model_fields if name.startswith(leaf)]
    parts = sections() | BESIDE
    classes = [*default_registry().classes(section).values(), *filter(None, [parts.get(section)])]
    schemas = [model_schema(cls).get(leaf, {}) for cls in (classes if section else [JobSpec])] if equals else []
    few = dict.fromkeys(value for schema in schemas for value in _choice_values(schema) if leaf != "name")
    return [f"{key}={value}" for value in few if value.startswith(start)]


def _plugin_loss_options(word: str) -> list[str]:
    """`algorithm.option=` for the options of plug-ins' losses, which no file of conf/ has."""
    names = {option for found in plug_ins().values() for one in found.values() for option in one.options}
    return [key for name in names if word.startswith("algorithm.") and (key := f"algorithm.{name}=").startswith(word)]


def _choice_values(schema: Mapping[str, Any]) -> list[str]:
    """The values of a choice or a switch, as they are typed; none where any number or text will do."""
    kinds = schema.get("anyOf", [schema])
    if not any("enum" in kind or kind.get("type") == "boolean" for kind in kinds):
        return []
    switch = {"boolean": ["true", "false"], "null": ["null"]}
    return [value for kind in kinds for value in kind.get("enum", switch.get(str(kind.get("type")), []))]


def _recipes(word: str, names: Sequence[str]) -> list[str]:
    """`recipe=x` and `+recipe=x`, those in folders included, and files."""
    key, equals, start = word.partition("=")
    if not equals or key.lstrip("+") != GROUP:
        return []
    files = [f"{path}/" if os.path.isdir(path) else path for path in glob.glob(f"{glob.escape(start)}*") if start]
    known = [name for name in names if name.startswith(start)]
    return [f"{key}={name}" for name in [*known, *(file for file in files if file.endswith(("/", *SUFFIXES)))]]


def _second_model_options(word: str, models: Sequence[str]) -> list[str]:
    """`model@OPTION=` for each option that takes a second model, and the models for it."""
    key, equals, start = word.partition("=")
    known = [f"{MODEL}@{package}" for package in second_model_keys(default_registry())]
    if equals:
        return [f"{key}={name}" for name in models if key.lstrip("+") in known and name.startswith(start)]
    plus = "+" if word.startswith("+") else ""
    return [f"{plus}{name}=" for name in known if "@" in word and f"{plus}{name}".startswith(word)]
