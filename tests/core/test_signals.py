"""Signals: at once while nothing can be saved, after the step later, and never through a stream that is in use."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.core.errors import Interrupted
from runner.core.signals import StopSignal, signal_name, survive_early_save
from runner.launch.run_messages import console_logging
from runner.tracker import console as module

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    """Installed for the length of a test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    subject = StopSignal()
    subject.install()
    yield subject
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_where_nothing_can_be_saved_it_ends_at_once(stop: StopSignal, number: int, code: int) -> None:
    reached = []
    with (
        pytest.raises(Interrupted, match="before the first step ended; no checkpoint was written") as caught,
        stop.interrupt_immediately(),
    ):
        try:
            os.kill(os.getpid(), number)
            reached.append("the next line")
        except Exception:  # what a library does around an import of something optional
            reached.append("taken for a fault")
    assert caught.value.exit_code == code and reached == []


def test_it_is_obeyed_also_where_a_library_swallows_it(stop: StopSignal) -> None:
    with pytest.raises(Interrupted), stop.interrupt_immediately():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException:
            done = True
    assert done


def test_after_a_signal_the_block_is_not_entered(stop: StopSignal) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    entered = []
    with pytest.raises(Interrupted, match="SIGTERM before the first step ended"), stop.interrupt_immediately():
        entered.append("a build of minutes")
    assert entered == []


def test_the_exit_code_is_kept_where_a_signal_comes_while_a_string_is_executed(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from runner.core.errors import Interrupted
from runner.core.signals import StopSignal, signal_name, survive_early_save
stop = StopSignal()
stop.install()
try:
    with stop.interrupt_immediately():
        exec("os.kill(os.getpid(), signal.SIGTERM)")
except Interrupted as error:
    sys.exit(error.exit_code)
"""
    (tmp_path / "stopped.py").write_text(program)
    path = os.pathsep.join((str(ROOT), str(tmp_path)))
    done = subprocess.run([sys.executable, "-m", "stopped"], env=os.environ | {"PYTHONPATH": path}, check=False)
    assert done.returncode == 143


def test_after_its_block_a_signal_goes_to_who_had_it_before() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        subject = StopSignal()
        with subject.handle_signals(), subject.interrupt_immediately():
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM] and subject.number is None
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_interrupt_that_was_no_signal_of_ours_passes_through(stop: StopSignal) -> None:
    with pytest.raises(KeyboardInterrupt), stop.interrupt_immediately():
        raise KeyboardInterrupt


def test_after_the_block_it_waits_for_the_step(stop: StopSignal, capfd: pytest.CaptureFixture[str]) -> None:
    with stop.interrupt_immediately():
        assert stop.number is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert not stop.is_requested, "nobody has agreed to it yet"
    stop.agree_across_ranks(lambda number: [None, number])
    assert stop.is_requested
    assert "SIGTERM: finishing this step, then saving" in capfd.readouterr().err
    with pytest.raises(Interrupted, match="after step 3 of 9; a checkpoint was written"):
        stop.raise_if_requested(3, 9)
    stop.raise_if_requested(9, 9)


class SignalsItself(io.RawIOBase):
    """A screen at whose every write a signal arrives, while the buffer above it is in use."""

    def writable(self) -> bool:
        return True

    def write(self, content: object) -> int:
        if self.asked.number is None:
            os.kill(os.getpid(), signal.SIGTERM)
        return len(memoryview(content))  # type: ignore[arg-type]

    asked: StopSignal


def test_a_signal_in_the_middle_of_a_write_breaks_nothing(
    stop: StopSignal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = SignalsItself()
    raw.asked = stop
    screen = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")
    monkeypatch.setattr(module.sys, "stdout", screen)
    with console_logging(tmp_path / "run.log") as console:
        console.message("a line")  # logging from the handler would be: reentrant call inside the buffered writer
    assert stop.number == signal.SIGTERM and "a line" in (tmp_path / "run.log").read_text()


def test_a_second_signal_ends_the_process(tmp_path: Path) -> None:
    program = (
        "import os, signal\nfrom runner.core.signals import StopSignal\nstop = StopSignal()\nstop.install()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nos.kill(os.getpid(), signal.SIGTERM)\nprint('still here')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (143, "")


def test_sigusr1_before_a_run_has_handlers_does_not_end_it(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        with survive_early_save():
            os.kill(os.getpid(), signal.SIGUSR1)
            assert "SIGUSR1: there is nothing to save yet; the run continues" in capfd.readouterr().err
            subject = StopSignal()
            with subject.handle_signals():  # which takes the place of the early handler
                os.kill(os.getpid(), signal.SIGUSR1)
                assert "saving a checkpoint after this step" in capfd.readouterr().err
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_without_a_name_has_a_number() -> None:
    assert (
        signal_name(signal.SIGKILL) == "SIGKILL" and signal_name(signal.SIGRTMIN + 3) == f"signal {signal.SIGRTMIN + 3}"
    )
