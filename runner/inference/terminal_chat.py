"""A chat in a terminal: lines of the user, answers as they come, reasoning shown dim.

/reset  forget what was said      /system TEXT  another system prompt      /exit, Ctrl-D  end
Ctrl-C  stop the answer; at the prompt, drop the line
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from runner.core.errors import DataError
from runner.inference.generate import Conversation
from runner.tracker.text import escape_controls

HELP = """\
/reset          forget what was said
/system TEXT    forget what was said, with another system prompt
/exit           end (Ctrl-D, too)
Ctrl-C          stop the answer
A message that begins with / is sent with a blank before it."""
DIM, PLAIN = "\033[2m", "\033[0m"


def run_chat(conversation: Conversation) -> None:
    """Answer lines of standard input until it ends or says so."""
    while (line := _read_line()) is not None:
        command, _, rest = line.partition(" ")
        if command in ("/exit", "/quit"):
            return
        if command == "/reset":
            conversation.reset()
            _say("(a new conversation)")
        elif command == "/system":
            conversation.reset(rest.strip())
            _say("(a new conversation, with this system prompt)" if rest.strip() else "(…, without a system prompt)")
        elif command.startswith("/"):
            _say(HELP if command == "/help" else f"no command {command}\n{HELP}")
        elif line.strip():
            _answer(conversation, line.removeprefix(" ") if line.startswith(" /") else line)


def _read_line() -> str | None:
    """The next line, "" for one that was dropped; None at the end of the input."""
    try:
        if not sys.stdin.isatty():
            read = sys.stdin.readline()
            return read.rstrip("\r\n") if read else None
        import readline  # noqa: F401  # lets `input` edit lines and remember them

        return input("> ")
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print()
        _say("(/exit or Ctrl-D ends)")
        return ""


def _answer(conversation: Conversation, text: str) -> None:
    dim = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    shown_as = escape_controls if sys.stdout.isatty() else str  # a terminal obeys what a model says
    before, hidden, part = "content", 0, "content"
    with _stopped_by_sigint() as is_stopped:
        try:
            for part, piece in conversation.answer(text, is_stopped):
                if part == "reasoning" and not sys.stdout.isatty():
                    hidden += len(piece)
                    continue
                if part != before:
                    print((DIM if part == "reasoning" else PLAIN) if dim else "\n", end="")
                    before = part
                print(shown_as(piece), end="", flush=True)
        except DataError as error:
            _say(f"error: {error}")
            return
        finally:
            if dim and before == "reasoning":
                print(PLAIN, end="")
        print(flush=True)
        if hidden:
            _say(f"(reasoning of {hidden} characters is not shown)")
        if is_stopped():
            _say("(stopped)")


@contextmanager
def _stopped_by_sigint() -> Iterator[Callable[[], bool]]:
    """A function that says whether Ctrl-C was pressed inside the block.

    A token under way is finished first, so that the engine never stops in the middle of one.
    """
    pressed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
