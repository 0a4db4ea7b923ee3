"""Weights that one rank reads, and the others get their pieces of: those of a single process, bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.adapter import lora
from runner.adapter.config import LoraConfig
from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem, RunnerError
from runner.distributed.dtensor_utils import full_tensor, local_tensor
from runner.distributed.work_partition import SINGLE_PROCESS
from runner.model import hf, tiny
from runner.model.config import HfConfig, TinyConfig
from runner.model.tiny import byte_tokenizer
from runner.parallelism.config import DdpConfig, FsdpConfig, HsdpConfig, MeshConfig, TpConfig
from runner.parallelism.mesh import Mesh
from runner.parallelism.weight_scatter import META, WeightScatter
from tests.model import zoo
from tests.parallelism.forked import ranks
from tests.parallelism.worlds import meshed

CPU = torch.device("cpu")
SLOW = pytest.mark.slow
SOAK = pytest.mark.soak
LAYOUTS: dict[str, tuple[MeshConfig, Mesh]] = {
    "ddp": (DdpConfig(), Mesh(dp_replicate=2)),
    "fsdp": (FsdpConfig(), Mesh(dp_shard=2)),
    "hsdp": (HsdpConfig(), Mesh(dp_replicate=2, dp_shard=2)),
    "tp": (TpConfig(), Mesh(tp=2)),
    "fsdp × tp": (FsdpConfig(), Mesh(dp_shard=2, tp=2)),
}
Make = Callable[[torch.device], Any]


def read(folder: Path, where: torch.device, adapter: LoraConfig | None = None, **options: Any) -> Any:
    """A folder's model, and an adapter that is drawn beside it."""
    given = {"tokenizer": byte_tokenizer(512), "device": where, "seed": 3, "decide": Decisions()}
    model: Any = hf.build(HfConfig(path=str(folder), **options), **given)
    return model if adapter is None else lora.attach(adapter, model, decide=Decisions())


def saved(kind: str, folder: Path, **options: Any) -> Path:
    zoo.causal(kind, **options).save(folder)
    return folder


def tensors(model: Any) -> dict[str, Tensor]:
    named = {**dict(model.whole.named_parameters()), **dict(model.whole.named_buffers())}
    return {name: full_tensor(tensor) for name, tensor in named.items()}


def spread(rank: int, config: MeshConfig, mesh: Mesh, make: Make) -> Any:
    world = meshed(config, mesh)
    model = world.load(make)
    assert (model.device == META) == (rank > 0)
    world.shard(model, Decisions())
    assert model.device == CPU and model.inner.device == CPU
    return model


def held(rank: int, config: MeshConfig, mesh: Mesh, make: Make) -> Any:
    model = spread(rank, config, mesh, make)
    learns = {name: p.requires_grad for name, p in model.module.named_parameters()}
    return tensors(model), learns, sum(local_tensor(p).nbytes for p in model.whole.parameters())


def compare(layout: str, make: Make) -> None:
    config, mesh = LAYOUTS[layout]
    alone = make(CPU)
    wanted = tensors(alone)
    learns = {name: p.requires_grad for name, p in alone.module.named_parameters()}
    for got, there, _ in ranks(mesh.world_size, held, config, mesh, make):
        assert got.keys() == wanted.keys() and there == learns
        for name, tensor in wanted.items():
            assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


@pytest.mark.parametrize(
    ("kind", "layout", "adapter"),
    [
        ("qwen2", "ddp", True),
        ("qwen3", "fsdp × tp", True),
        ("qwen3_moe", "fsdp", False),
        *(
            pytest.param(kind, layout, adapter, marks=SOAK)
            for kind in ("qwen2", "qwen3", "llama", "qwen3_moe")
            for layout in LAYOUTS
            for adapter in (False, True)
        ),
    ],
)
def test_every_tensor_is_that_of_one_process(kind: str, layout: str, adapter: bool, tmp_path: Path) -> None:
    folder = saved(kind, tmp_path / kind)
    beside = () if "tp" in layout else ("lm_head",)  # which is cut there
    options = LoraConfig(rank=4, targets=("q_proj", "v_proj"), modules_to_save=beside) if adapter else None
    compare(layout, lambda where: read(folder, where, options))


@pytest.mark.parametrize("layout", ["fsdp", pytest.param("tp", marks=SLOW), pytest.param("ddp", marks=SLOW)])
def test_tied_and_of_two_types(layout: str, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "llama", tie_word_embeddings=True)

    compare(layout, lambda where: read(folder, where, LoraConfig(rank=4), dtype="bfloat16"))


@pytest.mark.parametrize("head", ["lm+value", pytest.param("scalar", marks=SLOW)])
def test_drawn_weights_and_other_heads(head: Any) -> None:
    config = TinyConfig(layers=1)

    def make(where: torch.device) -> Any:
        given = {"tokenizer": tiny.tokenizer(config), "device": where, "seed": 5, "decide": Decisions()}
        return tiny.build(config, head=head, **given)

    compare("fsdp", make)


@pytest.mark.parametrize("kind", ["gemma2", "bloom"])  # logits that are changed after the head; rows that are padded
def test_what_the_first_rank_finds_out_the_others_are_told(kind: str, tmp_path: Path) -> None:
    folder = saved(kind, tmp_path / kind)

    def work(rank: int) -> Any:
        model = spread(rank, *LAYOUTS["ddp"], lambda where: read(folder, where))
        said = model.layout, model.chunked, model.default_attention, model.inner.config._attn_implementation
        return said, model.outputs(zoo.batch(), zoo.LOGPROBS)["logprobs"].detach()

    alone = read(folder, CPU)
    wanted = alone.layout, alone.chunked, alone.default_attention, alone.inner.config._attn_implementation
    logprobs = alone.outputs(zoo.batch(), zoo.LOGPROBS)["logprobs"]
    for said, got in ranks(2, work):
        assert said == wanted and torch.equal(got, logprobs)


def test_only_the_first_rank_needs_the_weights(tmp_path: Path) -> None:
    complete, bare = saved("qwen2", tmp_path / "complete"), saved("qwen2", tmp_path / "bare")
    (bare / "model.safetensors").unlink()

    def work(rank: int, places: tuple[Path, Path]) -> Any:
        try:
            return tensors(spread(rank, *LAYOUTS["fsdp"], lambda where: read(places[rank], where)))
        except RunnerError as error:
            return str(error)

    wanted = tensors(read(complete, CPU))
    for got in ranks(2, work, (complete, bare)):
        assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())
    first, second = ranks(2, work, (bare, complete))
    assert "cannot be loaded" in first and second == f"rank 0: {first}"


def test_a_tensor_that_would_not_travel_is_refused(tmp_path: Path) -> None:
    folder = saved("qwen2", tmp_path / "qwen2")

    def make(where: torch.device) -> Any:
        model = read(folder, where)
        model.inner.scale = torch.ones(3)
        return model

    def work(rank: int) -> str:
        try:
            spread(rank, *LAYOUTS["ddp"], make)
        except EnvironmentProblem as error:
            return str(error)
        return ""

    for said in ranks(2, work):
        assert said.startswith("module (Qwen2ForCausalLM) has a tensor, scale, that is neither a parameter nor a buf")


class Pair(nn.Module):
    """Two layers of which a rank may have one; their weight is one, and each has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.arange(4.0))


def test_what_lies_elsewhere_stays_without_numbers_and_tied_names_stand_for_one_another() -> None:
    module = Pair()
    weight, bias = module.first.weight.detach().clone(), module.second.bias.detach().clone()
    weights = WeightScatter(module, SINGLE_PROCESS, CPU)
    assert all(t.device == META for t in (*module.parameters(), *module.buffers()))
    assert module.second.weight is module.first.weight
    with weights.materialize(module, [module.second]):
        assert torch.equal(module.second.weight, weight) and torch.equal(module.second.bias, bias)
        assert module.first.bias.device == META
    assert module.second.weight.device == META
    weights.scatter(module, CPU, absent={"first.weight", "first.bias"})
    assert module.first.weight.device == module.first.bias.device == META
    assert torch.equal(module.second.weight, weight) and torch.equal(module.second.bias, bias)
    assert torch.equal(module.get_buffer("scale"), torch.arange(4.0))


def peak(work: Callable[[], Any]) -> int:
    """By how many bytes this process grew at most while `work` ran."""
    gc.collect()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here on
    kept = work()
    grown = status("VmHWM") - before
    del kept
    return grown


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of memory are read from Linux")
@pytest.mark.parametrize(("layout", "most"), [("fsdp", 0.75), ("tp", 0.75)])
def test_the_host_of_another_rank_never_holds_the_model(layout: str, most: float) -> None:
    config = TinyConfig(hidden_size=512, intermediate_size=1536, layers=16)
    given: dict[str, Any] = {"tokenizer": tiny.tokenizer(config), "seed": 0, "decide": Decisions()}

    def work(rank: int) -> tuple[int, int]:
        spec = LAYOUTS[layout]
        spread(rank, *spec, lambda where: tiny.build(TinyConfig(layers=1), device=where, **given))  # libraries
        sizes: list[int] = []

        def run() -> Any:
            model = spread(rank, *spec, lambda where: tiny.build(config, device=where, **given))
            sizes.append(sum(p.numel() * p.element_size() for p in model.whole.parameters()))
            return model

        return peak(run), sizes[0]

    (first, size), (second, _) = ranks(2, work)
    assert size > 190 * 2**20
    assert first > most * size  # what is measured would show it; a process may have had pages to spare
    assert second < most * size  # half of it is its own
