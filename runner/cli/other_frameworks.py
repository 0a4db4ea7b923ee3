"""Command lines of other frameworks: each of their words is answered with what is typed here."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from runner.cli.args import UsageError, is_override, near_flag, parser_of, plugin_verbs
from runner.cli.config_sources import GROUP, is_file_name
from runner.cli.job_builder import compose_job
from runner.cli.verbs import VERBS
from runner.core.errors import SpecError
from runner.spec import migrate, suggest
from runner.spec.registry import default_registry
from runner.spec.schema import OptionIndex

OF_A_JOB = ("run", "plan")  # verbs whose words are a job
FLAG = re.compile(r"--?[A-Za-z][\w.-]*(?:=.*)?", re.DOTALL)
UNQUOTED = re.compile(r"[\w./:@%+-]+")
LAUNCHERS = ("python", "python3", "torchrun", "accelerate", "deepspeed")
TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")
ADVICE = re.compile(r"not an option of \S+(?: job)?; ")


def refuse(args: Namespace) -> NoReturn:
    """Raise UsageError with a line for each word of the command.

    Their meaning depends on the job, so the job is composed with them: its problems are the answers.
    """
    recipes = [f"+{GROUP}={word}" for word in args.words if is_file_name(word)]
    is_script = args.command.split()[:1] and args.command.split()[0] in LAUNCHERS and args.foreign
    typed = [*([] if is_script else _of_command(args.command)), *recipes]
    instead = f"no verb named '{args.command}'; type run {' '.join(typed) or '…'}" if args.command else ""
    settings = {key: f"{key}={_value(values)}" for key, values in args.foreign.items()}
    known = [word for word in (*typed, *args.words) if is_override(word)]
    answers = _answers([*(word for word in known if not _is_lost(word)), *settings.values()])
    lines = [f"--{key}: {answers.get(key) or _alone(key, word)}" for key, word in settings.items()]
    lines += [f"{key}: {answers[key]}" for key in (word.partition("=")[0] for word in known) if key in answers]
    head = "options of a job are written without dashes, as key=value" if settings else ""
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
    return value if value[:1] in "[{" else "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def foreign_command(argv: Sequence[str]) -> Namespace | None:
    """Parse a command line of another framework; None for one of ours.

    command: its first words; foreign: its options with dashes (key=value); words: the others. Raises UsageError for a
    flag of Hydra's.
    """
    launcher, argv = _split_launcher(list(argv[: list(argv).index("--")] if "--" in argv else argv))
    first = argv[0] if argv else ""
    if (first in VERBS and first not in OF_A_JOB) or {"--help", "-h", "--shell-completion"} & set(argv):
        return None
    parser = parser_of(first if first in VERBS else "run")
    command = _command(argv) if first not in plugin_verbs() else ""
    words, foreign, rest = list[str](), dict[str, list[str]](), list(argv[len(command.split()) or first in VERBS :])
    command = command or launcher
    given: list[str] | None = None  # the values of the flag before
    while rest:
        word = rest.pop(0)
        flag = word.partition("=")[0]
        if not FLAG.fullmatch(word):
            (words if given is None or is_override(word) else given).append(word)
        elif action := parser._option_string_actions.get(flag):
            given = None
            words += [word, *([rest.pop(0)] if action.nargs != 0 and word == flag and rest else [])]
        elif said := migrate.table().flags.get(flag):
            raise UsageError(f"{flag}: {said}")
        elif not flag.startswith("--") or (near_flag(flag, parser) and not migrate.table().find(flag[2:])):
            return None  # the parser says what is wrong
        else:
            given = foreign.setdefault(flag.lstrip("-").replace("-", "_"), [])
            given += [word.partition("=")[2]] if word != flag else []
    if not foreign and not command:
        return None
    unset = {"help": False, "version": False, "shell_completion": False}
    return Namespace(verb="foreign", command=command, words=words, foreign=foreign, **unset)


def _split_launcher(argv: list[str]) -> tuple[str, list[str]]:
    """The program that starts a script or module, and the words of both without the script's name.

    `torchrun --nnodes 2 FILE.py --lr 1` → torchrun, `--lr 1 --nnodes 2`; Python's own options are left out. No program
    where the words start nothing.
    """
    first = argv[0] if argv else ""
    script = next((i for i, word in enumerate(argv) if word == "-m" or word.endswith(".py")), 0)
    if first not in LAUNCHERS or not script:
        return "", argv
    rest = argv[script + (2 if argv[script] == "-m" else 1) :]
    if first.startswith("python"):
        module = argv[script + 1] if argv[script] == "-m" and rest else ""
        return _split_launcher(["torchrun", *rest]) if module in TORCHRUN else (first, rest)
    name = "accelerate launch" if first == "accelerate" else first
    return name, rest + argv[len(name.split()) : script]


def _command(argv: Sequence[str]) -> str:
    """The first words of another framework's command; empty for one of ours."""
    first = argv[0] if argv else ""
    if not first or first in VERBS or FLAG.fullmatch(first) or is_override(first):
        return ""
    return next((text for text in (" ".join(argv[:2]), first) if text in migrate.table().commands), "")
