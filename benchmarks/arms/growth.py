"""How cost grows: seconds and memory of one optimizer step at a given length, batch and vocabulary.

    python -m arms.growth runner|rows|flat RESULT ROWS LENGTH VOCAB CHUNK STEPS

Rows are of equal length. The model is the comparison's but for its vocabulary, from random weights. `runner` goes
through its library: pack → forward_backward → optim_step; CHUNK tokens have logits at once in it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from arms import bare, stamps
from arms.workload import MODEL, Rows

LR = 1e-4
Step = Callable[[Rows], None]


def rows_of(count: int, length: int, vocab: int) -> Rows:
    """Random tokens; as in chats, about a third of them are trained on."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocab, (count, length), generator=generator).tolist()
    mask = [0] * (length - length // 3) + [1] * (length // 3)
    return Rows(ids, [mask] * count)


def bare_step(kind: str, module: Any) -> Step:
    """One step of a bare loop."""
    optimizer = bare.adamw(module, LR)

    def step(rows: Rows) -> None:
        bare.one_step(module, optimizer, bare.FORWARDS[kind], rows)

    return step


def runner_step(module: Any, chunk: int) -> Step:
    """One step of this runner's learner; `chunk` tokens have logits at once."""
    from runner.algorithm.sft import CrossEntropy
    from runner.core.batch import pack, with_totals
    from runner.model.causal_lm import CausalLM
    from runner.model.config import HfConfig
    from runner.optimizer.config import AdamWConfig
    from runner.optimizer.optimizers import build_adamw
    from runner.trainer.learner import LocalLearner

    config = HfConfig(path="random", lm_head_chunk_tokens=chunk)
    model = CausalLM(module, None, config, seed=0, decide=_refuse)
    optimizer = build_adamw(AdamWConfig(lr=LR), parameters=model.trainable(), decide=_refuse)
    learner = LocalLearner(
        model, optimizer, lr=LR, clip_norm=1.0, factor=lambda _: 1.0, budget=4096, seed=0, device=torch.device("cpu")
    )

    def step(rows: Rows) -> None:
        batch = pack(rows.ids, [[float(m) for m in mask] for mask in rows.mask])
        learner.begin_step(0)
        metrics, _ = learner.forward_backward(with_totals(batch, batch.count()), CrossEntropy())
        metrics.result()
        learner.optim_step()

    return step


def _refuse(feature: str, wanted: str, got: str, reason: str) -> None:
    raise RuntimeError(f"{feature}: {got} instead of {wanted} ({reason}); this would not measure what it says")


def _forget_peak() -> None:
    """Let the process's peak resident set begin again (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def main(kind: str, result: Path, rows: int, length: int, vocab: int, chunk: int, steps: int) -> None:
    """Measure and write: processor seconds per step (least of `steps`), memory above model and optimizer."""
    torch.manual_seed(0)
    module = Qwen2ForCausalLM(Qwen2Config(**{**MODEL, "vocab_size": vocab})).train()
    step = runner_step(module, chunk) if kind == "runner" else bare_step(kind, module)
    step(rows_of(1, 8, vocab))  # allocates the optimizer's state
    batch = rows_of(rows, length, vocab)
    before = stamps.rss_bytes()
    _forget_peak()
    seconds = []
    for _ in range(steps):
        begin = time.process_time()
        step(batch)
        seconds.append(time.process_time() - begin)
    logits = rows * length * vocab * 4
    record = {"cpu_s": min(seconds), "extra_bytes": stamps.peak_rss_bytes() - before, "logits_bytes": logits}
    result.write_text(json.dumps(record))


if __name__ == "__main__":
    arm, target_file, *numbers = sys.argv[1:]
    main(arm, Path(target_file), *map(int, numbers))
