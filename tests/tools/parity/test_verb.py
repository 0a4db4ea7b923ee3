"""`run parity` as a user meets it: the same device agrees to the bit, one that computes wrongly is found out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner.cli.main import main
from runner.device.cpu import Cpu
from runner.device.fused_modules import FUSED_MODULES
from runner.tools.parity.recording import read
from tests.device import operators

SMALL = (
    "model=tiny",
    "model.hidden_size=32",
    "model.intermediate_size=32",
    "model.layers=2",
    "data=demo",
    "data.items=64",
    "data.held_out=8",
    "algorithm.batch_size=4",
    "tracker=none",
)
STOPS = ",".join(map(str, range(0, 512, 4)))  # so many tokens end an answer that lengths, and rewards, differ
SAMPLED = (
    "sampler=torch",
    "sampler.max_new_tokens=6",
    f"sampler.stop_token_ids=[{STOPS}]",
    "reward=length",
    "reward.target=3",
)
GRPO = ("algorithm=grpo", "algorithm.group_size=4", *SAMPLED)
FILE = "a.safetensors"
Fuse = Callable[[Any], None]


def parity(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    found = main(["parity", *words])
    captured = capsys.readouterr()
    assert found == code, captured
    return captured.out + captured.err


def with_device(monkeypatch: pytest.MonkeyPatch, fuse: Fuse) -> None:
    """From now on the processor changes the modules of a model as `fuse` does."""
    monkeypatch.setattr(Cpu, "apply_fused_ops", lambda self, module, kernels: fuse(module))


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(("algorithm=sft",), marks=pytest.mark.slow),
        ("algorithm=sft", "adapter=lora", "adapter.dropout=0.5", "algorithm.micro_batch_tokens=64"),
        ("algorithm=dpo",),
        pytest.param(("algorithm=rm",), marks=pytest.mark.slow),
        pytest.param(GRPO, marks=pytest.mark.slow),
        (*GRPO, "algorithm.lag=1", "algorithm.correction=tis"),
        ("algorithm=ppo", "algorithm.mini_batches=2", *SAMPLED),
    ],
    ids=["sft", "lora", "dpo", "rm", "grpo", "grpo ahead", "ppo"],
)
def test_the_same_device_agrees_to_the_bit(
    job: tuple[str, ...], workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parity(capsys, "--record", FILE, "--steps", "3", "device=cpu", *SMALL, *job)
    said = parity(capsys, "--compare", FILE, "--tolerance", "0")
    assert said.count("equal bit for bit") == 2 and said.endswith("they agree\n")
    assert [path.name for path in workdir.iterdir()] == [FILE], "no run folder, nothing aside"
    recorded = read(Path(FILE))
    assert len(recorded.steps) == 3 and all(step["train/grad_norm"] > 0 for step in recorded.steps)
    assert bool(recorded.experiences) == ("sampler=torch" in job)
    assert any("loss input" in name for name in recorded.of_kind("output"))


def test_a_wrong_norm_is_named(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parity(capsys, "--record", "cpu", *SMALL, "algorithm=sft")

    def wrong(module: Any) -> None:
        module.model.layers[1].input_layernorm.variance_epsilon = 1e-2

    with_device(monkeypatch, wrong)
    said = parity(capsys, "--compare", "parity-cpu.safetensors", code=5)
    assert "first in the forward pass: policy/model.layers.1.input_layernorm, whose output differs by" in said
    assert "while its input differs by 0\n" in said


def test_wrong_attention_is_named_as_what_the_layer_computes_itself(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parity(capsys, "--record", FILE, "device=cpu", *SMALL, "algorithm=sft")

    def wrong(module: Any) -> None:
        module.model.layers[0].self_attn.scaling = 4.0

    with_device(monkeypatch, wrong)
    said = parity(capsys, "--compare", FILE, code=5)
    assert "the cause is what policy/model.layers.0.self_attn computes before it" in said


class Doubled(torch.autograd.Function):
    """The identity, whose gradient is doubled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


def test_a_wrong_gradient_of_a_right_output_is_named(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parity(capsys, "--record", FILE, "device=cpu", *SMALL, "algorithm=sft")

    def wrong(module: Any) -> None:
        part = module.model.layers[1].mlp.down_proj
        part.forward = lambda x: Doubled.apply(nn.functional.linear(x, part.weight, part.bias))

    with_device(monkeypatch, wrong)
    said = parity(capsys, "--compare", FILE, code=5)
    assert "first in the forward pass" not in said and "0 beyond the bound 0.001" in said
    assert "the gradient of policy/model.layers.1.mlp.down_proj.weight differs by 1 " in said


def test_a_number_that_is_not_finite_is_traced_to_its_module(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parity(capsys, "--record", FILE, "device=cpu", *SMALL, "algorithm=sft")

    def wrong(module: Any) -> None:
        part = module.model.layers[0].post_attention_layernorm
        own = part.forward
        # without gradient it is right: what is tried before the first step would choose another layout
        part.forward = lambda x: own(x) * (torch.nan if torch.is_grad_enabled() else 1)

    with_device(monkeypatch, wrong)
    said = parity(capsys, "--compare", FILE, code=5)
    assert "stopped early here: step 1: the loss is nan" in said
    assert "first in the forward pass: policy/model.layers.0.post_attention_layernorm" in said


@pytest.mark.slow
def test_samples_are_learnt_again_and_not_drawn_again(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parity(capsys, "--record", FILE, "device=cpu", *SMALL, *GRPO)

    def refuse(*_: object) -> None:
        raise AssertionError("asked again")

    monkeypatch.setattr("runner.sampler.torch.TorchSampler.sample", refuse)
    monkeypatch.setattr("runner.interfaces.rewards.GroupScorer.score", refuse)
    said = parity(capsys, "--compare", FILE, "device.threads=2")
    assert "mean −log-likelihood of the sampled tokens (nll)" in said
    assert "|trainer − recorded sampler| per token" in said


def test_a_recording_that_learnt_nothing_is_said(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = ("sampler=torch", "sampler.max_new_tokens=4", "reward=exact", "algorithm.group_size=2")
    words = ("--record", FILE, "--steps", "1", "device=cpu", *SMALL, "algorithm=grpo", *same)
    assert "note: no recorded step had a gradient" in parity(capsys, *words)
    said = parity(capsys, "--compare", FILE)
    assert "no recorded step had a gradient" in said and "nan" not in said


def test_another_data_type_is_within_the_bounds_of_that_type(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parity(capsys, "--record", FILE, "device=cpu", *SMALL, "algorithm=sft")
    said = parity(capsys, "--compare", FILE, "model.dtype=bfloat16", "model.gradient_checkpointing=true")
    assert "0 beyond the bound 0.05" in said and "equal bit for bit" not in said


class InPairs:
    """The rotary positions of neighbors, where the model was made for those of halves."""

    @staticmethod
    def npu_rotary_mul(x: Any, cos: Any, sin: Any, mode: str) -> Any:
        return operators.npu_rotary_mul(x, cos, sin, "interleave")


def test_wrong_rotary_positions_are_named_in_bfloat16_where_only_gradients_show_them(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parity(capsys, "--record", FILE, "--steps", "1", "device=cpu", *SMALL, "algorithm=sft")
    rounded = ("--compare", FILE, "model.dtype=bfloat16")
    assert "0 beyond the bound 0.06" in parity(capsys, *rounded)

    def wrong(module: Any) -> None:
        part = module.model.layers[1].self_attn
        part.forward = FUSED_MODULES["rotary"].forward(part, InPairs).__get__(part)

    with_device(monkeypatch, wrong)
    said = parity(capsys, *rounded, code=5)
    assert "first in the forward pass" not in said, "so near are they in a model of random weights"
    assert re.search(r"the gradient of policy/model\.layers\.1\.self_attn\.[qk]_proj\.weight differs by", said)


def test_a_job_of_several_processes_is_refused(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--record", FILE, "device=cpu", *SMALL, "algorithm=sft", "launch.devices=2", "parallelism=ddp")
    said = parity(capsys, *words, code=2)
    assert "launch.devices: run parity uses one process, but this job has 2; type launch.devices=1" in said


def test_another_job_other_weights_and_other_data_are_refused(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Path(f"{name}.jsonl") for name in "ab"]
    for path in rows:
        path.write_text(
            "".join(json.dumps({"prompt": f"{n}?", "completion": path.name * (n + 1)}) + "\n" for n in range(8))
        )
    data = ("data=file", "data.path=a.jsonl", "data.cache=false")
    parity(capsys, "--record", FILE, "--steps", "2", "device=cpu", *SMALL[:4], *data, "algorithm.batch_size=4")
    assert "optimizer.lr: was recorded as" in parity(capsys, "--compare", FILE, "optimizer.lr=1", code=2)
    assert "the data (or its tokenizer) differs from" in parity(capsys, "--compare", FILE, "data.path=b.jsonl", code=3)

    def other(module: Any) -> None:
        with torch.no_grad():
            module.model.norm.weight += 1e-3

    with_device(monkeypatch, other)
    assert "weights differ from the recording, the first is policy/model.norm.weight" in parity(
        capsys, "--compare", FILE, code=4
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected --record or --compare"),
        (["--record", "a", "--compare", "b"], "expected --record or --compare"),
        (["--record", "cpu", "device=npu"], "--record cpu already sets the device"),
        (["--record", "nowhere/a"], "expected a file in an existing folder"),
        (["--record", "a", "--tolerance", "1%"], "--tolerance is for --compare"),
        (["--record", "a", "--steps", "0"], "expected a number from 1"),
        (["--compare", "a", "--steps", "3"], "leave out --steps"),
        (["--compare", "a", "--tolerance", "5"], "expected a fraction such as 0.5% or 0.005"),
        (["--compare", "a"], "a: no such file; to record one, type: run parity --record a"),
    ],
)
def test_usage(words: list[str], message: str, workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in parity(capsys, *words, code=2)
    assert list(workdir.iterdir()) == []


def test_a_recording_of_a_runs_job_has_no_more_steps_than_it(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--cfg", "job", *SMALL, "algorithm=sft", "device=cpu", "steps=2"])
    Path("spec.yaml").write_text(capsys.readouterr().out)
    assert "recorded 2 steps" in parity(capsys, "--record", FILE, "--spec", "spec.yaml")
