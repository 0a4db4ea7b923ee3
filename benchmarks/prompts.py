"""What completions behind one long prompt cost: peak memory and processor seconds of a forward and backward pass.

    python benchmarks/prompts.py [--prompt 4096] [--completion 64] [--group 8] [--rounds 3]

Three arms: one completion, all of them with the prompt shared, all of them with the prompt repeated. The losses of the
last two must be equal. A Qwen2 of 4 layers, hidden size 256, vocabulary 512, all weights trained, one thread. Memory is
what a pass allocates above the weights, gradients included, as torch's profiler records it.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import accumulate
from typing import Any

import torch
from images import update
from torch.profiler import ProfilerActivity, profile
from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM

from runner.core.auto_choices import Decisions
from runner.core.batch import Batch
from runner.core.prefix_tree import Branch, Tree, pack_trees
from runner.model.causal_lm import CausalLM
from runner.model.config import TinyConfig
from runner.model.tiny import byte_tokenizer


def build(positions: int) -> Any:
    """The model for rows of so many tokens."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": positions}
    shape = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
    module = Qwen2ForCausalLM(Qwen2Config(**shape, **heads, bos_token_id=None, eos_token_id=258))
    return CausalLM(module, byte_tokenizer(512), TinyConfig(), seed=0, decide=Decisions())


def peak(model: Any, batch: Batch) -> int:
    """Bytes."""
    model.module.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        update(model, batch)
    events: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--completion", type=int, default=64, help="tokens of each completion")
    parser.add_argument("--group", type=int, default=8, help="completions of the prompt")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model, ids = build(asked.prompt + asked.completion), list(range(256))
    branches = [
        Branch([*range(at, at + asked.completion)], {"weight": [0.01] * asked.completion}) for at in range(asked.group)
    ]
    prompt = (ids * (asked.prompt // 256 + 1))[: asked.prompt]
    arms = {
        "one": pack_trees([Tree(prompt, branches[:1])]),
        "shared": pack_trees([Tree(prompt, branches)]),
        "repeated": pack_trees([Tree(prompt, branches)], share=False),
    }
    peaks, losses, seconds = dict[str, int](), dict[str, float](), dict[str, float]()
    for name, batch in arms.items():
        losses[name], begin = update(model, batch), time.process_time()
        for _ in range(asked.rounds):
            update(model, batch)
        seconds[name] = (time.process_time() - begin) / asked.rounds
        peaks[name] = peak(model, batch)
        print(
            f"{name:9} {batch.num_tokens:6} tokens, {seconds[name]:6.2f} cpu-s, {peaks[name] / 1e6:6.1f} MB, "
            f"{peaks[name] / peaks['one']:.2f} x one, loss {losses[name]:.6f}"
        )
    return 0 if abs(losses["shared"] - losses["repeated"]) < 1e-5 * abs(losses["shared"]) else 1


if __name__ == "__main__":
    sys.exit(main())
