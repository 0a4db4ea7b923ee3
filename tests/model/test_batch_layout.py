"""Laying out a batch waits for no device: everything runs on tensors that have no values, prompts shared or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runner.core.batch import Batch
from runner.core.prefix_tree import pack_trees
from runner.model.batch_layout import run_packed, run_padded
from runner.model.causal_lm import CausalLM
from tests.model.test_shared_prompts import trees
from tests.model.zoo import batch, causal

META = torch.device("meta")
BATCHES = {"rows": batch, "shared": lambda: pack_trees(trees(temperature=False))}


def without_values(kind: str) -> CausalLM:
    """A model that was built as usual, whose weights have since gone where nothing can be read."""
    model = causal(kind)
    model.module.to(META)
    return model


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_no_value_is_read_back_from_the_device(kind: str, name: str) -> None:
    model, on_cpu = without_values(kind), BATCHES[name]()
    there = on_cpu.to(META)
    outputs = model.outputs(there, frozenset({"logprobs", "entropy"}))
    assert outputs["logprobs"].device == META and len(outputs["entropy"]) == there.num_tokens
    total, _ = model.linear_loss(there, -on_cpu.tokens["weight"])
    (total + outputs["entropy"].sum()).backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for p in model.trainable().values())


@pytest.mark.parametrize("layout", [run_packed, run_padded])
@pytest.mark.parametrize("name", BATCHES)
def test_a_layout_reads_nothing_back(layout: object, name: str) -> None:
    def forward(input_ids: Tensor, **keywords: object) -> Tensor:
        return input_ids[..., None].expand(-1, -1, 4).float()

    there = BATCHES[name]().to(META)
    assert layout(forward, there).shape == (there.num_tokens, 4)  # type: ignore[operator]


def test_a_batch_that_was_made_on_a_device_is_read_there() -> None:
    lost = Batch(batch().to(META).tokens, batch().to(META).rows)
    with pytest.raises((NotImplementedError, RuntimeError)):
        run_packed(lambda **keywords: torch.empty(0), lost)
