"""Child processes: start them, end them with their parent, kill their children, exchange JSON lines.

    ChildProcess(command, end_signal=SIGTERM) ─▶ this file as a program: prctl(PR_SET_PDEATHSIG) ─▶ exec command
    JsonLines (parent) ◀── one JSON text per line, over pipes or a socket ──▶ JsonLines (child)

The kernel sends the signal however the parent ends. The program starts without site-packages, so psutil is imported
where it is needed.
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
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil

PR_SET_PDEATHSIG = 1
# Programs that remove what other processes leave, as soon as these are dead; then they end by themselves
CLEANERS = ("multiprocessing.resource_tracker", "runner.launch.cleanup_process")
SETTLE_S = 2.0  # for them to do so
POLL_S = 0.05
READ_BYTES = 2**16
LONGEST_POLL_S = 2e6  # of one call of poll, which takes milliseconds as a C int
LONGEST_BYTES = 2**30  # of a message that is read

Identity = tuple[int, int]  # number and start time, in clock ticks since boot: no later process has both


# --- start -----------------------------------------------------------------------------------------------------------


def with_pdeathsig(command: Sequence[str], cores: Sequence[str] = (), end_signal: int = signal.SIGTERM) -> list[str]:
    """The command that runs `command` on these cores (none: on all), with a parent-death signal.

    The kernel sends it `end_signal` when the thread that started it ends.
    """
    own = [str(os.getpid()), str(int(end_signal)), ",".join(cores) or "-"]
    return [sys.executable, "-I", "-S", __file__, *own, *command]


def end_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when the thread that started it ends. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(number)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def main(parent: str, end_signal: str, cores: str, *command: str) -> None:
    """Replace this process by the program; ends at once if the parent has ended by now."""
    end_with_parent(int(end_signal))
    if os.getppid() != int(parent):
        sys.exit(128 + int(end_signal))
    if cores != "-":
        os.sched_setaffinity(0, map(int, cores.split(",")))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT in all that it starts, which inherits that
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error.strerror}")


class ChildProcess(subprocess.Popen[bytes]):
    """A child in its own session: Ctrl-C reaches only the parent, and its children end with the child.

    Raises OSError where there is no such program. end_signal: what the kernel sends it when the thread that started it
    ends (None: nothing; then `command` is started directly); own_session=False: it stays in this process's group
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        end_signal: int | None = None,
        own_session: bool = True,
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._own_session, self._reaping = own_session, threading.RLock()
        program = command[0] if cwd is None or os.sep not in command[0] else os.path.join(cwd, command[0])
        if (
            end_signal is not None
            and shutil.which(program, path=(os.environ if env is None else env).get("PATH")) is None
        ):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
        super().__init__(
            list(command) if end_signal is None else with_pdeathsig(command, end_signal=end_signal),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            cwd=cwd,
            pass_fds=pass_fds,
            start_new_session=own_session,
        )

    def is_running(self) -> bool:
        """Whether it still runs. When it has ended, the rest of its session is killed and `returncode` is set.

        Any thread may call this.
        """
        with self._reaping:
            if self.returncode is not None:
                return False
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return True
            self._kill_session()  # before it is reaped: until then no other process can have its number
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
        """Its exit code; each signal that this process adds to `received` meanwhile is sent to it once."""
        sent = 0
        while self.is_running():
            for number in received[sent:]:
                self.send_signal(number)
                sent += 1
            time.sleep(POLL_S)
        return int(self.returncode)

    def stop(self, grace_s: float, number: int = signal.SIGTERM) -> int:
        """Send it a signal, and kill it if it runs on for `grace_s` seconds; its exit code."""
        self.send_signal(number)
        if not self.ends_within(grace_s):
            self.kill()
            self.ends_within(math.inf)
        return int(self.returncode)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process alone. Any thread may call this; unlike Popen's it does not reap."""
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
    """Tells a living process from a later one with the same number; None for one that has ended.

    Readable by other processes. Not psutil's create_time, which moves when the clock is set.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else (pid, int(fields[19]))


def is_alive(process: psutil.Process) -> bool:
    """Whether a process still runs; a zombie does not, and a later process with its number is another."""
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
    """SIGKILL each that is still the process it was; a stopped one dies too."""
    import psutil

    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it ended by itself
            process.kill()


def kill_session(leader: int) -> None:
    """Send SIGKILL to all processes of a session, whatever their group.

    Processes that clean up after the others are killed last, if they have not ended by then.
    """
    import psutil

    mine = [process for process in psutil.process_iter() if _session(process.pid) == leader and is_alive(process)]
    cleaners = [process for process in mine if is_cleaner(process)]
    with suppress(psutil.AccessDenied):
        kill([process for process in mine if process not in cleaners])
    psutil.wait_procs(cleaners, timeout=SETTLE_S)
    with suppress(psutil.AccessDenied):
        kill(cleaners)
    with suppress(ProcessLookupError, PermissionError):  # what has been started meanwhile; nobody is left in it
        os.killpg(leader, signal.SIGKILL)


def is_cleaner(process: psutil.Process) -> bool:
    """Whether it only removes what others leave."""
    import psutil

    try:
        words = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
    return any(program in words for program in CLEANERS)


def _session(pid: int) -> int | None:
    """The number of a process's session; None where it has ended."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


# --- JSON lines ------------------------------------------------------------------------------------------------------


class JsonLines:
    """One end of a connection that carries one JSON text per line. Several threads may write.

    reading, writing: descriptors of pipes or of a socket, which no longer block and stay open; None: the other
    direction alone, or bytes that come by other means (`feed`); longest_bytes: of a message that is read
    """

    def __init__(
        self, reading: int | None = None, writing: int | None = None, longest_bytes: int = LONGEST_BYTES
    ) -> None:
        self._reading, self._writing, self._lock = reading, writing, threading.Lock()
        self._rest, self._longest_bytes, self._is_closed, self._is_torn = bytearray(), longest_bytes, False, False
        self._fault: ValueError | None = None  # of a line behind messages that were returned first
        for descriptor in (reading, writing):
            if descriptor is not None:
                os.set_blocking(descriptor, False)

    @classmethod
    def to_parent(cls) -> JsonLines:
        """Take stdin and stdout for messages; what is printed from now on goes to stderr."""
        writing = os.dup(1)
        os.dup2(2, 1)
        return cls(0, writing)

    def send(self, message: object, within_s: float = math.inf) -> bool:
        """Send a message; False where the other end is closed. Raises TimeoutError where it does not read.

        If a part was sent by then, the connection is closed: no later message may continue a torn line.
        """
        return self.write(json.dumps(message).encode() + b"\n", within_s)

    def write(self, line: bytes, within_s: float = math.inf) -> bool:
        """The same for a message that is JSON by now, with its newline."""
        assert self._writing is not None
        end = time.monotonic() + within_s
        rest = memoryview(line)  # a pipe takes 64 KiB at a time: copies of the rest would be quadratic
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
        """Close the other end's connection. The descriptors stay valid: they are the caller's to close."""
        with open(os.devnull, "r+b", buffering=0) as nothing:
            for descriptor in (self._reading, self._writing):
                if descriptor is None:
                    continue
                os.dup2(nothing.fileno(), descriptor, inheritable=False)
        self._is_closed = self._is_torn = True

    def receive(self, wait_s: float = 0.0) -> list[Any] | None:
        """The messages that have come, once there is something to read or `wait_s` is over; None at the end.

        Raises ValueError where something is no JSON, or longer than any message.
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
            except OSError:  # the other machine has reset the connection, or is unreachable
                content = b""
            self._is_closed = not content
            messages += self.parse(content)
        if self._fault is not None and not messages:
            raise self._fault
        return None if self._is_closed and not messages else messages

    def parse(self, content: bytes) -> list[Any]:
        """The messages that these bytes complete.

        Raises ValueError where a line is no message: at once, or, if messages came before it, at the next call.
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
    """Whether reading or writing does not block, after at most so many seconds."""
    waiting = select.poll()
    waiting.register(descriptor, event)
    return bool(waiting.poll(None if seconds > LONGEST_POLL_S else max(seconds, 0.0) * 1000))


if __name__ == "__main__":
    main(*sys.argv[1:])
