"""Jobs that sample with vLLM, as their user sees them: in the rank, in a process of its own; they learn."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.weight_sync.store_dir import store_dirs
from tests.launch.several import Job
from tests.sampler.vllm.engines import MEAN, NEEDED

pytestmark = [*NEEDED, pytest.mark.slow, pytest.mark.timeout(1500)]

DEMO = ("+recipe=grpo_demo", "sampler=vllm", "sampler.kv_cache_memory_bytes=214748364", "tracker=none")
# random weights sort nothing, so that answers are rewarded for their length, of which one in five ids is the end
SHORT = (
    *DEMO,
    "init_from=null",
    "reward=length",
    "reward.max_length=8",
    "reward.overlong_buffer_len=7",
    f"sampler.stop_token_ids={list(range(64))}",
    "algorithm.batch_size=8",
    "data.items=64",
    "data.held_out=8",
    "model.layers=2",
    "evaluation.every=0",
    "checkpoint.best=null",
    "steps=3",
)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job, of whose weights nothing is left."""
    made = Job(tmp_path)
    yield made
    assert not any(place.exists() for place in store_dirs(made.latest.resolve()))


@pytest.mark.parametrize("words", [(), ("launch.samplers=1", "algorithm.lag=1")], ids=["beside", "own"])
def test_a_job_samples_what_its_policy_would(words: tuple[str, ...], job: Job) -> None:
    said = job.run(*SHORT, *words)
    curve = job.curve()
    assert len(curve) == 3 and all(row["weight_sync/logprob_error"] < MEAN for row in curve), said
    if not words:
        assert all(row["mismatch/logprob_diff"] < MEAN for row in curve)
    assert "sampler.vllm: 0.32" in said + "".join(path.read_text() for path in (job.latest / "samplers").glob("*.log"))


AGENT = """
import json, os, sys, urllib.request
messages = json.load(sys.stdin)["prompt"]
for turn in range(2):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    request.add_header("Content-Type", "application/json")
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [said, {"role": "user", "content": "and?"}]
"""


def test_programs_call_a_policy_that_vllm_samples(job: Job) -> None:
    (job.cwd / "my_agent.py").write_text(AGENT)
    job.run(*SHORT, "environment=agent", f"environment.command={sys.executable} my_agent.py")
    curve = job.curve()
    assert len(curve) == 3 and all(row["mismatch/logprob_diff"] < MEAN for row in curve)
    assert all(row["environment/turns"] == 2 and row["environment/rows"] == 1 for row in curve)


def test_an_adapter_that_is_sent_alone_is_sampled_from(job: Job) -> None:
    job.run(*SHORT, "adapter=lora", "sampler.weight_sync=adapter")
    assert all(row["mismatch/logprob_diff"] < MEAN and row["weight_sync/logprob_error"] < MEAN for row in job.curve())


def test_the_demo_learns(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.launch.several.DEADLINE_S", 1400)
    job.run(*DEMO, "steps=60", "evaluation.every=0", "checkpoint.best=null")
    rewards = [row["reward/mean"] for row in job.curve()]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.25, rewards
