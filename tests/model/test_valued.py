"""A language model with a value head: both heads against the plain model, one pass, and what is kept of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from runner.adapter import lora
from runner.adapter.config import LoraConfig
from runner.core.auto_choices import Decisions
from runner.core.batch import Batch, with_tokens
from runner.core.errors import SpecError, UnsupportedModelError
from runner.core.prefix_tree import Branch, Tree, pack_trees
from runner.model import hf
from runner.model.config import HfConfig, TinyConfig
from runner.model.tiny import byte_tokenizer
from runner.model.value_head import PolicyWithValueHead
from tests.model.zoo import VOCAB, module, relative

ALL = frozenset({"logprobs", "entropy", "values"})
VALUES = frozenset({"values"})


def valued(kind: str = "qwen2", double: bool = False, **options: Any) -> PolicyWithValueHead:
    """A model of the zoo with a value head that is not zero."""
    made = module(kind)
    if double:
        made.double()
    model = PolicyWithValueHead(made, byte_tokenizer(512), TinyConfig(**options), seed=0, decide=Decisions())
    return with_head(model, torch.float64 if double else torch.float32)


def with_head(model: PolicyWithValueHead, dtype: torch.dtype = torch.float32) -> PolicyWithValueHead:
    drawn = torch.randn(len(model.value_head), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    model.value_head.data = drawn.to(dtype)
    return model


def trees() -> list[Tree]:
    generator = torch.Generator().manual_seed(2)

    def ids(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    shape = ((9, (3, 12, 1)), (1, (5,)), (14, (2, 2)))
    return [Tree(ids(p), [Branch(ids(n), {"weight": [1.0] * n}) for n in lengths]) for p, lengths in shape]


def plain(made: Any, head: Tensor) -> dict[str, Tensor]:
    """The outputs on the branches' tokens, path by path, from the transformers model alone."""
    found: dict[str, list[Tensor]] = {name: [] for name in ALL}
    for tree in trees():
        for branch in tree.branches:
            path = torch.tensor([[*tree.prompt, *branch.ids]])
            hidden = made.base_model(input_ids=path, use_cache=False).last_hidden_state[0]
            logits = made(input_ids=path, use_cache=False).logits[0]
            start = len(tree.prompt) - 1
            drawn = torch.distributions.Categorical(logits=logits[start:-1])
            found["logprobs"].append(drawn.log_prob(path[0, start + 1 :]))
            found["entropy"].append(drawn.entropy())
            found["values"].append(hidden[start:-1] @ head)
    return {name: torch.cat(parts) for name, parts in found.items()}


def learnt(batch: Batch, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs on the branches' tokens, which lie in the same order with and without sharing."""
    return {name: values[batch.tokens["weight"] > 0] for name, values in outputs.items()}


def total(outputs: dict[str, Tensor]) -> Tensor:
    """Something that is linear in no output."""
    return torch.stack([(n + 1) * outputs[name].sin().sum() for n, name in enumerate(sorted(ALL))]).sum()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gpt2", "gemma2", "granite", "bloom"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("share", [True, False])
def test_outputs_and_gradients_equal_the_plain_model(kind: str, layout: str, share: bool) -> None:
    model, made = valued(kind, double=True, batch_layout=layout), module(kind).double()
    batch = pack_trees(trees(), share=share)
    head = model.value_head.detach().clone().requires_grad_()
    wanted, everywhere = plain(made, head), model.outputs(batch, ALL)
    got = learnt(batch, everywhere)
    limit = 1e-6 if kind in ("gemma2", "bloom") else 1e-11  # whose own attention has a float32 softmax
    for name in ALL:
        torch.testing.assert_close(got[name], wanted[name], atol=limit, rtol=limit)
        assert not everywhere[name][batch.tokens["parent"] < 0].any(), "roots are 0"
    total(got).backward()
    total(wanted).backward()
    grads: Any = {name: p.grad for name, p in model.trainable().items()}
    plain_grads: Any = {name: p.grad for name, p in made.named_parameters()} | {"value_head": head.grad}
    assert relative(grads, plain_grads) < 1e-6  # norms are in float32, where two gradients meet in another order


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])  # chunked head, full logits
def test_all_outputs_come_from_one_pass_and_do_not_depend_on_what_else_is_asked(kind: str) -> None:
    model, batch, passes = valued(kind), pack_trees(trees()), list[int]()
    model.causal.base_model.register_forward_hook(lambda *_: passes.append(1))
    with torch.no_grad():
        together = model.outputs(batch, ALL)
        assert len(passes) == 1
        alone = {name: model.outputs(batch, frozenset({name}))[name] for name in ALL}
    assert all(torch.equal(alone[name], together[name]) for name in ALL)
    with pytest.raises(SpecError, match="PolicyWithValueHead makes entropy, hidden, logprobs, values"):
        model.outputs(batch, frozenset({"values", "scores"}))


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_hidden_states_can_be_asked_for_beside_values(kind: str) -> None:
    model, batch = valued(kind), pack_trees(trees())
    with torch.no_grad():
        [wanted] = model.outputs(batch, frozenset({"hidden"})).values()
        for more in (VALUES, ALL):
            found = model.outputs(batch, more | {"hidden"})
            assert found.keys() == more | {"hidden"} and torch.equal(found["hidden"], wanted)


def test_a_temperature_changes_no_value() -> None:
    model, batch = valued(), pack_trees(trees())
    hot = with_tokens(batch, temperature=torch.full((batch.num_tokens,), 0.5))
    with torch.no_grad():
        one, two = model.outputs(batch, ALL), model.outputs(hot, ALL)
    assert torch.equal(one["values"], two["values"]) and not torch.allclose(one["logprobs"], two["logprobs"])


def test_the_lm_head_stays_in_chunks() -> None:
    """What is kept for the backward pass is never as large as all logits; a chunk changes no number."""
    batch, sizes, grads = pack_trees(trees()), list[int](), []

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    for chunk in (4, 1000):
        model = valued(lm_head_chunk_tokens=chunk, double=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            value = total(model.outputs(batch, ALL))
        value.backward()
        grads.append({name: p.grad for name, p in model.trainable().items()})
    assert max(sizes) < batch.num_tokens * VOCAB
    assert relative(grads[0], grads[1]) < 1e-12  # type: ignore[arg-type]


def test_a_model_that_hides_its_backbone_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="exposes its backbone: Llama4ForCausalLM does not"):
        valued("llama4")


def test_beside_an_adapter_the_value_head_learns_in_float32() -> None:
    made = PolicyWithValueHead(
        module("qwen2").bfloat16(), byte_tokenizer(512), TinyConfig(), seed=0, decide=Decisions()
    )
    model = with_head(lora.attach(LoraConfig(rank=2), made, decide=Decisions()))
    assert all(name == "value_head" or "lora_" in name for name in model.trainable())
    assert {p.dtype for p in model.trainable().values()} == {torch.float32}
    batch = pack_trees(trees())
    outputs = model.outputs(batch, ALL)
    assert outputs["values"].dtype == torch.float32
    total(learnt(batch, outputs)).backward()
    assert all(p.grad is not None for p in model.trainable().values())


def test_values_are_float32_in_a_model_that_computes_in_bfloat16() -> None:
    model = valued(dtype="bfloat16")
    with torch.no_grad():
        values = model.outputs(pack_trees(trees()), VALUES)["values"]
    assert values.dtype == torch.float32 and not torch.equal(values, values.bfloat16().float())


def test_a_folder_is_loaded_with_a_value_head(tmp_path: Path) -> None:
    model = valued()
    model.save(tmp_path)
    config, tokenizer = HfConfig(path=str(tmp_path)), model.tokenizer
    options: Any = {"tokenizer": tokenizer, "device": torch.device("cpu"), "seed": 0, "decide": Decisions()}
    loaded = hf.build(config, head="lm+value", **options)
    assert isinstance(loaded, PolicyWithValueHead) and not loaded.value_head.any()
    with torch.no_grad():
        with_head(loaded)
        torch.testing.assert_close(loaded.outputs(pack_trees(trees()), ALL), model.outputs(pack_trees(trees()), ALL))


def test_a_fresh_head_says_zero() -> None:
    model = PolicyWithValueHead(module("qwen2"), byte_tokenizer(512), TinyConfig(), seed=0, decide=Decisions())
    assert not model.outputs(pack_trees(trees()), VALUES)["values"].any()


@pytest.mark.parametrize("adapter", [False, True])
def test_an_export_is_the_language_model_alone(adapter: bool, tmp_path: Path) -> None:
    model = valued()
    if adapter:
        model = with_head(lora.attach(LoraConfig(rank=2), model, decide=Decisions()))
        model.merge_on_save()
    model.save(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(loaded(ids).logits, module("qwen2")(ids).logits)
