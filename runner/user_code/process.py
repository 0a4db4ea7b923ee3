"""A process that runs code of the user: started, asked, killed with all that it has started.

See `worker.py` for what happens on the other side. The kernel names the sender of everything that arrives on the socket
(SO_PASSCRED); what another process than the worker wrote, one that the function has forked, is dropped.

Of what the code prints, the first lines are shown, and all up to a limit is kept in the run folder, secrets masked.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, Thread
from typing import IO, TYPE_CHECKING, Any

from runner.core.fsync_io import error_reason, sha256
from runner.core.signals import signal_name
from runner.core.subprocess import ChildProcess, JsonLines
from runner.run_dir.manifest import VARIABLES, is_secret_name, redact
from runner.run_dir.user_files import original_path
from runner.user_code import worker

if TYPE_CHECKING:
    from runner.interfaces.model import Decide
    from runner.user_code.config import UserCodeConfig

log = logging.getLogger("runner")
PRINTED_LINES = 20
LOGGED_BYTES = 8 << 20


class CapturedOutput:
    """Takes lines from several threads. Without a file, lines that are not printed are only counted."""

    def __init__(self, label: str, path: Path | None) -> None:
        self._label, self._path = label, path
        self._lock = Lock()
        self._lines = self._kept = self._dropped = 0
        self._has_logged = False

    def add_line(self, text: str) -> None:
        """A line that was printed."""
        with self._lock:
            self._lines += 1
            if self._lines <= PRINTED_LINES:
                log.info("%s| %s", self._label, text)
            if self._lines == PRINTED_LINES:
                log.info("%s| … further lines: %s", self._label, self._path or "not stored, only counted")
            if not self._keep(text) and self._lines > PRINTED_LINES:
                self._dropped += 1

    def append_logged(self, lines: Sequence[str]) -> None:
        """What the function gave to TRL's log_extra and log_metric: for the file only, which is said once."""
        if not self._has_logged:
            self._has_logged = True
            log.info("%s: log_extra and log_metric go to %s, not to the metrics", self._label, self._path or "nowhere")
        for line in lines:
            self.append_to_file(line)

    def append_to_file(self, text: str) -> None:
        """Text for the file only."""
        with self._lock:
            self._keep(text)

    def close(self) -> None:
        """Print how many lines there were."""
        if self._lines > PRINTED_LINES:
            lost = f", {self._dropped} of them dropped" if self._dropped else ""
            where = f" in {self._path}" if self._path is not None else ""
            log.info("%s| %d lines were printed%s%s", self._label, self._lines, where, lost)
        self._lines = self._dropped = 0

    def _keep(self, text: str) -> bool:
        if self._path is None or self._kept > LOGGED_BYTES:
            return False
        line = f"{redact(text)}\n".encode(errors="replace")
        self._kept += len(line)
        try:
            with self._path.open("ab") as file:
                file.write(line)
        except OSError as error:  # in a thread that must go on reading what the function prints
            log.warning("%s cannot be written: %s; what follows is not kept", self._path, error_reason(error))
            self._path = None
            return False
        return True


START_S = 120.0  # for importing the file and what it imports
END_S = 10.0
GOING_S = 10.0  # between the end of a socket and the end of its process
LINE_BYTES = 2000
STACK_BYTES = 1 << 20
READ_BYTES = 1 << 16
# The environment of a function: what the manifest records, and what programs need to find their files
PREFIXES = (*VARIABLES["recorded_prefixes"], *VARIABLES["user_code_prefixes"])
NAMES = {*VARIABLES["recorded"], *VARIABLES["user_code"]}
CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group


KILLED = f"killed by {signal.SIGKILL.name}"


class WorkerDiedError(Exception):
    """A process ended in the middle of its work; in words, how."""


class WorkerStartError(Exception):
    """The file cannot be imported, or has no such function."""


@dataclass(frozen=True, slots=True)
class FunctionTarget:
    """The function or class to run.

    imports_siblings: modules beside the file can be imported; env: extra variables; copy: the file to read in place of
    `file`, in a tree of copies that ends with the path of `file`; variables: of its environment, with their values
    """

    file: Path
    function: str
    imports_siblings: bool = True
    env: tuple[str, ...] = ()
    copy: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: UserCodeConfig, decide: Decide) -> FunctionTarget:
        """What a config names; `decide` records the digest of its file. Raises SpecError if it is not there."""
        config.preflight()
        source = config.file.resolve()
        file, digest = original_path(source), sha256(source)[:16]
        decide.record_fact(f"{config.group}.path", f"{file}:{config.function}", f"sha256 {digest}")
        return cls(file, config.function, env=config.env, copy=source)

    @property
    def label(self) -> str:
        """What it is called in logs."""
        return f"{self.file.name}:{self.function}"


def variables_without_secrets(env: Sequence[str]) -> dict[str, str]:
    """The environment of a user's code: no variable with a secret, unless `env` names it."""
    kept = (k for k in os.environ if k in env or (k.startswith(PREFIXES) and not is_secret_name(k)) or k in NAMES)
    return {name: os.environ[name] for name in kept}


class UserProcess:
    """A running process. Raises WorkerStartError if it does not get ready.

    program: the file that has the other side; ready: what it reports of the user's code
    """

    def __init__(self, program: Path, target: FunctionTarget, output: CapturedOutput) -> None:
        self._output, self._file = output, str(target.file)
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115 - end() closes it
        self._channel, theirs = socket.socketpair()
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._sender, self._is_forgery_reported = 0, False  # 0: not known before the first message
        self._arrived: list[Any] = []  # and not yet returned
        with theirs:
            passed = (theirs.fileno(), self._stack.fileno())
            command = [sys.executable, "-P", "-u", str(program), *map(str, passed), self._file, target.function]
            command += ["here" if target.imports_siblings else "apart", str(target.copy or target.file)]
            self._process = ChildProcess(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=passed,
                env={**variables_without_secrets(target.env), **target.variables},
            )
        self._lines = JsonLines(writing=self._channel.fileno())
        assert self._process.stdout is not None
        self._printing = Thread(target=forward_output, args=(self._process.stdout, output), daemon=True)
        self._printing.start()
        try:
            self._get_ready()
        except BaseException:
            self.end()
            raise

    def request(self, question: bytes, timeout_s: float) -> dict[str, Any]:
        """The answer to a question in JSON. Raises TimeoutError, EOFError if the process is gone."""
        end = time.monotonic() + timeout_s
        if self._arrived:
            raise EOFError("more than one response to a request")
        self._lines.write(question + b"\n", timeout_s)
        return self._receive(end - time.monotonic())

    def send_descriptor(self, descriptor: int, timeout_s: float) -> None:
        """Pass a descriptor to the process. Raises OSError if it has exited."""
        self._channel.settimeout(timeout_s)
        socket.send_fds(self._channel, [b"d"], [descriptor])

    def hang_location(self) -> str:
        """Where the function was shortly before its deadline: `, at FILE:LINE in FUNCTION`; empty if unknown."""
        dump = os.pread(self._stack.fileno(), STACK_BYTES, 0).decode("ascii", errors="replace")
        self._output.append_to_file(dump.rstrip())
        place = worker.innermost_frame(dump, self._file)
        return f", at {place}" if place else ""

    def exit_reason(self) -> str:
        """How the process ended that has left the socket, in words."""
        self._process.ends_within(GOING_S)  # one that lives on without the socket is ended like any other
        return self.end()

    def end(self) -> str:
        """End the process and all below it; how it ended, in words."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        # Where a forked child of ours still holds stdin open, closing it has no effect.
        code = self._process.stop(END_S)
        self._channel.close()
        self._stack.close()
        self._printing.join(END_S)
        return exit_words(code)

    def _get_ready(self) -> None:
        end = time.monotonic() + START_S
        try:
            self._receive(START_S)
            answer = self._receive(end - time.monotonic())
        except TimeoutError as error:
            raise WorkerStartError(f"the import takes longer than {START_S:g} s") from error
        except EOFError as error:
            raise WorkerStartError(f"the process ended during the import: {self.exit_reason()}") from error
        self.ready = answer
        if "failed" in answer:
            self._output.append_to_file(answer["trace"])
            raise WorkerStartError(answer["failed"])

    def _receive(self, within_s: float) -> dict[str, Any]:
        """The worker's next message. Raises TimeoutError, and EOFError at the end or for anything else."""
        end = time.monotonic() + within_s
        readable = select.poll()
        readable.register(self._channel, select.POLLIN)
        while not self._arrived:
            if not readable.poll(max(end - time.monotonic(), 0.0) * 1000):
                raise TimeoutError(f"no response within {within_s:g} s")
            try:
                content, sender = sender_of(self._channel)
                if not content:
                    raise EOFError
                if self._is_worker(sender):
                    self._arrived += self._lines.parse(content)
            except (ValueError, ConnectionError) as error:
                raise EOFError(str(error)) from error
            if not self._arrived and time.monotonic() > end:
                raise TimeoutError(f"no response within {within_s:g} s")
        return dict(self._arrived.pop(0))

    def _is_worker(self, sender: int) -> bool:
        """Whether what arrived is the worker's; the first message is, and comes before foreign code runs."""
        self._sender = self._sender or sender
        if sender not in (self._sender, 0) and not self._is_forgery_reported:
            self._is_forgery_reported = True
            log.warning("process %d, which the user's code started, wrote to its socket; this is ignored", sender)
        return sender == self._sender


def sender_of(channel: socket.socket) -> tuple[bytes, int]:
    """The next bytes on a Unix socket with SO_PASSCRED, empty at its end, and the writing process.

    The kernel joins no bytes of two processes. Process 0: unknown.
    """
    content, ancillary, _, _ = channel.recvmsg(READ_BYTES, socket.CMSG_SPACE(CREDENTIALS.size))
    found = [data for level, kind, data in ancillary if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)]
    return content, CREDENTIALS.unpack(found[0])[0] if found else 0


def forward_output(stream: IO[bytes], output: CapturedOutput) -> None:
    """Forward printed output line by line; a long line in parts."""
    with stream:
        while line := stream.readline(LINE_BYTES):
            output.add_line(line.decode("utf-8", errors="replace").rstrip("\r\n"))


def exit_words(code: int) -> str:
    """How a process ended, by the exit code of its guard."""
    number = -code if code < 0 else code - 128
    return f"killed by {signal_name(number)}" if 0 < number < signal.NSIG else f"it exited with code {code}"
