"""Jobs with processes that only sample, as their user sees them: undisturbed, killed, stopped; the same numbers."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.weight_sync.store_dir import store_dirs
from tests.launch.several import DDP, ROOT, Job, alive, gone, wait_until

pytestmark = pytest.mark.timeout(400)  # several processes share few cores

STEPS = 8
# random weights sort nothing, so that answers are rewarded for their length: every group has a gradient
SMALL = (
    "+recipe=grpo_demo",
    "init_from=null",
    "reward=length",
    "reward.max_length=8",
    "reward.overlong_buffer_len=7",
    "sampler.max_new_tokens=8",
    "algorithm.batch_size=8",
    "data.items=64",
    "data.held_out=8",
    "model.hidden_size=32",
    "model.intermediate_size=32",
    "model.layers=2",
    "tracker=none",
    "evaluation.every=0",
    "checkpoint.every=2",
)
SHORT, LONG = f"steps={STEPS}", "steps=100000"
SAMPLED = (*SMALL, "launch.samplers=1")


class Sampled(Job):
    """A job of which some processes only sample."""

    def samplers(self) -> list[int]:
        """Their processes by their endpoint files; that of a killed one stays until another replaces it."""
        paths = sorted((self.latest / "samplers").glob("*.json"))
        return [json.loads(path.read_text())["pid"] for path in paths]

    def end(self, steps: int = STEPS) -> tuple[bytes, list[dict[str, object]]]:
        """What training came to: parameters with the optimizer's state, and every step's numbers."""
        rows = self.curve()
        own = ("sampler/", "mismatch/", "correction/", "weight_sync/")
        return self.weights(steps), [{k: v for k, v in row.items() if not k.startswith(own)} for row in rows]

    def leftovers(self) -> list[Path]:
        """What is left of weights for samplers."""
        return [place for place in store_dirs(self.latest.resolve()) if place.exists()]


@pytest.fixture(scope="module")
def peaceful(tmp_path_factory: pytest.TempPathFactory) -> Sampled:
    """The same job whose ranks sample, left in peace."""
    job = Sampled(tmp_path_factory.mktemp("peaceful"))
    job.run(*SMALL, SHORT)
    return job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Sampled]:
    """A job, of which nothing is left."""
    made = Sampled(tmp_path)
    yield made
    assert not made.latest.exists() or made.leftovers() == []


def begun(job: Sampled, *words: str, steps: int = 2) -> tuple[subprocess.Popen[bytes], list[int], list[int]]:
    """The command, its ranks and its samplers, after so many steps."""
    process = job.start(*words)
    wait_until(lambda: job.steps() >= steps, process)
    return process, job.pids(), job.samplers()


@pytest.mark.slow
def test_a_sampler_of_its_own_that_is_killed_changes_no_bit(job: Sampled, peaceful: Sampled) -> None:
    process, ranks, [sampler] = begun(job, *SAMPLED, SHORT)
    os.kill(sampler, signal.SIGKILL)
    assert process.wait(120) == 0, job.said()
    assert "sampler 0 was killed (SIGKILL); restarting it (1 of 3)" in job.said()
    assert job.end() == peaceful.end()
    named = {name for row in job.curve() for name in row}
    assert {"sampler/utilization_percent", "sampler/resident_bytes", "sampler/queue", "rollout/staleness"} <= named
    assert not alive([*ranks, sampler]) and job.samplers() == [], "told to end, they take their notes away"


@pytest.mark.slow
def test_samplers_of_several_ranks_change_no_bit(job: Sampled, tmp_path: Path) -> None:
    several = (*DDP, "launch.devices=2")
    job.run(*SMALL, SHORT, *several, "launch.samplers=2", "algorithm.lag=1")
    (tmp_path / "colocated").mkdir()
    colocated = Sampled(tmp_path / "colocated")
    colocated.run(*SMALL, SHORT, *several, "algorithm.lag=1")
    assert job.end() == colocated.end()


@pytest.mark.slow
def test_samplers_that_are_sent_images_change_no_bit(job: Sampled, tmp_path: Path) -> None:
    own = [word for word in SMALL if word.startswith(("init_from", "reward", "algorithm", "evaluation", "tracker"))]
    words = ("+recipe=vision_grpo_demo", *own, "data.items=64", "sampler.max_new_tokens=8", "steps=3")
    job.run(*words, "launch.samplers=2")
    (tmp_path / "colocated").mkdir()
    colocated = Sampled(tmp_path / "colocated")
    colocated.run(*words)
    assert job.end(3) == colocated.end(3)


@pytest.mark.slow
def test_replayed_experts_of_two_samplers_survive_a_kill(job: Sampled, tmp_path: Path) -> None:
    ends = f"sampler.stop_token_ids={list(range(0, 512, 4))}".replace(" ", "")  # or all answers were equally long
    words = (*SMALL, SHORT, "model=tiny_moe", "launch.samplers=2", "algorithm.lag=1", ends)
    process, ranks, samplers = begun(job, *words, steps=3)
    process.kill()
    assert process.wait() == -signal.SIGKILL and gone([*ranks, *samplers])
    job.run("resume", "latest")
    (tmp_path / "peaceful").mkdir()
    left_alone = Sampled(tmp_path / "peaceful")
    left_alone.run(*words)
    assert job.end() == left_alone.end()
    assert all(row["router/replay_diff_frac"] > 0 and row["train/grad_norm"] > 0 for row in job.curve()[2:])


@pytest.mark.soak
def test_a_sampler_that_is_stopped_is_replaced(job: Sampled, peaceful: Sampled) -> None:
    process, _, [sampler] = begun(job, *SAMPLED, SHORT, "sampler.timeout_s=120")
    os.kill(sampler, signal.SIGSTOP)
    assert process.wait(200) == 0, job.said()
    assert "sampler 0 is stopped (SIGSTOP), and sent no heartbeat for 40 s; restarting it (1 of 3)" in job.said()
    assert job.end() == peaceful.end() and gone([sampler])


# Run by Python at the start of every process that has the folder in its path: samplers do not see the trainer's files,
# and sampler 0 stops while it receives those of version 3, once.
STOPS = """
import sys
if "runner.launch.sampler_main" in sys.orig_argv:
    import os, signal
    from pathlib import Path
    from runner.inference.rollout_server import RolloutServer, WeightFile
    WeightFile.at = lambda path: WeightFile(path.name, -1, -1)
    receive, stopped = RolloutServer._put_file, Path(__file__).with_name("stopped")
    async def stop_once(self, request):
        if sys.orig_argv[-1] == "0" and request.path_params["name"].startswith("v3-") and not stopped.exists():
            stopped.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return await receive(self, request)
    RolloutServer._put_file = stop_once
"""


@pytest.mark.slow
def test_one_of_two_samplers_that_stops_while_it_receives_weights_changes_no_bit(
    job: Sampled, peaceful: Sampled, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(STOPS)
    words = (*SMALL, SHORT, "launch.samplers=2", "sampler.timeout_s=90")
    process = job.start(*words, PYTHONPATH=f"{site}{os.pathsep}{ROOT}")
    assert process.wait(300) == 0, job.said()
    assert (site / "stopped").exists()
    assert "sampler 0 is stopped (SIGSTOP), and sent no heartbeat for 30 s; restarting it (1 of 3)" in job.said()
    assert job.end() == peaceful.end()


@pytest.mark.slow
def test_a_job_whose_rank_is_killed_goes_on_by_itself(job: Sampled, peaceful: Sampled) -> None:
    process, [rank], samplers = begun(job, *SAMPLED, SHORT, "launch.attempts=2", steps=3)
    os.kill(rank, signal.SIGKILL)
    assert process.wait(200) == 0, job.said()
    text = (
        "attempt 1 ended: rank 0 of 1 was killed (SIGKILL); "
        "attempt 2 continues from the newest checkpoint (the last one)"
    )
    assert text in job.said()
    assert job.end() == peaceful.end() and gone([rank, *samplers])
    assert (job.status()["state"], job.status()["attempt"]) == ("done", 2)
    assert {"manifest.json", "spec.yaml", "overrides.yaml"} <= {f.name for f in (job.latest / "attempts/2").iterdir()}


@pytest.mark.slow
def test_of_a_killed_command_nothing_is_left(job: Sampled) -> None:
    process, ranks, samplers = begun(job, *SAMPLED, LONG)
    process.kill()
    assert process.wait() == -signal.SIGKILL and gone([*ranks, *samplers])
    end = time.monotonic() + 5
    while job.leftovers() and time.monotonic() < end:
        time.sleep(0.05)
    assert job.leftovers() == []


@pytest.mark.slow
def test_a_sampler_that_is_lost_too_often_ends_the_job_which_goes_on_exactly(job: Sampled, peaceful: Sampled) -> None:
    process, ranks, samplers = begun(job, *SAMPLED, SHORT, "launch.max_worker_restarts=0")
    os.kill(samplers[0], signal.SIGKILL)
    assert process.wait(60) == 75 and gone([*ranks, *samplers]), job.said()
    assert "error: sampler 0 was killed (SIGKILL)\n" in job.said() and "launch.max_worker_restarts=0" in job.said()
    assert "Traceback" not in job.said() and "continue: run resume latest" in job.said()
    job.run("resume", "latest")
    assert job.end() == peaceful.end()


@pytest.mark.soak
def test_a_signal_saves_while_samplers_serve(job: Sampled) -> None:
    process, ranks, samplers = begun(job, *SAMPLED, LONG)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143 and gone([*ranks, *samplers]), job.said()
    assert job.weights(job.curve()[-1]["step"]) and "error" not in job.said()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_whoever_is_killed_whenever(job: Sampled, peaceful: Sampled, seed: int) -> None:
    moments = random.Random(seed)
    process = job.start(*SAMPLED, SHORT, "launch.attempts=4")
    wait_until(lambda: job.steps() >= 1, process)
    for victim in moments.choices(("sampler", "rank", "command"), k=3):
        time.sleep(3 * moments.random())
        for pid in victims(job, process)[victim]:
            os.kill(pid, signal.SIGKILL)
    while (code := process.wait(200)) == -signal.SIGKILL:
        process = job.start("resume", "latest")
    assert code == 0, job.said()
    assert job.end() == peaceful.end() and "Traceback" not in job.said()


def victims(job: Sampled, process: subprocess.Popen[bytes]) -> dict[str, list[int]]:
    """The processes that run now, by what they are."""
    ranks = job.pids() if (job.latest / "manifest.json").exists() else []  # an attempt that is built has none yet
    found = {"sampler": job.samplers(), "rank": ranks, "command": [] if process.poll() is not None else [process.pid]}
    return {name: alive(pids) for name, pids in found.items()}
