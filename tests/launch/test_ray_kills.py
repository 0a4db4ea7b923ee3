"""`kill -9` of a job's sampler, rank, Ray driver or command under launch=ray at random moments: the same parameters.

launch=local, in peace ───────────────────────────────▶ step 8   ┐ same bytes
launch=ray   ──✗ sampler, rank, driver: by itself ────▶ step 8   ┤
             ──✗ command;  run resume ────────────────▶ step 8   ┘ and nothing of it is left
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.several import DDP, wait_until
from tests.launch.test_sampled_runs import SMALL, STEPS, Sampled
from tests.launch.traces import Traces, traces

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(900)
JOB = (*SMALL, f"steps={STEPS}")
RAY = ("launch=ray", "launch.samplers=1")
PROGRAMS = {  # among the words of each
    "sampler": "-m runner.launch.sampler_main ",
    "rank": "-m runner.launch.rank_main ",
    "driver": "-m runner.launch.ray.driver ",
    "command": "",
}
VICTIMS = tuple(PROGRAMS)
END_S, LOOK_S = 400.0, 0.5
STARTING_S, STEP_S = 6.0, 0.2  # of a job; of a step
Undisturbed = Callable[[int], Sampled]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The same job under launch=local, by its ranks."""
    made: dict[int, Sampled] = {}

    def run(ranks: int) -> Sampled:
        if ranks not in made:
            made[ranks] = Sampled(tmp_path_factory.mktemp(f"local-{ranks}"))
            made[ranks].run(*JOB, *on(ranks))
        return made[ranks]

    return run


@pytest.fixture
def trail() -> Iterator[Traces]:
    with traces() as one:
        yield one


def on(ranks: int) -> tuple[str, ...]:
    return (*DDP, f"launch.devices={ranks}") if ranks > 1 else ()


def found(name: str, process: subprocess.Popen[bytes], trail: Traces) -> list[int]:
    """The job's processes with this among their words, as soon as there is one; what they have is remembered."""
    end = time.monotonic() + END_S
    while not trail.processes(name):
        assert process.poll() is None, "it ended by itself"
        assert time.monotonic() < end, "there is none"
        time.sleep(LOOK_S)
    trail.look()
    return trail.processes(name)


def ended(process: subprocess.Popen[bytes], trail: Traces) -> int:
    """Its exit code; what it has is remembered on the way."""
    end = time.monotonic() + END_S
    while process.poll() is None:
        assert time.monotonic() < end, "it did not end"
        trail.look()
        time.sleep(LOOK_S)
    return process.returncode


def disturbed(job: Sampled, victim: str, words: tuple[str, ...], seed: int, trail: Traces) -> int:
    """Start a job, kill one process of it at a random moment, and wait for the end; the steps it had done then."""
    moments = random.Random(seed)
    process = job.start(*words, **trail.environment)
    at = moments.randrange(STEPS - 2)  # 0: while processes start
    wait_until(job.latest.exists, process)
    time.sleep(moments.uniform(0.0, STARTING_S) if at == 0 else 0)
    found(PROGRAMS["rank"] if at else "", process, trail)
    victims = [process.pid] if victim == "command" else found(PROGRAMS[victim], process, trail)
    wait_until(lambda: job.steps() >= at, process)
    time.sleep(moments.uniform(0.0, STEP_S) if at else 0)
    os.kill(moments.choice(victims), signal.SIGKILL)
    had = job.steps()
    code = ended(process, trail)
    if victim == "command":
        assert code == -signal.SIGKILL and trail.left() == {}, trail.left(0.0)
        process = job.start("resume", "latest", **trail.environment)
        code = ended(process, trail)
    assert code == 0, job.said()
    return had


SAYS = {
    "sampler": "sampler 0 was killed (SIGKILL); restarting it (1 of 3) and retrying",
    "rank": "was killed (SIGKILL); attempt 2 continues from the newest checkpoint",
    "driver": "Ray's driver exited",
    "command": "",
}
ATTEMPTS = {"sampler": 1, "rank": 2, "driver": 2, "command": 2}


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.slow if seed == 3 else pytest.mark.soak) for seed in range(10)],
)
def test_whoever_is_killed_whenever(seed: int, undisturbed: Undisturbed, tmp_path: Path, trail: Traces) -> None:
    victim, ranks = VICTIMS[seed % len(VICTIMS)], 1 + seed // len(VICTIMS) % 2
    job = Sampled(tmp_path)
    done = disturbed(job, victim, (*JOB, *RAY, *on(ranks)), seed, trail)
    left = trail.left()
    same = job.end() == undisturbed(ranks).end()
    had = f"{len(trail.known)} processes, {len(trail.sockets)} ports and {len(trail.files)} files"
    print(
        f"seed {seed}: {ranks} ranks, {victim} killed after step {done}, attempts {job.status()['attempt']}; ", end=""
    )
    print(f"same bytes: {same}; of {had} left: {left or 'nothing'}")
    assert SAYS[victim] in job.said() and job.status()["attempt"] == ATTEMPTS[victim]
    assert same and left == {} and job.leftovers() == []
    assert len(trail.known) > 10 and trail.sockets and trail.files


@pytest.mark.soak
def test_a_sampler_that_is_stopped_is_replaced(undisturbed: Undisturbed, tmp_path: Path, trail: Traces) -> None:
    job = Sampled(tmp_path)
    process = job.start(*JOB, *RAY, "sampler.timeout_s=240", **trail.environment)
    wait_until(lambda: job.steps() >= 1, process)
    [sampler] = job.samplers()  # of its endpoint file: a search of all processes takes as long as the remaining steps
    os.kill(sampler, signal.SIGSTOP)
    assert ended(process, trail) == 0, job.said()
    assert "sampler 0 is stopped (SIGSTOP), and sent no heartbeat for 80 s; restarting it (1 of 3)" in job.said()
    assert job.end() == undisturbed(1).end() and trail.left() == {} and job.leftovers() == []
