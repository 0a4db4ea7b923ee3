"""Whole jobs whose answers a running server draws: what is sent after each step arrives, by the probe's word."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.model.zoo import causal
from tests.sampler.server.standin import Fault, StandIn, served

pytestmark = pytest.mark.slow
JOB = (
    *("+recipe=grpo_demo", "init_from=null", "model=hf", "steps=3", "schedule=constant", "optimizer.lr=0.01"),
    *("algorithm.batch_size=4", "algorithm.group_size=2", "algorithm.zero_variance=keep", "algorithm.kl_estimator=k3"),
    *(
        "data.items=32",
        "data.held_out=4",
        "data.max_length=128",
        "evaluation.every=0",
        "checkpoint.best=null",
        "tracker=none",
    ),
    *(
        "reward=function",
        "reward.path=my_reward.py:score",
        "sampler=server",
        "sampler.max_new_tokens=6",
        "sampler.temperature=0.8",
    ),
)
REWARD = "def score(completion_ids, **_):\n    return [sum(ids) / len(ids) for ids in completion_ids]\n"


@pytest.mark.parametrize(
    "words", [("sampler.weight_sync=reload",), ("sampler.weight_sync=adapter", "adapter=lora")], ids=" ".join
)
def test_a_job_trains_on_what_a_server_draws(words: tuple[str, ...], tmp_path: Path) -> None:
    policy = causal("qwen3", max_position_embeddings=512)
    policy.save(tmp_path / "model")
    server = StandIn(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval(), tokenizer=policy.tokenizer, max_model_len=512
    )
    (tmp_path / "my_reward.py").write_text(REWARD)
    server.faults = [Fault("", 0), Fault("503", 2)]
    with served(server) as url:
        own = (f"sampler.url={url}", f"model.path={tmp_path / 'model'}", *words)
        done = subprocess.run(
            [sys.executable, "-m", "runner", *JOB, *own],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "outputs/latest/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["weight_sync/logprob_error"] < 1e-4 and line["mismatch/logprob_diff"] < 1e-4
        assert line["rollout/staleness"] == 0 and line["train/grad_norm"] > 0
    assert lines[0]["sampler/retries"] == 2
    assert not [*Path("/dev/shm").glob("posttrain-run-*/run-*")] and not server.adapters
