"""What a job wants of Ray, who sits where, and the process that an actor stands by; jobs on Ray: test_ray_jobs.py."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.cli.job_builder import compose_job
from runner.core.errors import EnvironmentProblem, Interrupted, RankLost, RunnerError, SpecError
from runner.core.rank_info import RankInfo
from runner.launch import worker_process
from runner.launch.exit_cause import JobFailed, is_final
from runner.launch.heartbeat import HeartbeatReader
from runner.launch.ray import actor_process as children
from runner.launch.ray.actor_process import CHUNK, WORKER_SPEC, ActorProcess, worker_environment
from runner.launch.ray.attempt import close_after
from runner.launch.ray.driver_connection import RayConnection, require_ray
from runner.launch.ray.placement import (
    Bundle,
    BundleLocation,
    bundle_order,
    bundles,
    free_text,
    placement_table,
    refuse_too_many,
    request_text,
)
from runner.launch.worker_process import WorkerSpec
from runner.run_dir.folder import RunFolder
from tests.launch.several import ROOT, alive

SIX_AND_TWO = [Bundle("rank", n, "NPU", 1) for n in range(6)] + [Bundle("sampler", n, "NPU", 1) for n in range(2)]


def npus(*counts: int) -> list[dict[str, float]]:
    return [{"CPU": 8.0, "NPU": float(count)} if count else {"CPU": 8.0} for count in counts]


def test_bundles_follow_from_the_job() -> None:
    words = ["+recipe=grpo_demo", "parallelism=ddp", "launch=ray", "launch.devices=2", "launch.samplers=1"]
    spec = compose_job([*words, "device.threads=3"]).spec
    assert bundles(spec) == [Bundle("rank", 0, "CPU", 3), Bundle("rank", 1, "CPU", 3), Bundle("sampler", 0, "CPU", 3)]
    assert spec.launch.attempts == 3


@pytest.mark.parametrize(
    ("nodes", "wanted", "words"),
    [
        (npus(4), SIX_AND_TWO, r"needs 8 NPUs \(6 to train, 2 to sample\), but Ray has 4 NPUs on 1 node: 4 too few"),
        (npus(4, 3), SIX_AND_TWO, r"has 7 NPUs on 2 nodes \(4 \+ 3\): 1 too few; lower launch.devices or"),
        (npus(0, 0), SIX_AND_TWO[:1], r"needs 1 NPU, but Ray has no NPU on 2 nodes: 1 too few; `ray status`"),
        (
            npus(3, 3, 2),
            [*SIX_AND_TWO[:2], *(Bundle("sampler", n, "NPU", 2) for n in range(3)), Bundle("sampler", 3, "NPU", 4)],
            r"needs 12 NPUs \(2 to train, 10 to sample\), .*: 4 too few",
        ),
        (
            npus(3, 3),
            [SIX_AND_TWO[0], Bundle("sampler", 0, "NPU", 4)],
            r"1 sampler needs 4 NPUs of one node, .*\(3 \+ 3\): room for 0",
        ),
    ],
)
def test_what_cannot_be_placed_is_refused_with_the_arithmetic(
    nodes: list[dict[str, float]], wanted: list[Bundle], words: str
) -> None:
    with pytest.raises(EnvironmentProblem, match=words):
        refuse_too_many(wanted, nodes, "Ray")


@given(
    there=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    ranks=st.integers(1, 5),
    samplers=st.integers(0, 3),
    unit=st.integers(1, 2),
    cards=st.integers(1, 3),
)
def test_it_is_refused_exactly_where_no_placement_exists(
    there: list[int], ranks: int, samplers: int, unit: int, cards: int
) -> None:
    wanted = [Bundle("rank", n, "NPU", unit) for n in range(ranks)]
    wanted += [Bundle("sampler", n, "NPU", unit * cards) for n in range(samplers)]
    try:
        refuse_too_many(wanted, npus(*there), "Ray")
        accepted = True
    except EnvironmentProblem:
        accepted = False
    assert accepted == fits(tuple(there), tuple(bundle.count for bundle in reversed(wanted)))


def fits(there: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a placement exists, by trying all."""
    if not wanted:
        return True
    first, rest = wanted[0], wanted[1:]
    return any(
        fits((*there[:at], there[at] - first, *there[at + 1 :]), rest)
        for at in {there.index(count) for count in there}
        if there[at] >= first
    )


def test_what_others_have_taken_is_counted() -> None:
    assert request_text(SIX_AND_TWO) == "8 NPUs (6 to train, 2 to sample)"
    assert free_text(SIX_AND_TWO, [*npus(5, 3), {"CPU": 4.0}], {"NPU": 3.0, "CPU": 1.0}) == "3 of 8 NPUs"


def test_ranks_on_a_node_are_neighbors_and_the_fullest_node_is_first() -> None:
    nodes = ["a", "b", "b", "a", "b", "a", "b"]
    assert bundle_order(nodes, ["rank"] * 5 + ["sampler"] * 2) == [1, 2, 4, 0, 3, 6, 5]


def test_the_table_says_role_node_and_devices() -> None:
    taken = [BundleLocation("10.0.0.3", "left", (str(n),)) for n in range(4)] + [
        BundleLocation("10.0.0.4", "right", ("7",))
    ]
    wanted = [*SIX_AND_TWO[:4], Bundle("sampler", 0, "NPU", 1)]
    assert list(placement_table(wanted, taken)) == [
        "  role          node              devices",
        "  ranks 0 to 3  left (10.0.0.3)   NPU 0, 1, 2, 3",
        "  sampler 0     right (10.0.0.4)  NPU 7",
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["launch.address=ray://head:10001"], "use a node of the cluster"),
        (["launch.address=head"], "auto or HOST:PORT"),
        (["launch.address=auto", "device=auto"], "type device=npu, device=cuda or device=cpu"),
    ],
)
def test_an_address_that_cannot_be_is_refused(words: list[str], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        compose_job(["+recipe=sft_demo", "launch=ray", *words])


def test_without_the_package_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r"launch=ray needs .*\n  pip install 'posttrain-run\[ray\]'"):
        require_ray("launch=ray")


def test_a_process_gets_its_nodes_environment_and_what_was_brought_and_nothing_of_rays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RAY_AUTH_TOKEN", "RANK", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("ASCEND_HOME_PATH", "/the/nodes/own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    found = worker_environment({"HF_HOME": "/brought"}, "npu", ("4", "6"), alike=3)
    assert found["ASCEND_RT_VISIBLE_DEVICES"] == "4,6" and found["HF_HOME"] == "/brought"
    assert found["OMP_NUM_THREADS"] == "2" and found["ASCEND_HOME_PATH"] == "/the/nodes/own"
    assert not [name for name in found if name.startswith("RAY_") or name == "RANK"]


def order(root: Path, asked: str | None = None, **more: Any) -> WorkerSpec:
    """An order for a toy rank, which does as asked."""
    place = RankInfo(0, 2, 0, 1)
    environment = {**place.to_environment(), "TOY": json.dumps({"0": asked}), "PYTHONPATH": str(ROOT)}
    return WorkerSpec(
        **{
            "role": "rank",
            "index": 0,
            "folder": RunFolder(root),
            "attempt": 2,
            "cards": (0,),
            "environment": environment,
            "place": place,
            "hosts_store": True,
            **more,
        }
    )


def test_an_order_is_the_same_after_its_way_over_the_line(tmp_path: Path) -> None:
    for one in (
        order(tmp_path),
        order(tmp_path, role="sampler", folder=RunFolder(tmp_path).for_sampler(3), place=None, cards=(4, 5)),
    ):
        assert WORKER_SPEC.validate_python(json.loads(json.dumps(WORKER_SPEC.dump_python(one, mode="json")))) == one


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run of toy ranks."""
    monkeypatch.setitem(worker_process.PROGRAMS, "rank", ("-m", "tests.launch.toy_rank"))
    (tmp_path / "ranks").mkdir()
    (tmp_path / "spec.yaml").touch()
    return tmp_path


def begun(asked: str | None, folder: Path) -> ActorProcess:
    """A child that is a toy rank; the socket is not used by it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return ActorProcess(order(folder, asked), dict(os.environ), os.dup(listener.fileno()))


def heard(child: ActorProcess, heartbeat: HeartbeatReader) -> int:
    """Hear it to its end."""
    end = time.monotonic() + 200
    while time.monotonic() < end:
        said = child.receive(0.5)
        assert len(said["pipe"]) <= CHUNK
        if said["pipe"]:
            heartbeat.feed(said["pipe"].encode("latin-1"))
        if said["code"] is not None:
            return int(said["code"])
    raise AssertionError("it did not end")


@pytest.mark.parametrize(("asked", "code"), [(None, 0), ("data", 3), ("kill", -signal.SIGKILL), ("wordless", 9)])
def test_an_actor_tells_all_that_its_process_said_and_how_it_ended(asked: str | None, code: int, toys: Path) -> None:
    heartbeat = HeartbeatReader()
    assert heard(begun(asked, toys), heartbeat) == code
    assert heartbeat.begun or asked in {"kill", "wordless"}, "these may end before their first beat"
    assert (heartbeat.report is not None) == (asked == "data")
    assert heartbeat.report is None or heartbeat.report.message == "rank 0 of 2: line 7 is no JSON"


def test_what_an_actor_kills_is_gone(toys: Path) -> None:
    child = begun("long", toys)
    said, end = toys / "ranks" / "0.said", time.monotonic() + 200
    while not (said.exists() and said.read_text()):
        assert child.receive(0.1)["code"] is None and time.monotonic() < end
    pid = json.loads(said.read_text())["pid"]
    child.kill()
    assert heard(child, HeartbeatReader()) == -signal.SIGKILL and not alive([pid])


def test_what_is_killed_before_it_begins_ends_as_it_does(toys: Path) -> None:
    child = begun("long", toys)
    child.kill()
    assert heard(child, HeartbeatReader()) == -signal.SIGKILL


@pytest.mark.parametrize("place, lacking", [(children, "CleanupProcess"), (ActorProcess, "_relay")])
def test_an_actor_that_cannot_start_its_process_says_why(
    place: object, lacking: str, toys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(place, lacking, refuse)
    heartbeat, child = HeartbeatReader(), begun("long", toys)
    assert heard(child, heartbeat) == 1
    assert child._member is None or child._member.process.wait(200) == -signal.SIGKILL
    assert heartbeat.report is not None and "OSError: [Errno 24] Too many open files" in heartbeat.report.message
    assert heartbeat.report.message.startswith(f"rank 0 of 2, on {socket.gethostname()}: ")


def test_a_folder_that_a_node_does_not_see_is_said(tmp_path: Path) -> None:
    heartbeat = HeartbeatReader()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = ActorProcess(order(tmp_path / "elsewhere"), dict(os.environ), os.dup(listener.fileno()))
    assert heard(child, heartbeat) == 2
    assert heartbeat.report is not None and "use storage that all nodes share" in heartbeat.report.message


def test_a_guard_leaves_nothing_of_a_driver_that_was_killed(tmp_path: Path) -> None:
    module, folder, weights = tmp_path / "a_driver.py", tmp_path / "cluster", tmp_path / "weights"
    folder.mkdir()
    weights.mkdir()
    module.write_text(
        "import os, subprocess, sys\n"
        "from pathlib import Path\n"
        "from runner.launch.cleanup_process import CleanupProcess\n"
        f"CleanupProcess().remove(Path({str(weights)!r}))\n"  # as an actor has one
        "left = subprocess.Popen(['sleep', '100'], start_new_session=True)\n"
        "print(left.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    words = [
        sys.executable,
        "-P",
        "-m",
        "runner.launch.ray.driver_connection",
        "a_driver",
        json.dumps({"folder": str(folder)}),
    ]
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": path}, capture_output=True, timeout=60)
    assert done.returncode == 128 + signal.SIGKILL and not folder.exists() and not weights.exists()
    assert not alive([int(done.stdout)])


@pytest.mark.parametrize(
    ("does", "kind", "words"),
    [
        ("os.kill(os.getpid(), 9)", RankLost, "Ray's driver exited"),
        ("sys.exit('no such cluster')", EnvironmentProblem, r"Ray's driver exited \(no such cluster\)"),
        ("tell(why='no room', passes=False)", EnvironmentProblem, "Ray on this machine: no room"),
        ("tell(why='too slow', passes=True)", RankLost, "Ray on this machine: too slow"),
    ],
)
def test_a_driver_that_is_killed_or_too_slow_is_worth_another_attempt(
    does: str, kind: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = "tell = lambda **words: print(json.dumps({'is': 'refused', **words}), flush=True)"
    (tmp_path / "a_driver.py").write_text(f"import json, os, sys\n{tell}\n{does}\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    with pytest.raises(kind, match=words), RayConnection("a_driver", {"address": None}):
        pass


class Closing:
    """A line that takes Ctrl-C while it ends."""

    ended = False

    def __exit__(self, *_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        self.ended = True


@pytest.mark.parametrize("error", [None, Interrupted(signal.SIGINT, "saved"), RankLost("gone"), RunnerError("a bug")])
def test_ctrl_c_while_ray_ends_leaves_the_end_as_it_is_and_makes_it_the_last(error: RunnerError | None) -> None:
    link, found = Closing(), None
    try:
        with close_after(cast(RayConnection, link)):
            if error is not None:
                raise error
    except RunnerError as raised:
        found = raised
    assert link.ended
    if not isinstance(error, RankLost):
        assert found is error
    else:
        assert isinstance(found, JobFailed) and is_final(found)
        assert (str(found), found.exit_code) == ("gone", error.exit_code)


class Actor:
    """What Ray has in an actor's place; `asked`: what of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, what: str) -> Any:
        def remote(*_: object) -> tuple[str, int]:
            self.asked.append(what)
            return what, len(self.asked)

        return SimpleNamespace(remote=remote)


@pytest.fixture
def driver_with_actor(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Actor, list[dict[str, Any]]]:
    """A driver with one actor, that, and what the driver tells."""
    pytest.importorskip("ray")
    import ray

    from runner.launch.ray import driver

    told: list[dict[str, Any]] = []
    actor, lines = Actor(), SimpleNamespace(send=told.append)
    monkeypatch.setattr(ray, "kill", lambda actor: actor.asked.append("end"))
    one = driver.RayJobDriver(cast(Any, lines))
    one._slots = [driver.ActorSlot("sampler", "CPU", 1, actor=actor, location=("10.0.0.3", "left", []))]
    return one, actor, told


def test_an_actor_that_is_told_to_kill_what_it_has_yet_to_start_is_told_again(
    driver_with_actor: tuple[Any, Actor, list[dict[str, Any]]],
) -> None:
    driver, actor, _ = driver_with_actor
    driver._start(0, {})
    driver._kill(0)
    driver._handle_answer("start", 0, None)
    assert actor.asked == ["start", "kill", "receive", "kill"]
    driver._start(0, {})
    driver._handle_answer("start", 0, None)
    assert actor.asked[4:] == ["start", "receive"], "who follows is another one"


def test_who_follows_a_process_whose_actor_is_dismissed_has_another_actor(
    driver_with_actor: tuple[Any, Actor, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, actor, told = driver_with_actor
    started: list[int] = []
    monkeypatch.setattr(driver, "_start_actor", started.append)
    driver._start(0, {})
    driver._dismiss(0)
    driver._dismiss(0)
    driver._start(0, {"role": "sampler"})
    assert actor.asked == ["start", "end"] and started == [0]
    driver._collect_answers()
    assert told == [] and driver._slots[0].spec == {"role": "sampler"}


def test_the_driver_has_a_method_for_each_request_of_the_launcher() -> None:
    from runner.launch.ray import attempt
    from runner.launch.ray.driver import RayJobDriver

    requests = set(re.findall(r'do="(\w+)"', Path(attempt.__file__).read_text()))
    assert "dismiss" in requests and [name for name in requests if not hasattr(RayJobDriver, f"_{name}")] == []


def test_an_actor_is_lost_once_however_much_it_was_asked(
    driver_with_actor: tuple[Any, Actor, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, _, told = driver_with_actor
    import ray
    from ray.exceptions import RayError

    def gone(answer: object) -> None:
        raise RayError("The actor is dead because its node has died.")

    monkeypatch.setattr(ray, "wait", lambda calls, **_: (calls, []))
    monkeypatch.setattr(ray, "get", gone)
    driver._call_actor("receive", 0)
    driver._kill(0)
    driver._collect_answers()
    assert [(event["is"], event["why"]) for event in told] == [("lost", "its node left (10.0.0.3) was lost")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
            "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) …",
            "its actor on left (10.0.0.3) died; Ray reports: Worker unexpectedly exits with a connection error code 2",
        ),
        ("The actor is dead because its node has died. Node Id: 12", "its node left (10.0.0.3) was lost"),
    ],
)
def test_rays_reason_is_a_sentence(text: str, words: str) -> None:
    pytest.importorskip("ray")
    from ray.exceptions import RayError

    from runner.launch.ray.driver import actor_end_reason

    assert actor_end_reason(RayError(text), ("10.0.0.3", "left", [])) == words
