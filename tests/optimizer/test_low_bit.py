"""AdamW in 8 bits and Muon: they learn, and a job that is resumed continues to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.build.components import default_registry
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem, SpecError
from runner.launch.local import prepare_spec
from runner.optimizer.config import AdamW8bitConfig, AdamWConfig, MuonConfig, OptimizerConfig
from runner.trainer.optimizer_state import learner_state, restore_learner_state

STEPS = 6
KINDS = [
    pytest.param(AdamW8bitConfig(lr=1e-2, weight_decay=0.1), id="8 bits"),
    pytest.param(AdamW8bitConfig(lr=1e-2, stochastic_rounding=True), id="rounding"),
    pytest.param(MuonConfig(lr=1e-2, weight_decay=0.1), id="muon"),
]


def needed(config: OptimizerConfig) -> None:
    """Skip a test where what the optimizer is made of is not here."""
    if config.name == "adamw8bit":
        pytest.importorskip("torchao")
    if config.name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon: torch 2.9 and newer")


class Job:
    """A layer behind an embedding that learns fixed numbers."""

    def __init__(self, config: OptimizerConfig) -> None:
        torch.manual_seed(0)
        self.module = nn.ModuleDict({"embed": nn.Embedding(32, 128), "layer": nn.Linear(128, 64)})
        self.module.to(torch.bfloat16 if config.weights_dtype == "bfloat16" else torch.float32)
        self.parameters = dict(self.module.named_parameters())
        build = default_registry().factory(config)
        self.optimizer: Any = build(config, parameters=self.parameters, decide=Decisions())
        self.wanted = torch.randn(32, 64)

    def train(self, steps: int) -> list[float]:
        """Losses, each before its step; the rate is set in each, as the learner does."""
        losses = []
        for _ in range(steps):
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-2
            made: Tensor = self.module["layer"](self.module["embed"](torch.arange(32)))
            loss = (made.float() - self.wanted).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses


@pytest.mark.parametrize("config", KINDS)
def test_it_learns_and_goes_on_from_a_checkpoint_to_the_bit(config: OptimizerConfig) -> None:
    needed(config)
    whole, first, second = (Job(config) for _ in range(3))
    losses = whole.train(STEPS)
    assert losses[-1] < 0.9 * losses[0]
    first.train(STEPS // 2)
    state = learner_state(first.parameters, first.optimizer)
    assert all(type(tensor) in (Tensor, nn.Parameter) for tensor in state["tensors"].values()), "what safetensors hold"
    state["optimizer"] = json.loads(json.dumps(state["optimizer"]))
    torch.manual_seed(99)
    restore_learner_state(second.parameters, second.optimizer, state)
    assert second.train(STEPS - STEPS // 2) == losses[STEPS // 2 :]
    for name, parameter in whole.parameters.items():
        assert torch.equal(parameter, second.parameters[name])


@pytest.mark.parametrize("config", KINDS)
def test_its_state_takes_the_bytes_that_a_plan_counts(config: OptimizerConfig) -> None:
    needed(config)
    job = Job(config)
    job.train(1)
    tensors = learner_state(job.parameters, job.optimizer)["tensors"]
    for name in ("layer.weight", "embed.weight"):
        held = sum(t.nbytes for key, t in tensors.items() if key.startswith("optim/") and key.endswith(f"/{name}"))
        parameter = job.parameters[name]
        counted = parameter.numel() * config.state_bytes(parameter.itemsize, end=name == "embed.weight")
        assert held == pytest.approx(counted, abs=8), "but for the count of steps"


def test_updates_that_bfloat16_would_round_away_arrive_on_average() -> None:
    pytest.importorskip("torchao")
    built = default_registry().factory(AdamW8bitConfig())
    moved = []
    for rounding in (False, True):
        weight = nn.Parameter(torch.ones(256, 256, dtype=torch.bfloat16))
        config = AdamW8bitConfig(lr=1e-4, stochastic_rounding=rounding)
        optimizer: Any = built(config, parameters={"weight": weight}, decide=Decisions())
        for _ in range(5):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved.append(1.0 - float(weight.detach().float().mean()))
    assert moved[0] == 0.0 and moved[1] == pytest.approx(5e-4, rel=0.1)


def test_random_bits_follow_the_seed_and_leave_the_process_its_own() -> None:
    pytest.importorskip("torchao")
    built = default_registry().factory(AdamW8bitConfig())
    weights = []
    for seed in (1, 1, 2):
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        config = AdamW8bitConfig(lr=1e-3, stochastic_rounding=True)
        optimizer: Any = built(config, parameters={"weight": weight}, decide=Decisions())
        optimizer.seed = seed
        weight.grad = torch.ones_like(weight)
        before = torch.get_rng_state()
        optimizer.step()
        assert torch.equal(torch.get_rng_state(), before)
        weights.append(weight.detach())
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_muon_is_near_a_step_of_adamw_in_size() -> None:
    """With its default, so that AdamW's rates can be kept."""
    needed(MuonConfig())
    jobs = [Job(config) for config in (MuonConfig(lr=1e-2), AdamWConfig(lr=1e-2))]
    before = jobs[0].parameters["layer.weight"].detach().clone()
    for job in jobs:
        job.train(1)
    sizes = [float((job.parameters["layer.weight"].detach() - before).norm()) for job in jobs]
    assert 0.1 < sizes[0] / sizes[1] < 1.0


def test_adamw_beside_muon_is_fused() -> None:
    needed(MuonConfig())
    groups = Job(MuonConfig()).optimizer.param_groups
    assert [group.get("fused") for group in groups if "betas" in group] == [True, True]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (MuonConfig(), r"pip install 'torch>=2\.9'  # or type optimizer=adamw"),
        (AdamW8bitConfig(), "pip install 'torchao>=0.18'  # or type optimizer=adamw"),
    ],
    ids=["muon", "8 bits"],
)
def test_what_is_not_installed_is_named_before_a_model_is_read(
    config: OptimizerConfig, said: str, monkeypatch: pytest.MonkeyPatch, workdir: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    spec = compose_job(["+recipe=sft_demo", f"optimizer={config.name}"]).spec
    with pytest.raises(EnvironmentProblem, match=said):
        prepare_spec(spec)


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (["optimizer=muon", "parallelism=fsdp", "launch.devices=2"], "optimizer.name", "or cp, or optimizer=adamw"),
        (["optimizer=adamw8bit", "parallelism=tp", "launch.devices=2"], "optimizer.name", "not support sharded"),
        (["optimizer=adamw8bit", "optimizer.stochastic_rounding=true"], "optimizer.stochastic_rounding", "bfloat16"),
        (
            ["optimizer=adamw8bit", "optimizer.stochastic_rounding=true", "model.dtype=bfloat16", "adapter=lora"],
            "optimizer.stochastic_rounding",
            "keeps its trainable weights in float32",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(words: list[str], key: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        compose_job(["+recipe=sft_demo", *words])
    assert any(problem.key == key and said in problem.message for problem in caught.value.problems)
