"""A chat: what is said stays said, Ctrl-C stops an answer and nothing else, reasoning is dim; in a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from runner.core.auto_choices import Decisions
from runner.core.errors import DataError
from runner.data.chat import Renderer
from runner.inference.engine import SamplingParams
from runner.inference.generate import Conversation
from runner.inference.model_source import load_source, parse_source
from runner.inference.torch_engine import TorchEngine
from tests.inference import scripted

AROUND = 19  # tokens of the template around one user's message
THINKS = "x" * (scripted.begins()["thinks and calls"] - AROUND)  # what is answered with reasoning
ENDLESS = "y" * (scripted.USED + 20)
MAX_NEW_TOKENS = 400  # with the prompt, most of what the model can take


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scripted.write_model(tmp_path_factory.mktemp("models") / "scripted")


@pytest.fixture
def conversation(folder: Path) -> Conversation:
    loaded = load_source(parse_source(str(folder)), device="cpu")
    engine = TorchEngine(loaded.model, decide=Decisions(), max_num_seqs=1)
    return Conversation(engine, Renderer(loaded.tokenizer), SamplingParams(0.0, max_new_tokens=300))


def test_a_conversation_keeps_what_was_said_and_forgets_it_at_once(conversation: Conversation) -> None:
    parts = list(conversation.answer(THINKS))
    said = {name: "".join(piece for part, piece in parts if part == name) for name in ("reasoning", "content")}
    assert said["reasoning"].strip() == "Add them." and said["content"].startswith("I call it.")
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]
    assert conversation.messages[1]["content"] == said["content"].strip(), "reasoning is no part of what was said"
    conversation.reset("Be short.")
    assert conversation.messages == [{"role": "system", "content": "Be short."}]
    conversation.reset("")
    assert list(conversation.answer(THINKS)) == parts


def test_an_answer_that_is_stopped_stays_as_far_as_it_went(conversation: Conversation) -> None:
    pieces = [
        piece for _, piece in conversation.answer(ENDLESS, is_stopped=lambda: conversation.engine.num_running > 0)
    ]
    assert conversation.engine.step() == [] and conversation.engine.is_idle, "its request is gone"
    assert conversation.messages[-1]["content"] == "".join(pieces).strip()
    before = list(conversation.messages)
    with pytest.raises(DataError, match="/reset starts a new one"):
        list(conversation.answer("z" * scripted.POSITIONS))
    assert conversation.messages == before


def own_terminal() -> None:
    """Make standard input the controlling terminal of this session, so that Ctrl-C sends SIGINT."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A command in a pseudo-terminal of its own."""

    def __init__(self, *words: str) -> None:
        self._end, other = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "runner", *words],
            stdin=other,
            stdout=other,
            stderr=other,
            env=environment,
            start_new_session=True,
            preexec_fn=own_terminal,
        )
        os.close(other)
        self.shown = ""

    def wait_for(self, text: str, seconds: float = 90) -> str:
        """What is shown up to a text, which has to come; the rest is left for the next one."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            ready, _, _ = select.select([self._end], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {text!r} in {self.shown!r}"
            try:
                self.shown += os.read(self._end, 65536).decode(errors="replace")
            except OSError as error:  # the other end is closed
                raise AssertionError(f"no {text!r} in {self.shown!r}") from error
        before, _, self.shown = self.shown.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._end)


def stop_an_answer(terminal: Terminal) -> str:
    """What is shown of an answer until Ctrl-C stops it. One that ends before, on a busy machine, is asked for again."""
    for _ in range(5):
        terminal.type("/reset\n")
        terminal.wait_for("(a new conversation)")
        terminal.wait_for("> ")
        terminal.type(ENDLESS + "\n")
        terminal.wait_for(ENDLESS[-40:])  # the echo of what was typed
        terminal.wait_for("\n")
        terminal.wait_for("!")  # the answer has begun
        terminal.type("\x03")
        answer = terminal.wait_for("(")
        if terminal.wait_for(")") == "stopped":
            return answer
        terminal.wait_for("> ")
    raise AssertionError("Ctrl-C has stopped none of five answers")


@pytest.mark.slow
def test_a_chat_in_a_terminal(folder: Path) -> None:
    terminal = Terminal("chat", str(folder), "device=cpu", "--max-new-tokens", str(MAX_NEW_TOKENS))
    try:
        assert "/help lists the commands" in terminal.wait_for("> ")
        terminal.type(THINKS + "\n")
        terminal.wait_for("\033[2m")
        assert "Add them." in terminal.wait_for("\033[0m"), "reasoning is dim"
        assert "I call it." in terminal.wait_for("> ")
        answer = stop_an_answer(terminal)
        assert len(re.sub(r"\s", "", answer)) < MAX_NEW_TOKENS, "it ended before its limit"
        terminal.wait_for("> ")
        terminal.type("half a line\x03")
        terminal.wait_for("(to exit: /exit or Ctrl-D)")
        terminal.wait_for("> ")
        terminal.type("/none\n")
        terminal.wait_for("no command /none")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()
