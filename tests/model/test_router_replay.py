"""Replayed experts against plain float64 computations, and against a sampler that routes differently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.glm4_moe import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.models.gpt_oss import GptOssConfig, GptOssForCausalLM
from transformers.models.mixtral import MixtralConfig, MixtralForCausalLM
from transformers.models.olmoe import OlmoeConfig, OlmoeForCausalLM
from transformers.models.qwen2_moe import Qwen2MoeConfig, Qwen2MoeForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

from runner.adapter.config import LoraConfig
from runner.adapter.lora import attach
from runner.algorithm.policy.importance import sampler_mismatch
from runner.algorithm.rollouts import Group, RolloutSample, expert_channel
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.batch import Batch, pack
from runner.core.errors import SpecError
from runner.core.metrics import Metrics
from runner.core.prefix_tree import Branch, Tree, pack_trees
from runner.interfaces import Prompt, Request, Rollout
from runner.interfaces.routing import ExpertCounts
from runner.model import kv_cache
from runner.model.causal_lm import CausalLM
from runner.model.config import HfConfig, TinyConfig
from runner.model.model_parts import freeze_parts
from runner.model.router_replay import find_routers, replay_objection
from runner.model.tiny import byte_tokenizer
from runner.sampler.config import TorchSamplerConfig
from runner.sampler.torch import TorchSampler
from runner.trainer.learner import DEAD_AFTER, LocalLearner
from tests.model.zoo import LOGPROBS, SHAPE, gradients, module, relative, rows

EXPERTS, TOP = 8, 3
WIDTH = {"moe_intermediate_size": 16, "num_experts_per_tok": TOP}
QWEN = SHAPE | WIDTH | {"num_experts": EXPERTS}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
LOCAL = SHAPE | {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP}
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen2_moe": lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**QWEN, norm_topk_prob=False)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN, norm_topk_prob=True)),
    "mild": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN | {"initializer_range": 0.1}, norm_topk_prob=True)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**LOCAL)),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**SHAPE | {"num_experts": EXPERTS, "num_experts_per_tok": TOP})),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(**SHAPE | WIDTH | LATENT | GROUPS | {"num_key_value_heads": 4}, first_k_dense_replace=1)
    ),
    "glm4_moe": lambda: Glm4MoeForCausalLM(Glm4MoeConfig(**SHAPE | WIDTH | GROUPS, first_k_dense_replace=1)),
    "gpt_oss": lambda: GptOssForCausalLM(GptOssConfig(**LOCAL)),
}
PROMPTS = rows((5, 9, 3))


def transformers_model(family: str, double: bool = False) -> Any:
    """A small random model of a family."""
    torch.manual_seed(3)
    made = FAMILIES[family]().eval().requires_grad_(True)
    for name, buffer in made.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.arange(len(buffer)).sin())
    if double:
        made.set_experts_implementation("eager")  # grouped products have no float64
    return made.double() if double else made


def policy(family: str, double: bool = False, **options: Any) -> CausalLM:
    """The same behind CausalLM, with hooked routers that replay."""
    made = transformers_model(family, double)
    model = CausalLM(made, byte_tokenizer(512), TinyConfig(**options), seed=0, decide=Decisions())
    assert model.hook_routers() is None and model.routing is not None
    model.routing.replays = "sampler"
    return model


def given_batch(model: CausalLM, seed: int = 11) -> Batch:
    """Rows with distinct random experts for each token and layer."""
    ids = rows((7, 2, 12))
    data = pack(ids, [[1.0] * len(row) for row in ids])
    layers = len(find_routers(model.inner))
    scores = torch.rand(data.num_tokens, layers, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return replace(data, tokens={**data.tokens, "experts": scores.topk(TOP).indices.to(torch.int16)})


# --- a float64 reference: each router written out, with the given experts ---


def softmax_first(router: Any, hidden: Tensor, given: Tensor, normalized: bool) -> Tensor:
    probabilities = functional.linear(hidden, router.weight).softmax(-1, dtype=torch.float64)
    weights = probabilities.gather(1, given)
    return weights / weights.sum(1, keepdim=True) if normalized else weights


def softmax_last(router: Any, hidden: Tensor, given: Tensor) -> Tensor:
    return functional.linear(hidden, router.weight, router.bias).gather(1, given).softmax(-1)


def sigmoid(router: Any, hidden: Tensor, given: Tensor) -> Tensor:
    weights = functional.linear(hidden, router.weight).sigmoid().gather(1, given)
    return weights / (weights.sum(1, keepdim=True) + 1e-20) * router.routed_scaling_factor


WEIGHTS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "qwen2_moe": lambda *a: softmax_first(*a, normalized=False),
    "olmoe": lambda *a: softmax_first(*a, normalized=False),
    "qwen3_moe": lambda *a: softmax_first(*a, normalized=True),
    "mixtral": lambda *a: softmax_first(*a, normalized=True),
    "deepseek_v3": sigmoid,
    "glm4_moe": sigmoid,
    "gpt_oss": softmax_last,
}


def written_out(model: Any, family: str, given: Tensor) -> None:
    """Give a model without hooks routers that are written out."""
    for layer, router in enumerate(find_routers(model)):

        def forward(hidden: Tensor, router: Any = router, layer: int = layer) -> tuple[Tensor, Tensor, Tensor]:
            hidden = hidden.reshape(-1, hidden.shape[-1])
            return hidden, WEIGHTS[family](router, hidden, given[:, layer]), given[:, layer]

        router.forward = forward


@pytest.mark.parametrize("family", sorted(WEIGHTS))
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_weights_and_gradients_are_those_of_the_given_experts(family: str, layout: str) -> None:
    model = policy(family, double=True, batch_layout=layout)
    data = given_batch(model)
    got, c = model.outputs(data, LOGPROBS)["logprobs"], torch.arange(data.num_tokens).cos().double()
    (got * c).sum().backward()
    found = {name: p.grad.clone() for name, p in model.trainable().items() if p.grad is not None}
    plain = transformers_model(family, double=True)
    lengths, begin, wanted = data.rows["lengths"].tolist(), 0, []
    for length in lengths:
        ids = data.tokens["ids"][begin : begin + length]
        written_out(plain, family, data.tokens["experts"][begin : begin + length].long())
        logits = plain(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        wanted += [logits.new_zeros(1), logits[:-1].gather(1, ids[1:, None])[:, 0]]
        begin += length
    expected = torch.cat(wanted)
    (expected * c).sum().backward()
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)  # some routers compute in float32 in any model
    reference = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert relative(found, reference) < 1e-6
    routers = [name for name in found if name.endswith((".gate.weight", ".router.weight"))]
    assert routers and all(float(found[name].abs().max()) > 0 for name in routers), "routers learn"


def test_checkpointed_layers_take_the_given_experts_again() -> None:
    plain, recomputed = (policy("qwen3_moe", gradient_checkpointing=on) for on in (False, True))
    data = given_batch(plain)
    assert relative(gradients(recomputed, True, data), gradients(plain, True, data)) == 0


def test_lora_on_experts_and_routers_replays() -> None:
    model = attach(LoraConfig(rank=2), policy("qwen3_moe"), decide=Decisions())
    assert model.routing is not None
    data = given_batch(model)
    found = gradients(model, True, data)
    assert {name.split(".")[-3] for name in found} >= {"gate", "experts"} or len(found) > 8
    with torch.no_grad():
        replayed = model.outputs(data, LOGPROBS)["logprobs"]
        own = model.outputs(data.without_tokens("experts"), LOGPROBS)["logprobs"]
    torch.testing.assert_close(replayed, policy("qwen3_moe").outputs(data, LOGPROBS)["logprobs"].detach())
    assert (replayed - own).abs().max() > 0.1


@pytest.mark.parametrize("adapter", [False, True])
def test_frozen_routers_are_not_trained_and_replay(adapter: bool) -> None:
    model = policy("qwen3_moe")
    freeze_parts(model.inner, ("router",), Decisions())
    data = given_batch(model)
    wanted = model.outputs(data, LOGPROBS)["logprobs"].detach()
    if adapter:
        with pytest.raises(SpecError, match=r"mlp\.gate gets one, but model\.freeze excludes it"):
            attach(LoraConfig(rank=2), policy_with_frozen_routers(), decide=Decisions())
        targets = ("q_proj", "gate_proj", "up_proj", "down_proj")
        model = attach(LoraConfig(rank=2, targets=targets), policy_with_frozen_routers(), decide=Decisions())
    found = gradients(model, True, data)
    assert found and not any(".gate." in name for name in found)
    torch.testing.assert_close(model.outputs(data, LOGPROBS)["logprobs"], wanted)
    with pytest.raises(SpecError, match="Qwen3ForCausalLM has no routers"):
        freeze_parts(module("qwen3"), ("router",), Decisions())


def policy_with_frozen_routers() -> CausalLM:
    """A policy of model.freeze=[router], with hooked routers that replay."""
    config = HfConfig(path="/nowhere", freeze=("router",))
    model = CausalLM(transformers_model("qwen3_moe"), byte_tokenizer(512), config, seed=0, decide=Decisions())
    assert model.hook_routers() is None and model.routing is not None
    model.routing.replays = "sampler"
    return model


def test_a_router_that_returns_something_else_is_named() -> None:
    assert replay_objection(module("llama4")) == "Llama4Router does not return logits, weights and experts of one top-k"
    assert replay_objection(module("qwen3")) == "Qwen3ForCausalLM has no routers"
    assert all(replay_objection(make()) is None for make in FAMILIES.values())


# --- a sampler whose routers choose by noisy scores ---


def add_noise(model: CausalLM, scale: float) -> None:
    """Let routers choose by noisy probabilities, and weigh by exact ones."""
    noise = torch.Generator().manual_seed(5)
    for router in find_routers(model.inner):

        def forward(hidden: Tensor, router: Any = router) -> tuple[Tensor, Tensor, Tensor]:
            logits = functional.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
            disturbed = logits + scale * torch.randn(logits.shape, generator=noise)
            chosen = disturbed.topk(TOP).indices
            weights = logits.softmax(-1).gather(1, chosen)
            return logits, weights / weights.sum(1, keepdim=True), chosen

        router.forward = forward


def noisy_rollouts(scale: float, make_decoder: Any = None) -> tuple[list[Request], list[Rollout]]:
    model = CausalLM(transformers_model("mild"), byte_tokenizer(512), TinyConfig(), seed=0, decide=Decisions())
    sampler = TorchSampler(TorchSamplerConfig(max_new_tokens=12, max_num_seqs=2), model=model, decide=Decisions())
    if make_decoder is not None:
        sampler._writer._make_decoder = make_decoder  # type: ignore[attr-defined]
    add_noise(model, scale)
    model.hook_routers()
    assert model.routing is not None
    model.routing.replays = "sampler"
    asked = [
        Request(tuple(p), 10 * at + k, 6 + at + 3 * k, at, raw=True) for at, p in enumerate(PROMPTS) for k in (0, 1)
    ]
    return asked, sampler.sample(asked)


def sample_of(rollout: Rollout) -> RolloutSample:
    assert rollout.raw_logprobs is not None
    tokens = rollout.ids, (1.0,) * len(rollout.ids), rollout.raw_logprobs
    return RolloutSample(*tokens, "", rollout.finish, 0, None, experts=rollout.experts)


def sampled_batch(asked: list[Request], drawn: list[Rollout], share: bool = True) -> Batch:
    pairs = list(zip(asked, drawn, strict=True))
    groups = [
        Group(Prompt(tuple(prompt), ""), tuple(sample_of(r) for a, r in pairs if a.group == at))
        for at, prompt in enumerate(PROMPTS)
    ]
    trees = [
        Tree(g.prompt.ids, [Branch(s.ids, {"weight": s.mask, "sampled": s.logprobs}) for s in g.samples])
        for g in groups
    ]
    data = pack_trees(trees, share=share)
    return replace(data, tokens={**data.tokens, "experts": expert_channel(data, groups)})


def mismatch(model: CausalLM, data: Batch) -> dict[str, float]:
    with torch.no_grad():
        old = model.outputs(data, LOGPROBS)["logprobs"]
    found = sampler_mismatch(old, data.tokens["sampled"], data.tokens["weight"] != 0)
    return {name: float(total) / float(count) for name, (total, count) in found.items()}


DECODERS = [kv_cache.ContinuousBatchDecoder, kv_cache.WaveBatchDecoder]


@pytest.mark.parametrize("make_decoder", DECODERS)
@pytest.mark.parametrize("share", [True, False])
def test_replay_removes_the_mismatch_of_a_noisy_router(make_decoder: Any, share: bool) -> None:
    asked, drawn = noisy_rollouts(0.5, make_decoder)
    for request, rollout in zip(asked, drawn, strict=True):
        assert rollout.experts is not None and rollout.experts.dtype == np.int16
        assert rollout.experts.shape == (len(request.prompt) + len(rollout.ids) - 1, 2, TOP)
    data, trainer = sampled_batch(asked, drawn, share), policy("mild")
    replayed, own = mismatch(trainer, data), mismatch(trainer, data.without_tokens("experts"))
    assert own["kl"] > 1e-3 and own["kl"] >= 100 * max(replayed["kl"], 1e-12)
    with torch.no_grad():
        logprobs = trainer.outputs(data, LOGPROBS)["logprobs"]
    learnt = data.tokens["weight"] != 0
    torch.testing.assert_close(logprobs[learnt], data.tokens["sampled"][learnt], atol=1e-6, rtol=0)


def test_a_decoder_without_a_cache_records_the_experts_too() -> None:
    _, drawn = noisy_rollouts(0.0, kv_cache.RecomputeBatchDecoder)
    _, cached = noisy_rollouts(0.0)
    assert [r.ids for r in drawn] == [r.ids for r in cached]
    for found, wanted in zip(drawn, cached, strict=True):
        assert found.experts is not None and wanted.experts is not None
        np.testing.assert_array_equal(np.sort(found.experts), np.sort(wanted.experts))


def test_counts_are_of_the_routers_own_and_of_the_given_experts() -> None:
    model = policy("qwen3_moe")
    assert model.routing is not None
    data = given_batch(model)
    data.tokens["experts"][0] = -1
    own = policy("qwen3_moe")
    assert own.routing is not None
    for one, batch in ((model, data), (own, data.without_tokens("experts"))):
        assert one.routing is not None
        one.routing.counts_tokens = True
        one.outputs(batch, LOGPROBS)
        one.routing.counts_tokens = False
        one.outputs(batch, LOGPROBS)  # not counted
    counts, plain = model.routing.pop_counts(), own.routing.pop_counts()
    assert counts is not None and plain is not None and model.routing.pop_counts() is None
    assert int(counts.tokens) == data.num_tokens and int(counts.given) == data.num_tokens - 1
    assert counts.chosen.sum(1).tolist() == [TOP * data.num_tokens] * 2
    picked = data.tokens["experts"][1:, 0].flatten().long().bincount(minlength=EXPERTS)
    assert int((counts.chosen[0] - picked).clamp(min=0).sum()) == TOP, "and those of the token without"
    found = plain.metrics()
    assert "router/replay_diff_frac" not in found and found["router/load_balance_loss"] > 0.9
    assert 0.5 < counts.metrics()["router/replay_diff_frac"] <= counts.metrics()["router/replay_diff_max"] <= 1
    share = plain.chosen / plain.chosen.sum(1, keepdim=True)
    wanted = (EXPERTS * share * plain.probability / data.num_tokens).sum(1).mean()
    assert found["router/load_balance_loss"] == pytest.approx(float(wanted))
    assert isinstance(counts.idle, Tensor) and isinstance(model.inner, nn.Module)


@pytest.mark.parametrize("share", [True, False])
def test_padding_is_not_counted_and_a_shared_prompt_once(share: bool) -> None:
    branches = [Branch(row, {"weight": [1.0] * len(row)}) for row in rows((2, 7), seed=2)]
    data = pack_trees([Tree(prompt, branches) for prompt in PROMPTS], share=share)
    scores = torch.rand(data.num_tokens, 2, EXPERTS, generator=torch.Generator().manual_seed(0))
    found = []
    for layout in ("packed", "padded"):
        model = policy("mild", double=True, batch_layout=layout)
        assert model.routing is not None and model.layout == layout
        model.routing.counts_tokens = True
        for batch in (data, replace(data, tokens={**data.tokens, "experts": scores.topk(TOP).indices.to(torch.int16)})):
            model.outputs(batch, LOGPROBS)
        found.append(model.routing.pop_counts())
    packed, padded = found
    assert packed is not None and padded is not None and int(padded.tokens) == 2 * data.num_tokens
    assert int(padded.given) == data.num_tokens and padded.metrics() == pytest.approx(packed.metrics())
    assert torch.equal(padded.chosen, packed.chosen)


def local_learner(model: CausalLM) -> LocalLearner:
    """A learner whose micro-batches have 30 tokens."""
    how: dict[str, Any] = {"lr": 1.0, "factor": lambda _: 1.0, "clip_norm": None, "budget": 30, "seed": 0}
    return LocalLearner(model, torch.optim.SGD(model.trainable().values()), device=model.device, prefix="policy", **how)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("share", [True, False])
def test_experts_of_the_old_pass_are_replayed_in_the_update(layout: str, share: bool) -> None:
    model = policy("mild", batch_layout=layout)
    assert model.routing is not None
    model.routing.replays = "old"
    asked, drawn = noisy_rollouts(0.0)
    data = sampled_batch(asked, drawn, share)
    wanted, data = data.tokens["experts"], data.without_tokens("experts")
    learner = local_learner(model)
    old = learner.forward(data, LOGPROBS)
    known = wanted[:, 0, 0] >= 0
    assert (old["experts"][known].sort(-1).values == wanted[known].sort(-1).values).all()
    with torch.no_grad():
        for router in find_routers(model.inner):  # as an update moves them
            router.weight.add_(torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(1)))
        own = model.outputs(data, LOGPROBS)["logprobs"]
        replayed = model.outputs(replace(data, tokens={**data.tokens, "experts": old["experts"]}), LOGPROBS)["logprobs"]
    torch.testing.assert_close(learner.forward(data, LOGPROBS)["logprobs"], own, atol=1e-5, rtol=0)
    assert (replayed - old["logprobs"]).abs().mean() < (own - old["logprobs"]).abs().mean()


def test_replay_of_the_old_pass_needs_one(workdir: Path) -> None:
    words = ["+recipe=grpo_demo", "init_from=null", "model=tiny_moe", "model.router_replay=old"]
    with pytest.raises(SpecError, match="makes no pass for old log-probabilities"):
        compose_job(words)
    compose_job([*words, "algorithm.mini_batches=2"])


def test_an_expert_without_a_token_for_long_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    learner = local_learner(policy("qwen3_moe"))
    counts = ExpertCounts.zeros(2, EXPERTS, torch.device("cpu"))
    counts.tokens += 5
    counts.chosen += 1
    counts.chosen[1, 6] = 0
    for _ in range(DEAD_AFTER - 1):
        learner._report_experts(counts, metrics := Metrics())
    assert metrics.result()["router/idle_experts"] == 1 and not caplog.messages
    for _ in range(2):
        learner._report_experts(counts, Metrics())
    [said] = caplog.messages
    assert (
        f"1 experts of {2 * EXPERTS} got no token in {DEAD_AFTER} mini-batches, the first is expert 6 of layer 1"
        in said
    )
