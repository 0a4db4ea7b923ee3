"""How far the probe lets a sampler be off: as far as rounding makes two right ones, not as far as other weights do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from runner.core.tolerance import TOLERANCES
from runner.weight_sync.sync_probe import SyncProbe

VOCABULARY, SPREAD = 2000, 3.0  # of logits, as a trained model's


def trained() -> Qwen2ForCausalLM:
    """Twelve layers, in bfloat16, with logits that spread as widely as a trained model's."""
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(num_hidden_layers=12, vocab_size=VOCABULARY, initializer_range=0.06, **shape)
    made = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        made.lm_head.weight.mul_(SPREAD / made(torch.arange(64)[None]).logits.std())
    return made.to(torch.bfloat16)


@torch.no_grad()
def said(policy: Qwen2ForCausalLM, rows: Sequence[Sequence[int]], attention: str) -> list[list[float]]:
    policy.set_attn_implementation(attention)
    ids = torch.tensor(rows)
    found = policy(ids).logits.float().log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    return [[float(one) for one in row] for row in found]


def test_an_engine_in_bfloat16_may_round_as_it_likes_and_not_have_other_weights() -> None:
    policy, probe = trained(), SyncProbe.from_seed(1, VOCABULARY, TOLERANCES["bfloat16"].logprobs)
    probe.expect(0, said(policy, probe.rows, "eager"))
    rounded = probe.difference([said(policy, probe.rows, "sdpa")], 0)
    policy.lm_head.weight.data = policy.lm_head.weight.roll(1, 0)  # as of a head that was not exchanged
    other = probe.difference([said(policy, probe.rows, "sdpa")], 0)
    assert 0.01 < rounded < TOLERANCES["bfloat16"].logprobs / 2 and other > 5 * TOLERANCES["bfloat16"].logprobs
