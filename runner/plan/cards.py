"""Cards, as far as a plan needs to know them: memory, and the most that they compute."""

from __future__ import annotations

from typing import NamedTuple

GIB = 2**30
MIB = 2**20


class Card(NamedTuple):
    """An accelerator. `memory`: bytes, as its own tool reports them; `flops`: dense bfloat16 operations per second,
    None where no figure is known; `context`: bytes (at least, at most) that the runtime keeps for itself; `bandwidth`:
    bytes of its memory that it reads per second, None where no figure is known."""

    name: str
    device: str
    memory: int
    flops: float | None
    context: tuple[int, int]
    bandwidth: float | None = None


_CANN = (512 * MIB, 2048 * MIB)
_CUDA = (300 * MIB, 1024 * MIB)
# The 910B's arithmetic is the figure that ms-swift's utilisation counter takes; all others are their makers'. Of the
# memory of Ascend's cards no figure of Huawei's is known to us, and what others say of it differs by four.
CARDS = {
    card.name: card
    for card in (
        Card("910B", "npu", 64 * GIB, 354e12, _CANN),
        Card("910B4", "npu", 32 * GIB, None, _CANN),
        Card("910C", "npu", 64 * GIB, None, _CANN),  # one of the two chips of a module
        Card("950PR", "npu", 128 * GIB, None, _CANN),
        Card("A100-40G", "cuda", 40 * GIB, 312e12, _CUDA, 1.555e12),
        Card("A100", "cuda", 80 * GIB, 312e12, _CUDA, 2.039e12),
        Card("H100", "cuda", 80 * GIB, 989e12, _CUDA, 3.35e12),
        Card("H200", "cuda", 141 * GIB, 989e12, _CUDA, 4.8e12),
        Card("L40S", "cuda", 48 * GIB, 362e12, _CUDA, 0.864e12),
        Card("4090", "cuda", 24 * GIB, 165e12, _CUDA, 1.008e12),
    )
}
USUAL = {"npu": "910B", "npu_sim": "910B", "cuda": "H100"}  # what is planned for where nobody said
# One communicator of HCCL keeps a buffer for sending and one for receiving, each of HCCL_BUFFSIZE (200 MB by default).
HCCL_BUFFERS = 2 * 200 * 10**6
