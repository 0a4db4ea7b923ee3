"""A sharded model on two simulated cards learns as one process does."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_a_sharded_model_learns_over_hccl_as_one_process_on_the_cpu(child: Any, tmp_path: Path) -> None:
    def run(rank: int) -> str:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        found: str = child(HERE / "pieces.py", str(rank), str(tmp_path / "meeting"), **place, OMP_NUM_THREADS="1")
        return found

    with ThreadPoolExecutor(2) as pool:
        seen = json.loads(next(iter(pool.map(run, range(2)))).splitlines()[-1])
    rounded = seen.pop("qwen2 lora bfloat16")  # a base of types that travel as bytes; AdamW makes much of its rounding
    assert rounded < 0.5
    assert len(seen) == 4 and max(seen.values()) < 1e-3, seen
