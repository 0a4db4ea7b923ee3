"""Sampling side by side in one process: the runner's sampler and transformers' own ways, turn by turn.

    python -m arms.sampler RESULT SIZE CASE ROUNDS ARM,ARM,…      (runner, generate, continuous)

Random weights, random prompts. An answer ends at one of so many ids, so that lengths differ as in practice, or only at
its last permitted token; each arm counts the tokens of its own answers, up to their ends. A hook reads the clock around
the model's forward: what remains is the arm's own time.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from runner.interfaces import Request, Rollout
from runner.model import tiny
from runner.model.causal_lm import CausalLM
from runner.model.config import TinyConfig
from runner.sampler.config import TorchSamplerConfig
from runner.sampler.torch import TorchSampler

SIZES = {
    "1 M": TinyConfig(),
    "4 M": TinyConfig(hidden_size=256, intermediate_size=768),
}


@dataclass(frozen=True, slots=True)
class Case:
    """So many prompts of lengths between two, answers per prompt, answers at once, most new tokens, ids that end."""

    prompts: int
    shortest: int
    longest: int
    each: int
    batch: int
    new: int
    ends: int

    def asked(self) -> list[tuple[int, ...]]:
        """The prompts, each as often as it is to be answered; the same every time."""
        chance = random.Random(0)
        lengths = [chance.randint(self.shortest, self.longest) for _ in range(self.prompts)]
        return [p for n in lengths for p in [tuple(chance.choices(range(256), k=n))] * self.each]

    def end_ids(self) -> list[int]:
        """Ids that end an answer."""
        return list(range(self.ends))


CASES = {
    "1 at once": Case(prompts=4, shortest=50, longest=50, each=1, batch=1, new=64, ends=0),
    "8 at once": Case(prompts=8, shortest=50, longest=50, each=1, batch=8, new=64, ends=0),
    "64 at once": Case(prompts=64, shortest=50, longest=50, each=1, batch=64, new=64, ends=0),
    "8, lengths differ": Case(prompts=64, shortest=8, longest=128, each=1, batch=8, new=128, ends=12),
    "64, lengths differ": Case(prompts=256, shortest=8, longest=128, each=1, batch=64, new=128, ends=12),
    "64, and 8 per prompt": Case(prompts=32, shortest=8, longest=128, each=8, batch=64, new=128, ends=12),
}
# Sizes that continuous batching would take from a GPU's memory.
PAGES = {"num_blocks": 512, "page_size": 32, "max_batch_tokens": 2048}
Arm = Callable[[], int]  # answers all prompts; returns the tokens of the answers


class Clock:
    """Processor seconds inside the model's forward, and how often it was called."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.seconds, self.calls, self._begin = 0.0, 0, 0.0
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self._begin = time.process_time()

    def _leave(self, *_: Any) -> None:
        self.seconds += time.process_time() - self._begin
        self.calls += 1

    def measure(self, arm: Arm) -> dict[str, float]:
        """Run once."""
        self.seconds, self.calls = 0.0, 0
        begin = time.process_time()
        tokens = arm()
        seconds = time.process_time() - begin
        return {"cpu_s": seconds, "tokens": tokens, "forward_cpu_s": self.seconds, "forwards": self.calls}


def runner_arm(model: CausalLM, case: Case, kept: list[tuple[Request, Rollout]]) -> Arm:
    """This runner; its rollouts are left in `kept`."""
    config = TorchSamplerConfig(max_num_seqs=case.batch, stop_token_ids=tuple(case.end_ids()))
    sampler = TorchSampler(config, model, decide=_refuse)
    requests = [Request(p, seed, case.new, seed // case.each) for seed, p in enumerate(case.asked())]

    def run() -> int:
        rollouts = sampler.sample(requests)
        kept[:] = zip(requests, rollouts, strict=True)
        return sum(len(rollout.ids) for rollout in rollouts)

    return run


def generate_arm(model: CausalLM, case: Case) -> Arm:
    """transformers: batches in the given order, padded on the left, drawn from the whole distribution."""
    ends, pad, config = case.end_ids(), model.tokenizer.pad_token_id, _sampling(model, case)
    asked = case.asked()
    batches = [asked[i : i + case.batch] for i in range(0, len(asked), case.batch)]

    def run() -> int:
        return sum(_generated(model, batch, config, pad, ends) for batch in batches)

    return run


@torch.no_grad()
def _generated(model: CausalLM, prompts: Sequence[tuple[int, ...]], config: Any, pad: int, ends: list[int]) -> int:
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.causal.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, width:]
    over = torch.isin(out, torch.tensor(ends)).int()
    return int((over.cumsum(1) - over == 0).sum())


@torch.no_grad()
def worst_logprob(model: CausalLM, kept: Sequence[tuple[Request, Rollout]]) -> float:
    """Largest difference between reported logprobs and those of one pass over the whole row."""
    worst = 0.0
    for request, rollout in kept:
        ids = torch.tensor([(*request.prompt, *rollout.ids)])
        logits = model.causal(input_ids=ids, use_cache=False).logits[0, len(request.prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(rollout.ids)[:, None])[:, 0]
        worst = max(worst, float((wanted - torch.tensor(rollout.logprobs)).abs().max()))
    return worst


def continuous_arm(model: CausalLM, case: Case) -> Arm:
    """transformers' continuous batching: a paged cache, equal beginnings shared; drawn from the whole distribution."""
    config = _sampling(model, case)
    pages = ContinuousBatchingConfig(max_requests_per_batch=case.batch, **PAGES)
    asked = [list(prompt) for prompt in case.asked()]

    def run() -> int:
        with torch.no_grad():
            out = model.causal.generate_batch(asked, generation_config=config, continuous_batching_config=pages)
        if len(out) != len(asked):
            raise RuntimeError(f"{len(asked) - len(out)} of {len(asked)} prompts have no answer")
        return sum(len(answer.generated_tokens) for answer in out.values())

    return run


def _sampling(model: CausalLM, case: Case) -> GenerationConfig:
    ends, pad = case.end_ids(), model.tokenizer.pad_token_id
    return GenerationConfig(
        max_new_tokens=case.new, do_sample=True, top_k=0, eos_token_id=ends or None, pad_token_id=pad
    )


def _refuse(feature: str, wanted: str, got: str, reason: str) -> None:
    raise RuntimeError(f"{feature}: {got} instead of {wanted} ({reason}); this would not measure what it says")


def random_model(size: str) -> CausalLM:
    """The same weights every time; only the case's ids end an answer."""
    config = SIZES[size]
    place = {"tokenizer": tiny.tokenizer(config), "device": torch.device("cpu"), "seed": 0}
    model = tiny.build(config.model_copy(update={"batch_layout": "padded"}), decide=_refuse, **place)
    model.tokenizer.eos_token = model.causal.generation_config.eos_token_id = None
    return model


def main(result: Path, size: str, case: Case, rounds: int, names: Sequence[str]) -> None:
    """One warm-up each, then A B A B …; writes all rounds and the worst logprob."""
    kept: list[tuple[Request, Rollout]] = []
    makers: dict[str, Callable[[CausalLM, Case], Arm]] = {
        "runner": partial(runner_arm, kept=kept),
        "generate": generate_arm,
        "continuous": continuous_arm,
    }
    models = {name: random_model(size) for name in names}  # one each, because continuous batching changes its model
    clocks = {name: Clock(model.causal) for name, model in models.items()}
    arms = {name: makers[name](model, case) for name, model in models.items()}
    for arm in arms.values():
        arm()
    measured = [{name: clocks[name].measure(arm) for name, arm in arms.items()} for _ in range(rounds)]
    model = models["runner"]
    result.write_text(json.dumps({"rounds": measured, "worst_logprob": worst_logprob(model, kept[:16])}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], CASES[sys.argv[3]], int(sys.argv[4]), sys.argv[5].split(","))
