"""The W&B sink against the real `wandb`: what arrives, and that no fault of it reaches the run."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from runner.core import subprocess as processes
from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem
from runner.run_dir.folder import RunFolder
from runner.tracker.config import UploadConfig, WandbConfig
from runner.tracker.console import Console
from runner.tracker.jsonl import JsonlTracker, NoTracker, truncate_after
from runner.tracker.upload_process import UploadProcess, parse_options
from runner.tracker.uploader import UploadTracker, build
from tests.command import run
from tests.small import UNJUDGED

ROOT = Path(__file__).resolve().parents[2]
KEY = "0123456789abcdef0123456789abcdef01234567"
# The library's calls take up to 15 s when it is stuck; a busy machine delays what does not wait for it by less.
PROMPT_S = 14.0
SPEC = {"name": "toy", "optimizer": {"lr": 1e-3}, "data": {"path": f"https://me:{KEY}@host/x"}}


class Run:
    """A run that writes its two files and has an upload process, as the loop does it."""

    made: ClassVar[list[Run]] = []  # by the test that runs

    def __init__(
        self,
        root: Path,
        mode: str = "offline",
        deadline_s: float = 200.0,
        first: int = 0,
        strict: bool = False,
        kind: type[UploadConfig] = WandbConfig,
    ) -> None:
        root.mkdir(exist_ok=True)
        self.folder, self.screen, self.decide = RunFolder(root), io.StringIO(), Decisions(strict)
        self.console = Console(self.folder.log, self.screen)
        self.jsonl = JsonlTracker(self.folder)
        config = kind(mode=mode, deadline_s=deadline_s, project="p", tags=("t",))
        self.tracker = build(
            config,
            folder=self.folder,
            spec=SPEC,
            run_id="toy-1",
            name="toy",
            first_step=first,
            console=self.console,
            decide=self.decide,
        )
        self.durations_s: list[float] = []
        self.made.append(self)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            values = {"train/loss": 1 / step, "eval/loss": float("nan")}
            self.jsonl.log(step, values)
            self.timed(lambda s=step, v=values: self.tracker.log(s, v))

    def sample(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        self.jsonl.log_samples(step, rows)
        self.tracker.log_samples(step, rows)

    def timed(self, call: Callable[[], None]) -> None:
        begin = time.perf_counter()
        call()
        self.durations_s.append(time.perf_counter() - begin)

    def is_prompt(self) -> bool:
        """Whether no call blocked: the slowest on a busy machine, and the median as on any other."""
        return max(self.durations_s) < PROMPT_S and statistics.median(self.durations_s) < 0.1

    def pid(self) -> int:
        assert isinstance(self.tracker, UploadTracker) and self.tracker._process is not None
        return self.tracker._process.pid

    def wait_for(self, what: Callable[[], Any], seconds: float = 60.0) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.tracker.log(0, {})
            if found := what():
                return found
            time.sleep(0.05)
        raise AssertionError("it never came\n" + self.screen.getvalue())

    def opened(self) -> dict[str, Any]:
        assert isinstance(self.tracker, UploadTracker)
        tracker = self.tracker
        return dict(self.wait_for(lambda: tracker._events.get("open")))

    def finish(self, status: str = "done") -> str:
        self.jsonl.finish(status)
        [line] = self.tracker.finish(status)
        return line

    def end(self) -> None:
        """End what a failed test has left: its upload process with all below, and open files."""
        self.jsonl.finish("failed")
        if isinstance(self.tracker, UploadTracker) and self.tracker._process is not None:
            self.tracker._kill_process()


@pytest.fixture(autouse=True)
def ended_runs() -> Iterator[None]:
    """Nothing of a test's runs is left to the next test, whether it failed or not."""
    yield
    while Run.made:
        Run.made.pop().end()


def records(root: Path) -> list[dict[str, Any]]:
    """Everything in the one current W&B file of a run, read by W&B's own tool."""
    [file] = root.glob("wandb/offline-run-*/run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def history(found: list[dict[str, Any]]) -> dict[int, float]:
    items = [r["history"]["item"] for r in found if r["type"] == "history"]
    rows = [(i["train/step"], i["train/loss"]) for i in items if "train/loss" in i]
    assert len(rows) == len(dict(rows)), "a step was written twice"
    return dict(rows)


def exit_code(found: list[dict[str, Any]]) -> int:
    [code] = [r["exit"].get("exit_code", 0) for r in found if r["type"] == "exit"]
    return int(code)


def survivors(root: Path) -> list[str]:
    """Command lines of living processes that name this run's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and processes.process_identity(int(entry.name)):
            try:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if str(root) in words:
                found.append(words)
    return found


def gone(pids: Sequence[Sequence[int]], seconds: float = 120.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if all(processes.process_identity(pid) != (pid, started) for pid, started in pids):
            return True
        time.sleep(0.05)
    return False


def test_a_process_that_ends_before_it_is_killed_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, nobody = Run(tmp_path / "run"), 2**22 + 1  # above every process number
    assert isinstance(run.tracker, UploadTracker)
    run.wait_for(lambda: run.tracker._events.get("open"))
    opened = list(run.tracker._events["open"]["processes"])
    run.tracker._events["open"]["processes"].append([nobody, 7])
    identity = processes.process_identity
    monkeypatch.setattr(processes, "process_identity", lambda pid: (pid, 7) if pid == nobody else identity(pid))
    run.tracker._kill_process()
    assert opened and gone(opened)


def expected(last: int) -> dict[int, float]:
    return {step: 1 / step for step in range(1, last + 1)}


def test_all_that_was_logged_is_read_back_and_no_secret_is_on_the_disk(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    run = Run(tmp_path / "run")
    run.steps(1, 40)
    run.sample(40, [{"prompt": "2+2", "answer": "4", "exact": True}, {"prompt": "key?", "answer": KEY, "reward": 0.5}])
    line = run.finish()
    assert line == f"upload    wandb sync {next((tmp_path / 'run').glob('wandb/offline-run-*'))}  # offline"
    assert run.is_prompt()
    found = records(tmp_path / "run")
    assert history(found) == expected(40)
    assert exit_code(found) == 0
    [begin] = [r["run"] for r in found if r["type"] == "run"]
    assert begin["run_id"] == "toy-1" and begin["project"] == "p" and begin["tags"] == ["t"]
    assert begin["config"]["update"]["optimizer"] == {"lr": 1e-3}
    [metric] = [r["metric"] for r in found if r["type"] == "metric" and r["metric"].get("glob_name") == "*"]
    assert metric["step_metric"] == "train/step"
    [table] = (tmp_path / "run").glob("wandb/offline-run-*/files/media/table/*.json")
    content = json.loads(table.read_text())
    assert content["columns"] == ["prompt", "answer", "exact", "reward"]
    assert content["data"] == [["2+2", "4", True, None], ["key?", "***", None, 0.5]]
    assert [p for p in tmp_path.rglob("*") if p.is_file() and KEY.encode() in p.read_bytes()] == []
    assert survivors(tmp_path / "run") == []


def test_a_resumed_run_has_the_same_id_and_each_step_once(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.steps(1, 12)
    run.finish("interrupted")
    assert exit_code(records(tmp_path / "run")) == 1
    time.sleep(1.0)  # wandb names its folder by the second
    truncate_after(run.folder, 8, 2)
    again = Run(tmp_path / "run", first=8)
    again.steps(9, 20)
    again.finish()
    found = records(tmp_path / "run")
    assert history(found) == expected(20)
    assert [r["run"]["run_id"] for r in found if r["type"] == "run"] == ["toy-1"]
    assert len(list((tmp_path / "run/wandb/superseded").iterdir())) == 1


PARENT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.tracker.test_wandb import Run
run = Run(Path(sys.argv[1]))
run.steps(1, 25)
print(run.pid(), flush=True)
if sys.argv[2] == "early":
    time.sleep(60)
print(run.opened()["processes"], flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("moment", [pytest.param("early", marks=pytest.mark.slow), "running"])
def test_kill_9_of_the_run_leaves_a_whole_file_and_no_process(tmp_path: Path, moment: str) -> None:
    command = [sys.executable, "-c", PARENT.format(root=str(ROOT)), str(tmp_path / "run"), moment]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        sink = processes.process_identity(int(parent.stdout.readline()))
        children = json.loads(parent.stdout.readline()) if moment == "running" else []
        parent.kill()
    assert sink is not None
    assert gone([sink, *children])
    found = records(tmp_path / "run")
    assert history(found) == expected(25)
    assert exit_code(found) == 1
    assert survivors(tmp_path / "run") == []


@contextmanager
def server(kind: str) -> Iterator[str]:
    """The address of: nothing at all, a listener that never answers, or a server that knows no page."""
    if kind == "refuses":
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            yield f"http://127.0.0.1:{closed.getsockname()[1]}"
    elif kind == "silent":
        with socket.create_server(("127.0.0.1", 0)) as listener:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    else:
        with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as http:
            thread = threading.Thread(target=http.serve_forever)
            thread.start()
            yield f"http://127.0.0.1:{http.server_port}"
            http.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("kind", "key", "said"),
    [
        ("refuses", KEY, "cannot be reached"),
        ("silent", KEY, "127.0.0.1"),
        pytest.param("answers", "", "No API key configured", marks=pytest.mark.slow),
    ],
)
def test_online_without_a_server_or_a_key_becomes_offline(
    tmp_path: Path, monkeypatch: Any, kind: str, key: str, said: str
) -> None:
    with server(kind) as address:
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("HOME", str(tmp_path))  # no .netrc of the user's
        if key:
            monkeypatch.setenv("WANDB_API_KEY", key)
        run = Run(tmp_path / "run", mode="online")
        run.steps(1, 10)
        run.opened()
        run.steps(11, 20)
        line = run.finish()
    [decision] = run.decide.entries
    assert (decision.feature, decision.wanted, decision.got) == ("tracker.mode", "online", "offline")
    assert said in decision.reason
    assert line.startswith("upload    wandb sync ") and line.endswith("  # offline")
    assert run.is_prompt()
    assert history(records(tmp_path / "run")) == expected(20)
    assert [p for p in (tmp_path / "run").rglob("*") if p.is_file() and KEY.encode() in p.read_bytes()] == []


def core_of(run: Run) -> int:
    """The process of wandb-core."""
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid, _ in run.opened()["processes"]}
    return next(pid for pid, name in names.items() if b"wandb-core" in name)


@pytest.mark.slow
def test_a_killed_wandb_core_is_replaced_and_everything_is_written_again(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.steps(1, 10)
    before = run.opened()
    os.kill(core_of(run), signal.SIGKILL)
    run.wait_for(lambda: run.opened()["processes"] != before["processes"])  # though nothing is logged meanwhile
    run.steps(11, 20)
    run.steps(21, 30)
    line = run.finish()
    assert "wandb sync" in line
    assert run.is_prompt()
    assert history(records(tmp_path / "run")) == expected(30)
    assert gone(before["processes"])


def test_a_wandb_core_that_ends_because_the_run_ends_is_not_replaced(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb/sink.json").write_text('{"deadline_s": 1.0}')
    sink = UploadProcess(parse_options([str(tmp_path / "wandb/sink.json")]))
    sink._services = [(7, 7)]

    def finish(pid: int) -> None:
        """While the watching thread looks at the process, the other one begins to finish, which ends it."""
        sink._services = []

    looks = iter([False])
    monkeypatch.setattr(processes, "process_identity", finish)
    monkeypatch.setattr(sink, "_run_has_ended", lambda: next(looks))
    monkeypatch.setattr(sink, "_restart", pytest.fail)
    with pytest.raises(StopIteration):  # it looks once more
        sink._watch()


@pytest.mark.slow
def test_a_stopped_wandb_core_does_not_hold_up_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", deadline_s=30.0)
    run.steps(1, 10)
    opened = run.opened()
    os.kill(core_of(run), signal.SIGSTOP)
    run.steps(11, 20)
    begin = time.monotonic()
    line = run.finish()
    assert time.monotonic() - begin < 30.0 + PROMPT_S
    assert run.is_prompt()
    assert "wandb sync" in line
    assert history(records(tmp_path / "run")) == expected(20)
    assert gone(opened["processes"]) and survivors(tmp_path / "run") == []


@pytest.mark.slow
def test_a_killed_sink_is_started_again_and_leaves_nothing_out(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.steps(1, 10)
    before, opened = run.pid(), run.opened()
    os.kill(before, signal.SIGKILL)
    run.wait_for(lambda: run.pid() != before)
    run.steps(11, 20)
    run.finish()
    assert "restarting it" in run.screen.getvalue()
    assert history(records(tmp_path / "run")) == expected(20)
    assert gone(opened["processes"])


@pytest.mark.slow
def test_a_sink_that_is_stuck_is_ended_at_the_deadline_and_can_be_replayed(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", deadline_s=1.0)
    run.steps(1, 10)
    opened = run.opened()
    os.kill(run.pid(), signal.SIGSTOP)
    begin = time.monotonic()
    line = run.finish()
    assert time.monotonic() - begin < 1.0 + PROMPT_S
    assert "incomplete" in line and "metrics.jsonl has every number" in line
    assert gone(opened["processes"]) and survivors(tmp_path / "run") == []
    replay = line.partition("write it again: ")[2].split()
    assert replay[:3] == ["python", "-m", "runner.tracker.upload_process"]
    time.sleep(1.0)  # wandb names its folder by the second
    subprocess.run([sys.executable, *replay[1:]], cwd=ROOT, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    assert history(records(tmp_path / "run")) == expected(10)


def test_without_the_package_one_line_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what Python itself writes there for a package that is not there
    run = Run(tmp_path / "run")
    run.steps(1, 3)
    assert isinstance(run.tracker, NoTracker)
    assert [str(d) for d in run.decide.entries] == [
        "tracker: none instead of wandb (wandb is not installed: pip install wandb, or type tracker=none)"
    ]
    assert run.tracker.finish("done") == []
    run.jsonl.finish("done")
    with pytest.raises(EnvironmentProblem, match="tracker=none"):
        Run(tmp_path / "strict", strict=True)


def test_a_strict_run_does_not_go_on_offline_but_a_failed_one_keeps_its_own_error(
    tmp_path: Path, monkeypatch: Any
) -> None:
    with server("refuses") as address:
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        run = Run(tmp_path / "run", mode="online", strict=True)
        with pytest.raises(EnvironmentProblem, match="offline instead of online"):
            run.wait_for(lambda: False)
        assert "wandb sync" in run.finish("failed")
        again = Run(tmp_path / "again", mode="online", strict=True)
        assert "wandb sync" in again.finish("failed")
    assert survivors(tmp_path) == []


def test_a_package_that_cannot_be_imported_does_not_stop_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "broken/wandb").mkdir(parents=True)
    (tmp_path / "broken/wandb/__init__.py").write_text("raise ImportError('no such symbol')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    run = Run(tmp_path / "run")
    run.steps(1, 3)
    line = run.finish()
    assert "cannot be imported: no such symbol" in line


def test_a_variable_that_contradicts_the_spec_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    for name, value in {"WANDB_MODE": "disabled", "WANDB_DIR": "/elsewhere", "WANDB_RUN_ID": "mine"}.items():
        monkeypatch.setenv(name, value)
    run = Run(tmp_path / "run")
    run.steps(1, 2)
    said = [str(entry).partition(" (")[0] for entry in run.decide.entries]
    assert said[0] == "tracker.mode: offline instead of WANDB_MODE=disabled"
    assert [one.partition(" instead of ")[2] for one in said[1:]] == ["WANDB_DIR=/elsewhere", "WANDB_RUN_ID=mine"]
    assert "wandb sync" in run.finish()


def test_the_sink_imports_no_torch() -> None:
    program = "import runner.tracker.upload_process, sys; sys.exit('torch' in sys.modules or 'wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


@pytest.mark.slow
def test_a_run_whose_server_never_answers_ends_with_its_results(tmp_path: Path) -> None:
    """The server accepts connections, and that is all: a black hole."""
    words = [word for word in UNJUDGED if not word.startswith("tracker=")]
    online = ("tracker=wandb", "tracker.mode=online", "tracker.deadline_s=15", "steps=2")
    with server("silent") as address:
        begin = time.monotonic()
        said = run(*words, *online, cwd=tmp_path, WANDB_BASE_URL=address, WANDB_API_KEY=KEY, HOME=str(tmp_path))
    assert time.monotonic() - begin < 100
    assert "wandb sync" in said and "done      2 steps" in said, said
    lines = (tmp_path / "outputs/latest/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
