"""Quantize an exported folder by llmcompressor, rounding to the nearest; it needs no data.

This program runs in an environment of its own, and imports nothing of this project.

python llmcompressor_guest.py SOURCE TARGET w8a8|w4a16 THREADS

w8a8    weights in 8 bits with a scale for each row; inputs in 8 bits with a scale for each token, found as they come
w4a16   weights in 4 bits with a scale for each 128 (64, 32) numbers
"""

from __future__ import annotations

import sys

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

GROUPS = (128, 64, 32)


def main() -> None:
    """Write the quantized folder."""
    source, target, scheme, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    head = model.get_output_embeddings()
    sizes = {m.in_features for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head}
    if not sizes:
        sys.exit(f"{type(model).__name__} has no linear layers of torch")
    how: dict[str, object] = {"targets": "Linear", "scheme": "W8A8"}
    if scheme == "w4a16":
        group = next((one for one in GROUPS if not any(size % one for size in sizes)), None)
        if group is None:
            sys.exit(f"none of {GROUPS} divides the inputs {sorted(sizes)} of all layers; use w8a8")
        weights = QuantizationArgs(num_bits=4, strategy="group", group_size=group)
        how = {"config_groups": {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}}
    ignored = [name for name, module in model.named_modules() if module is head]
    oneshot(model=model, recipe=[QuantizationModifier(**how, ignore=ignored)])
    model.save_pretrained(target, save_compressed=True)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)


if __name__ == "__main__":
    main()
