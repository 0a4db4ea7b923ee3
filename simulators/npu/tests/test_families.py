"""Our adapters on torch_npu's own operators: its schemas, its gradients, a strict card behind them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.timeout(600)  # the first test builds the simulator


@pytest.mark.slow
def test_models_on_the_card_are_those_on_the_processor(child: Any) -> None:
    seen = json.loads(child(HERE / "families.py").splitlines()[-1])
    assert len(seen["kernels"]) == 9 and not any(seen["kernels"].values())
    found = seen["models"]
    assert {name: one["gap"] for name, one in found.items() if one["gap"] > (0.1 if "bfloat16" in name else 1e-3)} == {}
    assert "experts: one after the other" in str(found.pop("unfused qwen3_moe")["facts"])
    for name, one in found.items():
        assert one["answers"] or "bfloat16" in name, name
        assert "attention.padded: fused" in str(one["facts"])
        moe = name.startswith("qwen3_moe")
        text = "\n".join(one["facts"])
        kinds = ("rms_norm", "rotary", "swiglu", *["grouped_matmul"] * moe)
        for kind in kinds:
            assert f"device.fused_ops.{kind}: " in text and "instead of" not in text
        assert "attention: fused (npu_fusion_attention" in text or name.startswith("padded")
