"""Weight decay groups and factories."""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.cohere import CohereConfig, CohereForCausalLM
from transformers.models.gpt_oss import GptOssConfig, GptOssForCausalLM
from transformers.models.mamba import MambaConfig, MambaForCausalLM

from runner.core.auto_choices import Decisions
from runner.optimizer import optimizers
from runner.optimizer.config import AdamWConfig, MuonConfig, SgdConfig


def no_decision(*args: str) -> None:
    raise AssertionError(args)


def test_only_matrices_are_decayed() -> None:
    named = dict(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).named_parameters())
    optimizer = optimizers.build_adamw(AdamWConfig(lr=0.1, weight_decay=0.5), parameters=named, decide=no_decision)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    before = {n: p.detach().clone() for n, p in named.items()}
    optimizer.step()
    for name, parameter in named.items():
        expected = before[name] * (1 - 0.1 * 0.5) if parameter.ndim == 2 else before[name]
        torch.testing.assert_close(parameter.detach(), expected)


def test_vectors_of_experts_heads_and_channels_are_vectors() -> None:
    """They have two dimensions, and neither decay nor Muon is for them."""
    with torch.device("meta"):
        models = [
            GptOssForCausalLM(GptOssConfig(num_hidden_layers=1)),
            CohereForCausalLM(CohereConfig(num_hidden_layers=1, use_qk_norm=True)),
            MambaForCausalLM(MambaConfig(num_hidden_layers=1)),
        ]
    named = {name: p for model in models for name, p in model.named_parameters()}
    stacked = {name for name, p in named.items() if p.ndim >= 2 and not optimizers.is_matrix(name, p)}
    assert {name.partition("layers.0.")[2] for name in stacked} == {
        *("mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"),
        *("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
        "mixer.A_log",
    }
    given = {name: nn.Parameter(torch.ones(2, 2)) for name in [*stacked, "layers.0.mlp.up_proj.weight"]}
    for config, build in ((SgdConfig(weight_decay=0.5), optimizers.build_sgd), (MuonConfig(), optimizers.build_muon)):
        first, last = build(config, parameters=given, decide=Decisions()).param_groups  # type: ignore[operator]
        assert (len(first["params"]), len(last["params"])) == (1, len(stacked))
        assert last["weight_decay"] == 0.0


def test_sgd_is_the_formula() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = optimizers.build_sgd(SgdConfig(lr=0.1), parameters={"w": weight}, decide=no_decision)
    weight.grad = torch.full((2, 2), 2.0)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), 0.8))
