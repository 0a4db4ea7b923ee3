"""Images on several ranks, of which some have none: the update of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import distributed

from runner.adapter import lora
from runner.adapter.config import LoraConfig, NoAdapterConfig
from runner.core.auto_choices import Decisions
from runner.core.batch import Batch, pack
from runner.core.media import MEDIA_ID
from runner.data.chat import Renderer
from runner.distributed.work_partition import SINGLE_PROCESS
from runner.model import hf
from runner.model.config import HfConfig
from runner.parallelism.process_groups import ProcessGroupCollectives
from tests.model.vision_zoo import write_folder
from tests.model.zoo import CPU
from tests.parallelism.forked import ranks
from tests.parallelism.test_fsdp import close, sharded, trained

SHAPES = {"fsdp": (1, 2), "hsdp": (2, 2)}
SIZES = {"ddp": 2, "fsdp": 2, "hsdp": 4}


def made(folder: Path, trained: str) -> tuple[Any, list[list[int]]]:
    """trained: language, adapter or all"""
    config = HfConfig(path=str(folder), freeze=() if trained == "all" else None)
    tokenizer = hf.tokenizer(config)
    tokenizer.image_reader = hf.image_reader(config, tokenizer)
    image = {"type": "image", "image": str(folder / "a.png")}
    said: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": [image, {"type": "text", "text": "what"}]}],
        [{"role": "user", "content": "no image at all"}],
        [{"role": "user", "content": [{"type": "text", "text": "one"}, image, image]}],
        [{"role": "user", "content": "none"}],
    ]
    rows = [Renderer(tokenizer).conversation_ids(messages) for messages in said]
    model = hf.build(config, tokenizer=tokenizer, device=CPU, seed=0, decide=Decisions())
    if trained == "adapter":
        return lora.attach(LoraConfig(rank=2), model, decide=Decisions()), rows
    return lora.train_all(NoAdapterConfig(), model, decide=Decisions()), rows


def part(rows: list[list[int]], rank: int, size: int) -> Batch:
    """Every second rank has no images."""
    own = rows[rank::size]
    return pack(own, [[float(one < MEDIA_ID) for one in row] for row in own])


def on_rank(rank: int, folder: Path, layout: str, parts: str) -> Any:
    model, rows = made(folder, parts)
    if layout != "ddp":
        return trained(sharded(model, SHAPES[layout]), part(rows, rank, SIZES[layout]))
    return trained(model, part(rows, rank, 2), ProcessGroupCollectives(distributed.group.WORLD, 60.0))


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        ("fsdp", "language"),
        ("fsdp", "adapter"),
        ("fsdp", "all"),
        ("hsdp", "all"),
        ("ddp", "language"),
        ("ddp", "all"),
    ],
)
def test_a_rank_without_images_waits_for_none(layout: str, parts: str, tmp_path: Path) -> None:
    folder = write_folder("qwen2_5_vl", tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "a.png")
    model, rows = made(folder, parts)
    wanted = trained(model, part(rows, 0, 1), SINGLE_PROCESS)
    found = ranks(SIZES[layout], on_rank, folder, layout, parts)
    losses = [sum(step) for step in zip(*(one["losses"] for one in found), strict=True)]
    assert losses[0] == pytest.approx(wanted["losses"][0], rel=1e-6)
    assert losses == pytest.approx(wanted["losses"], rel=5e-6)  # AdamW makes rounding of small gradients larger
    close(found[0]["gradients"], wanted["gradients"], 1e-6)
