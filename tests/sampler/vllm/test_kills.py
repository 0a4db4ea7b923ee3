"""`kill -9` of a job that samples with vLLM: it continues the answers that were drawn, and nothing of it is left.

killed:  start ──✗  resume ──✗  resume ─────────▶ step 6   ┐
              └─ every page of the journal, kept           ├ same bytes
replay:  start ─✗ (nothing drawn), the journal put there,  │
                  resume: no answer is drawn ───▶ step 6   ┘
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.several import Job, wait_until
from tests.launch.traces import Traces, traces
from tests.sampler.vllm.engines import NEEDED
from tests.sampler.vllm.test_runs import SHORT

pytestmark = [*NEEDED, pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 6
WORDS = (*(word for word in SHORT if not word.startswith("steps=")), f"steps={STEPS}", "checkpoint.every=2")
OVER_TWO = ("launch.samplers=2", "sampler.tensor_parallel_size=2")  # an engine whose workers share memory
END_S = 600.0


@pytest.fixture
def trail() -> Iterator[Traces]:
    with traces() as one:
        yield one


class Kept:
    """Every page that a job's journal ever had: what is removed there has another name here."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job, self.folder = job, folder
        folder.mkdir()

    def look(self) -> None:
        for page in (self._job.latest / "journal").glob("v*.jsonl"):
            if not (self.folder / page.name).exists():
                os.link(page, self.folder / page.name)

    def pages(self) -> dict[str, bytes]:
        self.look()
        return {page.name: page.read_bytes() for page in self.folder.iterdir()}


def followed(process: subprocess.Popen[bytes], kept: Kept, trail: Traces) -> int:
    """Its exit code; pages and traces are taken in on the way."""
    end = time.monotonic() + END_S
    while process.poll() is None:
        assert time.monotonic() < end, "it did not end"
        kept.look()
        trail.look()
        time.sleep(0.02)
    kept.look()
    return process.returncode


def killed(job: Job, at: int, kept: Kept, trail: Traces, wait_s: float, process: subprocess.Popen[bytes]) -> None:
    """Kill the command after so many steps and a while, of which nothing is left."""
    page = kept.folder / f"v{at}.jsonl"

    def reached() -> bool:
        kept.look()
        return page.exists()  # the step's answers are being drawn, or trained on

    wait_until(reached, process)
    time.sleep(wait_s)
    trail.look()
    kept.look()
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert trail.left() == {}


def replayed(pages: Path, words: tuple[str, ...], cwd: Path, trail: Traces) -> Job:
    """The same job, given answers; it draws none."""
    cwd.mkdir()
    job = Job(cwd)
    process = job.start(*words, **trail.environment)
    wait_until(lambda: (job.latest / "spec.yaml").exists(), process)
    process.kill()
    process.wait()
    shutil.rmtree(job.latest / "journal", ignore_errors=True)
    shutil.copytree(pages, job.latest / "journal")
    kept = Kept(job, cwd / "kept")
    assert followed(job.start("resume", "latest", **trail.environment), kept, trail) == 0, job.said()
    assert kept.pages() == {page.name: page.read_bytes() for page in pages.iterdir()}, "it drew answers of its own"
    return job


@pytest.mark.parametrize(
    "words", [pytest.param((), id="beside"), pytest.param(OVER_TWO, id="over two", marks=pytest.mark.soak)]
)
def test_a_killed_job_is_what_its_journal_says(words: tuple[str, ...], tmp_path: Path, trail: Traces) -> None:
    moments = random.Random(len(words))
    job = Job(tmp_path)
    kept = Kept(job, tmp_path / "kept")
    process = job.start(*WORDS, *words, **trail.environment)
    for at in (1, 3):
        killed(job, at, kept, trail, moments.uniform(0.0, 0.3), process)
        process = job.start("resume", "latest", **trail.environment)
    assert followed(process, kept, trail) == 0, job.said()
    assert trail.left() == {}
    again = replayed(kept.folder, (*WORDS, *words), tmp_path / "again", trail)
    assert job.weights(STEPS) == again.weights(STEPS) and trail.left() == {}
    own = ("sampler/", "mismatch/", "correction/", "weight_sync/")
    mine, other = (
        [{k: v for k, v in row.items() if not k.startswith(own)} for row in one.curve()] for one in (job, again)
    )
    assert mine == other and len(mine) == STEPS
