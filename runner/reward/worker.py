"""The process that runs a user's reward function. Imports only the standard library.

    runner ══ stdin, SIGTERM ══▶ guard ── fork ──▶ worker: imports the file, calls the function
           ◀═ socket ═════════════════════════════▶   one line of JSON per question, one per answer; the runner
                                                      takes those of the worker's own process alone (`sender_of`)
           ◀═ stdout and stderr, one pipe ═════════   what the function prints
           ◀═ a file without a name ═══════════════   where the function is when its time is nearly over

Nothing comes through stdin: its end means that the runner exited, and SIGTERM that it needs no more. The guard runs no
foreign code, so it always notices. It is the subreaper of all processes below it, so it finds and ends
what the function left behind, also in sessions of its own. It does not rely on PR_SET_PDEATHSIG, which fires when the
runner's *thread* that started it ends. The worker does: its parent is the guard's only thread.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import math
import os
import random
import re
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import CodeType, ModuleType
from typing import Any

STDIN, STDERR = 0, 2
LOOK_S = 1.0  # between two looks at whether the runner is still our parent
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


# --- the guard -------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """argv: descriptors of socket and stack file, file, function, `here` for modules beside it, copy."""
    descriptor, stack, path, name, where, copy = int(arguments[0]), int(arguments[1]), *arguments[2:]
    runner = os.getppid()
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
        return run_worker(socket.socket(fileno=descriptor), stack, path, name, where == "here", copy)
    os.close(descriptor)
    os.close(stack)
    status = run_guard(child, runner, woken)
    return 128 - status if status < 0 else status


def run_guard(child: int, runner: int, woken: int) -> int:
    """Wait until the worker ends, the runner ends or sends SIGTERM; then end all processes below.

    Returns the worker's exit code, -N for a signal, 0 if it had not ended by itself.
    """
    status = None
    while status is None:
        ready, _, _ = select.select([STDIN, woken], [], [], LOOK_S)
        if STDIN in ready or os.getppid() != runner:
            break
        if woken in ready and signal.SIGTERM in os.read(woken, 4096):
            break
        status = _reap_children(child)
    _kill_descendants(child)
    return status or 0


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
    while True:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        for pid in (children := _children()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            for _ in children or [0]:
                os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    """Our children, by /proc: the field after the name and the state is the parent."""
    found, me = [], str(os.getpid())
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[1] == me:
                found.append(int(pid))
    return found


# --- the worker ------------------------------------------------------------------------------------------------------


def run_worker(channel: socket.socket, stack: int, path: str, name: str, here: bool, copy: str) -> int:
    """Import the function, report it, and answer requests until the socket ends."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, this process is ended and not the training
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, STDIN)
    os.close(nothing)
    _keep_from_children(channel.fileno(), stack)
    faulthandler.enable(STDERR)
    me = os.getpid()
    _answer(channel, {"started": True})  # before foreign code runs: from now on this process alone is listened to
    try:
        function = load_function(path, name, here, copy)
    except Exception as error:  # whatever the user's file raises is the answer
        _answer(channel, {"failed": describe_error(error, path), "trace": traceback.format_exc()})
        return 0
    _answer(channel, {"ready": True})
    for line in channel.makefile("rb"):
        question = json.loads(line)
        with dump_stack_before_timeout(stack, question["timeout_s"]):
            reply = call_function(function, question, path)
        if os.getpid() != me:
            os._exit(0)  # the function forked and its child came back: only one of the two may answer
        _answer(channel, reply)
    return 0


def _keep_from_children(*descriptors: int) -> None:
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


def _answer(channel: socket.socket, reply: Mapping[str, Any]) -> None:
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
    function = getattr(module, name, None)
    if not callable(function):
        raise TypeError(f"{name} is {type(function).__name__}, not a function")
    return function


def call_function(function: Callable[..., Any], question: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Call the function for one group: {"values": [...], "faults": [[kind, message, samples], ...]}."""
    size, logged = int(question["size"]), list[str]()
    given = dict(question["arguments"])
    if "trainer_state" in given:  # a user's function, in TRL's signature
        given["trainer_state"] = TrainerState(**given["trainer_state"])
        given["log_extra"] = lambda column, values: logged.append(f"log_extra {column}: {list(values)!r}")
        given["log_metric"] = lambda name, value: logged.append(f"log_metric {name}: {value}")
    _seed(question["seed"])
    try:
        returned = function(**select_arguments(function, given))
        if inspect.isawaitable(returned):
            returned = asyncio.run(_await_result(returned))
        return validate_scores(returned, size) | {"logged": logged}
    except Exception as error:  # foreign code may raise anything; it is reported, and this group has no scores
        kind = f"{type(error).__name__} at {_error_location(error, path)}"
        reply = {"values": [None] * size, "faults": [[kind, describe_error(error, path), size]]}
        return reply | {"trace": traceback.format_exc()}


class TrainerState:
    """TRL's argument `trainer_state`, with what is known here."""

    def __init__(self, global_step: int, max_steps: int) -> None:
        self.global_step, self.max_steps = global_step, max_steps

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state.{name} is not known to a run; it has: {', '.join(vars(self))}")


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


async def _await_result(returned: Any) -> Any:
    return await returned


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


def validate_scores(returned: Any, size: int) -> dict[str, Any]:
    """What was returned as scores: a finite float or None for each of `size` samples, and what was wrong."""
    if not isinstance(returned, Iterable) or isinstance(returned, str | bytes | Mapping | set | frozenset):
        return _invalid_scores(f"expected a list of {size} scores, got {_short_repr(returned)}", size)
    values = list(returned)
    if len(values) != size:
        return _invalid_scores(
            f"expected {size} scores, one for each completion, got {len(values)}: {_short_repr(values)}", size
        )
    scores, faults = [], []
    for i, value in enumerate(values):
        score, fault = _as_score(value)
        scores.append(score)
        if fault:
            faults.append(
                [fault, f"score {i + 1} of {size} is {_short_repr(value)}; expected a finite number or None", 1]
            )
    return {"values": scores, "faults": faults}


def _invalid_scores(message: str, size: int) -> dict[str, Any]:
    return {"values": [None] * size, "faults": [["wrong number of scores", message, size]]}


def _as_score(value: Any) -> tuple[float | None, str | None]:
    """(score, kind of fault); None is no fault: the function has no score for the sample."""
    if value is None:
        return None, None
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        return None, "not a number"
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array of several numbers, an int of 400 digits
        return None, "not a number"
    return (score, None) if math.isfinite(score) else (None, "not finite")


def describe_error(error: BaseException, path: str) -> str:
    """The last line of the traceback, and where in the user's file it came from."""
    last = traceback.format_exception_only(error)[-1].strip()
    return f"{last[:400]} ({_error_location(error, path)})"


def _error_location(error: BaseException, path: str) -> str:
    if isinstance(error, SyntaxError):
        return f"{os.path.basename(error.filename or path)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == path]
    if not own:
        return os.path.basename(path)
    return f"{os.path.basename(path)}:{own[-1].lineno} in {own[-1].name}"


def _short_repr(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # the repr of a foreign object may fail; its type is all that is known then
        text = f"an object whose repr raises {type(error).__name__}"
    return f"{text[:100]} ({type(value).__name__})"


def _seed(seed: int) -> None:
    """Give each global random generator in use a seed: a score does not depend on what was scored before."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
