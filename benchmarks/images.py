"""What a shared prompt saves where it has an image: patches that the vision part computes, and seconds of an update.

    python benchmarks/images.py [--group 8] [--pixels 224] [--rounds 5]

Both arms train on the same completions of one prompt with one image, as GRPO does: `shared` computes the prompt once,
`repeated` once for each completion. Their losses must be equal. The model is tiny_vl, all parts trained, one thread.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image

from runner.adapter import lora
from runner.adapter.config import NoAdapterConfig
from runner.core.auto_choices import Decisions
from runner.core.batch import Batch
from runner.core.prefix_tree import Branch, Tree, pack_trees
from runner.data.chat import Renderer
from runner.model import tiny
from runner.model.config import TinyVlConfig


def build(pixels: int) -> tuple[Any, list[int]]:
    """The model, and the ids of a prompt with an image of so many pixels on each side."""
    config = TinyVlConfig(max_positions=8192, vision_layers=4)
    tokenizer = tiny.tokenizer(config)
    tokenizer.image_reader = tiny.image_reader(config, tokenizer, max_pixels=pixels**2)
    model = tiny.build(config, tokenizer=tokenizer, device=torch.device("cpu"), seed=0, decide=Decisions())
    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (pixels, pixels, 3), dtype=np.uint8)).save(content, "PNG")
    parts = [{"type": "image", "image": content.getvalue()}, {"type": "text", "text": "which shapes?"}]
    renderer = Renderer(tokenizer)
    prompt = renderer.control.ids_of(renderer.render_prompt([{"role": "user", "content": parts}]), begins_row=True)
    return lora.train_all(NoAdapterConfig(), model, decide=Decisions()), prompt


def update(model: Any, batch: Batch) -> float:
    """The loss of a forward and backward pass."""
    model.module.zero_grad()
    total = model.linear_loss(batch, -batch.tokens["weight"])[0]
    total.backward()
    return float(total.detach())


def timed(work: Callable[[], float]) -> tuple[float, float]:
    """What `work` returns, and its seconds."""
    begin = time.perf_counter()
    return work(), time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", type=int, default=8, help="completions of the prompt")
    parser.add_argument("--pixels", type=int, default=224, help="width and height of the image")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model, prompt = build(asked.pixels)
    patches = list[int]()
    model.inner.model.visual.register_forward_pre_hook(lambda module, given: patches.append(len(given[0])))
    branches = [Branch([65 + at, 66, 67, 68], {"weight": [0.1] * 4}) for at in range(asked.group)]
    arms = {name: pack_trees([Tree(prompt, branches)], share=name == "shared") for name in ("shared", "repeated")}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    losses, computed = dict[str, float](), dict[str, int]()
    for _ in range(asked.rounds + 1):
        for name, batch in arms.items():
            patches.clear()
            losses[name], taken = timed(lambda batch=batch: update(model, batch))  # type: ignore[misc]
            seconds[name].append(taken)
            computed[name] = sum(patches)
    for name, batch in arms.items():
        median = statistics.median(seconds[name][1:])
        print(
            f"{name:9} {computed[name]:7} patches, {batch.num_tokens:6} tokens, {median:.3f} s, loss {losses[name]:.5f}"
        )
    ratio = statistics.median(a / b for a, b in zip(seconds["repeated"][1:], seconds["shared"][1:], strict=True))
    print(f"repeated / shared: {computed['repeated'] / computed['shared']:.1f} patches, {ratio:.1f} seconds")
    return 0 if abs(losses["shared"] - losses["repeated"]) < 1e-4 * abs(losses["shared"]) else 1


if __name__ == "__main__":
    sys.exit(main())
