"""Code of completions runs against tests in a real sandbox, which lets it do nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.core.errors import EnvironmentProblem
from runner.reward import code as sandbox
from runner.reward.code import build, sandbox_problem
from runner.reward.config import CodeConfig
from tests.ports import free_port
from tests.reward.samples import answer, scores
from tests.reward.test_http import service

PROBLEM = sandbox_problem(CodeConfig())
needs_sandbox = pytest.mark.skipif(PROBLEM is not None, reason=f"no sandbox: {PROBLEM}")
DOUBLE = "def double(x):\n    return 2 * x"
TESTS = ["assert double(2) == 4", "assert double(-1) == -2"]
PRINTED = {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10"]}


def score(text: str, tests: Any, **options: Any) -> float | None:
    """The score of one completion."""
    return scores(CodeConfig(**{"max_failures": 10_000, **options}), answer(text, tests=tests))[0]


def block(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


@needs_sandbox
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
    ],
)
def test_code_that_passes_scores_1(text: str, tests: Any, expected: float | None) -> None:
    assert score(text, tests) == expected


def outcome(code: str, **options: Any) -> str:
    """What code prints in the sandbox, the kind of its exception included."""
    wrapped = "try:\n" + "\n".join(f"    {line}" for line in code.splitlines())
    wrapped += "\nexcept BaseException as error:\n    print(type(error).__name__)"
    return sandbox.run_in_bubblewrap(CodeConfig(**options), wrapped, "").stdout.strip()


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("import socket; socket.create_connection(('1.1.1.1', 53), 2)", "OSError"),
        ("import os; print(os.listdir('/sys/class/net') if os.path.exists('/sys') else [])", "[]"),
        ("import os; print(sorted(set(os.environ) - {'PWD', 'LC_CTYPE'}))", "[]"),
        ("import os; print(os.path.exists('/etc/passwd'), os.path.exists('/home'))", "False False"),
        ("open('/usr/x', 'w')", "OSError"),
        ("open('/x', 'w')", "OSError"),
        ("import os; os.setuid(0)", "PermissionError"),
        ("open('/tmp/x', 'w').write('1'); print('written')", "written"),
        ("import os; print(len([p for p in os.listdir('/proc') if p.isdigit()]) < 5)", "True"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("with open('/tmp/x', 'wb') as f: f.write(bytes(1 << 21))", "OSError"),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY,) * 2)", "ValueError"),
    ],
)
def test_the_sandbox_has_no_network_no_files_no_variables_and_limits(code: str, printed: str) -> None:
    assert outcome(code, memory_bytes=1 << 28) == printed


@needs_sandbox
def test_the_number_of_processes_is_limited_and_none_is_left() -> None:
    marker = f"1234.{os.getpid()}"
    forks = "import os, time\nfor n in range(100):\n    try: made = os.fork()\n    except OSError: print(n); break\n"
    forks += f"    if not made:\n        os.setsid(); os.execv('/usr/bin/sleep', ['sleep', '{marker}'])"
    result = sandbox.run_in_bubblewrap(CodeConfig(processes=8), forks, "")
    assert result.succeeded and 1 <= int(result.stdout) < 8
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _is_readable(path)]
    assert not any(marker.encode() in command for command in commands)


def _is_readable(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


@needs_sandbox
def test_code_that_hangs_or_prints_without_end_fails_in_time() -> None:
    assert score(block("while True: pass"), TESTS, timeout_s=1.0) == 0.0
    assert score(block("while True: print('x' * 1000)"), TESTS, timeout_s=20.0, output_bytes=10_000) == 0.0


@needs_sandbox
def test_no_secret_of_the_run_is_visible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    (tmp_path / "file").write_text("secret")
    assert outcome(f"print(open('{tmp_path}/file').read())") == "FileNotFoundError"
    assert outcome("import os; print(os.environ.get('JUDGE_API_KEY'))") == "None"
    assert outcome("print(open('/proc/1/environ').read())") in {"", "PermissionError"}


@needs_sandbox
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


def test_without_bubblewrap_the_reason_is_said_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EnvironmentProblem, match=r"(?s)bwrap is not installed.*apt install bubblewrap.*reward\.url="):
        build(CodeConfig())


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
