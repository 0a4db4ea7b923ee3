"""Compiled layers: the numbers of plain ones, compiled once for batches of any shape, and refused where they cannot be.

Fast tests trace one family; slow ones (`make test-all`) trace and differentiate all, or run inductor as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import OutOfMemoryError, Tensor
from torch._dynamo.utils import counters

from runner.adapter import lora
from runner.adapter.config import LoraConfig
from runner.build import build_device, build_model, build_tokenizer
from runner.cli.job_builder import compose_job
from runner.cli.main import main
from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem, SpecError
from runner.core.prefix_tree import pack_trees
from runner.device.config import CpuConfig
from runner.device.cuda import FlashAttention
from runner.model import checkpointing_and_compile
from tests.device import operators
from tests.device.cases import trees
from tests.model.zoo import LOGPROBS, batch, causal, gradients, greedy, relative, rows
from tests.parallelism.worlds import alone

SHAPES = [(7, 1, 19), (5, 5), (30, 2, 12, 4, 4), (11,), (3, 17, 8)]
FLOAT32 = 2e-5  # of the largest gradient
# torch hides it from users, as it looks into every tensor that it traces
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing_and_compile, "OPTIONS", {"dynamic": True, "backend": "aot_eager"})
    monkeypatch.setattr(checkpointing_and_compile, "compiler_problem", lambda *_: None)
    torch._dynamo.reset()
    counters.clear()


def made(kind: str, fast: bool, adapter: float | None = None, targets: Any = "all-linear", **options: Any) -> Any:
    model: Any = causal(kind, num_hidden_layers=4, compile=fast, **options)
    if adapter is not None:
        model = lora.attach(LoraConfig(rank=4, dropout=adapter, targets=targets), model, decide=Decisions())
        for name, parameter in model.trainable().items():
            if "lora_B" in name:
                parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)), std=0.1)
    if fast:
        model.compile(Decisions(strict=True))
    return model


def compare(kind: str, limit: float, **options: Any) -> None:
    """Gradients, scores and greedy answers over batches of several shapes."""
    plain, fast = (made(kind, on, **options) for on in (False, True))
    for seed, lengths in enumerate(SHAPES):
        data, found = batch(lengths, seed), []
        for model in (plain, fast):
            torch.manual_seed(seed)  # of dropout
            found.append(gradients(model, True, data))
        assert relative(found[1], found[0]) < limit
        with torch.no_grad():
            wanted, got = (model.outputs(data, LOGPROBS)["logprobs"] for model in (plain, fast))
        torch.testing.assert_close(got, wanted, atol=50 * limit, rtol=50 * limit)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    assert greedy(fast, rows((5, 1, 11)), 4) == greedy(plain, rows((5, 1, 11)), 4)
    assert counters["stats"]["unique_graphs"] == graphs  # text is written by what is not compiled


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("qwen3", {"adapter": 0.3, "gradient_checkpointing": "selective"}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"adapter": 0.0}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"attn_pdrop": 0.3, "resid_pdrop": 0.3}, marks=pytest.mark.slow),
        pytest.param("qwen2", {"batch_layout": "padded"}, marks=pytest.mark.slow),
    ],
    ids=["adapter, recomputed", "experts", "adapted experts", "dropout in attention", "padded"],
)
def test_the_same_numbers(kind: str, options: dict[str, Any]) -> None:
    compare(kind, FLOAT32, **options)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


FAST = [("qwen3", 0.0, "selective")]
GRAPHS = [
    pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
    for case in product(("qwen2", "qwen3", "llama", "qwen3_moe"), (None, 0.0), (False, True, 2, "selective"))
]


@pytest.mark.usefixtures("traced")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "adapter", "way"), GRAPHS)
def test_whole_layers_are_a_few_graphs_for_ragged_batches(
    kind: str, adapter: float | None, way: bool | int | str
) -> None:
    """No break, and at most three graphs in training and three in scoring; of experts, attention is adapted alone."""
    checkpointing_and_compile.OPTIONS["backend"] = "eager"  # which traces as any other does
    targets = {"targets": ATTENTION} if kind == "qwen3_moe" and adapter is not None else {}
    model, random = made(kind, True, adapter, gradient_checkpointing=way, **targets), Random(0)
    batches = [batch(tuple(random.randint(1, 40) for _ in range(random.randint(1, 8))), seed) for seed in range(50)]
    for data in batches:
        gradients(model, True, data)
    trained = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        for data in batches:
            model.outputs(data, LOGPROBS)
    most = 4 if kind == "qwen3_moe" and way == 2 else 3  # two kinds of layers, either recomputed or not
    assert 1 <= trained <= most and 1 <= counters["stats"]["unique_graphs"] - trained <= most
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # inductor imports such a module
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "options", "limit"),
    [
        ("qwen2", {}, FLOAT32),
        ("qwen3", {"adapter": 0.3, "gradient_checkpointing": 2}, FLOAT32),
        ("qwen2", {"dtype": "bfloat16", "initializer_range": 0.05}, 0.05),
    ],
    ids=["plain", "adapter with dropout, recomputed", "bfloat16"],
)
def test_inductor_gives_the_same_numbers(kind: str, options: dict[str, Any], limit: float) -> None:
    torch._dynamo.reset()
    counters.clear()
    compare(kind, limit, **options)


@pytest.mark.usefixtures("traced")
def test_a_model_that_does_not_name_its_layers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model, decisions = causal("qwen2", compile=True), Decisions()
    monkeypatch.setattr(model.inner, "_no_split_modules", None)
    model.compile(decisions)
    assert [(d.feature, d.got) for d in decisions.entries] == [("model.compile", "false")]


@pytest.mark.slow
def test_recomputed_layers_with_an_adapter_on_experts_stay_uncompiled_and_this_is_said() -> None:
    model = made("qwen3_moe", False, 0.0, gradient_checkpointing=True)
    model.config = model.config.model_copy(update={"compile": True})
    model.compile(decisions := Decisions())
    assert [(d.feature, d.got) for d in decisions.entries] == [("model.compile", "false")] and model._compiled is None


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuConfig, "compiles_for", "cpu")


def trained(*words: str, world: bool = True) -> tuple[Any, list[tuple[str, bool, str]]]:
    """A job's model, and what was said of its layers: value, whether it is a fact, reason."""
    spec, decide = compose_job(list(words)).spec, Decisions()
    device, tokenizer = build_device(spec, decide), build_tokenizer(spec, decide)
    model = build_model(spec, tokenizer, device, decide, world=alone() if world else None)
    return model, [(d.got, d.is_fact, d.reason) for d in decide.entries if d.feature == "model.compile"]


@pytest.mark.usefixtures("traced", "as_on_cuda")
def test_by_default_layers_are_compiled_where_they_can_be_and_it_is_said() -> None:
    model, said = trained("model=tiny")
    assert said == [("true", True, "the default on cpu; type model.compile=false to turn it off")]
    assert model._compiled is not None
    with torch.no_grad():
        model.outputs(batch((3, 5)), LOGPROBS)
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.usefixtures("traced", "as_on_cuda")
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["adapter=lora", "model.quantization=int8"], "not tested with torch.compile: model.quantization=int8"),
        (["model=tiny_moe", "model.gradient_checkpointing=true"], "routers of layers that are recomputed and"),
        (["model.batch_layout=padded"], "the layers of Qwen2ForCausalLM with padded rows are not tested"),
    ],
)
def test_by_default_they_stay_as_they_are_where_something_would_be_lost(words: list[str], reason: str) -> None:
    model, [(value, is_fact, said)] = trained(*words)
    assert model._compiled is None and (value, is_fact) == ("false", True) and said.startswith(reason)


@pytest.mark.usefixtures("as_on_cuda")
def test_by_default_a_missing_compiler_is_a_fact_and_on_request_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing_and_compile, "compiler_problem", lambda on, _: f"none for {on}; install one")
    model, said = trained("model=tiny")
    assert model._compiled is None and said == [("false", True, "none for cpu; install one")]
    with pytest.raises(EnvironmentProblem, match=r"^model\.compile=true: none for cpu; install one, or leave it out$"):
        trained("model=tiny", "model.compile=true")


@pytest.mark.usefixtures("traced", "as_on_cuda")
def test_by_default_what_only_answers_is_not_compiled() -> None:
    model, said = trained("model=tiny", world=False)
    assert model._compiled is None and not said
    assert trained("model=tiny", "model.compile=false")[0]._compiled is None


def test_the_default_is_that_of_the_device() -> None:
    specs = [compose_job([f"device={name}"]).spec for name in ("cpu", "cuda", "npu", "auto")]
    assert [spec.device.compiles_for for spec in specs] == [None, "cuda", None, "cuda"]
    assert [spec.model.compile for spec in specs] == [None] * 4
    words = ["device=cuda", "parallelism=tp", "launch.devices=2", "model.kernels=liger", "device.deterministic=true"]
    spec = compose_job(words).spec
    assert spec.model.compile_objection(spec) == (
        "not tested with torch.compile: parallelism.tp=2, device.deterministic=true, model.kernels=liger"
    )
    for name in ("cpu", "cuda"):
        spec = compose_job([f"device={name}"]).spec
        assert spec.model.compile_objection(spec) is None


@pytest.mark.parametrize(("fault", "code"), [(RuntimeError("no such instruction"), 2), (OutOfMemoryError("full"), 75)])
def test_a_layer_that_torch_cannot_compile_is_no_bug_of_this_project(
    fault: Exception, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise fault

    monkeypatch.setattr(checkpointing_and_compile, "OPTIONS", {"dynamic": True, "backend": fail})
    monkeypatch.setattr(checkpointing_and_compile, "compiler_problem", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    assert main(["+recipe=sft_demo", "steps=1", "model.compile=true", "--folder", "compiled"]) == code
    said = capsys.readouterr().err
    wanted = {2: "torch cannot compile a layer: RuntimeError: no such instruction", 75: "memory is exhausted: full"}
    assert wanted[code] in said and ("type model.compile=false" in said) == (code == 2)


def test_without_a_compiler_it_is_an_error_that_says_what_to_install() -> None:
    program = (
        "import torch\nfrom runner.model.checkpointing_and_compile import compiler_problem\n"
        "print(compiler_problem(torch.device('cpu'), torch.float32))"
    )
    own = {"CXX": "no-such-compiler", "PATH": "/nowhere", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=own, capture_output=True, text=True)
    assert "torch cannot compile for cpu" in done.stdout, done.stderr
    assert "install a C++ compiler (g++)" in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_a_kernel_is_traced_with_lengths_that_are_no_constants() -> None:
    seen = set[int]()

    @torch.library.custom_op("runner_tests::varlen", mutates_args=())
    def varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, most_q: int, most_k: int) -> Tensor:
        seen.add(most_k)
        none: Any = {"dropout_p": 0.0, "softmax_scale": 8**-0.5, "causal": True, "window_size": (-1, -1)}
        found: Tensor = operators.flash_attn_varlen_func(q, k, v, cu_q, cu_k, most_q, most_k, **none)
        return found.clone()

    varlen.register_fake(lambda q, *_: torch.empty_like(q))
    plain, fast = (made("qwen3", on) for on in (False, True))
    fast._kernel = FlashAttention(lambda *given, **_: varlen(*given), deterministic=False)
    with torch.no_grad():
        for seed in range(20):
            data = pack_trees(trees()) if seed == 9 else batch(tuple(range(2, 3 + seed)), seed)
            wanted, got = (model.outputs(data, LOGPROBS)["logprobs"] for model in (plain, fast))
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    assert len(seen) > 15 and not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 2  # without and with shared prompts


@pytest.mark.slow
def test_counting_routers_count_under_compiled_layers(traced: None) -> None:
    found = []
    for is_compiled in (False, True):
        model = made("qwen3_moe", is_compiled)
        assert model.hook_routers() is None and model.routing is not None
        model.routing.counts_tokens = True
        gradients(model, True, batch())
        counts = model.routing.pop_counts()
        assert counts is not None
        found.append(counts.chosen)
    assert torch.equal(*found) and int(found[0].sum()) > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["parallelism=tp", "launch.devices=2"],
            "parallelism.tp=2 is not tested with torch.compile; leave it out",
        ),
        (
            ["device=cuda", "model.gradient_checkpointing=true", "model.activation_offloading=true"],
            "model.activation_offloading=true is not tested with torch.compile",
        ),
        (["adapter=lora", "model.quantization=int8"], "model.quantization=int8 is not tested with torch.compile"),
        (["device=cuda", "device.deterministic=true"], "device.deterministic=true is not tested with torch.compile"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(SpecError) as error:
        compose_job(["model.compile=true", *words])
    assert said in str(error.value)


def test_pieces_that_are_recomputed_are_not_refused() -> None:
    words = ["parallelism=fsdp", "launch.devices=2", "model.gradient_checkpointing=selective"]
    assert compose_job(["model.compile=true", *words]).spec.model.compile
    assert compose_job(["model.compile=true", "device=cpu", "device.deterministic=true"]).spec.model.compile


def test_routers_of_layers_that_are_recomputed_and_compiled_are_not_hooked() -> None:
    spec = compose_job(["model=tiny_moe", "model.compile=true", "model.gradient_checkpointing=true"]).spec
    assert spec.model.router_objection(spec) == "model.compile=true compiles recomputed layers with their routers"
