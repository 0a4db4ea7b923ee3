"""`run parity` between the processor and the simulated NPU: they agree, and a wrong norm of the NPU is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)  # the first test builds the simulator
SMALL = (
    "model=tiny model.hidden_size=32 model.intermediate_size=32 model.layers=2 data=demo data.items=64 data.held_out=8"
)
JOBS = {
    "sft": "algorithm=sft algorithm.batch_size=4",
    "grpo": "algorithm=grpo algorithm.batch_size=4 algorithm.group_size=4 "
    "sampler=torch sampler.max_new_tokens=6 reward=exact",
}
COMMAND = "import sys; from runner.cli.main import main; sys.exit(main(sys.argv[1:]))"
WRONG = """
from runner.device.npu_sim.device import NpuSim

class Wrong(NpuSim):
    def fuse(self, module):
        super().fuse(module)
        module.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-2
"""
ON_WRONG = "from runner.device.config import NpuSimConfig; NpuSimConfig.factory = 'wrong:Wrong'\n" + COMMAND
RECORD, COMPARE = ("parity", "--record", "cpu", *SMALL.split()), ("parity", "--compare", "parity-cpu.safetensors")
CARD = ("device=npu_sim", "device.memory_gib=8")


def assert_agrees(said: str) -> None:
    assert "device.fused.rms_norm: 5 modules" in said and said.endswith("they agree\n")
    assert "2 modules ran on one side only" in said, "the two activations, which npu_swiglu contains"


def test_the_simulated_npu_agrees_and_its_wrong_norm_is_named(child: Any, tmp_path: Path) -> None:
    child(COMMAND, *RECORD, *JOBS["sft"].split(), folder=tmp_path)
    assert_agrees(child(COMMAND, *COMPARE, *CARD, "--tolerance", "0.001%", folder=tmp_path))
    (tmp_path / "wrong.py").write_text(WRONG)
    said = child(ON_WRONG, *COMPARE, *CARD, folder=tmp_path, code=5)
    assert "first in the forward pass: policy/model.layers.1.post_attention_layernorm, whose output" in said


@pytest.mark.slow
def test_the_simulated_npu_learns_the_same_from_the_recorded_samples(child: Any, tmp_path: Path) -> None:
    child(COMMAND, *RECORD, *JOBS["grpo"].split(), folder=tmp_path)
    assert_agrees(child(COMMAND, *COMPARE, *CARD, "--tolerance", "0.001%", folder=tmp_path))
