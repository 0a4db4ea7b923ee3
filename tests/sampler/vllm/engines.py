"""Engines for the tests of this folder, and the plain computation that they are held against. One lives at a time."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.core.auto_choices import Decisions
from runner.device.process_setup import resolve_presets
from runner.interfaces import Request, Rollout
from runner.model.causal_lm import CausalLM
from runner.model.config import TinyConfig
from runner.model.tiny import byte_tokenizer
from runner.sampler.config import VllmSamplerConfig
from tests.model.zoo import module, rows

_SPEC = importlib.util.find_spec("vllm")
HERE = _SPEC is not None and _SPEC.origin is not None  # and no folder of that name
NEEDED = [
    pytest.mark.skipif(not HERE, reason="vLLM is not installed; make test-vllm makes an environment that has it"),
    pytest.mark.filterwarnings("default"),  # vLLM and what it imports warn of one another
]
LENGTH, MEAN = 128, 1e-4  # tokens of an engine's rows; most that log-probabilities in float32 differ by, on average
SHAPE: dict[str, Any] = {  # vLLM's attention on the CPU knows heads of 32 and more
    "hidden_size": 128,
    "intermediate_size": 96,
    "head_dim": 32,
    "initializer_range": 0.1,
}
PROMPTS = [tuple(row) for row in rows((3, 1, 9, 40))]


def model(kind: str = "qwen2", **options: Any) -> CausalLM:
    """A model of the zoo, in a shape that vLLM can run, too."""
    made = module(kind, **(SHAPE | options)).requires_grad_(True)
    return CausalLM(made, byte_tokenizer(512), TinyConfig(), seed=0, decide=Decisions())


@contextmanager
def engine(policy: CausalLM, folder: Path, **options: Any) -> Iterator[Any]:
    """A sampler over an engine, without weights."""
    from runner.device.config import CpuConfig
    from runner.sampler.vllm.build import build

    config = VllmSamplerConfig(**{"kv_cache_memory_bytes": 2**30 // 10, "max_num_seqs": 16} | options)
    presets = CpuConfig().environment(_Job(config, policy.config))
    os.environ.update({name: one.value for name, one in resolve_presets(presets, dict(os.environ)).set.items()})
    os.environ["HF_HUB_OFFLINE"] = "1"
    sampler = build(config, model=policy, decide=Decisions(), folder=folder, longest=LENGTH)
    try:
        yield sampler
    finally:
        sampler.close()


class _Job:
    def __init__(self, sampler: Any, model: Any) -> None:
        self.sampler, self.model = sampler, model


def requests(each: int = 3, length: int = 12, **options: Any) -> list[Request]:
    """`each` requests per prompt."""
    return [
        Request(prompt, seed=2**62 + 100 * group + k, max_new_tokens=length + k, group=group, **options)
        for group, prompt in enumerate(PROMPTS)
        for k in range(each)
    ]


@torch.no_grad()
def gap(policy: CausalLM, asked: Sequence[Request], got: Sequence[Rollout], temperature: float = 1.0) -> float:
    """Mean absolute difference of what is reported and the log-softmax of the policy's logits ÷ temperature."""
    found = []
    for request, rollout in zip(asked, got, strict=True):
        ids = torch.tensor([(*request.prompt, *rollout.ids)])
        with policy._generation_mode():
            logits = policy.causal(input_ids=ids, use_cache=False).logits[0].double() / temperature
        wanted = logits[len(request.prompt) - 1 : -1].log_softmax(-1)
        wanted = wanted.gather(1, torch.tensor(rollout.ids)[:, None])[:, 0]
        found.append((wanted - torch.tensor(rollout.logprobs, dtype=torch.float64)).abs())
    return float(torch.cat(found).mean())


def score_gap(policy: CausalLM, sampler: Any) -> float:
    """The same of rows that are scored."""
    asked = [Request(row[:1], seed=0, max_new_tokens=1, group=0) for row in PROMPTS if len(row) > 1]
    long = [row for row in PROMPTS if len(row) > 1]
    [found] = sampler.score(long)
    given = [Rollout(row[1:], tuple(scores), None, 0, "stop") for row, scores in zip(long, found, strict=True)]
    return gap(policy, asked, given)


def change(policy: CausalLM, by: float = 0.02, seed: int = 5) -> None:
    """Other weights, as a step of training would make them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * by)
