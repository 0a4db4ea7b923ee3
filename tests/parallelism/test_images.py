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


def made(folder: Path, adapter: bool) -> tuple[Any, list[list[int]]]:
    config = HfConfig(path=str(folder))
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
    if adapter:
        return lora.attach(LoraConfig(rank=2), model, decide=Decisions()), rows
    return lora.train_all(NoAdapterConfig(), model, decide=Decisions()), rows


def part(rows: list[list[int]], rank: int, size: int) -> Batch:
    """Of two ranks the second one has no images."""
    own = rows[rank::size]
    return pack(own, [[float(one < MEDIA_ID) for one in row] for row in own])


def on_rank(rank: int, folder: Path, layout: str, adapter: bool) -> Any:
    model, rows = made(folder, adapter)
    if layout == "fsdp":
        return trained(sharded(model, (1, 2)), part(rows, rank, 2))
    return trained(model, part(rows, rank, 2), ProcessGroupCollectives(distributed.group.WORLD, 60.0))


@pytest.mark.parametrize(("layout", "adapter"), [("fsdp", False), ("fsdp", True), ("ddp", False)])
def test_a_rank_without_images_waits_for_none(layout: str, adapter: bool, tmp_path: Path) -> None:
    folder = write_folder("qwen2_5_vl", tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "a.png")
    model, rows = made(folder, adapter)
    wanted = trained(model, part(rows, 0, 1), SINGLE_PROCESS)
    first, second = ranks(2, on_rank, folder, layout, adapter)
    losses = [a + b for a, b in zip(first["losses"], second["losses"], strict=True)]
    assert losses == pytest.approx(wanted["losses"], rel=2e-5)
    close(first["gradients"], wanted["gradients"], 1e-5)
