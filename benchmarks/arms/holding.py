"""A process that only holds weights, behind the same HTTP as every sampler.

python -m arms.holding INDEX FOLDER MEGABYTES here|elsewhere

elsewhere: it does not see the files of the trainer, as on another machine
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from runner.inference.rollout_server import serve
from runner.interfaces import Request, Rollout
from runner.sampler.server.job_token import job_token
from runner.sampler.server.protocol import WeightFile

TENSOR_BYTES = 16 * 2**20
MEGABYTE = 10**6


def weights(megabytes: int, seed: int = 0) -> dict[str, Tensor]:
    """bfloat16 matrices of 16 MiB that come to so many megabytes, as layers of a model do."""
    generator = torch.Generator().manual_seed(seed)
    count = -(-megabytes * MEGABYTE // TENSOR_BYTES)
    one = torch.randn(TENSOR_BYTES // 2, generator=generator, dtype=torch.float32).bfloat16().view(2048, -1)
    return {f"layers.{at}.weight": one * (at + 1) for at in range(count)}


class Holding:
    """A `Sampler` of nothing: loading copies each tensor into its own."""

    temperature, max_new_tokens, max_model_len = 1.0, 1, None

    def __init__(self, megabytes: int) -> None:
        self._own = weights(megabytes)

    def load_weights(self, tensors: Mapping[str, Tensor] | None, version: int) -> None:
        """Copy them."""
        for name, tensor in (tensors or {}).items():
            self._own[name].copy_(tensor)

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        """Nothing."""
        return []

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Nothing."""
        return [[[] for _ in rows]]

    def pop_metrics(self) -> dict[str, float]:
        """Nothing."""
        return {}

    def release_memory(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def named(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """As a learner hands them out."""
    yield from tensors.items()


def main(index: str, folder: str, megabytes: str, where: str) -> None:
    """Serve until the process is ended."""
    torch.set_num_threads(1)
    if where != "here":
        WeightFile.at = lambda path: WeightFile(path.name, -1, -1)  # type: ignore[method-assign]
    serve(Holding(int(megabytes)), int(index), Path(folder), token=job_token())


if __name__ == "__main__":
    main(*sys.argv[1:])
