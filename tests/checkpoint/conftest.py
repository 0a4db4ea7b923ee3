"""What checkpoint tests share: a small state that tells which step it is of, and a store that remembers its words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.checkpoint.config import SafetensorsConfig
from runner.checkpoint.store import CheckpointStore

State = dict[str, dict[str, Any]]


def make_state(step: int) -> State:
    """A policy with tensors and numbers, and an algorithm with numbers only."""
    tensors = {"weight": torch.arange(12.0).reshape(3, 4) + step, "count": torch.tensor(step)}
    return {"policy": {"tensors": tensors, "step": step}, "algorithm": {"seen": [step, "items"]}}


@pytest.fixture
def state_of() -> Callable[[int], State]:
    return make_state


@pytest.fixture
def words() -> list[str]:
    """What the stores of this test reported."""
    return []


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def open_store(root: Path, words: list[str]) -> Callable[..., CheckpointStore]:
    """A new process's view of the folder: `open_store(keep=2, best=...)`."""
    return lambda **options: CheckpointStore(SafetensorsConfig(**options), root=root, report=words.append)
