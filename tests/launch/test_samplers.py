"""The launcher over samplers without torch: they serve as long as ranks run, and are replaced where they are lost."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from runner.cli.job_builder import compose_job
from runner.core import device_kinds
from runner.core.errors import DataError, EnvironmentProblem, RunnerError, SamplerError
from runner.core.fsync_io import temporary_folder
from runner.core.rank_info import RankInfo
from runner.launch import supervisor, worker_process
from runner.launch.exit_cause import JobFailed
from runner.launch.local import LocalLauncher, run_attempts
from runner.launch.supervisor import Supervisor
from runner.launch.worker_process import WorkerSpec
from runner.run_dir.folder import RunFolder, write_json
from runner.sampler.server.job_token import TOKEN
from runner.spec.job import JobSpec
from runner.weight_sync.store_dir import store_dirs
from tests.launch.several import alive

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toy ranks and samplers, and a launcher that waits less for them."""
    monkeypatch.setitem(worker_process.PROGRAMS, "rank", ("-m", "tests.launch.toy_rank"))
    monkeypatch.setitem(worker_process.PROGRAMS, "sampler", ("-m", "tests.launch.toy_sampler", "sampler"))
    monkeypatch.setattr(supervisor, "GRACE_S", 1.0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a job of one rank and two samplers, which do what they are asked; returns what the launcher says."""

    def made(*words: str, rank: str = "until 2", **asked: list[str]) -> str:
        what = {"0": rank} | {name.replace("_", " "): lives for name, lives in asked.items()}
        monkeypatch.setenv("TOY", json.dumps(what))
        spec = a_job("launch.samplers=2", *words)
        with closing(LocalLauncher(spec)) as launcher:
            Supervisor(spec, RunFolder(tmp_path), 1, launcher).run()
        return capsys.readouterr().out

    return made


def a_job(*words: str) -> JobSpec:
    return compose_job(["+recipe=grpo_demo", *words]).spec


def lives(folder: Path, index: int) -> list[dict[str, Any]]:
    """What each process that was sampler `index` found in its environment, if it came to that."""
    path = folder / "samplers" / f"{index}.lives"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def ended_with(folder: Path, job: Callable[[], object]) -> str:
    """What a job ends with, the code first; nothing of it runs on."""
    with pytest.raises(RunnerError) as caught:
        job()
    assert not alive([one["pid"] for index in range(2) for one in lives(folder, index)])
    return f"{caught.value.exit_code}: {caught.value}"


def test_samplers_serve_until_the_ranks_have_ended_and_are_told_to_end(
    tmp_path: Path, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "GRACE_S", 60.0)
    write_json_note(tmp_path)
    assert run() == ""
    assert all((tmp_path / "samplers" / f"{index}.told").exists() for index in range(2))
    [first], [second] = lives(tmp_path, 0), lives(tmp_path, 1)
    assert first[TOKEN] == second[TOKEN] and len(first[TOKEN]) > 20 and TOKEN not in os.environ
    assert first["RANK"] is None, "a sampler is no rank"
    assert not alive([first["pid"], second["pid"]])
    assert not list((tmp_path / "samplers").glob("*.json")), "notes of a job that was killed are removed"


def test_of_the_ranks_only_the_one_that_asks_samplers_has_the_token(tmp_path: Path, run: Callable[..., str]) -> None:
    run("launch.devices=2", "parallelism=ddp")
    ranks = [json.loads((tmp_path / "ranks" / f"{rank}.said").read_text())[TOKEN] for rank in range(2)]
    assert ranks == [lives(tmp_path, 0)[0][TOKEN], None]


def test_a_sampler_that_dies_with_a_rank_is_not_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY", json.dumps({"0": "kill", "sampler 0": ["kill"]}))
    spec = a_job("launch.samplers=1")
    with closing(LocalLauncher(spec)) as launcher:
        job = Supervisor(spec, RunFolder(tmp_path), 1, launcher)
        try:
            job._start()
            for one in [*job.members, *job.samplers.members]:
                assert isinstance(one, worker_process.LocalWorker)
                os.waitid(os.P_PID, one.process.pid, os.WEXITED | os.WNOWAIT)  # both are dead when it looks
            while job._poll():
                time.sleep(0.01)
            assert job.samplers.restart_counts == {}
        finally:
            job._end()


def write_json_note(folder: Path) -> None:
    (folder / "samplers").mkdir()
    write_json(folder / "samplers" / "0.json", {"url": "http://127.0.0.1:9"})


def test_a_sampler_that_is_lost_is_replaced_with_a_line_that_says_why(tmp_path: Path, run: Callable[..., str]) -> None:
    said = run(rank="until 5", sampler_1=["kill", "fault", "quit"]).splitlines()
    assert [len(lives(tmp_path, index)) for index in range(2)] == [1, 4]
    assert [re.sub(r"see .*log", "see LOG", line) for line in said] == [
        "warning: sampler 1 was killed (SIGKILL); restarting it (1 of 3) and retrying",
        "warning: sampler 1: the engine is gone; restarting it (2 of 3) and retrying",
        "warning: sampler 1 exited unexpectedly; see LOG; restarting it (3 of 3) and retrying",
    ]
    assert all(line.removeprefix("warning: ") in (tmp_path / "run.log").read_text() for line in said)


@pytest.mark.slow
def test_a_sampler_that_is_stopped_is_found_by_its_silence_and_replaced(
    tmp_path: Path, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "SILENT", 1.0)
    said = run("sampler.timeout_s=6", rank="until 3", sampler_0=["stop"])
    assert "sampler 0 is stopped (SIGSTOP), and sent no heartbeat for 6 s; restarting it (1 of 3)" in said
    assert not alive([one["pid"] for one in lives(tmp_path, 0)])


def test_one_that_is_lost_too_often_ends_the_job(tmp_path: Path, run: Callable[..., str]) -> None:
    text = ended_with(tmp_path, lambda: run("launch.max_worker_restarts=1", sampler_0=["fault", "kill"], rank="long"))
    assert text.startswith("75: sampler 0 was killed (SIGKILL)\n"), text
    assert "it was restarted 1 times, the limit is launch.max_worker_restarts=1; its log: " in text
    assert text.endswith("continue: run resume " + str(tmp_path))


def test_an_error_of_the_job_itself_is_not_tried_again(tmp_path: Path, run: Callable[..., str]) -> None:
    text = ended_with(tmp_path, lambda: run(sampler_0=["data"], rank="long"))
    assert text == "3: sampler 0: line 7 is no JSON" and len(lives(tmp_path, 0)) == 1


def test_samplers_end_with_a_rank_that_fails(tmp_path: Path, run: Callable[..., str]) -> None:
    assert ended_with(tmp_path, lambda: run(rank="data")) == "3: rank 0 of 1: line 7 is no JSON"


def test_each_sampler_sees_the_cards_after_those_of_the_ranks(
    tmp_path: Path, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-1a,5")
    run("device=cuda")
    assert [lives(tmp_path, index)[0]["CUDA_VISIBLE_DEVICES"] for index in range(2)] == ["GPU-1a", "5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(device_kinds.glob, "glob", lambda _: [f"/dev/nvidia{number}" for number in (7, 9, 11)])
    run("device=cuda", rank="until 4")
    assert [lives(tmp_path, index)[1]["CUDA_VISIBLE_DEVICES"] for index in range(2)] == ["1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5")
    with pytest.raises(EnvironmentProblem, match=r"need 3 devices, but this machine has 2 \(7, 5\)"):
        run("device=cuda")


def test_what_a_process_may_leave_where_it_is_killed(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"attempt": 1, "cards": (), "environment": {}}
    first, other = (
        WorkerSpec(role="rank", index=n, folder=RunFolder(tmp_path, n), place=RankInfo(n, 2, n, 2), **plain)
        for n in (0, 1)
    )
    sampler = WorkerSpec(role="sampler", index=0, folder=RunFolder(tmp_path).for_sampler(0), **plain)
    engines = [tmp_path / name for name in ("ranks/0.engine", "ranks/1.engine", "samplers/0.engine")]
    own = [(engine, temporary_folder(engine)) for engine in engines]
    assert first.scratch == (*own[0], *store_dirs(tmp_path)), "it has the weights for samplers, too"
    assert [other.scratch, sampler.scratch] == own[1:]


def test_what_need_not_come_again_is_tried_again_from_the_newest_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("name: job\n")
    folder, seen = RunFolder(tmp_path), list[int]()

    def fail(number: int) -> None:
        seen.append(number)
        raise SamplerError("the engine is gone\nwith details")

    with pytest.raises(SamplerError):
        run_attempts(a_job("launch.attempts=3"), folder, 2, fail)
    assert seen == [2, 3, 4]
    assert json.loads(folder.status.read_text())["attempt"] == 4
    assert sorted(path.name for path in folder.attempts.iterdir()) == ["3", "4"]
    said = folder.log.read_text()
    again = "attempt 3 continues from the newest checkpoint (1 more after it)"
    assert f"attempt 2 ended: the engine is gone; {again}" in said


@pytest.mark.parametrize("error", [DataError("line 7"), KeyboardInterrupt(), JobFailed("killed", 75, stopped=True)])
def test_what_would_come_again_is_not_tried_again(tmp_path: Path, error: BaseException) -> None:
    seen = list[int]()

    def fail(number: int) -> None:
        seen.append(number)
        raise error

    with pytest.raises(type(error)):
        run_attempts(a_job("launch.attempts=3"), RunFolder(tmp_path), 1, fail)
    assert seen == [1]
