"""Processes that only score: what they are refused for, what they take of Ray, and jobs that they change no bit of."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.cli.compose import compose_job
from runner.errors import EnvironmentProblem, SpecError
from runner.folder import RunFolder
from runner.launch import member, services, team
from runner.launch.ray.seats import Seat, Taken, described, free, grouped, refuse_too_many, seats, table
from runner.launch.starter import Local
from runner.launch.team import Team
from runner.place import Place
from runner.sampler.remote.secret import TOKEN
from tests.launch.several import DDP, ROOT, Job, gone, wait_until
from tests.launch.test_ray import fits
from tests.launch.test_sampled_runs import SMALL
from tests.ray_cluster import cluster

pytestmark = pytest.mark.timeout(400)  # several processes share few cores

FUNCTION = ("reward=function", "reward.path=my_reward.py:score")
SOURCE = """
import os, random, time

def score(completions, **_):
    print("begin", os.getpid())
    time.sleep(0.2)
    random_ones = [random.random() for _ in completions]
    if sum(len(str(one)) for one in completions) % 5 == 0:
        raise ValueError("not this one")
    print("end", os.getpid())
    return [len(set(str(one))) + chance for one, chance in zip(completions, random_ones)]
"""


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["+recipe=grpo_demo", "reward=exact"], "reward=exact has no processes of its own"),
        (["+recipe=grpo_demo", "reward=http", "reward.url=http://a/b"], "is scored by its service"),
        (["+recipe=grpo_demo", "reward=model", "reward.path=rm"], "is scored on the ranks' devices"),
        (["+recipe=grpo_demo", "reward=sum", "reward.parts=[{name: exact}]"], "reward=sum has no processes"),
        (["+recipe=sft_demo"], "algorithm=sft asks no reward"),
        (["+recipe=grpo_demo", *FUNCTION, "launch=torchrun"], "torchrun starts ranks alone"),
        (["+recipe=grpo_demo", *FUNCTION, *DDP, "launch.nodes=2", "launch.node=0"], "is for launch=ray"),
    ],
)
def test_where_they_would_have_nothing_to_do_they_are_refused(words: list[str], text: str) -> None:
    with pytest.raises(SpecError, match=rf"launch\.rewarders: .*{text}"):
        compose_job([*words, "launch.rewarders=2"])


def test_their_seats_are_cores_for_all_workers_of_the_reward() -> None:
    parts = "reward.parts=[{name: exact}, {name: function, path: 'a.py:f', workers: 3}, {name: math, workers: 2}]"
    words = ["+recipe=grpo_demo", "reward=sum", parts, "launch=ray", "launch.rewarders=2", "launch.samplers=1"]
    wanted = seats(compose_job([*words, "device=npu", "launch.address=auto"]).spec)
    rewarders = [Seat("rewarder", 0, "CPU", 5), Seat("rewarder", 1, "CPU", 5)]
    assert wanted == [Seat("rank", 0, "NPU", 1), Seat("sampler", 0, "NPU", 1), *rewarders]
    assert described(wanted) == "2 NPUs (1 to train, 1 to sample), 10 cores (10 to score)"
    nodes = [{"CPU": 8.0, "NPU": 4.0}, {"CPU": 4.0}]
    assert free(wanted, nodes, {"CPU": 3.0}) == "0 of 4 NPUs, 3 of 12 cores"
    refuse_too_many(wanted, [{"CPU": 5.0, "NPU": 2.0}, {"CPU": 6.0}], "Ray")
    with pytest.raises(EnvironmentProblem, match=r"2 rewarders want 5 cores of one node each, .*: room for 0"):
        refuse_too_many(wanted, [{"CPU": 4.0, "NPU": 2.0}] * 5, "Ray")
    with pytest.raises(EnvironmentProblem, match=r"9 cores on 1 node: 1 too few; lower launch\.rewarders;"):
        refuse_too_many(wanted, [{"CPU": 9.0, "NPU": 2.0}], "Ray")


@given(
    there=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    ranks=st.integers(1, 3),
    threads=st.integers(1, 3),
    rewarders=st.integers(0, 3),
    workers=st.integers(1, 4),
)
def test_beside_ranks_on_cores_nothing_is_refused_that_has_room(
    there: list[int], ranks: int, threads: int, rewarders: int, workers: int
) -> None:
    wanted = [Seat("rank", n, "CPU", threads) for n in range(ranks)]
    wanted += [Seat("rewarder", n, "CPU", workers) for n in range(rewarders)]
    try:
        refuse_too_many(wanted, [{"CPU": float(count)} for count in there], "Ray")
    except EnvironmentProblem:
        assert not fits(tuple(there), tuple(seat.count for seat in wanted))


def test_a_seat_is_never_taken_by_another_role() -> None:
    roles: list[member.Role] = ["rank", "rank", "sampler", "rewarder", "rewarder"]
    order = grouped(["a", "b", "b", "a", "b"], roles)
    assert order == [1, 0, 2, 4, 3] and [roles[at] for at in order] == roles
    taken = [Taken("10.0.0.3", "left", ("0",)), Taken("10.0.0.4", "right", ()), Taken("10.0.0.4", "right", ())]
    wanted = [Seat("rank", 0, "NPU", 1), Seat("rewarder", 0, "CPU", 2), Seat("rewarder", 1, "CPU", 2)]
    assert list(table(wanted, taken))[1:] == [
        "  rank 0            left (10.0.0.3)   NPU 0",
        "  rewarders 0 to 1  right (10.0.0.4)  4 cores",
    ]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a job of two toy ranks, a sampler and two rewarders, which do what they are asked; returns what is said."""
    monkeypatch.setitem(member.PROGRAMS, "rank", ("-m", "tests.launch.toy_rank"))
    for role in ("sampler", "rewarder"):
        monkeypatch.setitem(member.PROGRAMS, role, ("-m", "tests.launch.toy_sampler", role))
    monkeypatch.setattr(team, "GRACE_S", 1.0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ["+recipe=grpo_demo", *FUNCTION, *DDP, "launch.devices=2", "launch.samplers=1", "launch.rewarders=2"]

    def made(rank: str = "until 3", **asked: list[str]) -> str:
        monkeypatch.setenv(
            "TOY", json.dumps({"0": rank, "1": rank} | {k.replace("_", " "): v for k, v in asked.items()})
        )
        spec = compose_job(words).spec
        with closing(Local(spec)) as starter:
            Team(spec, RunFolder(tmp_path), 1, starter).run()
        return capsys.readouterr().out

    return made


def lives(folder: Path, name: str) -> list[dict[str, Any]]:
    """What each process of this name found in its environment."""
    return [json.loads(line) for line in (folder / f"{name}.lives").read_text().splitlines()]


def test_every_rank_may_ask_them_and_nobody_else(tmp_path: Path, run: Callable[..., str]) -> None:
    assert run() == ""
    names = ("samplers/0", "rewarders/0", "rewarders/1")
    tokens = {lives(tmp_path, name)[0][TOKEN] for name in names}
    tokens |= {json.loads((tmp_path / "ranks" / f"{rank}.said").read_text())[TOKEN] for rank in range(2)}
    assert len(tokens) == 1 and len(tokens.pop()) > 20
    assert all((tmp_path / f"{name}.told").exists() for name in names), "they are told to end"
    said = json.loads((tmp_path / "members" / "0.json").read_text())["members"]
    assert [one["name"] for one in said][2:] == ["sampler 0", "rewarder 0", "rewarder 1"]


@pytest.mark.slow
def test_one_that_is_lost_or_stopped_is_replaced(
    tmp_path: Path, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "SILENT_S", 2.0)
    said = run(rank="until 6", rewarder_1=["kill", "stop"], sampler_0=["quit"])
    assert [len(lives(tmp_path, name)) for name in ("samplers/0", "rewarders/0", "rewarders/1")] == [2, 1, 3]
    assert "rewarder 1 was killed (SIGKILL); it is started anew (1 of 3), and asked again" in said
    assert "rewarder 1 is stopped (SIGSTOP), and has said nothing for 2 s; it is started anew (2 of 3)" in said


def test_one_begins_without_torch_as_another_has_to_take_its_place_soon() -> None:
    code = (
        "import sys, runner.launch.rewarding, runner.reward.function, runner.reward.math; print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_rewarder_sees_no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = compose_job(["+recipe=grpo_demo", *FUNCTION, "device=cuda", "launch.rewarders=1"]).spec
    plain: dict[str, Any] = {"attempt": 1, "environment": {}}
    rewarder = member.Order(role="rewarder", index=0, folder=RunFolder(tmp_path).of_rewarder(0), cards=(), **plain)
    rank = member.Order(role="rank", index=0, folder=RunFolder(tmp_path), cards=(0,), place=Place(), **plain)
    with closing(Local(spec)) as starter:
        assert starter._seen(rewarder) == {"CUDA_VISIBLE_DEVICES": ""} and starter._seen(rank) == {}
    assert not set(rewarder.scratch) & set(rank.scratch), "it leaves nothing of a rank's"


# --- jobs ------------------------------------------------------------------------------------------------------------


def a_job(folder: Path) -> Job:
    """A job in this folder, of which each group takes 0.2 s, and some have no score."""
    folder.mkdir()
    (folder / "my_reward.py").write_text(SOURCE)
    return Job(folder)


def start(job: Job, *words: str) -> subprocess.Popen[bytes]:
    own = [word for word in SMALL if not word.startswith(("reward", "algorithm.batch_size"))]
    return job.start(*own, "algorithm.batch_size=4", "steps=4", *words)


def finish(process: subprocess.Popen[bytes], job: Job) -> tuple[bytes, list[dict[str, Any]], list[str]]:
    """Let it end well; returns what it learnt, every step's numbers, and what it said of the reward."""
    assert process.wait(300) == 0, job.said()
    return job.weights(4), job.curve(), re.findall(r"^warning: my_reward.*", job.said(), re.MULTILINE)


def rewarders(job: Job) -> list[int]:
    notes = sorted((job.latest / "rewarders").glob("*.json"))
    return [json.loads(note.read_text())["pid"] for note in notes]


def printed(job: Job, where: str) -> list[list[str]]:
    """The words of each line that the function has printed."""
    path = job.latest / where / "reward.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split() for line in lines if line.startswith(("begin", "end"))]


@pytest.mark.slow
def test_a_rewarder_that_is_killed_while_it_scores_changes_no_bit(tmp_path: Path) -> None:
    peaceful, job = a_job(tmp_path / "peaceful"), a_job(tmp_path / "job")
    expected = finish(start(peaceful, *FUNCTION, "reward.workers=2"), peaceful)
    process = start(job, *FUNCTION, "launch.rewarders=2")
    wait_until(lambda: job.steps() >= 1 and printed(job, "rewarders/0")[-1][0] == "begin", process)
    victims = rewarders(job)
    os.kill(victims[0], signal.SIGKILL)
    assert finish(process, job) == expected
    assert expected[2], "what could not be scored is said, and counted, as ever"
    said, lines = job.said(), [line for at in range(2) for line in printed(job, f"rewarders/{at}")]
    assert "rewarder 0 was killed (SIGKILL); it is started anew (1 of 3), and asked again" in said
    assert re.search(r"warning: rewarder 0 \(http://127.0.0.1:\d+\) does not answer, and is waited for", said)
    assert len(lines) > len(printed(peaceful, ".")), "its group was scored twice"
    assert gone([*victims, *{int(pid) for _, pid in lines}]), "what it has started goes with it"


@pytest.mark.slow
def test_several_ranks_that_sample_ahead_and_a_sum_change_no_bit(tmp_path: Path) -> None:
    parts = "reward.parts=[{name: length, max: 8, cache: 7}, {name: function, path: 'my_reward.py:score', workers: 2}]"
    words = ("reward=sum", parts, *DDP, "launch.devices=2", "algorithm.lag=1")
    alone, job = a_job(tmp_path / "alone"), a_job(tmp_path / "job")
    expected = finish(start(alone, *words), alone)
    assert finish(start(job, *words, "launch.rewarders=2"), job) == expected


@pytest.mark.slow
def test_a_file_that_cannot_be_imported_ends_the_job_with_its_words(tmp_path: Path) -> None:
    job = a_job(tmp_path / "job")
    (job.cwd / "my_reward.py").write_text("raise ValueError('no luck')\n" + SOURCE)
    assert start(job, *FUNCTION, "launch.rewarders=1").wait(120) == 2
    assert "my_reward.py cannot be used: ValueError: no luck (my_reward.py:1" in job.said()
    assert "started anew" not in job.said() and "Traceback" not in job.said()


@pytest.mark.slow
def test_on_ray_they_may_be_on_another_node_and_change_no_bit(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    alone, job = a_job(tmp_path / "alone"), a_job(tmp_path / "job")
    expected = finish(start(alone, *FUNCTION, "reward.workers=2"), alone)
    with cluster({"num_cpus": 1}, {"num_cpus": 4, "node_ip_address": "127.0.0.2"}) as nodes:
        where = ("launch=ray", f"launch.address={nodes.address}", "device=cpu", "device.threads=1")
        process = start(job, *FUNCTION, *where, "launch.rewarders=2", "reward.workers=2")
        wait_until(lambda: job.steps() >= 1, process)
        os.kill(rewarders(job)[1], signal.SIGKILL)
        assert finish(process, job) == expected
    said = job.said()
    assert "5 cores (1 to train, 4 to score) in one placement group" in said
    assert re.search(r"rank 0 +\S+ \(127\.0\.0\.1\) +1 core\n", said)
    assert re.search(r"rewarders 0 to 1 +\S+ \(127\.0\.0\.2\) +4 cores\n", said)
    assert "rewarder 1 was killed (SIGKILL); it is started anew (1 of 3), and asked again" in said
    assert "http://127.0.0.2:" in said, "it listens at its node's address"
