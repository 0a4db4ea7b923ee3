"""Run the code of completions against tests: in a sandbox here, or in a SandboxFusion service.

    completion ──extract──▶ code ─┬─ Assertions ──▶ one run: the last line of its output shows that all tests passed
                                  ├─ CallTests ──▶ one run: its last line has the results
                                  └─ ProgramTests ──▶ a run per input: what it prints is the output

bwrap (https://github.com/containers/bubblewrap): namespaces of its own for users, network, processes and IPC; of the
files only Python and the system's libraries, read-only; no variables. Root's processes cannot be limited in number and
may read root's files, so under root the code runs as an otherwise unused user, instead of a user namespace.

Where namespaces are forbidden, as in many containers, `landlock_sandbox` closes the process of the code itself.

The files of a run are bounded: by the size of its tmpfs, or under Landlock by looking at its folder while it runs. What
no file system bounds (memory without a name, shared memory of System V) is refused.

Tests run in the process of the code, which can fool them on purpose. Outputs are compared here: they cannot be fooled.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from runner.core import fsync_io
from runner.core.errors import EnvironmentProblem
from runner.core.untrusted_text import shorten
from runner.interfaces.rewards import (
    GroupScorer,
    ScoringFailures,
    UnscorableError,
    encode_json,
    require_column,
    score_each,
)
from runner.reward.code_tests import Assertions, CallTests, ProgramTests, Tests, parse_tests, prints_same, read_results
from runner.reward.config import CodeConfig
from runner.reward.landlock_sandbox import CALLS, OPEN_FILES, seccomp_filter
from runner.reward.rules import last_code_block, last_match

if TYPE_CHECKING:
    from runner.interfaces import Completion, Decide

PROGRAM = "/tmp/answer.py"
READABLE = ("/usr", "/lib", "/lib64", "/bin")
NAMESPACES = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")
OWN_USER = ("--unshare-user", "--disable-userns", "--cap-drop", "ALL")
# under root: what is needed to become another user, and lost by it
OTHER_USER = ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
FIRST_FREE_USER = 1 << 30  # of user numbers: far above those of people and of containers
KNOWN_TESTS = 4096  # texts of which it is remembered whether they pass without code
SERVICE_MARGIN_S = 30.0  # for a service to queue a run, beside the run itself
UNBOUNDED = ("memfd_create", "memfd_secret", "shmget")  # calls that make memory which no limit counts
TRIAL_S = 60.0  # for a sandbox to start on a busy machine, whatever the limit of the code
WATCH_S = 0.05  # between two looks at the folder of a run
MOST_FILES = 10_000  # in it
LANDLOCK = Path(__file__).with_name("landlock_sandbox.py")

# The first lines of the process: limits, then the code. argv: memory, file size, processes, CPU seconds, user.
START = f"""
import os, resource, runpy, sys
memory, size, processes, seconds, user = map(int, sys.argv[1:])
if user:
    os.setgroups([]); os.setresgid(user, user, user); os.setresuid(user, user, user)
for limit, value in (
    (resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_FSIZE, size),
    (resource.RLIMIT_NPROC, processes), (resource.RLIMIT_AS, memory), (resource.RLIMIT_NOFILE, {OPEN_FILES}),
):
    resource.setrlimit(limit, (value, value))
sys.argv = [{PROGRAM!r}]
runpy.run_path({PROGRAM!r}, run_name="__main__")
"""


class SandboxError(Exception):
    """The sandbox itself failed: nothing is known of the code."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run of code ended. exit_code: None where a limit ended it"""

    exit_code: int | None
    stdout: str
    stderr: str = ""

    @property
    def is_success(self) -> bool:
        """Whether the code ended by itself, without an error."""
        return self.exit_code == 0


Runner = Callable[[str, str], RunResult]  # code, standard input; raises SandboxError
Sandbox = Callable[[CodeConfig, str, str], RunResult]


def run_in_bubblewrap(config: CodeConfig, code: str, stdin: str) -> RunResult:
    """Run code in a sandbox that ends with the run, or after `timeout_s`. Raises SandboxError."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError("bwrap is not installed")
    rules = seccomp_filter({name: CALLS[name] for name in UNBOUNDED}, {})
    with (
        _file(code) as program, _file(rules) as calls,
        _file(stdin) as given, _file() as out, _file() as stderr, _file() as status,
    ):  # fmt: skip
        passed = (program.fileno(), calls.fileno(), status.fileno())
        command = [bwrap, *_sandbox(config, *passed), sys.executable, "-I", "-c", START, *map(str, _limits(config))]
        exit_code = _run(command, config.timeout_s, (given, out, stderr), passed)
        # bwrap writes it where the sandbox was made and Python started
        if exit_code is not None and b'"exit-code"' not in _read_all(status):
            said = _read_all(stderr)[:1000].decode(errors="replace").strip()
            raise SandboxError(said or "bwrap failed without a message")
        return _result(exit_code, out, stderr)


def run_in_landlock(config: CodeConfig, code: str, stdin: str) -> RunResult:
    """Run code in a process under Landlock and seccomp, without namespaces. Raises SandboxError.

    Its files may take `memory_bytes`, and at most its share of half of what is free on the disk.
    """
    limits = _limits(config)
    with (
        _temporary_folder() as folder,
        _file(stdin) as given, _file() as out, _file() as stderr, _file() as status,
    ):  # fmt: skip
        program = Path(folder, Path(PROGRAM).name)
        program.write_text(code, encoding="utf-8", errors="replace")
        if user := limits[-1]:
            os.chown(folder, user, user)
        words = [status.fileno(), program.name, *limits, *READABLE, sys.base_prefix, sys.prefix]
        command = [sys.executable, "-I", "-c", LANDLOCK.read_text(encoding="utf-8"), *map(str, words)]
        space = min(config.memory_bytes, fsync_io.free_bytes(Path(folder)) // (2 * config.workers))
        exit_code = _run(command, config.timeout_s, (given, out, stderr), (status.fileno(),), folder, space)
        if not _read_all(status):
            raise SandboxError(_last_line(stderr) or "the process ended before its sandbox was ready")
        return _result(exit_code, out, stderr)


def _result(exit_code: int | None, out: IO[bytes], stderr: IO[bytes]) -> RunResult:
    return RunResult(exit_code, *(_read_all(file).decode(errors="replace") for file in (out, stderr)))


def _run(
    command: Sequence[str],
    timeout_s: float,
    files: tuple[IO[bytes], IO[bytes], IO[bytes]],
    passed: Sequence[int],
    folder: str | None = None,
    space: int = 0,
) -> int | None:
    """Exit code of a command in a process group of its own, which is killed.

    None: it took too long, or more than `space` bytes in the folder that it runs in.
    """
    given, out, stderr = files
    end = time.monotonic() + timeout_s
    with subprocess.Popen(
        command, stdin=given, stdout=out, stderr=stderr, env={}, pass_fds=passed, start_new_session=True, cwd=folder
    ) as process:
        try:
            while (left := end - time.monotonic()) > 0 and (folder is None or _takes_at_most(folder, space)):
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(left if folder is None else min(left, WATCH_S))
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # bwrap ends its namespace with it (--die-with-parent)


def _takes_at_most(folder: str, space: int) -> bool:
    """Whether the files of a folder take at most `space` bytes of the disk, and none of them is hidden."""
    used, count, folders = 0, 0, [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # it was removed meanwhile
                        used += entry.stat(follow_symlinks=False).st_blocks * 512
                    folders += [entry.path] if entry.is_dir(follow_symlinks=False) else []
                    count += 1
                    if used > space or count > MOST_FILES:
                        return False
        except FileNotFoundError:
            continue
        except OSError:  # its mode, or the length of its path
            return False
    return True


def _sandbox(config: CodeConfig, program: int, calls: int, status: int) -> Iterator[str]:
    """The options of bwrap."""
    yield from (*NAMESPACES, *(OTHER_USER if os.geteuid() == 0 else OWN_USER), "--die-with-parent", "--new-session")
    yield from ("--size", str(config.memory_bytes), "--perms", "1777", "--tmpfs", "/tmp")
    readable = dict.fromkeys((*READABLE, sys.base_prefix, sys.prefix))
    above = dict.fromkeys(str(folder) for path in readable for folder in reversed(Path(path).parents[:-1]))
    for folder in above:  # which bwrap would make for root alone
        yield from ("--perms", "0755", "--dir", folder) if folder != "/tmp" else ()
    for path in readable:
        yield from ("--ro-bind-try", path, path)
    yield from ("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev")
    yield from ("--perms", "0444", "--file", str(program), PROGRAM, "--chdir", "/tmp", "--remount-ro", "/")
    yield from ("--seccomp", str(calls), "--json-status-fd", str(status))


def _limits(config: CodeConfig) -> tuple[int, ...]:
    """Memory, file size, processes, CPU seconds, and the user; 0: this one."""
    user = FIRST_FREE_USER + secrets.randbelow(FIRST_FREE_USER) if os.geteuid() == 0 else 0
    return config.memory_bytes, config.output_bytes, config.processes, math.ceil(config.timeout_s) + 1, user


def _file(content: str | bytes = b"") -> IO[bytes]:
    """A file without a name, read from its start."""
    fsync_io.failpoint("reward.code")
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(content if isinstance(content, bytes) else content.encode(errors="replace"))
    file.seek(0)
    return file


@contextmanager
def _temporary_folder() -> Iterator[str]:
    """A folder for code to fill. `rm` empties it: shutil.rmtree fails on deeply nested folders."""
    folder = tempfile.mkdtemp(prefix="run-code-")
    try:
        yield folder
    finally:
        script = 'rm -rf "$0" 2>/dev/null || { chmod -R u+rwX "$0"; rm -rf "$0"; }'
        command, path = ["/bin/sh", "-c", script, folder], {"PATH": "/usr/bin:/bin"}
        removed = subprocess.run(command, env=path, capture_output=True, text=True, check=False)
        if removed.returncode:
            raise SandboxError(f"{folder} cannot be removed: {removed.stderr[:200].strip()}")


def _read_all(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _last_line(file: IO[bytes]) -> str:
    return _read_all(file)[-1000:].decode(errors="replace").strip().rpartition("\n")[2]


SANDBOXES: Mapping[str, Sandbox] = {"bubblewrap": run_in_bubblewrap, "Landlock": run_in_landlock}


def run_in_service(config: CodeConfig, code: str, stdin: str) -> RunResult:
    """Run code by SandboxFusion's POST /run_code. Raises SandboxError.

    Source: https://bytedance.github.io/SandboxFusion
    """
    from runner.reward.http import ServiceFailure, post_json

    assert config.url is not None
    url = f"{config.url.rstrip('/')}/run_code"
    body = {"code": code, "language": "python", "stdin": stdin, "run_timeout": config.timeout_s}
    body["memory_limit_MB"] = config.memory_bytes >> 20
    try:
        reply = post_json(url, encode_json(body), config.timeout_s + SERVICE_MARGIN_S)
    except ServiceFailure as failure:
        raise SandboxError(str(failure)) from failure
    run = reply.get("run_result") if isinstance(reply, Mapping) else None
    if not isinstance(run, Mapping) or reply.get("status") == "SandboxError":
        raise SandboxError(f"{url}: the response has no run_result: {shorten(str(reply), 200)}")
    exit_code = run.get("return_code") if run.get("status") == "Finished" else None
    return RunResult(exit_code, str(run.get("stdout") or ""), str(run.get("stderr") or ""))


def sandbox_problem(run: Sandbox, config: CodeConfig) -> str | None:
    """Why code cannot be run in a sandbox here; None if it can. Tries it, for at least TRIAL_S."""
    patient = config.model_copy(update={"timeout_s": max(config.timeout_s, TRIAL_S)})
    try:
        result = run(patient, "print(6 * 7)", "")
    except (SandboxError, OSError) as error:
        return str(error)
    return None if result.stdout.strip() == "42" else "a sandbox starts, but Python does not work in it"


def find_sandbox(config: CodeConfig) -> tuple[Sandbox, dict[str, str]]:
    """The first sandbox that works, and why those before it do not. Raises EnvironmentProblem."""
    reasons = dict[str, str]()
    for name, run in SANDBOXES.items():
        if (reason := sandbox_problem(run, config)) is None:
            return run, reasons
        reasons[name] = reason
    raise EnvironmentProblem(
        f"reward=code cannot make a sandbox here: {'; '.join(f'{name}: {why}' for name, why in reasons.items())}\n"
        "  apt install bubblewrap  # 0.8 or newer; user namespaces must be allowed\n"
        "  or reward.url=http://HOST:PORT of a SandboxFusion service (docs/rewards.md)"
    )


def passes(run: Runner, code: str, tests: Tests) -> bool:
    """Whether code passes tests. Raises SandboxError."""
    if isinstance(tests, ProgramTests):
        return all(
            _prints(run, code, given, wanted, tests.exact)
            for given, wanted in zip(tests.inputs, tests.outputs, strict=True)
        )
    word = secrets.token_hex(16)  # code that ends the process before the tests does not print it
    if isinstance(tests, CallTests):
        result = run(tests.program(code, word), json.dumps(tests.calls))
        return result.is_success and tests.accepts(read_results(result.stdout, word))
    result = run(tests.program(code, word), "")
    return result.is_success and result.stdout.rstrip().endswith(word)


def _prints(run: Runner, code: str, given: str, wanted: str, exact: bool) -> bool:
    result = run(code, given)
    return result.is_success and prints_same(result.stdout, wanted, exact)


def build(config: CodeConfig, *, decide: Decide, **_: Any) -> GroupScorer:
    """The reward. Raises EnvironmentProblem where code cannot be run."""
    backend, reasons = (run_in_service, {}) if config.url is not None else find_sandbox(config)
    for name, reason in reasons.items():
        decide("reward", f"a sandbox of {name}", "one of Landlock and seccomp, without namespaces", reason)

    def run(text: str, stdin: str) -> RunResult:
        try:
            return backend(config, text, stdin)
        except OSError as error:
            raise fsync_io.full_disk_error(error) or SandboxError(fsync_io.error_reason(error)) from error

    extract = last_code_block if config.extract is None else partial(last_match, config.extract)

    @lru_cache(maxsize=KNOWN_TESTS)
    def assert_nothing(tests: Assertions) -> bool:
        return passes(run, "", tests)

    def rate(completion: Completion) -> float:
        value = require_column(completion, config.column, "column")
        tests = parse_tests(value, completion.prompt.columns.get("metadata"))
        code = extract(completion.text)
        try:
            if isinstance(tests, Assertions) and assert_nothing(tests):
                raise UnscorableError("no tests", f"the tests assert nothing: they pass without code: {value!r:.80}")
            return float(code is not None and passes(run, code, tests))
        except SandboxError as error:
            raise UnscorableError("the sandbox failed", str(error)) from error

    remedy = "set reward.column to a column of tests" if config.url is None else "check the service of reward.url"
    faults = ScoringFailures("reward=code", config.max_failures, remedy, EnvironmentProblem)
    return GroupScorer(score_each(rate), faults, config.workers)
