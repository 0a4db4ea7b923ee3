"""Code of completions runs against tests in a real sandbox, which lets it do nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem, StorageError
from runner.reward import code as sandbox
from runner.reward.code import SANDBOXES, Sandbox, sandbox_problem
from runner.reward.config import CodeConfig
from runner.reward.rules import last_code_block
from tests.ports import free_port
from tests.reward.samples import answer, made, scores
from tests.reward.test_http import service

PROBLEMS = {name: sandbox_problem(run, CodeConfig(timeout_s=60.0)) for name, run in SANDBOXES.items()}


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(PROBLEMS[name] is not None, reason=f"no sandbox of {name}: {PROBLEMS[name]}")


@pytest.fixture(params=[pytest.param(name, marks=needs(name)) for name in SANDBOXES])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The only sandbox that this machine has."""
    monkeypatch.setattr(sandbox, "SANDBOXES", {request.param: SANDBOXES[request.param]})
    return str(request.param)


DOUBLE = "def double(x):\n    return 2 * x"
TESTS = ["assert double(2) == 4", "assert double(-1) == -2"]
PRINTED = {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10"]}


def score(text: str, tests: Any, **options: Any) -> float | None:
    """The score of one completion."""
    return scores(CodeConfig(**{"max_failures": 10_000, "timeout_s": 60.0, **options}), answer(text, tests=tests))[0]


def block(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Install:\n```bash\npip install numpy\n```\nThen:\n```python\nx\n```", "x"),
        ("```json\n{}\n```\n```\nx\n```\nIt prints\n```text\n1\n```", "x"),
        ("```python\nx\n```\nIt prints\n```\n1\n```", "x"),
        ("```Python\nx\n```", "x"),
        ("```python3 title=x\r\nx\n```\r", "x"),
        ("``` py\nx\n\n  y\n```  ", "x\n\n  y"),
        ("<answer>```python\nx\n```</answer>", "x"),
        ("1. a\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y"),
        ("````python\n(\n```\nx\n```\n)\n````", "(\n```\nx\n```\n)"),
        ("```python\ns = '```'\n```", "s = '```'"),
        ("```python\nx\n```\nBetter:\n```python\ny", "x"),
        ("```python\nx\nNo:\n```python\ny\n```", "y"),
        ("<think>\n```python\nx\n```\nor\n```python\n</think>\n```\ny\n```", "y"),
        ("Use ```x``` or ``y``:\n```\nx\n```", "x"),
        ("Wrap it in ```.\n```python\nx\n```", "x"),
        ("```python\n  x\n  y```\nDone", "  x\n  y"),
        ("```python\n```", ""),
        ("```bash\nls\n```", None),
        ("```python\nx", None),
        ("x", None),
    ],
)
def test_fences_are_read_in_pairs_and_the_last_block_of_python_counts(text: str, expected: str | None) -> None:
    assert last_code_block(text) == expected


def test_the_code_is_the_last_block_or_what_extract_finds() -> None:
    text = f"Install:\n```bash\npip install numpy\n```\nThen:\n```python\n{DOUBLE}\n```"
    assert score(text, TESTS) == 1.0
    assert score(f"<code>{DOUBLE}</code>", TESTS, extract="<code>(.*?)</code>") == 1.0
    assert score(DOUBLE, TESTS, extract="(.+)") == 1.0
    assert score(DOUBLE, TESTS) == 0.0


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize(
    ("text", "tests", "expected"),
    [
        (block(DOUBLE), TESTS, 1.0),
        (block(DOUBLE), "\n".join(TESTS), 1.0),
        (block(DOUBLE.replace("2", "3")), TESTS, 0.0),
        (block("def double("), TESTS, 0.0),
        (block(DOUBLE) + block("import sys; sys.exit(0)"), TESTS, 0.0),  # the last block counts
        (block(f"{DOUBLE}\nimport os; os._exit(0)"), TESTS, 0.0),  # exit code 0, and no test was run
        ("no block of code", TESTS, 0.0),
        (block("print(2 * int(input()))"), PRINTED, 1.0),
        (block("print(4)"), PRINTED, 0.0),
        (block("print(2 * int(input()))\nraise SystemExit(3)"), PRINTED, 0.0),
        (block(DOUBLE), [], None),
        (block(DOUBLE), {"inputs": ["1"]}, None),
        (block(DOUBLE), 7, None),
        (block(DOUBLE), "def test_it():\n    assert double(2) == 5", None),  # nothing calls it
        (block(DOUBLE), "# double(2) == 4", None),
        (block(DOUBLE), "assert double(2) ==", None),
    ],
)
def test_code_that_passes_scores_1(text: str, tests: Any, expected: float | None) -> None:
    assert score(text, tests) == expected


ADD = "def add(a, b):\n    return a + b"
SOLUTION = "class Solution:\n    def add(self, a: List[int], b: int) -> List[int]:\n        return [a[0] + b]"
STDIN = '{"inputs": ["1 2\\n", "3 4\\n"], "outputs": ["3\\n", "7\\n"]}'
STDIN_CASES = [
    {"input": "1 2", "output": "3", "testtype": "stdin"},
    {"input": "3 4", "output": "7", "testtype": "stdin"},
]
FUNCTIONAL = '[{"input": "[1]\\n2", "output": "[3]", "testtype": "functional"}]'
SUM = "print(sum(map(int, input().split())))"


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize(
    ("code", "tests", "expected"),
    [
        ("print('hello')", STDIN, 0.0),
        (SUM, STDIN, 1.0),
        (SUM, STDIN_CASES, 1.0),
        (SUM, json.dumps(STDIN_CASES), 1.0),
        (SUM.replace("sum", "max"), json.dumps(STDIN_CASES), 0.0),
        (SUM, {"inputs": [["1 2"]], "outputs": [["3"]]}, 1.0),  # lines, as in APPS
        (ADD, '{"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}', 1.0),  # arguments and value, as in APPS
        (ADD, '{"fn_name": "add", "inputs": ["1\\n2", "3\\n4"], "outputs": ["3", "7"]}', 1.0),  # text, as in verl
        (ADD, '{"fn_name": "add", "inputs": ["1\\n2", "3\\n4"], "outputs": ["3", "8"]}', 0.0),
        (ADD, '{"fn_name": "plus", "inputs": ["1\\n2"], "outputs": ["3"]}', 0.0),
        ("print('hello')", '{"fn_name": "add", "inputs": ["1\\n2"], "outputs": ["3"]}', 0.0),
        ("def keys(d): return sorted(d)[0] + 1", {"fn_name": "keys", "inputs": [[{"2": 1}]], "outputs": [3]}, 1.0),
        ("def pair(a): return (a, (a,))", {"fn_name": "pair", "inputs": [[1]], "outputs": [[1, [1]]]}, 1.0),
    ],
)
def test_tests_of_apps_taco_and_verl_are_read_as_their_projects_read_them(
    code: str, tests: Any, expected: float
) -> None:
    assert score(block(code), tests) == expected


@pytest.mark.usefixtures("kind")
def test_functional_test_cases_of_livecodebench_take_the_function_from_metadata() -> None:
    config = CodeConfig(column="public_test_cases", max_failures=100, timeout_s=60.0)
    named = answer(block(SOLUTION), public_test_cases=FUNCTIONAL, metadata='{"func_name": "add"}')
    wrong = answer(block(SOLUTION.replace("+", "-")), public_test_cases=FUNCTIONAL, metadata={"func_name": "add"})
    assert scores(config, named, wrong, answer(block(SOLUTION), public_test_cases=FUNCTIONAL)) == [1.0, 0.0, None]
    both = {"public_test_cases": FUNCTIONAL, "private_test_cases": FUNCTIONAL, "metadata": {"func_name": "add"}}
    assert score(block(SOLUTION), both) == 1.0


def outcome(code: str, kind: str = "bubblewrap", **options: Any) -> str:
    """What code prints in the sandbox, the kind of its exception included."""
    wrapped = "try:\n" + "\n".join(f"    {line}" for line in code.splitlines())
    wrapped += "\nexcept BaseException as error:\n    print(type(error).__name__)"
    return SANDBOXES[kind](CodeConfig(**{"timeout_s": 60.0, **options}), wrapped, "").stdout.strip()


COMMON = [
    ("import os; os.memfd_create('x')", "PermissionError"),
    ("import ctypes; print(ctypes.CDLL(None).shmget(0, 4096, 0o1600))", "-1"),
    ("try: open('/dev/shm/x', 'w')\nexcept OSError: print('refused')", "refused"),
    ("a = [open('/dev/null') for _ in range(100)]", "OSError"),
    ("import os; print(sorted(set(os.environ) - {'PWD', 'LC_CTYPE'}))", "[]"),
    ("import os\ntry: os.setuid(0)\nexcept OSError: print('refused')", "refused"),
    ("x = bytearray(1 << 30)", "MemoryError"),
    ("import resource as r; r.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY,) * 2)", "ValueError"),
]


@needs("bubblewrap")
@pytest.mark.parametrize(
    ("code", "printed"),
    [
        *COMMON,
        ("open('/usr/x', 'w')", "OSError"),
        ("import socket; socket.create_connection(('1.1.1.1', 53), 2)", "OSError"),
        ("import os; print(os.listdir('/sys/class/net') if os.path.exists('/sys') else [])", "[]"),
        ("import os; print(os.path.exists('/etc/passwd'), os.path.exists('/var'))", "False False"),
        ("open('/x', 'w')", "OSError"),
        ("open('/tmp/x', 'w').write('1'); print('written')", "written"),
        ("import os; print(len([p for p in os.listdir('/proc') if p.isdigit()]) < 5)", "True"),
        ("with open('/tmp/x', 'wb') as f: f.write(bytes(1 << 21))", "OSError"),
    ],
)
def test_the_sandbox_has_no_network_no_files_no_variables_and_limits(code: str, printed: str) -> None:
    assert outcome(code, memory_bytes=1 << 28) == printed


@needs("Landlock")
@pytest.mark.parametrize(
    ("code", "printed"),
    [
        *COMMON,
        ("open('/usr/x', 'w')", "PermissionError"),
        ("import socket; socket.create_connection(('1.1.1.1', 53), 2)", "PermissionError"),
        ("import socket; socket.socket(socket.AF_UNIX)", "PermissionError"),
        ("open('/etc/passwd')", "PermissionError"),
        ("open('/proc/1/environ')", "PermissionError"),
        ("import os; os.listdir('/')", "PermissionError"),
        ("open('/tmp/x', 'w')", "PermissionError"),
        ("import tempfile as t; t.TemporaryFile().write(b'1'); print(t.gettempdir() != '/tmp')", "True"),
        ("with open('x', 'wb') as f: f.write(bytes(1 << 21))", "OSError"),
        ("import os; os.chmod('answer.py', 0o777)", "PermissionError"),
        ("import os; os.truncate('answer.py', 0)", "PermissionError"),
        ("import os; os.kill(os.getppid(), 0)", "PermissionError"),
        ("import fcntl, os; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())", "PermissionError"),
        ("import fcntl; fcntl.fcntl(0, 15, bytes(8))", "PermissionError"),  # F_SETOWN_EX
        ("import fcntl, socket as s; fcntl.ioctl(s.socketpair()[0], 0x8901, bytes(4))", "PermissionError"),
        ("import fcntl, socket as s; fcntl.ioctl(s.socketpair()[0], 0x8902, bytes(4))", "PermissionError"),
        ("import ctypes; print(ctypes.CDLL(None).prctl(1, 0, 0, 0, 0))", "-1"),
        ("import fcntl; print(fcntl.fcntl(0, fcntl.F_GETFL) >= 0)", "True"),
        ("import os; os.setsid()", "PermissionError"),
        ("import resource as r, os; r.prlimit(os.getppid(), r.RLIMIT_CPU, (1, 1))", "PermissionError"),
        ("import os; os.sched_setaffinity(0, [0])", "PermissionError"),
        ("import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))", "-1"),
        ("import ctypes; print(ctypes.CDLL(None).syscall(425, 1, 0))", "-1"),  # io_uring_setup
    ],
)
def test_landlock_and_seccomp_leave_no_network_files_signals_or_new_sessions(code: str, printed: str) -> None:
    assert outcome(code, "Landlock", memory_bytes=1 << 28) == printed


@needs("Landlock")
def test_landlock_makes_no_namespace_and_leaves_no_process() -> None:
    spaces = [Path(f"/proc/self/ns/{name}") for name in ("user", "pid", "net", "mnt", "ipc")]
    show = "import os; print(*(os.stat(f'/proc/self/ns/{n}').st_ino for n in ('user', 'pid', 'net', 'mnt', 'ipc')))"
    assert outcome(show, "Landlock") == " ".join(str(path.stat().st_ino) for path in spaces)
    if os.geteuid() == 0:  # each run is a user of its own
        leaves_no_process(sandbox.run_in_landlock, "")
    else:  # the limit counts this user's other processes and threads, which start and end meanwhile
        leaves_no_process(sandbox.run_in_landlock, "", processes=200, others=200)


@pytest.fixture
def deep_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files. It is not in tmp_path: pytest cannot remove what is nested deeply."""
    folder = Path(tempfile.mkdtemp(prefix="run-test-"))
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(folder))
    yield folder
    subprocess.run(["sh", "-c", 'chmod -R u+rwX "$0"; rm -rf "$0"', folder], capture_output=True, check=True)


@needs("Landlock")
def test_folders_that_code_nests_or_closes_are_removed(deep_folder: Path) -> None:
    nested = "import os\nos.mkdir('blind', 0o300)\nos.mkdir('blind/x')\n"
    nested += "for _ in range(1500): os.mkdir('a'); os.chdir('a')\nprint('done')"
    sandbox.run_in_landlock(CodeConfig(timeout_s=60.0), nested, "")
    assert list(deep_folder.iterdir()) == []


def test_code_that_fills_its_folder_scores_0_and_leaves_the_disk_to_others(kind: str, deep_folder: Path) -> None:
    """Each run has space of its own: what one fills does not take it from the next."""
    config = CodeConfig(memory_bytes=1 << 26, timeout_s=200.0)
    used, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            said = subprocess.run(["du", "-sk", deep_folder], capture_output=True, text=True).stdout
            used.append(int(said.split()[0]) << 10)

    watching = threading.Thread(target=watch)
    watching.start()
    fills = "import itertools\nfor n in itertools.count():\n    open(str(n), 'wb').write(bytes(1 << 20))"
    started = time.monotonic()
    try:
        assert not SANDBOXES[kind](config, fills, "").is_success
    finally:
        stop.set()
        watching.join()
    assert time.monotonic() - started < 150 and list(deep_folder.iterdir()) == []
    assert max(used) < 1 << 28
    assert score(block(DOUBLE), TESTS) == 1.0


def test_a_full_disk_of_ours_ends_the_run_with_its_path(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    reward = made(CodeConfig(timeout_s=60.0))
    monkeypatch.setenv("RUNNER_FAILPOINT", "reward.code:ENOSPC")
    monkeypatch.setenv("TMPDIR", "/scratch")
    with pytest.raises(StorageError, match=r"/scratch.*the disk is full\n.*TMPDIR"):
        reward.score([[answer(block(DOUBLE), tests=TESTS)]])
    reward.close()


def test_a_machine_without_landlock_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = sandbox.LANDLOCK.read_text().replace(
        "CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444", "CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 9444"
    )
    (tmp_path / "sandbox.py").write_text(source)  # a number that no kernel knows
    monkeypatch.setattr(sandbox, "LANDLOCK", tmp_path / "sandbox.py")
    said = sandbox_problem(sandbox.run_in_landlock, CodeConfig())
    assert said == "Landlock: Function not implemented (Landlock needs Linux 5.13, with lsm=landlock)"


@needs("bubblewrap")
def test_the_number_of_processes_is_limited_and_none_is_left() -> None:
    leaves_no_process(sandbox.run_in_bubblewrap, "os.setsid(); ")


def leaves_no_process(run: Sandbox, first: str, processes: int = 8, others: int = 0) -> None:
    """Run code that forks more than `processes`, each of which begins with `first`.

    others: how many processes and threads that the limit counts may end meanwhile
    """
    marker = f"1234.{os.getpid()}"
    forks = "import os, time\nfor n in range(1000):\n    try: made = os.fork()\n    except OSError: print(n); break\n"
    forks += f"    if not made:\n        {first}os.execv('/usr/bin/sleep', ['sleep', '{marker}'])"
    result = run(CodeConfig(processes=processes, timeout_s=60.0), forks, "")
    assert result.is_success and 1 <= int(result.stdout) < processes + others
    end = time.monotonic() + 60
    while f"sleep\0{marker}\0".encode() in _commands():  # the kernel ends them after bubblewrap
        assert time.monotonic() < end, "processes are left"
        time.sleep(0.01)


def _commands() -> Iterator[bytes]:
    """The command of every process."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield path.read_bytes()


@pytest.mark.usefixtures("kind")
def test_a_short_limit_of_the_code_is_not_that_of_the_trial() -> None:
    """A sandbox that starts slowly is not taken for one that does not work."""
    made(CodeConfig(timeout_s=0.001)).close()


@pytest.mark.usefixtures("kind")
def test_code_that_hangs_or_prints_without_end_fails_in_time() -> None:
    assert score(block("while True: pass"), TESTS, timeout_s=1.0) == 0.0
    assert score(block("while True: print('x' * 1000)"), TESTS, timeout_s=20.0, output_bytes=10_000) == 0.0


def test_no_secret_of_the_run_is_visible(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    (tmp_path / "file").write_text("secret")
    missing = {"FileNotFoundError", "PermissionError"}
    assert outcome(f"print(open('{tmp_path}/file').read())", kind) in missing
    assert outcome("import os; print(os.environ.get('JUDGE_API_KEY'))", kind) == "None"
    assert outcome("print(open('/proc/1/environ').read())", kind) in {"", "PermissionError"}


@needs("bubblewrap")
@pytest.mark.skipif(os.geteuid() != 0 or not Path("/usr/bin/python3").exists(), reason="needs root and its Python")
def test_a_user_who_is_not_root_gets_a_user_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for name, value in {"executable": "/usr/bin/python3", "prefix": "/usr", "base_prefix": "/usr"}.items():
        monkeypatch.setattr(sys, name, value)
    options = {"user": 65534, "group": 65534, "extra_groups": []}
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **given: start(*words, **given, **options))
    assert score(block(DOUBLE), TESTS) == 1.0
    assert outcome("import os; os.unshare") in {"", "AttributeError"}
    assert outcome("import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))") == "-1"


def test_without_a_sandbox_the_reasons_are_said_before_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "sandbox.py").write_text("raise SystemExit('Landlock is off')")
    monkeypatch.setattr(sandbox, "LANDLOCK", tmp_path / "sandbox.py")
    said = r"(?s)bubblewrap: bwrap is not installed; Landlock: Landlock is off.*apt install bubblewrap.*reward\.url="
    with pytest.raises(EnvironmentProblem, match=said):
        CodeConfig().preflight()


@needs("Landlock")
def test_landlock_in_place_of_bubblewrap_is_an_automatic_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    decide = Decisions()
    made(CodeConfig(timeout_s=60.0), decide=decide).close()
    [entry] = decide.entries
    assert str(entry) == (
        "reward: one of Landlock and seccomp, without namespaces instead of a sandbox of bubblewrap "
        "(bwrap is not installed)"
    )


def test_a_service_runs_the_code() -> None:
    run = {"status": "Finished", "return_code": 0, "stdout": "4\n", "stderr": ""}
    late = run | {"status": "TimeLimitExceeded", "return_code": None}
    replies = [
        {"status": "Success", "run_result": run},
        {"status": "Failed", "run_result": late},
        {"status": "SandboxError", "run_result": None},
    ]
    with service(lambda _: (200, replies.pop(0))) as (url, asked):
        text, only = block("print(4)"), {"inputs": ["2\n"], "outputs": ["4"]}
        url = url.partition("/score")[0]
        assert [score(text, only, url=url, timeout_s=3.0) for _ in range(3)] == [1.0, 0.0, None]
    assert asked[0].pop("code").strip() == "print(4)"
    expected = {"language": "python", "stdin": "2\n", "run_timeout": 3.0, "memory_limit_MB": 1024}
    assert asked[0] == expected | {"path": "/run_code"}


def test_a_service_that_is_gone_gives_no_score() -> None:
    assert score(block(DOUBLE), TESTS, url=f"http://127.0.0.1:{free_port()}") is None


def test_a_limit_that_a_service_does_not_read_is_refused() -> None:
    changed: dict[str, Any] = {"output_bytes": 100, "processes": 2}
    assert not CodeConfig(**changed).problems(None)
    config = CodeConfig(url="http://localhost:8080", memory_bytes=1 << 26, timeout_s=3.0)
    assert not config.problems(None)
    found = config.model_copy(update=changed).problems(None)
    assert [key for key, _ in found] == ["reward.output_bytes", "reward.processes"]
