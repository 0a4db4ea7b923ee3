"""Suggestions: every synonym leads to an option that exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.cli.job_builder import compose_job
from runner.core.errors import SpecError
from runner.spec import suggest
from runner.spec.migrate import table
from runner.spec.registry import built_in_registry, default_registry
from runner.spec.schema import OptionIndex

OPTIONS = OptionIndex(default_registry()).options


@pytest.mark.parametrize(
    ("group", "wrong", "right"),
    [
        ("device", "gpu", "cuda"),
        ("device", "ascend", "npu"),
        ("device", "CPU", "cpu"),
        ("optimizer", "adamw8", "adamw"),
        ("parallelism", "zero3", "fsdp"),
        ("parallelism", "fsdp2", "fsdp"),
        ("device", "zzz", None),
    ],
)
def test_names(group: str, wrong: str, right: str | None) -> None:
    assert suggest.suggest_name(group, wrong, default_registry().classes(group)) == right


@pytest.mark.parametrize(
    ("section", "chosen", "wrong", "hint"),
    [
        ("", "", "max_steps", "type steps=…"),
        ("data", "demo", "epochs", "did you mean 'epochs' or 'algorithm.epochs'?"),
        ("optimizer", "adamw", "learning_rate", "type optimizer.lr=…"),
        ("algorithm", "sft", "learning_rate", "type optimizer.lr=…"),
        ("optimizer", "adamw", "momentum", "an option of optimizer=sgd, optimizer=muon"),
        ("model", "tiny", "every", "did you mean 'checkpoint.every' or 'evaluation.every'?"),
        ("", "", "num_epochs", "type epochs=…"),
        (
            "",
            "",
            "local_rank",
            suggest.suggest_key("", "", "LOCAL_RANK", OPTIONS),
        ),
        ("parallelism", "ddp", "tp_size", "type parallelism=fsdp parallelism.tp=…"),
        ("launch", "ray", "nodes", suggest.WRONG_MEMBER["launch", "ray", "nodes"]),
        (
            "",
            "",
            "sequence_parallel_size",
            "type parallelism=fsdp parallelism.cp=…",
        ),
        ("launch", "local", "sampler", "did you mean 'samplers'?"),
        ("launch", "ray", "device", "did you mean 'devices'?"),
        ("checkpoint", "safetensors", "async", "type checkpoint.asynchronous=…"),
        (
            "model",
            "hf",
            "attn_implementation",
            "attention is an option of the device: device.attention=fused or sdpa, on cuda and npu",
        ),
        ("data", "file", "id", ""),
        ("model", "tiny", "qqqqq", ""),
    ],
)
def test_keys(section: str, chosen: str, wrong: str, hint: str) -> None:
    assert suggest.suggest_key(section, chosen, wrong, OPTIONS) == hint


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("adapter=qlora", "model.quantization=nf4 (4 bits)"),
        ("sampler=SGLang", "the only rollout engine is vLLM"),
        ("model.dtype=fp8", "an Ascend A2 or A3 has no FP8"),
        ("model.use_liger_kernel=true", "device.fused_ops has CANN's operators in Liger's places"),
        ("model.load_in_4bit=true", "model.quantization=nf4 (4 bits)"),
        ("launch.rewarders=2", "for an external service: reward=http"),
    ],
)
def test_what_others_have_and_this_does_not_is_refused_with_the_reason(word: str, why: str, workdir: Path) -> None:
    with pytest.raises(SpecError) as caught:
        compose_job(["+recipe=sft_npu", word])
    assert why in str(caught.value)


def test_nothing_that_is_there_counts_as_absent() -> None:
    registry = built_in_registry()
    members = {name for group in ("adapter", "sampler", "device", "model") for name in registry.classes(group)}
    options = {name for names in OPTIONS.values() for own in names.values() for name in own}
    assert not (members | options) & table().absent.keys()


@pytest.mark.parametrize("word", ["device=npu:2", "device=cuda:2", "device.visible=2", "+device.id=2", "device_ids=2"])
def test_who_asks_for_a_card_is_told_how_one_is_chosen(word: str, workdir: Path) -> None:
    with pytest.raises(SpecError, match=r"ASCEND_RT_VISIBLE_DEVICES=2.* run .*CUDA_"):
        compose_job([word])
