"""Command lines of other frameworks: each of their words is answered with what is typed here."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from runner.cli.args import UsageError, is_override
from runner.cli.config_sources import GROUP, is_file_name
from runner.cli.job_builder import compose_job
from runner.core.errors import SpecError
from runner.spec import migrate, suggest
from runner.spec.registry import default_registry
from runner.spec.schema import OptionIndex

UNQUOTED = re.compile(r"[\w./:@%+-]+")
ADVICE = re.compile(r"not an option of \S+(?: job)?; ")


def refuse(args: Namespace) -> NoReturn:
    """Raise UsageError with a line for each word of the command. What they mean depends on the job, so that is composed
    with them: its complaints are the answers."""
    recipes = [f"+{GROUP}={word}" for word in args.words if is_file_name(word)]
    typed = [*_of_command(args.command), *recipes]
    instead = f"no verb named '{args.command}'; type run {' '.join(typed) or '…'}" if args.command else ""
    if not args.foreign:
        raise UsageError(instead)
    settings = {key: f"{key}={_value(values)}" for key, values in args.foreign.items()}
    known = [word for word in (*typed, *args.words) if is_override(word)]
    answers = _answers([*(word for word in known if not _is_lost(word)), *settings.values()])
    lines = [f"--{key}: {answers.get(key) or _alone(key, word)}" for key, word in settings.items()]
    head = "options of a job are written without dashes, as key=value"
    raise UsageError("\n  ".join(filter(None, [head, instead, *lines])))


def _is_lost(word: str) -> bool:
    """Whether a word names a recipe's file that is not there."""
    name = word.partition("=")[2]
    return is_file_name(name) and not Path(name).expanduser().is_file()


def _of_command(command: str) -> list[str]:
    """The words that a command means. Raises UsageError for one that is no training."""
    said = migrate.table().commands.get(command, "")
    if said and "=" not in said.split()[0]:
        raise UsageError(f"no verb named '{command}'; {said}")
    return said.split()


def _answers(words: Sequence[str]) -> Mapping[str, str]:
    """What is wrong with the job of these words, by key: the advice alone, where there is one."""
    try:
        compose_job(words)
    except SpecError as error:
        return {problem.key: ADVICE.sub("", problem.message) for problem in error.problems}
    return {}


def _alone(key: str, word: str) -> str:
    """The answer where the job could not be composed, or has the option."""
    value = word.partition("=")[2]
    return migrate.answer(key, value, suggest.NO_JOB, OptionIndex(default_registry()).options) or f"type {word}"


def _value(values: Sequence[str]) -> str:
    """The values of a flag in the grammar of the command line."""
    quoted = [value if UNQUOTED.fullmatch(value) else _in_quotes(value) for value in values]
    return quoted[0] if len(quoted) == 1 else f"[{','.join(quoted)}]" if quoted else "true"


def _in_quotes(value: str) -> str:
    if value[:1] in "[{":
        return value
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
