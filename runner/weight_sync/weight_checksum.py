"""Digest of weights: of their names, types, shapes and bytes, on any device.

    bytes of a tensor ──pieces of 8 MiB──▶ XXH3-128 of each ──▶ of these ──name, type, shape──▶ of all, sorted by name

XXH3 (Yann Collet, xxHash 0.8) finds stale and damaged weights. It is no defence against an attacker, whom the job's
token excludes. It is as fast as memory, and other threads run meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash
from torch import Tensor

from runner.core.safetensors_layout import TYPES

PIECE_BYTES = 8 * 2**20  # of a tensor that one thread digests at once
THREADS = min(8, os.cpu_count() or 1)

TensorDigests = Mapping[str, bytes]  # of each tensor: what it is called, and what it is


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """The digest of weights, on any device; one tensor after the other is copied to the host."""
    found: dict[str, bytes] = {}
    for name, tensor in tensors.items():
        found.update(tensor_digests({name: tensor.detach().cpu().contiguous()}))
    return combine_digests(found)


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """What each of these is, by all threads at once; contiguous, on the CPU."""
    with ThreadPoolExecutor(THREADS) as pool:
        pending = {name: pool.map(chunk_digest, byte_chunks(tensor)) for name, tensor in tensors.items()}
        return {name: tensor_digest(name, tensors[name], [*found]) for name, found in pending.items()}


def byte_chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a contiguous tensor on the CPU, in its own memory, PIECE_BYTES at a time."""
    whole = tensor.reshape(-1).view(torch.uint8).numpy().data
    for begin in range(0, len(whole), PIECE_BYTES):
        yield whole[begin : begin + PIECE_BYTES]


def chunk_digest(piece: memoryview) -> bytes:
    """The digest of some bytes; unlike the call that does it all at once, `update` lets other threads run."""
    made = xxhash.xxh3_128()
    made.update(piece)
    return made.digest()


def tensor_digest(name: str, tensor: Tensor, found: Sequence[bytes]) -> bytes:
    """What a tensor is called, and what it is; `found`: the digests of its pieces."""
    bytes_ = xxhash.xxh3_128(b"".join(found)).hexdigest()
    return f"{name} {TYPES[tensor.dtype]} {list(tensor.shape)} {bytes_}\n".encode()


def combine_digests(digests: TensorDigests) -> str:
    """One digest of all, the same in every order."""
    return xxhash.xxh3_128(b"".join(digests[name] for name in sorted(digests))).hexdigest()
