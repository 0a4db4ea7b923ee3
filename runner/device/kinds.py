"""The kinds of device that this package has devices of."""

from __future__ import annotations

from runner.core.device_kinds import KINDS

CPU, CUDA, NPU = KINDS["cpu"], KINDS["cuda"], KINDS["npu"]
