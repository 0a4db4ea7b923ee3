"""The launcher over processes without torch: they start, end, fail and hang together, and nothing is left of them."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.cli.job_builder import compose_job
from runner.core.errors import Interrupted, RunnerError
from runner.launch import supervisor, worker_process
from runner.launch.local import LocalLauncher
from runner.launch.supervisor import Supervisor
from runner.run_dir.folder import RunFolder
from tests.launch.several import alive, gone, state

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toy ranks and samplers, and a launcher that waits less for those that do not end."""
    monkeypatch.setitem(worker_process.PROGRAMS, "rank", ("-m", "tests.launch.toy_rank"))
    monkeypatch.setitem(worker_process.PROGRAMS, "sampler", ("-m", "tests.launch.toy_sampler", "sampler"))
    monkeypatch.setattr(supervisor, "GRACE_S", 0.5)
    monkeypatch.setattr(supervisor, "CAUSE_S", 60.0)
    monkeypatch.setattr(worker_process, "DUMP_S", 0.3)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def a_team(
    folder: Path, monkeypatch: pytest.MonkeyPatch, size: int = 3, timeout_s: float = 60, **asked: str
) -> Supervisor:
    """A team of which `_1="kill"` asks rank 1 to kill itself."""
    monkeypatch.setenv("TOY", json.dumps({rank.removeprefix("_"): what for rank, what in asked.items()}))
    words = ["parallelism=ddp", f"launch.devices={size}", f"parallelism.timeout_s={timeout_s}"]
    spec = compose_job(["+recipe=sft_demo", *words]).spec
    return Supervisor(spec, RunFolder(folder), 1, LocalLauncher(spec))


def ended(folder: Path, one: Supervisor) -> str:
    """What the team's run ends with, the code first; nothing of it runs on."""
    with pytest.raises(RunnerError) as caught:
        one.run()
    assert not alive(said_pids(folder))
    return f"{caught.value.exit_code}: {caught.value}"


def said(folder: Path) -> list[dict[str, Any]]:
    """What each rank found in its environment."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("ranks/*.said"))]


@contextmanager
def meanwhile(look: Callable[[], object]) -> Iterator[None]:
    """Call `look` again and again in a thread while the block runs."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(0.02):
            look()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_each_rank_knows_where_all_meet_and_only_the_first_one_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)))
    a_team(tmp_path, monkeypatch).run()
    ranks = said(tmp_path)
    assert [rank["listener"].isdecimal() for rank in ranks] == [True, False, False]
    assert len({(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in ranks}) == 1
    assert {rank["OMP_NUM_THREADS"] for rank in ranks} == {"2"}, "7 cores for 3 ranks"
    assert {rank["GLOO_SOCKET_IFNAME"] for rank in ranks} == {"lo"}


def test_what_the_user_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    a_team(tmp_path, monkeypatch, size=2).run()
    assert {(rank["OMP_NUM_THREADS"], rank["GLOO_SOCKET_IFNAME"]) for rank in said(tmp_path)} == {("5", "eth7")}


def test_a_killed_rank_is_the_cause_also_where_others_waited_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "GRACE_S", 1.0)
    monkeypatch.setattr(supervisor, "CAUSE_S", 0.1)  # long before the other one would be killed
    text = ended(tmp_path, a_team(tmp_path, monkeypatch, _0="waited", _1="kill", _2="long"))
    assert text.startswith("75: rank 1 of 3 was killed (SIGKILL)") and "continue: run resume" in text


def test_an_error_of_one_rank_is_said_with_its_name_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ended(tmp_path, a_team(tmp_path, monkeypatch, _0="waited", _1="long", _2="data"))
    assert text == "3: rank 2 of 3: line 7 is no JSON"


def test_an_error_that_all_ranks_meet_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "GRACE_S", 60.0)
    assert ended(tmp_path, a_team(tmp_path, monkeypatch, _0="same", _1="same", _2="same")) == "3: line 7 is no JSON"


def test_a_rank_that_ends_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ended(tmp_path, a_team(tmp_path, monkeypatch, _1="wordless"))
    assert text.startswith("9: rank 1 of 3 exited with code 9 and no message; see ")


def test_a_rank_that_hangs_is_named_with_its_place_once_another_has_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = a_team(tmp_path, monkeypatch, timeout_s=40, _0="waited", _1="hang", _2="waited")
    log = tmp_path / "ranks" / "1.log"

    def shorten_wait() -> None:
        if sum(rank.heartbeat.report is not None for rank in one.members) == 2:
            monkeypatch.setattr(supervisor, "CAUSE_S", 0.4)

    def wait_for_stacks(seconds: float) -> None:
        end = time.monotonic() + 60
        while "in stuck_here\n" not in log.read_text() and time.monotonic() < end:
            time.sleep(0.02)

    monkeypatch.setattr(supervisor, "GRACE_S", 60.0)
    monkeypatch.setattr(worker_process, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait_for_stacks))
    with meanwhile(shorten_wait):
        text = ended(tmp_path, one)
    assert text.startswith("6: rank 1 of 3 does not respond; the others waited 40 s")
    assert re.search(r"rank 1 of 3 is in step \d, at .*toy_rank.py:\d+, in stuck_here\n", text), text
    assert "run.log" in text and "ranks/*.log" in text


def test_a_stopped_rank_is_found_by_its_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = a_team(tmp_path, monkeypatch, timeout_s=60, _0="long", _1="stop", _2="long")

    def let_silence_pass() -> None:
        heard = [rank.heartbeat.last_heard for rank in one.members if rank.heartbeat.begun]
        if len(heard) == 3 and min(heard) == heard[1] and state(one.members[1].heartbeat.where["pid"]) == "T":
            one.members[1].heartbeat.last_heard -= 60

    with meanwhile(let_silence_pass):
        text = ended(tmp_path, one)
    assert text.startswith("6: rank 1 of 3 does not respond") and "is stopped (SIGSTOP)" in text


def test_a_signal_is_passed_on_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = a_team(tmp_path, monkeypatch, _0="long", _1="long", _2="long")  # toys die of a signal, as ranks do early

    def interrupt() -> None:
        while len(said_pids(tmp_path)) < 3:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted, match="SIGTERM: stopped immediately") as caught:
        one.run()
    thread.join()
    assert caught.value.exit_code == 143 and gone(said_pids(tmp_path))


def said_pids(folder: Path) -> list[int]:
    """The ranks that have begun; one may be writing."""
    texts = [path.read_text() for path in folder.glob("ranks/*.said")]
    return [json.loads(text)["pid"] for text in texts if text]
