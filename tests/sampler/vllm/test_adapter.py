"""An adapter that is sent merged, and one that is sent by itself: both are the policy, in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.adapter.config import LoraConfig
from runner.adapter.lora import attach
from runner.core.auto_choices import Decisions
from runner.model.causal_lm import CausalLM
from tests.sampler.vllm.engines import MEAN, NEEDED, change, engine, gap, model, requests, score_gap

pytestmark = NEEDED


def adapted(**options: Any) -> CausalLM:
    """A policy with an adapter that does something."""
    policy = attach(LoraConfig(rank=4, **options), model(tie_word_embeddings=True), decide=Decisions())
    change(policy, by=0.1, seed=1)
    return policy


class Parts(dict[str, Any]):
    """Complete weights that say which of them a step changed."""

    def __init__(self, policy: CausalLM, kept: Any, sent: Any) -> None:
        changed = dict(policy.hf_tensors(sent))
        super().__init__({**dict(policy.hf_tensors(kept)), **changed})
        self.changed = frozenset(changed)


@pytest.mark.parametrize(
    ("sync", "kept", "sent"), [("adapter", "base", "adapter"), pytest.param("merged", "fixed", "changed")]
)
def test_the_engine_follows_the_adapter(sync: str, kept: str, sent: str, tmp_path: Path) -> None:
    policy = adapted(targets=("q_proj", "v_proj", "down_proj"), rslora=True)
    with engine(policy, tmp_path, weight_sync=sync, temperature=0.8) as sampler:
        for version in range(3):
            sampler.load_weights(Parts(policy, kept, sent), version)
            assert score_gap(policy, sampler) < MEAN
            asked = requests()
            got = sampler.sample(asked)
            assert gap(policy, asked, got, 0.8) < MEAN and got[0].version == version
            assert len(list(tmp_path.glob("adapter-*"))) == (sync == "adapter")
            change(policy, by=0.1, seed=version + 2)
            assert score_gap(policy, sampler) > MEAN
