"""A sweep's jobs on Ray: on a cluster that was there before and outlives the sweep, and on one of the sweep's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.core import subprocess as processes
from runner.core.device_kinds import ResourceRequest, kind_of
from runner.core.errors import EnvironmentProblem
from runner.launch.ray.driver_connection import actor_options
from runner.sweep.commands import print_status
from runner.sweep.config import SweepConfig
from runner.sweep.ray_executor import RayExecutor
from tests.ray_cluster import cluster
from tests.sweep import toy
from tests.sweep.test_scheduler import ROOT, only_sweep

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(400)
NPU = ResourceRequest("npu", 1)
PATIENCE_S = 120.0  # Ray needs seconds for each of its processes, and many where others work, too


def until(happened: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end, "nothing happened before the deadline"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster with four cores and four NPUs that are only declared."""
    with cluster({"num_cpus": 4, "resources": {"NPU": 4}}) as one:
        yield one.address


def run(where: Path, action: str, names: list[str], **options: object) -> subprocess.Popen[bytes]:
    """A sweep on Ray in a process of its own, which can be interrupted and killed."""
    given = json.dumps({"on": "ray", **options})
    command = [sys.executable, "-m", "tests.sweep.toy", str(where), action, ",".join(names), given]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def begun(where: Path, *indices: int) -> bool:
    """Whether these jobs of the only sweep there have measured something."""
    return all((where / "latest" / f"{index:03}" / "metrics.jsonl").exists() for index in indices)


def cards(folder: object, count: int) -> list[str]:
    root = folder.root  # type: ignore[attr-defined]
    return sorted(json.loads((root / f"{i:03}" / "metrics.jsonl").read_text())["cards"] for i in range(count))


def here(marker: str) -> set[int]:
    """Processes of this machine whose command line holds `marker`."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and processes.process_identity(int(entry.name)) is not None:
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            found |= {int(entry.name)} if marker in line else set()
    return found


def executor_of(nodes: list[dict[str, float]], parallel: int | None = None) -> RayExecutor:
    executor = RayExecutor(SweepConfig(on="ray", address="head:6379", parallel=parallel))
    executor.nodes = list(nodes)
    return executor


def test_what_no_node_can_hold_is_refused_with_the_arithmetic() -> None:
    executor = executor_of([{"CPU": 8, "NPU": 4}, {"CPU": 16, "NPU": 2}])
    with pytest.raises(EnvironmentProblem) as caught:
        executor.check([NPU, ResourceRequest("npu", 6)])
    assert str(caught.value) == (
        "a job needs 6 NPUs on one node; 2 nodes of Ray at head:6379: at most 4 NPUs per node, 6 in total; "
        "lower launch.devices or launch.samplers"
    )
    with pytest.raises(EnvironmentProblem, match=r"needs 1 GPU on one node; .*: no GPUs; `ray status`"):
        executor.check([ResourceRequest("cuda", 1)])
    assert executor.cards == ("npu",)


def test_as_many_jobs_at_once_as_all_nodes_hold() -> None:
    executor = executor_of([{"CPU": 8, "NPU": 4}, {"CPU": 16, "NPU": 3}])
    executor.check([ResourceRequest("npu", 2)] * 10)
    assert executor.parallel == 3
    assert executor.describe() == "2 NPUs each, of 7 on 2 nodes of Ray at head:6379; 3 jobs at once"
    limited = executor_of([{"CPU": 8}], parallel=2)
    limited.check([ResourceRequest("core", 3)] * 5)
    assert limited.parallel == 2


def test_a_job_on_cards_asks_ray_for_no_cores() -> None:
    assert actor_options(kind_of("cuda").resource, 2) == {"num_cpus": 0, "num_gpus": 2}
    assert actor_options(kind_of("npu").resource, 2) == {"num_cpus": 0, "resources": {"NPU": 2}}


@pytest.mark.parametrize(
    ("options", "key"),
    [({"address": "head:6379"}, "sweep.address"), ({"on": "ray", "address": "ray://head:10001"}, "sweep.address")],
)
def test_an_address_that_is_not_used_or_cannot_be_is_refused(options: dict[str, object], key: str) -> None:
    assert [k for k, _ in SweepConfig.model_validate(options).problems(None)] == [key]


@pytest.mark.slow
def test_four_jobs_get_four_cards_and_one_that_wants_eight_is_refused(tmp_path: Path, address: str) -> None:
    folder, code = toy.start(tmp_path, ["cards"] * 4, NPU, on="ray", address=address)
    assert (code, cards(folder, 4)) == (0, ["0", "1", "2", "3"])
    assert {job.devices for job in toy.jobs(folder)} == {("0",), ("1",), ("2",), ("3",)}


@pytest.mark.slow
def test_a_job_that_no_node_can_hold_is_refused_at_once(
    tmp_path: Path, address: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, code = toy.start(tmp_path, ["cards"], ResourceRequest("npu", 8), on="ray", address=address)
    assert code == 2 and not folder.state.exists()
    assert "a job needs 8 NPUs on one node; 1 node of Ray" in capfd.readouterr().err


@pytest.mark.slow
def test_what_becomes_of_jobs_is_what_becomes_of_them_here(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", "/somewhere")
    monkeypatch.setenv("A_SECRET", "of this machine")
    names = ["good", "raises", "dies", "exits", "hangs", "memory", "environment"]
    options = {"timeout_s": 3.0, "grace_s": 0.5, "retries": 2, "retry_wait_s": 0.05}
    folder, code = toy.start(tmp_path, names, on="ray", address=address, **options)
    assert code == 9
    assert toy.states(folder) == ["done", "failed", "killed", "failed", "timeout", "done", "done"]
    assert [toy.starts(folder, index) for index in range(7)] == [1, 1, 3, 1, 1, 3, 1]
    errors = {index: str(job.error) for index, job in enumerate(toy.jobs(folder)) if job.error}
    assert errors[1] == "exit code 1: ValueError: no such number" and errors[2] == "killed by SIGKILL"
    assert errors[3] == "exit code 3: giving up" and "not finished after 3 s" in errors[4]
    given = json.loads(folder.output(6).read_text())
    assert given["HF_HOME"] == "/somewhere" and "A_SECRET" not in given
    assert not [name for name in given if name.startswith("RAY_")]


@pytest.mark.slow
def test_jobs_go_on_without_the_sweep_and_a_resume_takes_them_up(
    tmp_path: Path, address: str, capfd: pytest.CaptureFixture[str]
) -> None:
    names = ["good", "saves", "saves", "good", "good"]
    process = run(tmp_path, "start", names, address=address, parallel=2)
    until(lambda: begun(tmp_path, 1, 2))
    process.kill()
    process.wait()
    folder = only_sweep(tmp_path)
    (folder.run(1).root / "go").touch()
    until(lambda: '"ended": 1' in folder.note(1).read_text())
    capfd.readouterr()
    before = folder.state.read_bytes()
    assert print_status(str(folder.root)) == 0 and folder.state.read_bytes() == before
    said = capfd.readouterr().out
    assert "2 waiting, 1 running, 2 done; not running" in said and "runs     job 2  on" in said
    toy.SweepState.read(folder).update(2, state="waiting")  # as if the sweep had died before it saw it begin
    assert run(folder.root, "resume", names, grace_s=0.1).wait(PATIENCE_S) == 2, "another cluster started it again"
    resumed = run(folder.root, "resume", names, address=address)
    until(lambda: "continues, on" in folder.log.read_text())
    (folder.run(2).root / "go").touch()
    assert resumed.wait(PATIENCE_S) == 0
    assert toy.states(folder) == ["done"] * 5 and [toy.starts(folder, index) for index in range(5)] == [1] * 5


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_lets_jobs_save(tmp_path: Path, address: str, number: int, code: int) -> None:
    process = run(tmp_path, "start", ["saves", "good"], address=address, parallel=1)
    until(lambda: list(tmp_path.glob("*/000/metrics.jsonl")))
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == code
    folder = only_sweep(tmp_path)
    assert toy.states(folder) == ["interrupted", "waiting"]
    assert '"step": 9' in folder.run(0).metrics.read_text()


@pytest.mark.slow
def test_a_job_whose_actor_is_killed_saves_and_can_go_on(tmp_path: Path, address: str) -> None:
    process = run(tmp_path, "start", ["saves"], address=address)
    until(lambda: list(tmp_path.glob("*/000/metrics.jsonl")))
    folder = only_sweep(tmp_path)
    wrapper = json.loads(folder.note(0).read_text())["process"]
    actor = int(Path(f"/proc/{wrapper}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(actor, signal.SIGKILL)
    assert process.wait(PATIENCE_S) == 9
    assert toy.states(folder) == ["interrupted"] and '"step": 9' in folder.run(0).metrics.read_text()


@pytest.mark.slow
def test_a_search_is_pruned_on_ray(tmp_path: Path, address: str) -> None:
    folder, code = toy.search(tmp_path, ["curve"], on="ray", address=address, trials=8, prune=True)
    assert code == 0 and set(toy.states(folder)) <= {"done", "pruned"} and len(toy.states(folder)) == 8


@pytest.mark.slow
def test_a_cluster_of_its_own_ends_with_a_sweep_that_is_killed(tmp_path: Path) -> None:
    others = here("ray::")
    before = {path.name for path in Path("/tmp").iterdir()} | {path.name for path in Path("/dev/shm").iterdir()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5")
        process = run(tmp_path, "start", ["saves", "saves", "good"], npus=1)
        until(lambda: begun(tmp_path, 0, 1))
        [folder_of_ray] = [path for path in Path("/tmp").glob("run-ray-*") if path.name not in before]
        assert here(folder_of_ray.name)
        process.kill()
        process.wait()
        folder = only_sweep(tmp_path)
        until(lambda: not here(folder_of_ray.name) and here("ray::") <= others and not folder_of_ray.exists())
        assert not {path.name for path in Path("/dev/shm").iterdir()} - before
        assert '"step": 9' in folder.run(0).metrics.read_text()  # it was told to save
        assert run(folder.root, "resume", ["saves", "saves", "good"]).wait(PATIENCE_S) == 0
    assert [toy.starts(folder, index) for index in range(3)] == [2, 2, 1] and toy.states(folder) == ["done"] * 3
    assert not here(folder_of_ray.name)


@pytest.mark.slow
def test_a_cluster_that_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert toy.start(tmp_path, ["good"], on="ray", address="127.0.0.1:1")[1] == 2
    assert "Ray at 127.0.0.1:1" in capfd.readouterr().err
