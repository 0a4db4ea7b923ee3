"""Cards, as far as a plan and the numbers of a run need to know them: memory, and the most that they compute."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

GIB = 2**30
MIB = 2**20


class Card(NamedTuple):
    """An accelerator.

    memory: bytes, as its own tool reports them; flops: dense operations per second by what products are computed in
    (a data type, or tf32), without what no figure is known for; context: bytes (at least, at most) that the runtime
    keeps for itself; bandwidth: bytes of its memory that it reads per second, None where no figure is known; pattern:
    what its driver calls it.
    """

    name: str
    device: str
    memory: int
    flops: Mapping[str, float]
    context: tuple[int, int]
    bandwidth: float | None = None
    pattern: str = ""


def _tensor_cores(bfloat16: float, tf32: float, float32: float) -> dict[str, float]:
    return {"bfloat16": bfloat16, "tf32": tf32, "float32": float32}


_CANN = (512 * MIB, 2048 * MIB)
_CUDA = (300 * MIB, 1024 * MIB)
_A100 = _tensor_cores(312e12, 156e12, 19.5e12)
_HOPPER = _tensor_cores(989e12, 495e12, 67e12)
_L40S = _tensor_cores(362e12, 183e12, 91.6e12)
_4090 = _tensor_cores(165e12, 82.6e12, 82.6e12)
# The 910B's arithmetic is the figure that ms-swift's utilisation counter takes; all others are their makers'. Of the
# memory of Ascend's cards no figure of Huawei's is known to us, and what others say of it differs by four.
CARDS = {
    card.name: card
    for card in (
        Card("910B", "npu", 64 * GIB, {"bfloat16": 354e12}, _CANN, pattern=r"Ascend910B[1-3]\w*"),
        Card("910B4", "npu", 32 * GIB, {}, _CANN, pattern=r"Ascend910B4\w*"),
        Card("910C", "npu", 64 * GIB, {}, _CANN, pattern=r"Ascend910_?93\w*"),  # one of the two chips of a module
        Card("950PR", "npu", 128 * GIB, {}, _CANN, pattern=r"Ascend950PR\w*"),
        Card("A100-40G", "cuda", 40 * GIB, _A100, _CUDA, 1.555e12, r"NVIDIA A100-(SXM4|PCIE)-40GB"),
        Card("A100", "cuda", 80 * GIB, _A100, _CUDA, 2.039e12, r"NVIDIA A100(-SXM4-80GB| 80GB PCIe)"),
        Card("H100", "cuda", 80 * GIB, _HOPPER, _CUDA, 3.35e12, r"NVIDIA H100 80GB HBM3"),  # PCIe and NVL are slower
        Card("H200", "cuda", 141 * GIB, _HOPPER, _CUDA, 4.8e12, r"NVIDIA H200"),
        Card("L40S", "cuda", 48 * GIB, _L40S, _CUDA, 0.864e12, r"NVIDIA L40S"),
        Card("4090", "cuda", 24 * GIB, _4090, _CUDA, 1.008e12, r"NVIDIA GeForce RTX 4090"),
    )
}
USUAL = {"npu": "910B", "cuda": "H100"}  # what is planned for where nobody said
# One communicator of HCCL keeps a buffer for sending and one for receiving, each of HCCL_BUFFSIZE (200 MB by default).
HCCL_BUFFERS = 2 * 200 * 10**6


def find_card(driver_name: str) -> Card | None:
    """The card that a driver calls so; None for one that is not in the table."""
    return next((card for card in CARDS.values() if re.fullmatch(card.pattern, driver_name)), None)
