"""Plays a page of docs/stories: writes its files, types its commands, and returns what each of them printed."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.command import Command, run

ROOT = Path(__file__).resolve().parents[1]
STORY_PAGES = ROOT / "docs" / "stories"
STORIES = sorted(page for page in STORY_PAGES.glob("*.md") if not page.name.endswith(".zh.md"))
FILE = re.compile(r"`([\w./]+)`:\n\n```\w+\n(.*?)```", re.DOTALL)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SERVER_S = 100.0  # until a server answers
RUN = partial(run, timeout_s=300)  # machines may be busy


class Typed(NamedTuple):
    """A command line of a page, and the lines that the page shows below it."""

    line: str
    shown: tuple[str, ...]


def commands(page: str) -> Iterator[Typed]:
    """What follows `$ `, in the order of the page; a backslash continues a line."""
    for block in (text for language, text in BLOCK.findall(page) if not language):
        for entry in re.split(r"^\$ ", block.replace("\\\n", ""), flags=re.MULTILINE)[1:]:
            line, *shown = entry.splitlines()
            yield Typed(re.sub(r"\s+#.*", "", line), tuple(filter(None, shown)))


def play(page: Path, folder: Path, start: Callable[..., str] = RUN) -> Iterator[tuple[Typed, str]]:
    """Each command of a page with what it printed; what ends with & runs until the page is over.

    start: runs the words after `run` in the folder `cwd`, and returns what was printed
    """
    text, running = page.read_text(encoding="utf-8"), list[Command]()
    for name, content in FILE.findall(text):
        (folder / name).write_text(content, encoding="utf-8")
    try:
        for typed in commands(text):
            words = [name for word in shlex.split(typed.line) for name in _matches(word, folder)]
            if words[-1] == "&":
                (folder / "server.log").touch()
                running.append(Command(*words[1:-1], cwd=folder, printed=folder / "server.log"))
                yield typed, wait_for_address(running[-1])
            elif words[0] == "run":
                yield typed, start(*words[1:], cwd=folder)
            else:
                words[0] = {"python": sys.executable}.get(words[0], words[0])
                done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=SERVER_S)
                assert done.returncode == 0, done.stderr
                yield typed, done.stdout
    finally:
        for command in running:
            command.send_signal(signal.SIGTERM)
            command.wait(SERVER_S)


def _matches(word: str, folder: Path) -> list[str]:
    """What a shell makes of a word."""
    found = sorted(folder.glob(word)) if word.startswith("outputs/") and "*" in word else []
    return [str(path.relative_to(folder)) for path in found] or [word]


def wait_for_address(command: Command) -> str:
    end = time.monotonic() + SERVER_S
    while "http://" not in command.said():
        assert command.poll() is None and time.monotonic() < end, command.said()
        time.sleep(0.2)
    return command.said()


def without_numbers(text: str) -> list[str]:
    """The lines of a text: run folders and numbers are `#`, spaces are single."""
    text = re.sub(r"outputs/\S*", "#", text)
    text = re.sub(r"[-+]?\d[\d.:]*(e[-+]?\d+)?[kM%]?|nan|--:--", "#", text)
    return [" ".join(line.split()) for line in text.splitlines()]


def missing_lines(typed: Typed, printed: str) -> list[str]:
    """What a page shows below a command and the command did not print, in this order; numbers may differ."""
    lines = iter(without_numbers(printed))
    return [line for line in without_numbers("\n".join(typed.shown)) if line not in lines]
