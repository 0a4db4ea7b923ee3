"""Experts on several real ranks against the single process: the same losses, gradients, norms and text.

float32: losses of five updates and gradients of the first to 1e-5. Later gradients are not compared: where two experts
score alike, the last bit decides which of them a token goes to.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from runner.adapter import lora
from runner.adapter.config import LoraConfig
from runner.algorithm.sft import CrossEntropy
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import SpecError
from runner.distributed.dtensor_utils import full_tensor
from runner.interfaces import LossFn
from runner.parallelism import expert_parallel as experts
from runner.parallelism.config import (
    CpConfig,
    DdpConfig,
    EpConfig,
    FsdpConfig,
    HsdpConfig,
    MeshConfig,
    PpConfig,
    TpConfig,
)
from runner.parallelism.mesh import Mesh
from runner.parallelism.parallel_context import ParallelContext
from runner.trainer.learner import LocalLearner
from tests.model import zoo
from tests.parallelism.forked import ranks
from tests.parallelism.test_fsdp import close, made, part, scalar, valued
from tests.parallelism.test_learning import STEPS, Curved, given
from tests.parallelism.worlds import alone, meshed

SLOW = pytest.mark.slow
SOAK = pytest.mark.soak
BOTH = pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
Build = Callable[[], Any]
EP2 = EpConfig(), Mesh(dp_replicate=2, ep=2)
LAYOUTS = {
    "ep4": (EpConfig(), Mesh(dp_replicate=4, ep=4)),
    "ddp": (DdpConfig(ep=2), Mesh(dp_replicate=4, ep=2)),
    "fsdp, experts whole": (FsdpConfig(ep=2), Mesh(dp_shard=2, ep=2)),
    "fsdp, sharded experts": (FsdpConfig(ep=2), Mesh(dp_shard=4, ep=2)),
    "hsdp": (HsdpConfig(ep=2), Mesh(dp_replicate=2, dp_shard=2, ep=2)),
    "tp": (TpConfig(tp=2, ep=2), Mesh(dp_replicate=2, tp=2, ep=2)),
    "tp, fsdp": (FsdpConfig(tp=2, ep=2), Mesh(dp_shard=2, tp=2, ep=2)),
    "cp": (CpConfig(ep=2), Mesh(cp=2, ep=2)),
    "cp, ddp": (CpConfig(ep=4), Mesh(dp_replicate=2, cp=2, ep=4)),
    "cp, fsdp": (FsdpConfig(cp=2, ep=2), Mesh(dp_shard=2, cp=2, ep=2)),
}


def moe(adapter: bool, **options: Any) -> Any:
    return made("qwen3_moe", adapter, **options)


def trained(world: ParallelContext, model: Any) -> dict[str, Any]:
    """What a learner measures, the gradients of its first update, and what it scores."""
    optimizer = torch.optim.AdamW(model.trainable().values(), lr=1e-2, eps=1e-6, fused=True)
    subject = LocalLearner(
        model,
        optimizer,
        lr=1e-2,
        clip_norm=1.0,
        factor=lambda step: 1.0,
        budget=40,
        seed=0,
        device=zoo.CPU,
        peers=world.peers,
        gradients=world.gradient_reducer(model),
        stage=model.stage,
    )
    first, numbers, scores = dict[str, Tensor](), list[dict[str, float]](), list[Tensor]()

    def note(*_: Any) -> None:
        if not numbers:
            first.update({n: full_tensor(p.grad).clone() for n, p in model.trainable().items() if p.grad is not None})

    optimizer.register_step_pre_hook(note)  # after the sum over ranks, and clipped
    losses: list[LossFn] = [CrossEntropy(), Curved()]
    for step in range(STEPS):
        subject.begin_step(step)
        metrics, _ = subject.forward_backward(given(step), losses[step % 2])
        metrics.merge(subject.optim_step())
        numbers.append(metrics.result())
        scores.append(subject.forward(given(step), zoo.LOGPROBS)["logprobs"])
    return {"numbers": numbers, "gradients": first, "scores": torch.cat(scores)}


def on_rank(rank: int, config: MeshConfig, mesh: Mesh, build: Build) -> dict[str, Any]:
    world, model = meshed(config, mesh), build()
    world.shard(model, Decisions())
    assert mesh.pp > 1 or all(isinstance(p, DTensor) for p in model.whole.parameters())
    return trained(world, model)


def compare(config: MeshConfig, mesh: Mesh, build: Build) -> dict[str, Tensor]:
    wanted = trained(alone(), build())
    several = ranks(mesh.world_size, on_rank, config, mesh, build)
    reached = {name: one for found in several for name, one in found["gradients"].items()}
    for found in several:
        for mine, other in zip(found["numbers"], wanted["numbers"], strict=True):
            loose = {name: value for name, value in other.items() if not name.endswith("loss")}
            assert {name: mine[name] for name in loose} == pytest.approx(loose, rel=1e-3)
            assert mine["train/loss"] == pytest.approx(other["train/loss"], rel=1e-5)
        close(reached | found["gradients"], wanted["gradients"], 1e-5)  # a stage has its own layers'
        assert torch.allclose(found["scores"], wanted["scores"], atol=1e-3)
    gradients: dict[str, Tensor] = wanted["gradients"]
    return gradients


@BOTH
def test_two_ranks_learn_as_one_process(adapter: bool) -> None:
    compare(*EP2, lambda: moe(adapter))


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[] if name == "ddp" else SLOW) for name in LAYOUTS])
def test_every_layout_learns_as_one_process(layout: str) -> None:
    compare(*LAYOUTS[layout], lambda: moe(False))


@SOAK
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_adapters_as_one_process(layout: str) -> None:
    compare(*LAYOUTS[layout], lambda: moe(True))


@SOAK
@BOTH
@pytest.mark.parametrize(
    "preset", [PpConfig(pp=2, dp_replicate=2, ep=2), FsdpConfig(pp=2, ep=2)], ids=["copies", "pieces"]
)
@pytest.mark.parametrize("dense", [[], [1]], ids=["experts in both stages", "experts in one"])
def test_stages_learn_as_one_process(preset: MeshConfig, dense: list[int], adapter: bool) -> None:
    mesh = preset.mesh(4)
    assert (mesh.pp, mesh.ep) == (2, 2)
    compare(preset, mesh, lambda: moe(adapter, mlp_only_layers=dense))


@SLOW
def test_fewer_experts_than_pieces_are_cut_by_their_features() -> None:
    compare(*LAYOUTS["fsdp, sharded experts"], lambda: moe(False, num_experts=2, num_experts_per_tok=1))


@pytest.mark.parametrize("adapter", [pytest.param(False, marks=SLOW), True], ids=["full", "lora"])
def test_gradient_checkpointing(adapter: bool) -> None:
    compare(*EP2, lambda: moe(adapter, gradient_checkpointing=True))


@SLOW
@pytest.mark.parametrize(
    "options",
    [{"gradient_checkpointing": "selective"}, {"layout": "padded"}, {"tie_word_embeddings": True}, {"vocab_size": 301}],
    ids=str,
)
def test_other_ways_to_run(options: dict[str, Any]) -> None:
    compare(*EP2, lambda: moe(False, **options))


@SLOW
@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_whatever_computes_the_experts(implementation: str) -> None:
    def build() -> Any:
        model = moe(False)
        model.inner.set_experts_implementation(implementation)
        return model

    compare(*EP2, build)


def one_sided() -> Any:
    """A model whose tokens all go to the same two of eight experts, as its router has no preference."""
    model = moe(False, num_experts=8)
    for name, parameter in model.module.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.requires_grad_(False).zero_()
    return model


@pytest.mark.parametrize("layout", ["ep4", pytest.param("fsdp, sharded experts", marks=SLOW)])
def test_a_rank_that_no_token_comes_to(layout: str) -> None:
    gradients = compare(*LAYOUTS[layout], one_sided)
    [of_experts] = [g for name, g in gradients.items() if name.endswith("experts.down_proj")]
    assert sorted(of_experts.flatten(1).any(1).tolist()) == [False] * 6 + [True] * 2


@SLOW
def test_nothing_learns_but_experts_some_of_which_no_token_comes_to() -> None:
    """What goes into the layer has no gradient: the rank without a row takes part in the backward pass all the same."""

    def build() -> Any:
        model = one_sided()
        for name, parameter in model.module.named_parameters():
            parameter.requires_grad_(".experts." in name)
        return model

    compare(*LAYOUTS["ep4"], build)


@SLOW
def test_experts_of_another_make() -> None:
    """With biases, laid out the other way round, and their outputs clamped."""
    compare(*EP2, lambda: made("gpt_oss", False))


@SLOW
@pytest.mark.parametrize(
    "build", [lambda: made("llama4", False), valued, lambda: scalar(False)], ids=["llama4", "valued", "scalar"]
)
def test_models_without_experts_are_refused(build: Build) -> None:
    def work(rank: int) -> str:
        with pytest.raises(SpecError, match="has no experts whose forward transformers can replace") as error:
            meshed(*EP2).shard(build(), Decisions())
        return error.value.problems[0].key

    assert ranks(2, work) == ["parallelism.ep"] * 2


def test_experts_that_do_not_divide_are_refused_before_there_are_weights() -> None:
    def work(rank: int) -> str:
        with pytest.raises(SpecError, match="2 does not divide num_experts=3 of the model; possible: 1, 3"):
            meshed(*EP2).check_divisible(moe(False, num_experts=3).inner.config)
        with pytest.raises(SpecError, match="2 ranks do not divide the 3 experts of Qwen3MoeExperts; type") as error:
            meshed(*EP2).shard(moe(False, num_experts=3), Decisions())
        return error.value.problems[0].key

    assert ranks(2, work) == ["parallelism.ep"] * 2


@BOTH
def test_text_is_written_with_all_experts_by_ranks_of_different_work(adapter: bool) -> None:
    prompts = zoo.rows((5, 3, 9))

    def work(rank: int, config: MeshConfig, mesh: Mesh) -> tuple[list[list[int]], bool]:
        world, model = meshed(config, mesh), moe(adapter)
        world.shard(model, Decisions())
        before = model.outputs(part(0, 1), zoo.LOGPROBS)["logprobs"]
        found = zoo.greedy(model, prompts[:rank], 4 + rank)  # rank 0 has nothing to do
        after = model.outputs(part(0, 1), zoo.LOGPROBS)["logprobs"]
        return found, torch.equal(before, after)

    wanted = [(zoo.greedy(moe(adapter), prompts[:rank], 4 + rank), True) for rank in range(2)]
    assert ranks(2, work, *EP2) == wanted


@SLOW
@pytest.mark.parametrize("layout", ["fsdp, sharded experts", "tp", "tp, fsdp"])
def test_text_of_other_layouts(layout: str) -> None:
    def work(rank: int, config: MeshConfig, mesh: Mesh) -> list[list[int]]:
        world, model = meshed(config, mesh), moe(False)
        world.shard(model, Decisions())
        return zoo.greedy(model, zoo.rows((5, 3)), 4 + rank)

    assert ranks(4, work, *LAYOUTS[layout]) == [zoo.greedy(moe(False), zoo.rows((5, 3)), 4 + rank) for rank in range(4)]


@pytest.mark.parametrize("layout", ["ep4", pytest.param("fsdp, sharded experts", marks=SLOW)])
def test_every_rank_has_its_share_only(layout: str) -> None:
    config, mesh = LAYOUTS[layout]

    def work(rank: int) -> tuple[int, int]:
        world, model = meshed(config, mesh), moe(False)
        spread = {name for name, _ in model.module.named_parameters() if ".experts." in name}
        world.shard(model, Decisions())
        whole = {name: 4 * p.numel() for name, p in model.module.named_parameters()}
        held = sum(p.to_local().untyped_storage().nbytes() for p in model.whole.parameters())
        share = sum(size // (4 if name in spread or mesh.dp_shard > 1 else 1) for name, size in whole.items())
        return held, share

    for held, share in ranks(4, work):
        assert held == pytest.approx(share, rel=0.01)  # what does not divide is padded


@pytest.mark.parametrize("mesh", [mesh for _, mesh in LAYOUTS.values()] + [Mesh(2, 2, 4, 2, 3, ep=4)], ids=str)
def test_every_rank_is_among_those_that_hold_pieces_of_its_experts(mesh: Mesh) -> None:
    """Two ranks hold pieces of the same experts if they have the same place in their `ep` runs, in the same copy."""
    place = {rank: (ep, at) for ep in mesh.expert_groups() for at, rank in enumerate(ep)}
    assert sorted(rank for one in mesh.expert_shard_groups() for rank in one) == list(range(mesh.world_size))
    copies = mesh.rank_groups("dp_shard", "cp", "tp") if mesh.dp_shard > 1 else mesh.rank_groups(*mesh.dims)
    for pieces in mesh.expert_shard_groups():
        assert len(pieces) == mesh.expert_grid["dp_shard"] and len({place[rank][1] for rank in pieces}) == 1
        assert any(set(pieces) <= set(copy) for copy in copies)
    assert prod(mesh.expert_grid.values()) == mesh.dp_cp_size


def test_experts_that_lie_whole_are_not_kept_on_the_host() -> None:
    words = "+recipe=sft_demo model=tiny_moe device=cuda parallelism=fsdp launch.devices=4 parallelism.cpu_offload=true"
    compose_job([*words.split(), "parallelism.ep=2"])
    with pytest.raises(SpecError, match="unsharded experts cannot be offloaded") as error:
        compose_job([*words.split(), "parallelism.ep=4"])
    assert [problem.key for problem in error.value.problems] == ["parallelism.cpu_offload"]


def test_a_model_without_experts_is_refused_at_once_with_one_that_has_some() -> None:
    with pytest.raises(
        SpecError,
        match=r"no experts; type parallelism\.ep=1, or choose a mixture-of-experts model, e.g. model=tiny_moe",
    ):
        compose_job(["+recipe=sft_demo", "parallelism=ep", "launch.devices=2"])
    with pytest.raises(SpecError, match=r"3 does not divide model\.experts=8 of the model; possible: 1, 2, 4, 8"):
        compose_job(["+recipe=sft_demo", "model=tiny_moe", "parallelism=ep", "launch.devices=3"])
    with pytest.raises(SpecError, match=r"possible: 1, 2, 4, 8; with these 6 ranks: 1, 2"):
        compose_job(["+recipe=sft_demo", "model=tiny_moe", "parallelism=ep", "parallelism.ep=3", "launch.devices=6"])


def test_adapters_on_experts_are_refused_with_what_to_type() -> None:
    def work(rank: int) -> str:
        model = lora.attach(LoraConfig(rank=4), moe(False, mlp_only_layers=[]), decide=Decisions())
        with pytest.raises(SpecError, match="adapters on weights outside linear layers") as error:
            meshed(*EP2).shard(model, Decisions())
        return error.value.problems[0].message

    assert all("type adapter.targets=[q_proj,k_proj,v_proj,o_proj]" in said for said in ranks(2, work))


def test_what_marks_experts_is_still_there() -> None:
    """`layers` finds them by an attribute that transformers gives them."""
    assert [type(one).__name__ for one in experts.expert_layers(zoo.module("qwen3_moe"))] == ["Qwen3MoeExperts"]
    assert not experts.expert_layers(zoo.module("qwen3"))
