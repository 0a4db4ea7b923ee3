"""Child processes: start them, end them with their parent, kill their children, exchange JSON lines.

    ChildProcess(command, end_signal=SIGTERM) ─▶ this file as a program: prctl(PR_SET_PDEATHSIG) ─▶ exec command
    JsonLines (parent) ◀── one JSON text per line, over pipes or a socket ──▶ JsonLines (child)

The kernel sends the signal however the parent ends. The program starts without site-packages, so psutil is imported
only inside of functions.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil

PR_SET_PDEATHSIG = 1
# Programs that clean up after other processes have ended, and then exit
CLEANERS = ("multiprocessing.resource_tracker", "runner.launch.cleanup_process")
SETTLE_S = 2.0  # for them to clean up
POLL_S = 0.05
READ_BYTES = 2**16
LONGEST_POLL_S = 2e6  # of one call of poll, which takes milliseconds as a C int
LONGEST_BYTES = 2**30  # of a message that is read

Identity = tuple[int, int]  # pid and start time in clock ticks since boot, which together are unique


# --- start -----------------------------------------------------------------------------------------------------------


def with_pdeathsig(command: Sequence[str], cores: Sequence[str] = (), end_signal: int = signal.SIGTERM) -> list[str]:
    """The command that runs `command` on these cores (none: on all), with a parent-death signal.

    The kernel sends it `end_signal` when the thread that started it ends.
    """
    own = [str(os.getpid()), str(int(end_signal)), ",".join(cores) or "-"]
    return [sys.executable, "-I", "-S", __file__, *own, *command]


def end_with_parent(number: int) -> None:
    """Let the kernel send this process a signal when the thread that started it ends. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(number)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def main(parent: str, end_signal: str, cores: str, *command: str) -> None:
    """Replace this process by the command; exit if the parent has already ended."""
    end_with_parent(int(end_signal))
    if os.getppid() != int(parent):
        sys.exit(128 + int(end_signal))
    if cores != "-":
        os.sched_setaffinity(0, map(int, cores.split(",")))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT in its children, which inherit that
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error.strerror}")


class ChildProcess(subprocess.Popen[bytes]):
    """A child in its own session: Ctrl-C reaches only the parent, and its children end with the child.

    Raises OSError if the program does not exist. end_signal: the signal from the kernel when the thread that started it
    ends (None: no signal, and `command` is started directly); own_session=False: it stays in this process's group;
    options: of Popen
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        end_signal: int | None = None,
        own_session: bool = True,
        stdin: int | None = subprocess.DEVNULL,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        **options: Any,
    ) -> None:
        self._own_session, self._reaping = own_session, threading.RLock()
        if end_signal is not None:
            program = os.path.join(cwd or "", command[0]) if os.sep in command[0] else command[0]
            if shutil.which(program, path=(os.environ if env is None else env).get("PATH")) is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
            command = with_pdeathsig(command, end_signal=end_signal)
        super().__init__(list(command), stdin=stdin, env=env, cwd=cwd, start_new_session=own_session, **options)

    def is_running(self) -> bool:
        """Whether it still runs. After its end the rest of its session is killed and `returncode` is set.

        Any thread may call this.
        """
        with self._reaping:
            if self.returncode is not None:
                return False
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return True
            self._kill_session()  # before it is reaped: until then no other process can have its pid
            self.wait()
            return False

    def ends_within(self, seconds: float) -> bool:
        """Whether it ends in that time."""
        end = time.monotonic() + seconds
        while self.is_running():
            if time.monotonic() > end:
                return False
            time.sleep(POLL_S)
        return True

    def wait_and_forward(self, received: Sequence[int]) -> int:
        """Wait for its end; returns its exit code. Signals that are added to `received` are sent to it once."""
        sent = 0
        while self.is_running():
            for number in received[sent:]:
                self.send_signal(number)
                sent += 1
            time.sleep(POLL_S)
        return int(self.returncode)

    def stop(self, grace_s: float, number: int = signal.SIGTERM) -> int:
        """Send it a signal, and kill it after `grace_s` seconds; returns its exit code."""
        self.send_signal(number)
        if not self.ends_within(grace_s):
            self.kill()
            self.ends_within(math.inf)
        return int(self.returncode)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process alone, from any thread; unlike Popen's method it does not reap."""
        with self._reaping:
            if self.returncode is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to it and to its session."""
        if self._own_session:
            self._kill_session()
        else:
            self.send_signal(signal.SIGKILL)

    def _kill_session(self) -> None:
        if self._own_session and self.returncode is None:
            kill_session(self.pid)


# --- which processes there are, and their end ------------------------------------------------------------------------


def process_identity(pid: int) -> Identity | None:
    """Identifies a running process among later ones with the same pid; None if it has ended.

    Not psutil's create_time, which changes when the clock is set.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else (pid, int(fields[19]))


def is_alive(process: psutil.Process) -> bool:
    """Whether a process still runs; a zombie does not, and a later process with its pid does not count."""
    import psutil

    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int) -> list[psutil.Process]:
    """Every living process below `pid`, parents before children, those in sessions of their own included."""
    import psutil

    try:
        return [process for process in psutil.Process(pid).children(recursive=True) if is_alive(process)]
    except psutil.NoSuchProcess:
        return []


def kill(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to each process, unless its pid now belongs to another one."""
    import psutil

    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it ended by itself
            process.kill()


def kill_session(leader: int) -> None:
    """Send SIGKILL to all processes of a session, whatever their group.

    Processes that clean up after others are killed last, if they still run.
    """
    import psutil

    mine = [process for process in psutil.process_iter() if _session(process.pid) == leader and is_alive(process)]
    cleaners = [process for process in mine if is_cleaner(process)]
    with suppress(psutil.AccessDenied):
        kill([process for process in mine if process not in cleaners])
    psutil.wait_procs(cleaners, timeout=SETTLE_S)
    with suppress(psutil.AccessDenied):
        kill(cleaners)
    with suppress(ProcessLookupError, PermissionError):  # processes that were started meanwhile, if any
        os.killpg(leader, signal.SIGKILL)


def is_cleaner(process: psutil.Process) -> bool:
    """Whether the process only cleans up after others."""
    import psutil

    try:
        words = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
    return any(program in words for program in CLEANERS)


def _session(pid: int) -> int | None:
    """The session id of a process; None if it has ended."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


# --- JSON lines ------------------------------------------------------------------------------------------------------


class JsonLines:
    """One end of a connection that carries one JSON text per line. Several threads may write.

    reading, writing: descriptors of pipes or of a socket, which become non-blocking and stay open; None: not used, or
    bytes come by other means (`parse`); longest_bytes: of a received message
    """

    def __init__(
        self, reading: int | None = None, writing: int | None = None, longest_bytes: int = LONGEST_BYTES
    ) -> None:
        self._reading, self._writing, self._lock = reading, writing, threading.Lock()
        self._rest, self._longest_bytes, self._is_closed, self._is_torn = bytearray(), longest_bytes, False, False
        self._fault: ValueError | None = None  # of a line after messages that were returned first
        for descriptor in (reading, writing):
            if descriptor is not None:
                os.set_blocking(descriptor, False)

    @classmethod
    def to_parent(cls) -> JsonLines:
        """Use stdin and stdout for messages; later prints go to stderr."""
        writing = os.dup(1)
        os.dup2(2, 1)
        return cls(0, writing)

    def send(self, message: object, within_s: float = math.inf) -> bool:
        """Send a message; False if the other end is closed. Raises TimeoutError if it does not read.

        If a part was sent by then, the connection is closed: no later message may continue an incomplete line.
        """
        return self.write(json.dumps(message).encode() + b"\n", within_s)

    def write(self, line: bytes, within_s: float = math.inf) -> bool:
        """Send an encoded message with its newline; see `send`."""
        assert self._writing is not None
        end = time.monotonic() + within_s
        rest = memoryview(line)  # a pipe accepts 64 KiB at a time: copies would take quadratic time
        with self._lock, suppress(ConnectionError):
            while rest and not self._is_torn:
                try:
                    rest = rest[os.write(self._writing, rest) :]
                except BlockingIOError:
                    if not _is_ready(self._writing, select.POLLOUT, end - time.monotonic()):
                        if len(rest) < len(line):
                            self._close()
                        raise TimeoutError(f"not read within {within_s:g} s") from None
        return not rest

    def _close(self) -> None:
        """Close the connection. The descriptors stay valid; the caller closes them."""
        with open(os.devnull, "r+b", buffering=0) as nothing:
            for descriptor in (self._reading, self._writing):
                if descriptor is None:
                    continue
                os.dup2(nothing.fileno(), descriptor, inheritable=False)
        self._is_closed = self._is_torn = True

    def receive(self, wait_s: float = 0.0) -> list[Any] | None:
        """The messages that have arrived, after at most `wait_s` seconds; None at the end of the stream.

        Raises ValueError for invalid JSON and for a message that is too long.
        """
        assert self._reading is not None
        if wait_s and not self._is_closed:
            _is_ready(self._reading, select.POLLIN, wait_s)
        messages: list[Any] = []
        while not self._is_closed and self._fault is None:
            try:
                content = os.read(self._reading, READ_BYTES)
            except BlockingIOError:
                break
            except OSError:  # the connection was reset, or the other machine is unreachable
                content = b""
            self._is_closed = not content
            messages += self.parse(content)
        if self._fault is not None and not messages:
            raise self._fault
        return None if self._is_closed and not messages else messages

    def parse(self, content: bytes) -> list[Any]:
        """The messages that these bytes complete.

        Raises ValueError for an invalid line: immediately or, if messages came before it, at the next call.
        """
        if self._fault is not None:
            raise self._fault
        *lines, rest = content.split(b"\n")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += rest
        messages: list[Any] = []
        try:
            for line in lines:
                messages.append(json.loads(line))
            if len(self._rest) > self._longest_bytes:
                raise ValueError(f"a message of more than {self._longest_bytes} bytes")
        except (ValueError, RecursionError) as error:
            self._fault = error if isinstance(error, ValueError) else ValueError("nested too deeply")
            if not messages:
                raise self._fault from error
        return messages


def _is_ready(descriptor: int, event: int, seconds: float) -> bool:
    """Whether reading or writing does not block; waits at most `seconds`."""
    waiting = select.poll()
    waiting.register(descriptor, event)
    return bool(waiting.poll(None if seconds > LONGEST_POLL_S else max(seconds, 0.0) * 1000))


if __name__ == "__main__":
    main(*sys.argv[1:])
