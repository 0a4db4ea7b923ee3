"""A chat in a terminal: lines of the user, answers as they come, reasoning shown dim.

/reset  forget what was said      /system TEXT  another system prompt      /image FILE  an image of the next message
/exit, Ctrl-D  end
Ctrl-C  stop the answer; at the prompt, drop the line
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.core.errors import DataError
from runner.inference.generate import Conversation
from runner.tracker.text import escape_controls

HELP = """\
/reset          start a new conversation
/system TEXT    start a new conversation with this system prompt
/image FILE     send an image with the next message
/exit           exit (also Ctrl-D)
Ctrl-C          stop the completion
To send a message that starts with /, type a space before it."""
WAKE_S = 0.1
DIM, PLAIN = "\033[2m", "\033[0m"


def run_chat(conversation: Conversation) -> None:
    """Answer lines of standard input until it ends or says so."""
    with _record_sigint() as pressed:
        while (line := _read_line()) is not None:
            command, _, rest = line.partition(" ")
            if command in ("/exit", "/quit"):
                return
            if command == "/reset":
                conversation.reset()
                _say("(a new conversation)")
            elif command == "/system":
                conversation.reset(rest.strip())
                _say(f"(a new conversation, {'with this' if rest.strip() else 'without a'} system prompt)")
            elif command == "/image" and rest.strip():
                _add_image(conversation, Path(rest.strip()).expanduser())
            elif command.startswith("/"):
                _say(HELP if command == "/help" else f"no command {command}\n{HELP}")
            elif line.strip():
                pressed.clear()
                _answer(conversation, line.removeprefix(" ") if line.startswith(" /") else line, pressed)


def _add_image(conversation: Conversation, path: Path) -> None:
    if conversation.renderer.reader is None:
        _say("this model reads text alone")
    elif not path.is_file():
        _say(f"{path}: no such file")
    else:
        conversation.images.append(path)
        _say("(sent with the next message)")


def _read_line() -> str | None:
    """The next line, "" for one that was dropped; None at the end of the input."""
    try:
        with _interruptible():
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
        _say("(to exit: /exit or Ctrl-D)")
        return ""


def _answer(conversation: Conversation, text: str, pressed: list[int]) -> None:
    dim = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    shown_as = escape_controls if sys.stdout.isatty() else str  # a terminal obeys what a model says
    before, hidden, part = "content", 0, "content"
    try:
        for part, piece in conversation.answer(text, lambda: bool(pressed)):
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
    if pressed:
        _say("(stopped)")


@contextmanager
def _record_sigint() -> Iterator[list[int]]:
    """Append each Ctrl-C outside of `_interruptible` to the list.

    A token under way is finished first, so that the engine never stops in the middle of one.
    """
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt inside the block.

    readline waits for a key in select(), which a signal ends only where it arrives during the wait: one that came just
    before would be seen after the next key. So a timer ends the wait regularly.
    """
    alarm = signal.signal(signal.SIGALRM, lambda number, frame: None)
    record = signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, WAKE_S, WAKE_S)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, record)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
