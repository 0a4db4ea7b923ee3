"""Weights and passes without data: known numbers, sums done by hand, and the straight line through depths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runner.plan import measure
from runner.plan.architecture import architecture, published
from runner.plan.measure import measured, micro_batch, weights
from runner.plan.tracking import META, Tracker, keep_gradients

SMALL = ("model.hidden_size=64", "model.intermediate_size=128", "model.vocab_size=512", "data.max_length=128")


@pytest.mark.parametrize(
    ("path", "numbers"),
    [
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-14B-Instruct", 14_770_033_664),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
    ],
)
def test_published_shapes_have_their_published_number_of_weights(compose: Any, path: str, numbers: int) -> None:
    spec = compose("+recipe=sft_full_npu", f"model.path={path}")
    assert weights(spec, "lm", published(path)[0]).total == numbers


def test_weights_are_counted_by_what_learns_and_by_layer(compose: Any) -> None:
    spec = compose("+recipe=sft_demo", *SMALL, "adapter=lora", "model.layers=2", "model.dtype=bfloat16")
    shape, found = architecture(spec.model)
    got = weights(spec, "lm", shape)
    layer = 64 * 64 * 4 + 3 * 64 + 3 * 64 * 128 + 2 * 64  # projections with the biases of q, k, v; feed-forward; norms
    assert found == "model=tiny" and got.frozen == 2 * layer + 2 * 512 * 64 + 64
    assert got.trained_bytes == 4 * got.trained and got.frozen_bytes == 2 * got.frozen  # the adapter is in float32
    assert got.layer_trained * 2 == got.trained_bytes and got.root_trained == 0
    assert got.layer == 2 * layer + got.layer_trained and got.root == 2 * (2 * 512 * 64 + 64)


@pytest.mark.parametrize("more", [(), ("model.gradient_checkpointing=true",), ("adapter=lora",)])
def test_a_deep_model_lies_on_the_line_through_two_shallow_ones(
    compose: Any, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    spec = compose("+recipe=sft_demo", *SMALL, *more, "model.layers=9", "algorithm.micro_batch_tokens=512")
    shape, _ = architecture(spec.model)
    drawn = measured(spec, "lm", shape, 1)
    monkeypatch.setattr(measure, "SAMPLES_OF_DEPTH", (1, 100))
    assert drawn == measured(spec, "lm", shape, 1)


def test_recomputing_takes_less_and_longer_micro_batches_more(compose: Any) -> None:
    def taken(*more: str) -> int:
        spec = compose("+recipe=sft_demo", *SMALL, *more)
        return sum(measured(spec, "lm", architecture(spec.model)[0], 1).values())

    plain, double = taken("algorithm.micro_batch_tokens=512"), taken("algorithm.micro_batch_tokens=1024")
    assert taken("algorithm.micro_batch_tokens=512", "model.gradient_checkpointing=true") < 0.8 * plain
    assert 1.7 * plain < double < 2.1 * plain


def test_a_micro_batch_is_full_of_the_longest_rows(compose: Any) -> None:
    spec = compose("+recipe=sft_demo", "data.max_length=100", "algorithm.micro_batch_tokens=250")
    assert micro_batch(spec).rows["lengths"].tolist() == [100, 100, 50]


def test_storages_are_counted_once_and_until_nobody_holds_them() -> None:
    weight = torch.empty(64, 64, device=META, requires_grad=True)
    tracker = Tracker([weight], vocabulary=7)
    with tracker:
        one = weight * 2  # 16384 bytes
        view = one[:8]
        del one
        wide = torch.empty(3, 7, device=META)  # 84 bytes: a block of 512
        del view, wide
        torch.empty(64, 64, device=META)
    assert tracker.peak == {"activations": 16384, "logits": 512, "gradients": 0}


def test_of_a_gradient_its_part_stays() -> None:
    weight = torch.nn.Parameter(torch.empty(64, 64, device=META))
    tracker = Tracker([weight], vocabulary=7)
    handles = keep_gradients([weight], tracker, parts=4)
    with tracker:
        (weight * 2).sum().backward()  # type: ignore[no-untyped-call]
        torch.empty(128, 64, device=META)
    assert len(handles) == 1 and weight.grad is None
    assert tracker.peak == {"activations": 32768, "logits": 0, "gradients": 4096}
