"""Engines over two workers, and an engine in each of two ranks: in processes of their own, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.sampler.vllm.engines import NEEDED

pytestmark = [*NEEDED, pytest.mark.slow, pytest.mark.timeout(400)]

OVER_TWO = """
import sys
from pathlib import Path

from runner.weight_sync.weight_store import StoredWeights
from safetensors.torch import save_file
from tests.sampler.vllm.engines import MEAN, change, engine, gap, model, requests, score_gap

if __name__ == "__main__":  # vLLM's workers import this file
    policy, folder = model("qwen3"), Path(sys.argv[1])
    (folder / "engine").mkdir()
    with engine(policy, folder / "engine", tp=2) as sampler:
        sampler.load_weights(dict(policy.hf_tensors("all")), 0)
        assert score_gap(policy, sampler) < MEAN
        change(policy)
        save_file({name: tensor.contiguous() for name, tensor in policy.hf_tensors("all")}, folder / "v1.safetensors")
        sampler.load_weights(StoredWeights([folder / "v1.safetensors"], 1), 1)
        asked = requests()
        got = sampler.sample(asked)
        assert gap(policy, asked, got) < MEAN and score_gap(policy, sampler) < MEAN
    print("equal")
"""
IN_TWO_RANKS = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tests.sampler.vllm.engines import MEAN, change, engine, gap, model, requests, score_gap

dist.init_process_group("gloo")
rank, policy = dist.get_rank(), model()
folder = Path(sys.argv[1]) / str(rank)
folder.mkdir()
with engine(policy, folder) as sampler:
    for version in range(2):
        sampler.load_weights(dict(policy.hf_tensors("all")), version)
        asked = requests()[: 3 + 5 * rank]  # ranks need not ask for as much
        got = sampler.sample(asked)
        assert gap(policy, asked, got) < MEAN and score_gap(policy, sampler) < MEAN
        change(policy)
count = torch.ones(1)
dist.all_reduce(count)  # the ranks' own group outlives the engines
assert count == 2
dist.destroy_process_group()
print("equal")
"""


def start(program: Path, folder: Path, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(program), str(folder)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=300)[0]
    finally:
        process.kill()


def test_an_engine_over_two_workers_follows_the_policy(tmp_path: Path) -> None:
    program = tmp_path / "over_two.py"
    program.write_text(OVER_TWO)
    assert (said := ended(start(program, tmp_path))).split()[-1] == "equal", said[-3000:]


def test_each_rank_has_an_engine_and_keeps_its_process_group(tmp_path: Path) -> None:
    program = tmp_path / "ranks.py"
    program.write_text(IN_TWO_RANKS)
    meeting: Mapping[str, str] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        start(program, tmp_path, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", **meeting)
        for rank in range(2)
    ]
    try:
        for said in [ended(rank) for rank in ranks]:
            assert said.split()[-1] == "equal", said[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
