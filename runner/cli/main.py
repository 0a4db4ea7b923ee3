"""The command `run`: picks the verb, words the errors, returns the exit code.

argv ─▶ args ─▶ verb ─▶ handler (imported when chosen) ─▶ exit code
"""

from __future__ import annotations

import io
import os
import pwd
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from runner.cli.args import UsageError, parse, plugin_verb
from runner.cli.verbs import HANDLERS
from runner.core.errors import EnvironmentProblem, Interrupted, RunnerError
from runner.core.fsync_io import full_disk_error
from runner.core.package import import_frozen, plug_in_fault, plugin_warnings
from runner.core.signals import survive_early_save
from runner.tracker.text import discard_output, print_text


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code (the table is in `runner.core.errors`)."""
    code = _run_words(list(sys.argv[1:] if argv is None else argv))
    try:
        print(end="", flush=True)
    except OSError:  # after an error that was told
        discard_output(sys.stdout)
    return code


def _run_words(words: list[str]) -> int:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started this process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without UTF-8 shows \u2026 and the like
            stream.reconfigure(errors="backslashreplace")
    debug = "--debug" in words
    try:
        code = _run_verb(words)
        print(end="", flush=True)  # here, where a full disk is told
        return code
    except Interrupted as stop:  # what the user wanted, and no error
        print_text(str(stop), file=sys.stderr)
        return stop.exit_code
    except RunnerError as error:
        if debug:
            print_text(_redacted_traceback(), file=sys.stderr)
        _print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (`| head`) has what it wanted
        return 0
    except Exception as error:
        if (full := full_disk_error(error)) is not None:
            _print_error(str(full))
            return full.exit_code
        fault = plug_in_fault(error)
        bug = f"this is a bug in this project: {type(error).__name__}: {error}"
        _print_error(_with_traceback(fault or bug, debug))
        return RunnerError.exit_code if fault is None else EnvironmentProblem.exit_code


def _complete_user() -> None:
    """Give a user without an entry in /etc/passwd, as in OpenShift's containers, a name and a home folder.

    Libraries ask for both, and write into a folder called ~ otherwise. Raises EnvironmentProblem.
    """
    try:
        pwd.getpwuid(os.getuid())
        return
    except KeyError:
        user = f"uid-{os.getuid()}"
    os.environ.setdefault("USER", user)
    if "HOME" in os.environ:
        return
    home = Path(tempfile.gettempdir(), f"run-home-{user}")
    home.mkdir(mode=0o700, exist_ok=True)
    if home.is_symlink() or home.stat().st_uid != os.getuid():
        raise EnvironmentProblem(f"{home} is another user's; set HOME to a folder that you can write to")
    os.environ["HOME"] = str(home)
    print_text(
        f"warning: user {os.getuid()} has no home folder; using {home}; set HOME to keep caches", file=sys.stderr
    )


def _run_verb(words: list[str]) -> int:
    """Run a verb of ours or of a plug-in, and name the plug-ins that were left out."""
    _complete_user()
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise EnvironmentProblem("the current folder was deleted; change to another one: cd FOLDER") from error
    # The shell asks `run -sc query=bash`; Hydra's scripts write the two in either order.
    flags = {"-sc", "--shell-completion"}
    completing = ["--shell-completion", *(w for w in words if w not in flags)] if flags & set(words) else words
    try:
        if (verb := plugin_verb(words)) is not None:
            return verb(words[1:])
        return _dispatch(_parse(completing))
    finally:
        for text in () if "--shell-completion" in completing else plugin_warnings():  # a shell calls this at every tab
            print_text(f"warning: {text}", file=sys.stderr)


def _parse(words: list[str]) -> Namespace:
    """Parse a command line; a wrong one may be another framework's, which is answered in our words."""
    try:
        return parse(words)
    except UsageError:
        from runner.cli.other_frameworks import foreign_command

        if (args := foreign_command(words)) is None:
            raise
        return args


def _dispatch(args: Namespace) -> int:
    chosen = "version" if args.version else "help" if args.help else "complete" if args.shell_completion else args.verb
    module, _, name = HANDLERS[chosen].partition(":")
    with survive_early_save() if chosen in ("run", "resume") else nullcontext():
        code: int = getattr(import_frozen(f"runner.cli.{module}"), name)(args)
    return code


def _print_error(message: str) -> None:
    red = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    from runner.run_dir.manifest import redact  # here, because only an error needs it

    print("\033[31merror:\033[0m " if red else "error: ", end="", file=sys.stderr)
    print_text(redact(message), file=sys.stderr)  # in a sweep or a queue, the screen is a file


def _with_traceback(summary: str, debug: bool) -> str:
    """The summary of an unexpected error with the file of its traceback, which --debug prints."""
    text = _redacted_traceback()
    try:
        if not debug:
            with tempfile.NamedTemporaryFile(prefix="run-traceback-", suffix=".txt", delete=False) as file:
                file.write(text.encode(errors="backslashreplace"))
            return f"{summary}\n  the traceback is in {file.name}; --debug shows it here"
    except OSError as failure:  # a disk that is full or read-only
        summary += f"\n  its traceback cannot be written: {failure}"
    print_text(text, file=sys.stderr)
    return summary


def _redacted_traceback() -> str:
    from runner.run_dir.manifest import redact

    return redact(traceback.format_exc())
