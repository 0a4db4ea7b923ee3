"""Models in stages over real ranks against the single process: the same losses, gradients, weights and text.

The numbers are those of one learner over five steps (see `test_learning`), whose micro-batches pass from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.algorithm.sft import CrossEntropy
from runner.core.auto_choices import Decisions
from runner.core.errors import SpecError
from runner.parallelism.config import FsdpConfig, MeshConfig, PpConfig
from runner.parallelism.mesh import Mesh
from runner.parallelism.parallel_context import ParallelContext
from runner.parallelism.process_groups import P2pChannel
from runner.trainer.learner import LocalLearner
from tests.model import zoo
from tests.parallelism.forked import ranks
from tests.parallelism.test_fsdp import BOTH, FAMILIES, close, made, scalar, valued
from tests.parallelism.test_learning import CPU, difference, given, learnt
from tests.parallelism.worlds import alone, meshed

SLOW = pytest.mark.slow
SOAK = pytest.mark.soak


def learner(model: Any, world: ParallelContext, budget: int = 40) -> LocalLearner:
    here = [p for p in model.trainable().values() if not p.is_meta]
    return LocalLearner(
        model,
        torch.optim.AdamW(here, lr=1e-2, eps=1e-6),
        lr=1e-2,
        clip_norm=1.0,
        factor=lambda step: 1.0,
        budget=budget,
        seed=0,
        device=CPU,
        peers=world.peers,
        gradients=world.gradient_reducer(model),
        stage=model.stage,
    )


def trained(world: ParallelContext, model: Any, budget: int = 40) -> dict[str, Any]:
    """As `test_learning.trained`, of a model that lies where it is to be."""
    return learnt(learner(model, world, budget))


def on_rank(rank: int, config: MeshConfig, mesh: Mesh, build: Callable[[], Any], budget: int) -> dict[str, Any]:
    world, model = meshed(config, mesh), build()
    world.shard(model, Decisions())
    assert any(p.is_meta for p in model.whole.parameters())
    return trained(world, model, budget)


def doubled(model: Any) -> Any:
    model.whole.double()
    return model


def compare(
    mesh: Mesh, build: Callable[[], Any], rounding: float = 1e-6, config: MeshConfig | None = None, budget: int = 40
) -> None:
    """In float64, in which only the norms are float32; in float32 with a larger `rounding`."""
    double = build if rounding > 1e-6 else lambda: doubled(build())
    wanted = trained(alone(), double(), budget)
    found = ranks(mesh.world_size, on_rank, config or PpConfig(), mesh, double, budget)
    gradients: dict[str, Tensor] = {}
    for one in found:
        gradients |= one["gradients"]
        assert difference(one["weights"], wanted["weights"]) < 10 * rounding
        assert difference(one["outputs"], wanted["outputs"]) < 10 * rounding
        assert all(torch.equal(one["weights"][name], value) for name, value in found[0]["weights"].items())
        for mine, other in zip(one["numbers"], wanted["numbers"], strict=True):
            assert mine == pytest.approx(other, rel=100 * rounding)
    assert difference(gradients, wanted["gradients"]) < rounding


@pytest.mark.parametrize(("kind", "adapter"), [("qwen2", False), pytest.param("qwen3", True, marks=SLOW)])
def test_two_stages_learn_as_one_process(kind: str, adapter: bool) -> None:
    compare(Mesh(pp=2), lambda: made(kind, adapter))


@pytest.mark.parametrize(("kind", "adapter"), [pytest.param("llama", True, marks=SLOW), ("qwen3_moe", False)])
def test_two_stages_learn_as_one_process_in_float32(kind: str, adapter: bool) -> None:
    compare(Mesh(pp=2), lambda: made(kind, adapter), 1e-5)


@pytest.mark.parametrize("chunks", [1, pytest.param(2, marks=SLOW)])
def test_stages_alone_give_the_bits_of_one_process(chunks: int) -> None:
    def build() -> Any:
        return made("qwen2", False, num_hidden_layers=4)

    [wanted] = ranks(1, lambda rank: trained(alone(), build()))
    for found in ranks(2, on_rank, PpConfig(pp_virtual_stages=chunks), Mesh(pp=2), build, 40):
        assert found["numbers"] == wanted["numbers"]
        assert all(torch.equal(found["weights"][name], one) for name, one in wanted["weights"].items())


@SOAK
@BOTH
@pytest.mark.parametrize("kind", FAMILIES)
def test_two_stages_of_each_family(kind: str, adapter: bool) -> None:
    compare(Mesh(pp=2), lambda: made(kind, adapter), 1e-5 if kind == "qwen3_moe" else 1e-6)  # has no float64


@SLOW
@BOTH
@pytest.mark.parametrize("layers", [4, 6])
def test_four_stages(layers: int, adapter: bool) -> None:
    compare(Mesh(pp=4), lambda: made("qwen2", adapter, num_hidden_layers=layers))


def test_stages_with_two_runs_of_layers_each() -> None:
    compare(Mesh(pp=2), lambda: made("qwen3", False, num_hidden_layers=5), config=PpConfig(pp_virtual_stages=2))


@SLOW
@pytest.mark.parametrize(("pp", "chunks"), [(2, 3), (3, 2), (4, 2)])
def test_more_runs_of_layers(pp: int, chunks: int) -> None:
    config = PpConfig(pp_virtual_stages=chunks)
    compare(Mesh(pp=pp), lambda: made("llama", True, num_hidden_layers=9), config=config, budget=20)


@SOAK
@BOTH
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("more", ["dp", "fsdp", "tp"])
def test_stages_with_something_else(more: str, kind: str, adapter: bool) -> None:
    mesh = {"dp": Mesh(pp=2, dp_replicate=2), "fsdp": Mesh(pp=2, dp_shard=2), "tp": Mesh(pp=2, tp=2)}[more]
    config = FsdpConfig() if more == "fsdp" else PpConfig()
    compare(mesh, lambda: made(kind, adapter), 1e-5 if kind == "qwen3_moe" or more == "fsdp" else 1e-6, config)


@SLOW
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("more", ["ulysses", "ring", "ep", "ep_fsdp"])
def test_stages_with_shared_tokens_and_experts(more: str, adapter: bool) -> None:
    mesh = {"ep": Mesh(pp=2, dp_replicate=2, ep=2), "ep_fsdp": Mesh(pp=2, dp_shard=2, ep=2)}.get(more, Mesh(pp=2, cp=2))
    config = FsdpConfig() if more == "ep_fsdp" else PpConfig(cp_backend=None if more.startswith("ep") else more)
    kind = "qwen3_moe" if more.startswith("ep") else "qwen3"
    options = {"num_experts": 4, "mlp_only_layers": []} if more.startswith("ep") else {}
    compare(mesh, lambda: made(kind, adapter, **options), 1e-5, config)


@SLOW
def test_stages_in_pieces() -> None:
    compare(Mesh(pp=2, dp_shard=2), lambda: made("qwen2", True), 1e-5, FsdpConfig())


@SLOW
def test_runs_of_layers_in_pieces() -> None:
    config = FsdpConfig(pp_virtual_stages=2)
    compare(Mesh(pp=2, dp_shard=2), lambda: made("qwen2", False, num_hidden_layers=4), 1e-5, config)


@pytest.mark.parametrize("adapter", [False, pytest.param(True, marks=SLOW)], ids=["full", "lora"])
def test_embedding_and_head_of_one_weight(adapter: bool) -> None:
    compare(Mesh(pp=2), lambda: made("llama", adapter, tie_word_embeddings=True))


@pytest.mark.parametrize("budget", [1000, pytest.param(40, marks=SLOW)], ids=["one micro-batch", "several"])
def test_embedding_and_head_of_one_weight_whose_shards_are_gathered(budget: int) -> None:
    def build() -> Any:
        return made("qwen2", False, tie_word_embeddings=True)

    compare(Mesh(pp=2, dp_shard=2), build, 1e-5, FsdpConfig(), budget)


@SLOW
@pytest.mark.parametrize("more", ["three", "dp", "fsdp", "tp"])
def test_embedding_and_head_of_one_weight_on_more_ranks(more: str) -> None:
    meshes = {"three": Mesh(pp=3), "dp": Mesh(pp=2, dp_replicate=2)}
    mesh = meshes.get(more, Mesh(pp=2, dp_shard=2) if more == "fsdp" else Mesh(pp=2, tp=2))
    config = FsdpConfig() if more == "fsdp" else PpConfig()

    def build() -> Any:
        return made("qwen2", False, tie_word_embeddings=True, num_hidden_layers=3)

    compare(mesh, build, 1e-5 if more == "fsdp" else 1e-6, config)


@SLOW
def test_one_micro_batch() -> None:
    compare(Mesh(pp=2), lambda: made("qwen2", False), budget=1000)


@SLOW
@pytest.mark.parametrize("way", [True, "selective", 2])
@pytest.mark.parametrize("more", ["", "fsdp"])
def test_gradient_checkpointing(way: Any, more: str) -> None:
    mesh = Mesh(pp=2, dp_shard=2 if more else 1)
    options = {"gradient_checkpointing": way, "num_hidden_layers": 4}
    config = FsdpConfig(pp_virtual_stages=2) if more else PpConfig(pp_virtual_stages=2)
    compare(mesh, lambda: made("qwen3", False, **options), 1e-5 if more else 1e-6, config)


@SLOW
def test_padded_rows() -> None:
    compare(Mesh(pp=2), lambda: made("qwen2", True, layout="padded"))


@SLOW
def test_a_head_that_is_not_cut() -> None:
    compare(Mesh(pp=2), lambda: made("gemma2", False, layout="padded"))


def staged(model: Any, mesh: Mesh, config: MeshConfig | None = None) -> Any:
    meshed(config or PpConfig(), mesh).shard(model, Decisions())
    return model


@pytest.mark.parametrize("adapter", [pytest.param(False, marks=SLOW), True], ids=["full", "lora"])
def test_text_is_written_with_the_whole_model_by_ranks_of_different_work(adapter: bool) -> None:
    prompts = zoo.rows((5, 3, 9))

    def work(rank: int) -> tuple[list[list[int]], bool, bool]:
        world, model = meshed(PpConfig(), Mesh(pp=2)), made("qwen3", adapter, tie_word_embeddings=True)
        world.shard(model, Decisions())
        subject = learner(model, world)
        before = subject.forward(given(0), zoo.LOGPROBS)["logprobs"]
        found = zoo.greedy(model, prompts[:rank], 4 + rank)  # rank 0 has nothing to do
        with model.summon_full_params():
            found += [] if rank else zoo.greedy(model, prompts[1:], 6)
        after = subject.forward(given(0), zoo.LOGPROBS)["logprobs"]
        return found, any(p.is_meta for p in model.whole.parameters()), torch.equal(before, after)

    model = made("qwen3", adapter, tie_word_embeddings=True)
    wanted = [zoo.greedy(model, prompts[1:], 6), zoo.greedy(model, prompts[:1], 5)]
    assert ranks(2, work) == [(wanted[0], True, True), (wanted[1], True, True)]


@SLOW
@pytest.mark.parametrize("mesh", [Mesh(pp=2, dp_shard=2), Mesh(pp=2, tp=2)], ids=str)
def test_text_of_stages_of_pieces(mesh: Mesh) -> None:
    config = FsdpConfig() if mesh.dp_shard > 1 else PpConfig()

    def work(rank: int) -> list[list[int]]:
        return zoo.greedy(staged(made("llama", True), mesh, config), zoo.rows((5, 3)), 4 + rank)

    model = made("llama", True)
    assert ranks(4, work) == [zoo.greedy(model, zoo.rows((5, 3)), 4 + rank) for rank in range(4)]


def test_each_rank_holds_its_layers_and_one_end() -> None:
    def work(rank: int) -> dict[str, int]:
        model = staged(made("llama", False, num_hidden_layers=3), Mesh(pp=2))
        return {name: p.untyped_storage().nbytes() for name, p in model.whole.named_parameters() if not p.is_meta}

    names = [name for name, _ in made("llama", False, num_hidden_layers=3).whole.named_parameters()]
    first, last = ranks(2, work)
    assert [name for name in names if name in first] == names[: len(first)]
    assert [name for name in names if name in last] == names[len(first) :]
    assert not any("layers.2." in name for name in first) and any("layers.2." in name for name in last)


def test_the_head_of_a_teacher_is_had_on_every_rank() -> None:
    def work(rank: int) -> Tensor:
        world, model = meshed(PpConfig(), Mesh(pp=2)), zoo.causal("qwen2")
        world.shard(model, Decisions())
        hidden = learner(model, world).forward(given(0), frozenset({"hidden"}))["hidden"]
        logits: Tensor = model.lm_head()(hidden)
        return logits

    model = zoo.causal("qwen2")
    with torch.no_grad():
        wanted = model.lm_head()(model.outputs(given(0), frozenset({"hidden"}))["hidden"])
    for found in ranks(2, work):
        assert torch.allclose(found, wanted, atol=1e-4)


def test_messages_are_hidden_states_and_their_gradients_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def counting(way: P2pChannel, tensor: Tensor) -> None:
        sent.append(tensor.nbytes)
        send(way, tensor)

    def work(rank: int) -> int:
        world, model = meshed(PpConfig(pp_virtual_stages=2), Mesh(pp=2)), made("qwen2", True, num_hidden_layers=4)
        world.shard(model, Decisions())
        sent.clear()
        learner(model, world).forward_backward(given(0), CrossEntropy())
        return sum(sent)

    send = P2pChannel.send
    monkeypatch.setattr(P2pChannel, "send", counting)
    width, borders = 32, 3
    assert sum(ranks(2, work)) == 2 * borders * given(0).num_tokens * width * 4


@pytest.mark.parametrize(("kind", "said"), [("gpt2", "has wpe before its layers"), ("bloom", "has word_embeddings_la")])
def test_what_cannot_be_divided_is_refused_on_every_rank(kind: str, said: str) -> None:
    def work(rank: int) -> str:
        with pytest.raises(SpecError, match=said) as error:
            staged(zoo.causal(kind), Mesh(pp=2))
        return error.value.problems[0].key

    assert ranks(2, work) == ["parallelism.pp"] * 2


def test_a_step_with_fewer_micro_batches_than_stages_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def work(rank: int) -> list[str]:
        world, model = meshed(PpConfig(), Mesh(pp=2)), zoo.causal("qwen2")
        world.shard(model, Decisions())
        subject = learner(model, world, budget=1000)
        with caplog.at_level("INFO", "runner"):
            for step in range(2):
                subject.begin_step(step)
                subject.forward_backward(given(step), CrossEntropy())
        return [record.getMessage() for record in caplog.records if "parallelism.pp" in record.getMessage()]

    for [said] in ranks(2, work):
        assert "step 1: fewer micro-batches (1) than stages (parallelism.pp=2)" in said
        assert "lower algorithm.micro_batch_tokens=1000" in said


@SLOW
@pytest.mark.parametrize("kind", ["mistral", "gemma2", "granite", "gpt_oss", "llama4"])
def test_other_architectures(kind: str) -> None:
    compare(Mesh(pp=2), lambda: made(kind, False), 1e-5)


@SLOW
@pytest.mark.parametrize("build", [valued, lambda: scalar(False), lambda: scalar(True)], ids=["valued", "full", "lora"])
def test_heads_of_one_number(build: Callable[[], Any]) -> None:
    compare_values(build)


def compare_values(build: Callable[[], Any]) -> None:
    def gradients(model: Any) -> dict[str, Tensor]:
        found = model.outputs(given(0), frozenset({"values", "scores"} & model.supported_outputs))
        sum((one.square().sum() for one in found.values()), torch.zeros(())).backward()
        return {n: p.grad for n, p in model.trainable().items() if p.grad is not None}

    wanted = gradients(build())
    first, last = ranks(2, lambda rank: gradients(staged(build(), Mesh(pp=2))))
    assert not first.keys() & last.keys()
    close(first | last, wanted, 1e-5)
