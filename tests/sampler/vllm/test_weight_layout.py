"""The fault that packing is switched off for, and that it is gone: on the CPU, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sampler.vllm.engines import NEEDED

pytestmark = NEEDED

PLAIN = """
with engine(policy, Path(sys.argv[1])) as sampler:
    sampler.load_weights(dict(policy.hf_tensors("all")), 0)
    change(policy)
    sampler.load_weights(dict(policy.hf_tensors("all")), 1)
    print("new" if score_gap(policy, sampler) < MEAN else "old")
"""
PACKED = """
utils.dispatch_cpu_unquantized_gemm = packs
with engine(policy, Path(sys.argv[1])) as sampler:
    worker = sampler._engine._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    head, hidden = worker.get_model().lm_head, torch.ones(1, 128)
    before = head.cpu_linear(hidden, head.weight, None).clone()
    name = "model.embed_tokens.weight"  # alone: into layers that it packed vLLM would not load at all
    worker.load_tensors({name: torch.randn(300, 128)}, [name], False)
    print("old" if torch.equal(head.cpu_linear(hidden, head.weight, None), before) else "new")
"""
BOTH = """
import sys
from pathlib import Path

import torch
import vllm.model_executor.layers.utils as utils

packs = utils.dispatch_cpu_unquantized_gemm
import runner.sampler.vllm.worker  # switches it off
from tests.sampler.vllm.engines import MEAN, change, engine, model, score_gap

policy = model(tie_word_embeddings=True)
"""


@pytest.mark.parametrize(
    ("program", "found"),
    [pytest.param(PLAIN, "new", id="plain"), pytest.param(PACKED, "old", id="packed", marks=pytest.mark.slow)],
)
def test_a_head_that_vllm_packs_keeps_its_old_weights(program: str, found: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BOTH + program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == found
