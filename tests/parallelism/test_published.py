"""What is published of a model, in whatever layout it lies: byte for byte what an export of one process has."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.core_model_loading import Chunk, WeightConverter

from runner.adapter import lora
from runner.adapter.config import LoraConfig
from runner.core.auto_choices import Decisions
from runner.core.errors import SpecError
from runner.parallelism.config import (
    CpConfig,
    DdpConfig,
    EpConfig,
    FsdpConfig,
    HsdpConfig,
    MeshConfig,
    PpConfig,
    TpConfig,
)
from runner.parallelism.mesh import Mesh
from tests.model import zoo
from tests.parallelism.forked import ranks
from tests.parallelism.test_fsdp import made
from tests.parallelism.test_weight_scatter import read, saved
from tests.parallelism.worlds import meshed

SLOW = pytest.mark.slow
LAYOUTS: dict[str, tuple[MeshConfig, Mesh]] = {
    "ddp": (DdpConfig(), Mesh(dp_replicate=2)),
    "fsdp": (FsdpConfig(), Mesh(dp_shard=2)),
    "hsdp": (HsdpConfig(), Mesh(dp_replicate=2, dp_shard=2)),
    "tp": (TpConfig(), Mesh(tp=2)),
    "tp in pieces": (TpConfig(), Mesh(dp_shard=2, tp=2)),
    "pp": (PpConfig(), Mesh(pp=2)),
    "cp": (CpConfig(), Mesh(cp=2)),
    "ep": (EpConfig(), Mesh(dp_replicate=2, ep=2)),
}
Named = Mapping[str, Tensor]
Make = Callable[[], Any]


def adapted(kind: str, **options: Any) -> Any:
    """A model with an adapter that is trainable."""
    own = {name: options.pop(name) for name in list(options) if name in LoraConfig.model_fields}
    model: Any = lora.attach(LoraConfig(**{"rank": 4, **own}), zoo.causal(kind, **options), decide=Decisions())
    for name, parameter in model.trainable().items():
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
        parameter.data.add_(0.1 * noise)
    return model


def drained(model: Any, way: str, **options: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in model.hf_tensors(way, **options)}


def exported(model: Any, folder: Path, *, merged: bool = False) -> dict[str, Tensor]:
    if merged:
        model.merge_on_save()
    model.save(folder)
    return load_file(next(folder.glob("*.safetensors")))


def same(one: Named, other: Named) -> bool:
    assert one.keys() == other.keys()
    return [n for n in one if not torch.equal(one[n], other[n]) or one[n].dtype != other[n].dtype] == []


def published_on(layout: str, make: Make) -> list[dict[str, dict[str, Tensor]]]:
    """By rank and way; the last rank keeps nothing."""

    def work(rank: int) -> dict[str, dict[str, Tensor]]:
        model = make()
        meshed(*LAYOUTS[layout]).shard(model, Decisions())
        keep = rank < LAYOUTS[layout][1].world_size - 1
        ways = ["all", "changed", "fixed", "base", *(["adapter"] if model.module is not model.inner else [])]
        found = {way: drained(model, way, keep=keep) for way in ways}
        sizes = {way: model.hf_tensor_bytes(way) for way in ways}
        assert not keep or sizes == {way: sum(one.nbytes for one in tensors.values()) for way, tensors in found.items()}
        return found

    return ranks(LAYOUTS[layout][1].world_size, work)


@pytest.mark.parametrize(
    ("layout", "kind", "adapter", "tied"),
    [
        ("fsdp", "qwen3", True, True),
        ("ep", "qwen3_moe", False, False),
        *(
            pytest.param(layout, kind, adapter, tied, marks=SLOW if kind == "qwen3" else pytest.mark.soak)
            for layout in LAYOUTS
            for kind in ("qwen3", "qwen3_moe", "llama")
            for adapter in (False, True)
            for tied in (False, True)
            if kind == "qwen3_moe" or layout != "ep"
            if (adapter is tied) or kind != "qwen3"
        ),
    ],
)
def test_every_layout_publishes_the_export(tmp_path: Path, layout: str, kind: str, adapter: bool, tied: bool) -> None:
    def make() -> Any:
        return made(kind, adapter, tie_word_embeddings=tied)

    wanted = exported(make(), tmp_path / "all", merged=adapter)
    *keeping, without = published_on(layout, make)
    assert all(tensors == {} for tensors in without.values())
    for found in keeping:
        assert same(found["all"], wanted)
        assert not found["changed"].keys() & found["fixed"].keys()
        assert same({**found["changed"], **found["fixed"]}, wanted)
        if adapter:
            assert 0 < len(found["changed"]) < len(wanted)
            assert same(found["adapter"], exported(unmerged(make()), tmp_path / "adapter"))
            assert same(found["base"], exported(zoo.causal(kind, tie_word_embeddings=tied), tmp_path / "base"))
        else:
            assert same(found["base"], wanted) and not found["fixed"]


def unmerged(model: Any) -> Any:
    """Drawn at random, a base would be exported with its adapter merged."""
    model.merges = False
    return model


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen2", {"dora": True}),
        ("llama", {"modules_to_save": ("lm_head",), "targets": ("q_proj",)}),
        pytest.param("qwen2", {"rslora": True}, marks=SLOW),
        pytest.param("llama", {"targets": ("embed_tokens", "down_proj")}, marks=SLOW),
        pytest.param("qwen3_moe", {}, marks=SLOW),
        pytest.param("gpt2", {"targets": ("c_attn", "c_fc")}, marks=SLOW),
        pytest.param("gemma2", {}, marks=SLOW),
    ],
)
def test_every_adapter_is_merged_as_an_export_merges_it(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)
        model = adapted(kind, **options)
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    again = drained(model, "all"), drained(model, "all")
    assert same(before, model.module.state_dict()), "nothing of the model has changed"
    assert same(*again)
    assert same(again[0], exported(model, tmp_path, merged=True))
    assert not same({**again[0]}, {**exported(zoo.causal(kind), tmp_path / "base")})


def test_of_coarse_weights_the_sum_is_made_in_float32_and_then_rounded(tmp_path: Path) -> None:
    def make() -> Any:
        model: Any = zoo.causal("qwen2")
        model.module.bfloat16()
        model = lora.attach(LoraConfig(rank=4), model, decide=Decisions())
        for name, parameter in model.trainable().items():
            parameter.data.add_(1e-3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
        return model

    wanted = exported(make(), tmp_path, merged=True)
    assert {tensor.dtype for tensor in wanted.values()} == {torch.float32}
    assert same(drained(make(), "all"), {name: tensor.bfloat16() for name, tensor in wanted.items()})
    *keeping, _ = published_on("fsdp", make)
    assert same(keeping[0]["all"], {name: tensor.bfloat16() for name, tensor in wanted.items()})


def test_a_type_that_is_asked_for() -> None:
    model = zoo.causal("llama")
    wanted = {name: tensor.bfloat16() for name, tensor in drained(model, "all").items()}
    assert same(drained(model, "all", dtype=torch.bfloat16), wanted)


@pytest.mark.parametrize("layout", [None, pytest.param("pp", marks=SLOW), pytest.param("tp", marks=SLOW)])
def test_where_several_tensors_are_one_on_the_disk_a_layer_changes_as_a_whole(
    tmp_path: Path, layout: str | None
) -> None:
    def make() -> Any:
        model = adapted("llama", targets=("gate_proj",))
        together = WeightConverter(
            "mlp.gate_up_proj.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(0)]
        )
        model.inner._weight_conversions = [together]
        return model

    wanted = exported(make(), tmp_path, merged=True)
    found = (
        {way: drained(make(), way) for way in ("all", "changed", "fixed")}
        if layout is None
        else published_on(layout, make)[0]
    )
    assert same(found["all"], wanted)
    assert found["changed"].keys() == {name for name in wanted if name.startswith("model.layers.")}
    assert "model.layers.0.mlp.gate_up_proj.weight" in found["changed"]
    assert same({**found["changed"], **found["fixed"]}, wanted)


def test_of_a_folder_that_was_read_all_ranks_know_how_it_was_cut(tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path / "given")
    wanted = load_file(next(folder.glob("*.safetensors")))

    def work(rank: int) -> dict[str, Tensor]:
        world = meshed(FsdpConfig(), Mesh(dp_shard=2))
        model = world.load(lambda where: read(folder, where))
        world.shard(model, Decisions())
        return drained(model, "all")

    for found in ranks(2, work):  # the first of which has read it, and the other not
        assert same(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "pp"])
def test_one_layer_is_there_at_a_time(layout: str) -> None:
    def make() -> Any:
        return made("qwen3", True, num_hidden_layers=6)

    def work(rank: int) -> int:
        model = make()
        meshed(*LAYOUTS[layout]).shard(model, Decisions())
        seen: list[weakref.ref[Tensor]] = []
        peak = 0
        for _, tensor in model.hf_tensors("all"):
            seen = [one for one in seen if one() is not None] + [weakref.ref(tensor)]
            storages = {one().untyped_storage().data_ptr(): one().untyped_storage() for one in seen}  # type: ignore[union-attr]
            peak = max(peak, sum(storage.nbytes() for storage in storages.values()))
        return peak

    sizes = [parameter.nbytes for parameter in make().module.parameters()]
    for peak in ranks(2, work):
        assert 0 < peak <= 2 * max(sizes) < sum(sizes) / 4


@pytest.mark.parametrize("adapter", [True, pytest.param(False, marks=SLOW)])
def test_a_blueprint_and_what_is_published_are_the_model(tmp_path: Path, adapter: bool) -> None:
    model = made("qwen2", adapter)
    model.save_configs(tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    assert not any(name.endswith((".safetensors", ".bin")) for name in files)
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= files
    assert (tmp_path / "adapter" / "adapter_config.json").exists() is adapter
    empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    empty.load_state_dict(drained(model, "all"))
    row = zoo.rows((12,))
    inside = model.outputs(zoo.batch((12,)), zoo.LOGPROBS)["logprobs"].detach()
    assert (zoo.reference(empty.eval(), row) - inside).abs().max() < 1e-4  # float32: merged against beside
    assert AutoTokenizer.from_pretrained(tmp_path)("a sort").input_ids == model.tokenizer("a sort").input_ids


def test_an_adapter_on_weights_that_are_shared_is_refused() -> None:
    with pytest.warns(UserWarning, match="tied"):
        model = adapted("llama", tie_word_embeddings=True, targets=("embed_tokens",))
    with pytest.raises(SpecError, match="are tied"):
        drained(model, "changed")
    assert drained(model, "base") and drained(model, "adapter")
