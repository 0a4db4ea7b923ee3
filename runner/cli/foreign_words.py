"""Recognizes a command line of another framework; `runner.cli.foreign` answers it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from runner.cli.args import VERBS, UsageError, is_override, parser_of, plugin_verbs
from runner.spec.migrate import table

OF_A_JOB = ("run", "plan")  # verbs whose words are a job
FLAG = re.compile(r"--?[A-Za-z][\w.-]*(?:=.*)?", re.DOTALL)


def foreign_command(argv: Sequence[str]) -> argparse.Namespace | None:
    """A command line of another framework: its first words as `command`, what it sets with dashes as `foreign`
    (key=value), the others as `words`; None for one of ours. Raises UsageError for a flag of Hydra's."""
    argv = list(argv[: list(argv).index("--")] if "--" in argv else argv)
    first = argv[0] if argv else ""
    if (first in VERBS and first not in OF_A_JOB) or {"--help", "-h", "--shell-completion"} & set(argv):
        return None
    parser = parser_of(first if first in VERBS else "run")
    command = _command(argv) if first not in plugin_verbs() else ""
    words, foreign, rest = list[str](), dict[str, list[str]](), list(argv[len(command.split()) or first in VERBS :])
    given: list[str] | None = None  # the values of the flag before
    while rest:
        word = rest.pop(0)
        flag = word.partition("=")[0]
        if not FLAG.fullmatch(word):
            (words if given is None or is_override(word) else given).append(word)
        elif action := parser._option_string_actions.get(flag):
            given = None
            words += [word, *([rest.pop(0)] if action.nargs != 0 and word == flag and rest else [])]
        elif said := table().flags.get(flag):
            raise UsageError(f"{flag}: {said}")
        elif not flag.startswith("--") or flag.replace("_", "-") in parser._option_string_actions:
            return None  # the parser says what is wrong
        else:
            given = foreign.setdefault(flag.lstrip("-").replace("-", "_"), [])
            given += [word.partition("=")[2]] if word != flag else []
    if not foreign and not command:
        return None
    unset = {"help": False, "version": False, "shell_completion": False}
    return argparse.Namespace(verb="foreign", command=command, words=words, foreign=foreign, **unset)


def _command(argv: Sequence[str]) -> str:
    """The first words of another framework's command; empty for one of ours."""
    first = argv[0] if argv else ""
    if not first or first in VERBS or FLAG.fullmatch(first) or is_override(first):
        return ""
    return next((text for text in (" ".join(argv[:2]), first) if text in table().commands), "")
