"""Whole jobs whose answers a running server draws: what is sent after each step arrives, by the probe's word."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from transformers import AutoModelForCausalLM

from tests.inference.scripted import serve
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
        "sampler.max_new_tokens=6",
        "sampler.temperature=0.8",
    ),
)
# of a step's numbers those that depend on what was sampled
LEARNT = ("train/loss", "train/grad_norm", "reward/mean", "rollout/length", "mismatch/logprob_diff")
REWARD = "def score(completion_ids, **_):\n    return [sum(ids) / len(ids) for ids in completion_ids]\n"


def train(folder: Path, *words: str) -> list[dict[str, float]]:
    """Train the model in a folder; every step's numbers."""
    (folder / "my_reward.py").write_text(REWARD)
    done = subprocess.run(
        [sys.executable, "-m", "runner", *JOB, f"model.path={folder / 'model'}", *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "KEY": "a-key"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (folder / "outputs/latest/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "words", [("sampler.weight_sync=reload",), ("sampler.weight_sync=adapter", "adapter=lora")], ids=" ".join
)
def test_a_job_trains_on_what_a_server_draws(words: tuple[str, ...], tmp_path: Path) -> None:
    policy = causal("qwen3", max_position_embeddings=512)
    policy.save(tmp_path / "model")
    server = StandIn(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval(), tokenizer=policy.tokenizer, max_model_len=512
    )
    server.faults = [Fault("", 0), Fault("503", 2)]
    with served(server) as url:
        lines = train(tmp_path, "sampler=server", f"sampler.url={url}", *words)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["weight_sync/logprob_error"] < 1e-4 and line["mismatch/logprob_diff"] < 1e-4
        assert line["rollout/staleness"] == 0 and line["train/grad_norm"] > 0
    assert lines[0]["sampler/retries"] == 2
    assert not [*Path("/dev/shm").glob("posttrain-run-*/run-*")] and not server.adapters


@pytest.mark.parametrize(
    "sync", [("sampler.weight_sync=reload",), ("sampler.weight_sync=adapter", "adapter=lora")], ids=" ".join
)
def test_a_job_learns_from_run_serve_what_it_learns_in_one_process(sync: tuple[str, ...], tmp_path: Path) -> None:
    causal("qwen3", max_position_embeddings=2048).save(tmp_path / "model")
    (tmp_path / "key").write_text("a-key")
    (tmp_path / "key").chmod(0o600)
    words = ("logprobs_mode=processed", "weight_updates=true", "--api-key-file", str(tmp_path / "key"))
    with serve(tmp_path / "model", *words, cwd=tmp_path) as server:
        url = server.url.removesuffix("/v1")
        remote = train(tmp_path, "sampler=server", f"sampler.url={url}", "sampler.api_key_env=KEY", *sync)
        refusals = [
            httpx.post(f"{url}/collective_rpc", json=body, headers=headers, timeout=60).status_code
            for headers, body in (
                ({}, {}),
                ({"Authorization": "Bearer a-key"}, {"method": "collect_model"}),
                (
                    {"Authorization": "Bearer a-key"},
                    {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "none")}},
                ),
            )
        ]
    assert refusals == [401, 400, 400]
    local = train(tmp_path, "sampler=torch", *sync[1:])
    for there, here in zip(remote, local, strict=True):
        assert there["weight_sync/logprob_error"] < 1e-5
        assert {name: there[name] for name in LEARNT} == pytest.approx({name: here[name] for name in LEARNT}, abs=1e-5)
