"""What a model that computes in bfloat16 multiplies in, stores and keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.qwen2 import Qwen2Config, Qwen2ForSequenceClassification

from runner.adapter import lora
from runner.adapter.config import LoraConfig
from runner.algorithm.sft import CrossEntropy
from runner.core.auto_choices import Decisions
from runner.core.batch import with_totals
from runner.core.tolerance import tolerance_of
from runner.interfaces import Request
from runner.model.causal_lm import CausalLM
from runner.model.config import TinyConfig
from runner.model.initial_weights import place_on_device
from runner.model.parameters import original_class, read_as_stored
from runner.model.tiny import byte_tokenizer
from runner.model.value_head import ScalarHeadModel
from runner.sampler.config import TorchSamplerConfig
from runner.sampler.torch import TorchSampler
from runner.trainer.learner import LocalLearner
from tests.model.zoo import CPU, LOGPROBS, SHAPE, batch, causal, gradients, module, relative, rows

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "grouped_mm_fallback", "linear")
BFLOAT16 = tolerance_of("bfloat16")


class Products(TorchDispatchMode):
    """The shapes of the operands of each matrix product, by whether one of them is in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.wide: list[tuple[tuple[int, ...], ...]] = []
        self.narrow = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function).split(".")[1] in PRODUCTS:
            operands = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            if operands[0].shape[-1] == 1:  # positions times frequencies: no matrix product
                return function(*args, **(kwargs or {}))
            if any(one.dtype == torch.float32 for one in operands):
                self.wide.append(tuple(tuple(one.shape) for one in operands))
            else:
                self.narrow += 1
        return function(*args, **(kwargs or {}))


def stored(kind: str, dtype: torch.dtype, **options: Any) -> CausalLM:
    """A model that computes in bfloat16, of weights that are stored in `dtype`."""
    ours = {key: options.pop(key) for key in list(options) if key in TinyConfig.model_fields}
    made = place_on_device(module(kind, initializer_range=0.05, **options), dtype, CPU).requires_grad_(True)
    config = TinyConfig(dtype="bfloat16", **ours)
    return CausalLM(made, byte_tokenizer(512), config, seed=0, decide=Decisions(strict=True))


def adapted(kind: str, **options: Any) -> Any:
    found: Any = stored(kind, torch.bfloat16, **options)
    found.module.requires_grad_(False)
    targets = ("q_proj", "v_proj") if kind == "qwen3_moe" else "all-linear"
    return lora.attach(LoraConfig(rank=4, targets=targets), found, decide=Decisions(strict=True))


def full(kind: str, **options: Any) -> Any:
    return stored(kind, torch.float32, **options)


def one_step(model: Any) -> Products:
    """Train a step; the matrix products that it took."""
    learner = LocalLearner(
        model,
        torch.optim.AdamW(model.trainable().values(), lr=1e-2),
        lr=1e-2,
        clip_norm=1.0,
        factor=lambda step: 1.0,
        budget=1000,
        seed=0,
        device=CPU,
    )
    data = batch()
    learner.begin_step(0)
    with Products() as products:
        learner.forward_backward(with_totals(data, data.count()), CrossEntropy())
        learner.optim_step()
    return products


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.8"),
    reason="its attention on the CPU is float32 products",
)
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("build", [adapted, full], ids=["lora", "full"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_no_product_of_a_step_is_in_float32_but_the_routers(
    kind: str, build: Callable[..., Any], recomputed: bool
) -> None:
    products = one_step(build(kind, gradient_checkpointing=recomputed))
    experts = 4  # of the router, whose products are the only ones with such a side
    assert [shapes for shapes in products.wide if not any(experts in shape for shape in shapes)] == []
    assert bool(products.wide) == (kind == "qwen3_moe") and products.narrow > 20


@pytest.mark.parametrize("build", [adapted, full], ids=["lora", "full"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_the_lm_head_may_be_in_float32(build: Callable[..., Any], kind: str) -> None:
    """Its products, logits and gradients, in training and in sampling; the layers stay in bfloat16."""
    model = build(kind, head_dtype="float32")
    weight = model.causal.get_output_embeddings().weight
    assert weight.dtype == torch.float32
    data = batch()
    hidden = model.outputs(data, frozenset({"hidden"}))["hidden"]
    assert hidden.dtype == torch.bfloat16
    logits = hidden.float() @ weight.T
    if model.chunked:
        logs = logits.log_softmax(-1).gather(1, data.tokens["ids"][:, None])[:, 0]
        got = model.outputs(data, LOGPROBS)["logprobs"]
        kept = data.tokens["parent"] >= 0
        torch.testing.assert_close(got[kept], logs[kept], atol=2e-6, rtol=0)
        narrow = build(kind).outputs(data, LOGPROBS)["logprobs"]
        assert float((narrow - got).detach()[kept].abs().max()) > 1e-4
    with model._bulk_generation_mode():
        assert model.causal(input_ids=torch.tensor([[5, 6, 7]])).logits.dtype == torch.float32
    products = one_step(model)
    assert products.wide and products.narrow > 20


def test_trainable_weights_are_stored_in_float32_and_frozen_ones_in_bfloat16() -> None:
    for model, frozen in ((adapted("qwen3"), {torch.bfloat16}), (full("qwen3"), set())):
        one_step(model)
        assert {p.dtype for p in model.trainable().values()} == {torch.float32}
        assert {p.dtype for p in model.module.parameters() if not p.requires_grad} == frozen
        assert model.compute_dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_oss", "gemma2", "gpt2", "llama4", "mistral", "granite"])
def test_it_is_the_model_of_float32_up_to_rounding(kind: str) -> None:
    options = {} if kind in ("gpt2",) else {"initializer_range": 0.05}
    wanted, model = causal(kind, **options), causal(kind, dtype="bfloat16", **options)
    exact, got = (one.outputs(batch(), LOGPROBS)["logprobs"].detach() for one in (wanted, model))
    assert got.dtype == torch.float32 and not torch.equal(got, exact)
    assert float((got - exact).abs().mean()) < BFLOAT16.logprobs
    found = gradients(model, True, batch())
    assert {g.dtype for g in found.values()} == {torch.float32}
    assert relative(found, gradients(wanted, True, batch())) < 3 * BFLOAT16.gradient


def test_a_model_that_computes_in_float32_is_left_as_it_is() -> None:
    model = causal("qwen3_moe")
    assert all(original_class(part) is type(part) for part in model.module.modules())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.module.modules())


def test_a_layer_that_is_recomputed_keeps_no_cast_of_a_weight() -> None:
    """As automatic mixed precision does: it keeps one of every weight until the forward pass is over, and longer."""
    model = full("qwen3", gradient_checkpointing=True)
    shapes = {tuple(p.shape) for block in model.transformer_blocks() for p in block.parameters() if p.ndim == 2}
    shapes |= {shape[::-1] for shape in shapes}
    kept = Counter[tuple[int, ...]]()

    def note(tensor: Tensor) -> Tensor:
        kept[tuple(tensor.shape)] += tensor.dtype == torch.bfloat16
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        total, _ = model.linear_loss(batch(), batch().tokens["weight"])
    assert kept and not any(kept[shape] for shape in shapes)
    total.backward()


def test_what_is_written_is_written_with_weights_that_are_cast_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = full("qwen3")
    sampler = TorchSampler(TorchSamplerConfig(top_k=1, max_new_tokens=6), model, decide=Decisions())  # tries the model
    requests = [Request(tuple(prompt), 0, 6, at) for at, prompt in enumerate(rows((5, 3)))]
    wanted = sampler.sample(requests)
    casts = Counter[tuple[int, ...]]()
    plain = Tensor.to

    def count(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if isinstance(tensor, nn.Parameter) and arguments[:1] == (torch.bfloat16,):
            casts[tuple(tensor.shape)] += 1
        return plain(tensor, *arguments, **options)

    monkeypatch.setattr(Tensor, "to", count)
    assert sampler.sample(requests) == wanted
    several = Counter(tuple(p.shape) for p in model.module.parameters())
    assert casts and all(times <= several[shape] for shape, times in casts.items())


def test_a_score_head_computes_in_float32() -> None:
    torch.manual_seed(0)
    classifier = Qwen2ForSequenceClassification(Qwen2Config(**SHAPE, num_labels=1)).requires_grad_(True)
    config = TinyConfig(dtype="bfloat16")
    scalar = ScalarHeadModel(classifier, byte_tokenizer(512), config, seed=0, decide=Decisions())
    values = scalar.outputs(batch(), frozenset({"values"}))["values"]
    assert values.dtype == torch.float32 and not torch.equal(values, values.bfloat16().float())
    values.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in scalar.trainable().values())


def test_a_frozen_copy_says_what_a_trainable_model_says() -> None:
    """Of a mixture of experts, too, whose routers would choose other experts after rounding."""
    policy, reference = (stored("qwen3_moe", dtype) for dtype in (torch.float32, torch.bfloat16))
    said = [model.outputs(batch(), LOGPROBS)["logprobs"] for model in (policy, reference)]
    assert torch.equal(*said)


def test_a_merged_export_has_the_weights_of_pefts_own_merge(tmp_path: Path) -> None:
    model = adapted("qwen3")
    with torch.no_grad():
        for name, parameter in model.trainable().items():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    wanted = deepcopy(model.module).float()
    read_as_stored(wanted)
    model.merge_on_save()
    model.save(tmp_path)
    exported = load_file(tmp_path / "model.safetensors")
    for name, tensor in wanted.merge_and_unload().state_dict().items():
        assert torch.allclose(exported[name], tensor, rtol=1e-6, atol=1e-7), name


def test_a_devices_operators_are_tried_in_what_a_model_computes_in() -> None:
    seen: list[set[torch.dtype]] = []

    def fit(part: nn.Module) -> None:
        seen.append({p.dtype for p in part.parameters()})

    made = place_on_device(module("qwen3"), torch.float32, CPU, fit, torch.bfloat16)
    assert seen == [{torch.bfloat16}] and {p.dtype for p in made.parameters()} == {torch.float32}
