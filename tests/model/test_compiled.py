"""Compiled layers: the numbers of plain ones, compiled once for batches of any shape, and refused where they cannot be.

Tests that compile are slow (`make test-all`): some only trace and differentiate, the others run inductor as well.
The fast tests check refusals, and a model that does not name its layers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from runner.adapter import lora
from runner.adapter.config import LoraConfig
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import SpecError
from runner.model import checkpointing_and_compile
from tests.model.zoo import LOGPROBS, batch, causal, gradients, greedy, relative, rows

SHAPES = [(7, 1, 19), (5, 5), (30, 2, 12, 4, 4), (11,), (3, 17, 8)]
FLOAT32 = 2e-5  # of the largest gradient
# torch hides it from users, as it looks into every tensor that it traces
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing_and_compile, "OPTIONS", {"dynamic": True, "backend": "aot_eager"})
    monkeypatch.setattr(checkpointing_and_compile, "refuse_without_compiler", lambda _: None)
    torch._dynamo.reset()
    counters.clear()


def made(kind: str, fast: bool, adapter: float | None = None, **options: Any) -> Any:
    model: Any = causal(kind, num_hidden_layers=4, **options)
    if adapter is not None:
        model = lora.attach(LoraConfig(rank=4, dropout=adapter), model, decide=Decisions())
        for name, parameter in model.trainable().items():
            if "lora_B" in name:
                parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)), std=0.1)
    if fast:
        model.compile(Decisions(strict=True))
    return model


def compare(kind: str, limit: float, **options: Any) -> None:
    """Gradients, scores and greedy answers over batches of several shapes; all graphs are made in the first one, but of
    padded rows, of which torch takes a single one for another case than several."""
    plain, fast = (made(kind, on, **options) for on in (False, True))
    graphs = []
    for seed, lengths in enumerate(SHAPES):
        data, found = batch(lengths, seed), []
        for model in (plain, fast):
            torch.manual_seed(seed)  # of dropout
            found.append(gradients(model, True, data))
        assert relative(found[1], found[0]) < limit
        with torch.no_grad():
            wanted, got = (model.outputs(data, LOGPROBS)["logprobs"] for model in (plain, fast))
        torch.testing.assert_close(got, wanted, atol=50 * limit, rtol=50 * limit)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and graphs[2] == graphs[0] and (graphs[-1] == graphs[0] or fast.is_padded)
    assert greedy(fast, rows((5, 1, 11)), 4) == greedy(plain, rows((5, 1, 11)), 4)
    assert counters["stats"]["unique_graphs"] == graphs[-1]  # text is written by what is not compiled


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("qwen3", {"adapter": 0.3, "gradient_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {}, marks=pytest.mark.slow),
        pytest.param("qwen2", {"batch_layout": "padded"}, marks=pytest.mark.slow),
    ],
    ids=["adapter, recomputed", "experts", "padded"],
)
def test_the_same_numbers_and_no_graph_for_another_shape(kind: str, options: dict[str, Any]) -> None:
    compare(kind, FLOAT32, **options)


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
    model, decisions = causal("qwen2"), Decisions()
    monkeypatch.setattr(model.inner, "_no_split_modules", None)
    model.compile(decisions)
    assert [(d.feature, d.got) for d in decisions.entries] == [("model.compile", "false")]


@pytest.mark.slow
def test_without_a_compiler_it_is_an_error_that_says_what_to_install() -> None:
    program = (
        "import torch\nfrom runner.core.errors import EnvironmentProblem\n"
        "from runner.model.checkpointing_and_compile import refuse_without_compiler\n"
        "try: refuse_without_compiler(torch.device('cpu'))\n"
        "except EnvironmentProblem as error: print(error)"
    )
    own = {"CXX": "no-such-compiler", "PATH": "/nowhere", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=own, capture_output=True, text=True)
    assert "model.compile=true: torch cannot compile for cpu" in done.stdout, done.stderr
    assert "install a C++ compiler (g++)" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["parallelism=tp", "launch.devices=2"],
            "parallelism.tp=2 changes layers, which is not tested with torch.compile",
        ),
        (["model.gradient_checkpointing=selective"], "selective selects operators"),
        (["parallelism=fsdp", "launch.devices=2", "model.gradient_checkpointing=2"], "are not tested with"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(SpecError) as error:
        compose_job(["model.compile=true", *words])
    assert said in str(error.value)


def test_copies_and_pieces_are_not_refused() -> None:
    assert compose_job(["model.compile=true", "parallelism=fsdp", "launch.devices=2"]).spec.model.compile
