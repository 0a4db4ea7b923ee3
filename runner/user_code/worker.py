"""The process that runs code of the user. Imports only the standard library.

    runner ══ stdin, SIGTERM ══▶ guard ── fork ──▶ worker: imports the file, serves requests
           ◀═ socket ═════════════════════════════▶   one line of JSON per question, one per answer; the runner
                                                      takes those of the worker's own process alone (`sender_of`)
           ◀═ stdout and stderr, one pipe ═════════   what the function prints
           ◀═ a file without a name ═══════════════   where the code is when its time is nearly over

Nothing comes through stdin: its end means that the runner exited, and SIGTERM that it needs no more. The guard runs no
foreign code, so it always notices. It is the subreaper of all processes below it, so it finds and ends
what the function left behind, also in sessions of its own. It does not rely on PR_SET_PDEATHSIG, which fires when the
runner's *thread* that started it ends. The worker does: its parent is the guard's only thread.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import random
import re
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import CodeType, ModuleType
from typing import Any

# the socket and the stack file → never returns before the socket ends
Serve = Callable[[socket.socket, int], None]
# what was loaded, and its path → what to report of it, and what serves it
Prepare = Callable[[Callable[..., Any], str], tuple[Mapping[str, Any], Serve]]
STDIN, STDERR = 0, 2
LOOK_S = 1.0  # between two looks at whether the runner is still our parent
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


# --- the guard -------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str], prepare: Prepare) -> int:
    """argv: descriptors of socket and stack file, file, function, `here` for modules beside it, copy."""
    descriptor, stack, path, name, where, copy = int(arguments[0]), int(arguments[1]), *arguments[2:]
    channel = socket.socket(fileno=descriptor)
    return run_guarded(
        lambda: run_worker(channel, stack, path, name, where == "here", copy, prepare), STDIN, (descriptor, stack)
    )


def run_guarded(work: Callable[[], int], connection: int, passed: Sequence[int]) -> int:
    """Fork a process for `work`, and kill it with all below it when it is no longer needed.

    That is at the end of `work`, of `connection`, or of our parent, or at SIGTERM.

    Returns the exit code of `work`, 128 + N for a signal, 0 if it had not ended by
    itself. passed: descriptors that only `work` uses; those but `connection` are closed here.
    """
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, waking = os.pipe()
    os.set_blocking(waking, False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.close(woken)
        os.close(waking)
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        return work()
    for descriptor in passed:
        if descriptor != connection:
            os.close(descriptor)
    with suppress(ProcessLookupError, PermissionError):  # whoever is first: a kill of the group reaches the child
        os.setpgid(child, child)
    status = _wait(child, parent, connection, woken)
    _kill_descendants(child)
    return 128 - status if status and status < 0 else status or 0


def _wait(child: int, parent: int, connection: int, woken: int) -> int | None:
    """The child's exit code, -N for a signal; None where something else ends the wait."""
    waiting = select.poll()
    waiting.register(connection, 0)  # its end alone is an event
    waiting.register(woken, select.POLLIN)
    status = None
    while status is None:
        ready = dict(waiting.poll(LOOK_S * 1000))
        ends = connection in ready or os.getppid() != parent
        if woken in ready:
            ends |= signal.SIGTERM in os.read(woken, 4096)
        status = _reap_children(child)  # also where something else ends the wait: the child may have ended before
        if ends:
            break
    return status


def _reap_children(child: int) -> int | None:
    """Wait for every process that has ended; the worker's exit code if it is among them."""
    found = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                found = os.waitstatus_to_exitcode(ended[1])
    return found


def _kill_descendants(group: int) -> None:
    """Kill processes and wait for them until no child is left: an orphan below us becomes our child."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(group, 0)
    with suppress(ChildProcessError):
        while True:  # what has left the group; looking for it is slow, so only where there is a child
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            for pid in (children := _children()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for _ in children or [0]:
                os.waitpid(-1, 0)


def _children() -> list[int]:
    """Our children, by /proc: the field after the name and the state is the parent."""
    found, me = [], str(os.getpid())
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[1] == me:
                found.append(int(pid))
    return found


# --- the worker ------------------------------------------------------------------------------------------------------


def run_worker(
    channel: socket.socket, stack: int, path: str, name: str, here: bool, copy: str, prepare: Prepare
) -> int:
    """Import the function or class, report it, and serve requests until the socket ends."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, this process is ended and not the training
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, STDIN)
    os.close(nothing)
    keep_from_children(channel.fileno(), stack)
    faulthandler.enable(STDERR)
    for ours in [module for module in sys.modules if module.partition(".")[0] == "runner"]:
        del sys.modules[ours]  # the user may have a module of this name
    answer(channel, {"started": True})  # before foreign code runs: from now on this process alone is listened to
    try:
        ready, serve = prepare(load_function(path, name, here, copy), path)
    except Exception as error:  # whatever the user's file raises is the answer
        answer(channel, {"failed": describe_error(error, path), "trace": traceback.format_exc()})
        return 0
    answer(channel, {"ready": True, **ready})
    serve(channel, stack)
    return 0


def keep_from_children(*descriptors: int) -> None:
    """Close descriptors in executed programs, and replace them by /dev/null in forked processes.

    So what runs below the function reads no question and writes no answer.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)

    def replace() -> None:
        for descriptor in descriptors:
            os.dup2(nothing, descriptor, inheritable=False)

    os.register_at_fork(after_in_child=replace)


def answer(channel: socket.socket, reply: Mapping[str, Any]) -> None:
    channel.sendall(json.dumps(reply).encode("ascii") + b"\n")


class CopyLoader(importlib.machinery.SourceFileLoader):
    """Imports a module from a copy under its own path, which __file__ and tracebacks show."""

    root = ""  # of the tree of copies

    def exec_module(self, module: ModuleType) -> None:
        """Run the copy."""
        module.__file__ = self.path.removeprefix(self.root)
        super().exec_module(module)

    def get_code(self, fullname: str) -> CodeType:
        """The compiled copy; nothing is cached beside it."""
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path.removeprefix(self.root))
        return code


def find_copies(path: str, copy: str) -> None:
    """Import modules beside `path` from their copies, and those without a copy from their own place."""
    CopyLoader.root = copy.removesuffix(path)
    finder = importlib.machinery.FileFinder.path_hook((CopyLoader, importlib.machinery.SOURCE_SUFFIXES))

    def hook(folder: str) -> importlib.abc.PathEntryFinder:
        if not folder.startswith(CopyLoader.root + os.sep):
            raise ImportError  # another hook finds what is there
        return finder(folder)

    sys.path_hooks.insert(0, hook)
    sys.path.insert(0, os.path.dirname(copy))


def load_function(path: str, name: str, here: bool, copy: str) -> Callable[..., Any]:
    """Import the file as a module of its own name and return the function; raises what the file raises."""
    if here:
        sys.path.insert(0, os.path.dirname(path))
        if copy != path:
            find_copies(path, copy)
    module_name = os.path.splitext(os.path.basename(path))[0]
    loader = CopyLoader(module_name, copy) if copy != path else None
    spec = importlib.util.spec_from_file_location(module_name, copy, loader=loader)
    assert spec is not None and spec.loader is not None  # the file ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise TypeError(f"{name} is {type(function).__name__}, not a function or class")
    return function


@contextmanager
def dump_stack_before_timeout(stack: int, timeout_s: float) -> Iterator[None]:
    """Write the stack to the file `stack` (emptied before) at 90 % of the time limit: it may hang."""
    os.ftruncate(stack, 0)
    os.lseek(stack, 0, os.SEEK_SET)
    faulthandler.dump_traceback_later(timeout_s * 0.9, file=stack)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def innermost_frame(dump: str, path: str) -> str | None:
    """`score.py:2 in score`: the innermost frame of the user's file in faulthandler's dump; else None."""
    written = path.encode("ascii", "backslashreplace").decode()  # as faulthandler writes it
    found = re.search(rf'File "{re.escape(written)}", line (\d+) in (\S+)', dump)
    return f"{os.path.basename(path)}:{found[1]} in {found[2]}" if found else None


def select_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the function names, or all of them if it takes **columns.

    Raises TypeError where it needs one that the data does not have.
    """
    parameters = inspect.signature(function).parameters.values()
    missing = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if absent := [name for name in missing if name not in given]:
        raise TypeError(f"the function has the parameter {', '.join(absent)}; available: {', '.join(given)}")
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return dict(given)
    named = {p.name for p in parameters}
    return {name: value for name, value in given.items() if name in named}


class EpisodeError(Exception):
    """A tool raises it where the episode cannot continue: it is left out, and counted."""

    ends_episode = True


def first_cause(error: BaseException) -> BaseException:
    """The error, or the first one in a group, such as that of a TaskGroup."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe_error(error: BaseException, path: str) -> str:
    """The last line of the traceback, and where in the user's file it came from."""
    error = first_cause(error)
    last = traceback.format_exception_only(error)[-1].strip()
    return f"{last[:400]} ({error_location(error, path)})"


def error_location(error: BaseException, path: str) -> str:
    if isinstance(error, SyntaxError):
        return f"{os.path.basename(error.filename or path)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == path]
    if not own:
        return os.path.basename(path)
    return f"{os.path.basename(path)}:{own[-1].lineno} in {own[-1].name}"


def seed_generators(seed: int) -> None:
    """Give each global random generator in use a seed: a score does not depend on what was scored before."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
