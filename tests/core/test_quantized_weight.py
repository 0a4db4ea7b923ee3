"""A quantized weight computes as its dequantized numbers, keeps nothing of full size, and is never written into."""

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import cast, get_args

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runner.adapter import lora
from runner.adapter.config import LoraConfig
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.device_kinds import NPU
from runner.core.errors import EnvironmentProblem, SpecError
from runner.core.quantized_weight import QuantizedWeight, Scheme, quantize_weight
from runner.device.config import NpuConfig
from runner.model import hf
from runner.model.config import HfConfig
from runner.model.initial_weights import quantize_layers
from tests.inference.model_folders import write_base
from tests.model.zoo import CPU, LOGPROBS, batch

SCHEMES = pytest.mark.parametrize("scheme", get_args(Scheme))


@pytest.fixture(autouse=True)
def _library(request: pytest.FixtureRequest) -> None:
    if "nf4" in request.node.name:
        pytest.importorskip("bitsandbytes")


def quantized_linear(scheme: Scheme) -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(128, 48)
    linear.weight = nn.Parameter(quantize_weight(linear.weight, scheme), False)
    return linear


@SCHEMES
def test_output_and_gradient_are_those_of_the_dequantized_numbers(scheme: Scheme) -> None:
    linear = quantized_linear(scheme)
    weight = linear.weight.dequantize()
    x, y = (torch.randn(7, 128, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: sizes.append(one.numel()) or one, lambda one: one):
        out = linear(x)
    wanted = F.linear(y, weight, linear.bias)
    out.square().sum().backward()
    wanted.square().sum().backward()
    assert (out - wanted).abs().max() <= 1e-5
    assert x.grad is not None and y.grad is not None and (x.grad - y.grad).abs().max() <= 1e-5
    assert weight.numel() not in sizes  # kept for the backward pass


@SCHEMES
def test_error_is_below_half_a_step(scheme: Scheme) -> None:
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(2))
    error = (quantize_weight(weight, scheme).dequantize() - weight).abs()
    blocks = error.view(-1, 64 if scheme == "nf4" else 128) / weight.view(
        -1, 64 if scheme == "nf4" else 128
    ).abs().amax(1, keepdim=True)
    assert blocks.max() <= (0.153 if scheme == "nf4" else 0.5 / 127 + 1e-6)  # nf4's widest gap is -1 … -0.696


@SCHEMES
def test_a_copy_moves_and_stays_quantized_and_writing_is_an_error(scheme: Scheme) -> None:
    linear = quantized_linear(scheme)
    assert isinstance(linear.weight.detach().to("meta"), QuantizedWeight)
    copied = deepcopy(linear)
    assert isinstance(copied.weight, QuantizedWeight) and isinstance(copied.weight, nn.Parameter)
    assert copied.weight.equal(linear.weight)
    with pytest.raises(RuntimeError, match="dequantize it first"), torch.no_grad():
        copied.weight.add_(1.0)


@SCHEMES
def test_shapes_on_meta_are_those_of_values(scheme: Scheme) -> None:
    weight = torch.randn(6, 32)
    here, blank = quantize_weight(weight, scheme), quantize_weight(weight.to("meta"), scheme)
    for part in ("codes", "scales"):
        found, wanted = getattr(blank, part), getattr(here, part)
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert blank.is_meta and blank.shape == weight.shape


@SCHEMES
def test_a_model_trains_and_evaluates_in_turn_and_its_merge_computes_the_same(scheme: Scheme, tmp_path: Path) -> None:
    config = HfConfig(path=str(write_base(tmp_path / "base")), quantization=scheme)
    found = Decisions()
    model = hf.build(config, tokenizer=hf.tokenizer(config), device=CPU, seed=0, decide=found)
    assert [one.got for one in found.entries if one.feature == "model.quantization"] == [scheme]
    model = lora.attach(LoraConfig(), model, decide=Decisions())
    optimizer, losses = torch.optim.SGD(model.trainable().values(), lr=1.0), []
    for _ in range(3):
        with torch.no_grad():  # bitsandbytes' own layer packs its weights here
            model.outputs(batch(), LOGPROBS)
        loss = -model.outputs(batch(), LOGPROBS)["logprobs"].sum() / 50
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    with torch.no_grad():
        wanted = model.outputs(batch(), LOGPROBS)["logprobs"]
    model.merge_on_save()
    model.save(tmp_path / "merged")
    plain = HfConfig(path=str(tmp_path / "merged"))
    merged = hf.build(plain, tokenizer=hf.tokenizer(plain), device=CPU, seed=0, decide=Decisions())
    assert not any(isinstance(one, QuantizedWeight) for one in merged.module.parameters())
    with torch.no_grad():
        torch.testing.assert_close(merged.outputs(batch(), LOGPROBS)["logprobs"], wanted, atol=1e-5, rtol=1e-5)


SERVED = ["+recipe=grpo_demo", "init_from=null", "adapter=lora", "sampler=server"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["+recipe=sft_demo"], "quantized weights cannot be trained"),
        (["+recipe=sft_demo", "adapter=lora", "adapter.dora=true"], "leave adapter.dora out"),
        (["+recipe=sft_demo", "adapter=lora", "parallelism=fsdp", "launch.devices=2"], "type parallelism=ddp"),
        (["+recipe=sft_demo", "adapter=lora", "device=npu"], "has no kernels for an NPU"),
        (["+recipe=sft_demo", "init_from=null", "adapter=none"], "type adapter=lora, or leave model.quantization out"),
        (
            [*SERVED, "sampler.url=http://localhost:1", "sampler.weight_sync=adapter"],
            "the server's base is not quantized",
        ),
    ],
)
def test_jobs_that_cannot_have_a_quantized_base_are_refused(words: list[str], why: str, workdir: Path) -> None:
    with pytest.raises(SpecError, match=why):
        compose_job([*words, "model.quantization=int8"])


def test_a_device_chosen_by_auto_that_is_an_npu_is_refused(monkeypatch: pytest.MonkeyPatch, workdir: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"not supported on an NPU \(chosen by device=auto\)"):
        npu = cast("torch.device", SimpleNamespace(type=NPU.name))  # torch has none without torch_npu
        quantize_layers(nn.Linear(2, 2), npu, "int8", Decisions())
    monkeypatch.setattr("runner.device.config.AutoConfig._likely_device", lambda _: NpuConfig())
    with pytest.raises(SpecError, match="no kernels for an NPU; leave it out: LoRA on a bfloat16 base"):
        compose_job(["+recipe=sft_demo", "adapter=lora", "device=auto", "model.quantization=int8"])


def test_a_layer_that_is_quantized_cannot_be_trained_beside_the_adapter(tmp_path: Path) -> None:
    config = HfConfig(path=str(write_base(tmp_path / "base")), quantization="int8")
    model = hf.build(config, tokenizer=hf.tokenizer(config), device=CPU, seed=0, decide=Decisions())
    with pytest.raises(SpecError, match=r"leave them or model\.quantization out"):
        lora.attach(LoraConfig(targets=("q_proj",), modules_to_save=("down_proj",)), model, decide=Decisions())
