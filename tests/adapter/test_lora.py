"""Adapters on small models: what learns, that layouts and checkpointing change nothing, and that saved ones load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen2 import Qwen2Config, Qwen2ForSequenceClassification

from runner.adapter import lora
from runner.adapter.config import LoraConfig, NoAdapterConfig
from runner.adapter.lora import train_all
from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem, SpecError
from runner.model.causal_lm import CausalLM
from runner.model.config import TinyConfig
from runner.model.initial_weights import WeightsSource
from runner.model.tiny import byte_tokenizer
from runner.model.value_head import ScalarHeadModel
from tests.model.zoo import LOGPROBS, SHAPE, batch, causal, gradients, greedy, module, reference, relative, rows


def adapted(kind: str = "qwen2", double: bool = False, model: dict[str, Any] | None = None, **options: Any) -> CausalLM:
    """A model with an adapter whose update is not zero, so that it counts."""
    made = lora.attach(LoraConfig(rank=4, **options), causal(kind, **(model or {})), decide=Decisions(strict=True))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in made.trainable().items():
            if "lora_B" in name or "embedding_A" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    if double:
        made.module.double()
    return made


def test_full_trains_everything() -> None:
    model = causal("qwen2")
    model.module.requires_grad_(False)
    assert train_all(NoAdapterConfig(), model, decide=Decisions()) is model
    assert model.trainable().keys() == dict(model.causal.named_parameters()).keys()


def test_only_the_adapter_learns_and_it_starts_as_the_base() -> None:
    model = lora.attach(LoraConfig(), causal("qwen2"), decide=Decisions(strict=True))
    assert all("lora_" in name for name in model.trainable()) and "lm_head" not in str(model.trainable().keys())
    got = model.outputs(batch(), LOGPROBS)["logprobs"].detach()
    torch.testing.assert_close(got, reference(module("qwen2"), rows()).float().detach(), atol=1e-5, rtol=1e-5)
    gradients(model, True, batch())
    assert all(p.grad is None for p in model.module.parameters() if not p.requires_grad)


def test_the_adapter_is_a_function_of_the_seed() -> None:
    def weights(seed: int) -> list[torch.Tensor]:
        return list(lora.attach(LoraConfig(), causal("llama", seed=seed), decide=Decisions()).trainable().values())

    state = torch.get_rng_state()
    one = weights(1)
    torch.manual_seed(99)
    assert all(torch.equal(a, b) for a, b in zip(one, weights(1), strict=True))
    assert not torch.equal(one[0], weights(2)[0])
    torch.set_rng_state(state)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dora": True},
        {"rslora": True, "targets": ("q_proj", "v_proj")},
        {"modules_to_save": ("lm_head",)},
        {"targets": ("q_proj", "lm_head")},
        {"targets": ("embed_tokens", "up_proj")},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "other", [{"layout": "padded"}, {"gradient_checkpointing": True}, {"lm_head_chunk_tokens": 5}], ids=str
)
def test_gradients_do_not_depend_on_how_it_is_run(options: dict[str, Any], other: dict[str, Any]) -> None:
    wanted = gradients(adapted(double=True, **options), True, batch())
    assert wanted and all(g.any() for g in wanted.values())
    for linear in (True, False):
        got = gradients(adapted(double=True, model=other, **options), linear, batch())
        assert relative(got, wanted) < 1e-6  # peft's DoRA norms and adapters pass through float32


@pytest.mark.parametrize(
    "options", [{}, {"dora": True}, {"modules_to_save": ("lm_head",)}, {"targets": ("lm_head",)}], ids=str
)
def test_gradients_equal_those_of_the_plain_peft_model(options: dict[str, Any]) -> None:
    model, data = adapted(double=True, **options), batch()
    got = gradients(model, True, data)
    c = torch.randn(data.num_tokens, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    model.module.zero_grad()
    model.module.config._attn_implementation = "sdpa"
    (reference(model.module, rows()) * c * data.tokens["weight"]).sum().backward()
    assert relative(got, {name: p.grad for name, p in model.trainable().items() if p.grad is not None}) < 1e-6


def test_tied_embeddings() -> None:
    tied = {"tie_word_embeddings": True}
    model = adapted(double=True, model=tied)
    assert model.causal.lm_head.weight is model.causal.model.embed_tokens.weight
    wanted = gradients(adapted(double=True, model=tied | {"layout": "padded"}), True, batch())
    assert relative(gradients(model, True, batch()), wanted) < 1e-6


def test_dropout_is_on_in_training_passes_alone() -> None:
    model = adapted(dropout=0.5)
    with torch.no_grad():
        quiet = [model.outputs(batch(), LOGPROBS)["logprobs"] for _ in range(2)]
    assert torch.equal(*quiet)
    assert not torch.allclose(model.outputs(batch(), LOGPROBS)["logprobs"].detach(), quiet[0])


def test_bfloat16_base_has_a_float32_adapter() -> None:
    base = causal("qwen2", dtype="bfloat16")
    base.module.to(torch.bfloat16)
    model = lora.attach(LoraConfig(), base, decide=Decisions(strict=True))
    assert {p.dtype for p in model.trainable().values()} == {torch.float32}
    assert all(torch.isfinite(g).all() for g in gradients(model, True, batch()).values())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of peft's making
@pytest.mark.parametrize("options", [{}, {"dora": True}, {"modules_to_save": ("lm_head",)}, {"alpha": 6.5}], ids=str)
def test_a_saved_adapter_loads_with_peft(options: dict[str, Any], tmp_path: Path) -> None:
    model = adapted(**options)
    model.save(tmp_path)
    assert {f.name for f in tmp_path.iterdir()} >= {
        "adapter_model.safetensors",
        "adapter_config.json",
        "tokenizer.json",
    }
    loaded = peft.PeftModel.from_pretrained(module("qwen2"), tmp_path).eval()
    with torch.no_grad():
        got = model.outputs(batch(), LOGPROBS)["logprobs"]
        torch.testing.assert_close(got, reference(loaded, rows()).float(), atol=1e-5, rtol=1e-5)


TIED = {"tie_word_embeddings": True}


def over_random_weights(
    decide: Decisions, model: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> CausalLM:
    """A model whose base is known to have been drawn, with an adapter that counts."""
    base = causal("qwen2", **(model or {}))
    base.module.to(dtype)
    base.weights_source = WeightsSource(drawn="from seed 0")
    made = lora.attach(LoraConfig(rank=4, **options), base, decide=decide)
    with torch.no_grad():
        for name, p in made.trainable().items():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    return made


@pytest.mark.parametrize(
    ("model", "options"),
    [({}, {}), ({}, {"modules_to_save": ("lm_head",)}), ({}, {"dora": True}), (TIED, {})],
    ids=str,
)
def test_an_adapter_over_random_weights_is_exported_in_a_whole_model(
    model: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """For nobody else has its base. It is said when the run begins, and the model continues as it was."""
    said = Decisions()
    made = over_random_weights(said, model, **options)
    assert [(d.feature, d.got) for d in said.entries] == [("export", "a merged model")]
    before = {n: p.detach().clone() for n, p in made.module.named_parameters()}
    made.save(tmp_path)
    assert all(torch.equal(p, before[n]) for n, p in made.module.named_parameters())
    assert not (tmp_path / "adapter_config.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        got = made.outputs(batch(), LOGPROBS)["logprobs"]
        torch.testing.assert_close(got, reference(loaded.eval(), rows()).float(), atol=1e-4, rtol=1e-4)


def test_merging_into_coarse_weights_loses_nothing_of_the_adapter(tmp_path: Path) -> None:
    made = over_random_weights(Decisions(), dtype=torch.bfloat16, targets=("q_proj",))
    made.save(tmp_path)
    layer = made.inner.model.layers[0].self_attn.q_proj
    update = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    got = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert got.dtype == torch.float32 and json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    torch.testing.assert_close(got, layer.base_layer.weight.float() + update)


@pytest.mark.filterwarnings("ignore:Model (has|with) .tie_word_embeddings:UserWarning")  # of peft's making
def test_an_adapter_that_cannot_be_merged_is_refused_before_it_is_trained() -> None:
    for options in ({"targets": ("lm_head",)}, {"modules_to_save": ("lm_head",)}):
        with pytest.raises(SpecError, match="are tied, so an adapter on them cannot be merged"):
            over_random_weights(Decisions(), TIED, **options)


def test_over_random_weights_strict_refuses() -> None:
    with pytest.raises(
        EnvironmentProblem, match=r"strict=true does not allow .* export: a merged model instead of an adapter"
    ):
        over_random_weights(Decisions(strict=True))


def test_the_origin_has_the_bases_weights_since_no_checkpoint_has(tmp_path: Path) -> None:
    causal("qwen2").save(tmp_path)
    base = causal("qwen2")
    base.weights_source = WeightsSource(folder=tmp_path)
    made = lora.attach(LoraConfig(rank=4), base, decide=Decisions(strict=True))
    assert made.base_fingerprint == WeightsSource(folder=tmp_path).identity(weights=True)
    other = train_all(NoAdapterConfig(), causal("qwen2"), decide=Decisions())
    assert base.base_fingerprint != other.base_fingerprint


def test_a_head_of_one_number_learns_in_float32_beside_the_adapter() -> None:
    torch.manual_seed(0)
    module = Qwen2ForSequenceClassification(Qwen2Config(**SHAPE, num_labels=1)).to(torch.bfloat16)
    base = ScalarHeadModel(module, byte_tokenizer(512), TinyConfig(dtype="bfloat16"), seed=0, decide=Decisions())
    model = lora.attach(LoraConfig(rank=4), base, decide=Decisions(strict=True))
    assert [n for n in model.trainable() if "lora_" not in n] == [
        "base_model.model.score.modules_to_save.default.weight"
    ]
    assert {p.dtype for p in model.trainable().values()} == {torch.float32}
    out = model.outputs(batch(), frozenset({"scores", "values"}))
    (out["scores"].sum() + out["values"].sum()).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.trainable().values())


def test_it_generates_with_its_adapter() -> None:
    model, prompt = adapted(), rows((6,))[0]
    ids = list(prompt)
    model.module.config._attn_implementation = "sdpa"
    for _ in range(6):
        ids.append(int(model.module(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    model.module.config._attn_implementation = "ragged"
    assert greedy(model, [prompt], 6)[0] == ids[6 : ids.index(258) if 258 in ids else None]


def test_unknown_names_are_all_listed_with_those_that_exist() -> None:
    config = LoraConfig(targets=("q_proj", "query", "nope"), modules_to_save=("head",))
    with pytest.raises(SpecError) as caught:
        lora.attach(config, causal("qwen2"), decide=Decisions())
    assert [p.key for p in caught.value.problems] == ["adapter.modules_to_save", "adapter.targets", "adapter.targets"]
    assert all("down_proj" in p.message and "lm_head" in p.message for p in caught.value.problems)


def test_an_adapter_on_experts_is_merged_on_export_since_older_releases_ignore_it(tmp_path: Path) -> None:
    decide = Decisions()
    model = causal("qwen3_moe")
    model.weights_source = WeightsSource(folder=tmp_path)
    module = lora.attach(LoraConfig(rank=2), model, decide=decide)
    said = {entry.feature: str(entry) for entry in decide.entries}
    assert "a merged model instead of an adapter" in said["export"] and "target_parameters" in said["export"]
    assert "e.g. model.layers.1.mlp.down_proj" in said["adapter.targets"], "the layer without experts is left out"
    module.save(tmp_path / "export")
    assert (tmp_path / "export" / "config.json").exists()
    with pytest.raises(EnvironmentProblem, match="strict=true"):
        lora.attach(LoraConfig(rank=2), causal("qwen3_moe"), decide=Decisions(strict=True))
    plain = lora.attach(LoraConfig(rank=2, targets=("q_proj",)), causal("qwen3_moe"), decide=Decisions(strict=True))
    assert not plain.merges


def test_targets_name_fused_experts_by_the_published_weights() -> None:
    """Where every layer has experts, no module has these names: peft knows them."""
    experts = ("gate_proj", "up_proj", "down_proj")

    def attached(*targets: str) -> CausalLM:
        model = causal("qwen3_moe", mlp_only_layers=[])
        return lora.attach(LoraConfig(rank=2, targets=targets), model, decide=Decisions())

    made = attached(*experts, "q_proj")
    torch.autograd.backward(made.outputs(batch(), LOGPROBS)["logprobs"].sum())
    learning = [name for name, p in made.trainable().items() if p.grad is not None]
    assert sum(".experts." in name for name in learning) == 2 * 2 * 2 and any("q_proj" in name for name in learning)
    with pytest.raises(SpecError, match="no module named 'down_prj'"):
        attached(*experts, "down_prj")
    with pytest.raises(SpecError, match="gate_proj without also targeting up_proj"):
        attached("gate_proj")


def test_a_module_to_save_that_peft_has_wrapped_already_is_refused() -> None:
    with pytest.raises(SpecError, match=r"adapter\.modules_to_save: peft cannot add the adapter.*ParamWrapper"):
        lora.attach(LoraConfig(modules_to_save=("gate",)), causal("qwen3_moe"), decide=Decisions())


def test_a_module_that_peft_cannot_adapt() -> None:
    with pytest.raises(SpecError, match="peft cannot add"):
        lora.attach(LoraConfig(targets=("input_layernorm",)), causal("qwen2"), decide=Decisions())


FAMILIES = {
    "falcon": ({"head_dim": None}, set()),
    "mamba": ({"num_hidden_layers": 2, "state_size": 4}, {"dt_proj", "out_proj"}),
    "falcon_h1": (
        {
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 8,
            "num_key_value_heads": 2,
        },
        {"out_proj"},
    ),
    "llama4_text": (
        {"num_key_value_heads": 2, "attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
        {"router"},
    ),
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_all_linear_leaves_out_what_no_adapter_can_be_at_and_says_so(kind: str) -> None:
    """Every matrix of the adapter gets a gradient; the linears that are left out are named."""
    options, left_out = FAMILIES[kind]
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "head_dim": 8} | options
    config = AutoConfig.for_model(kind, **{name: value for name, value in shape.items() if value is not None})
    torch.manual_seed(0)
    base = CausalLM(
        AutoModelForCausalLM.from_config(config), byte_tokenizer(512), TinyConfig(), seed=0, decide=Decisions()
    )
    decide = Decisions()
    model = lora.attach(LoraConfig(rank=2), base, decide=decide)
    said = [
        entry.got.removeprefix("all-linear except ") for entry in decide.entries if entry.feature == "adapter.targets"
    ]
    assert {name.strip() for one in said for name in one.split(",")} == left_out
    data = batch()
    model.linear_loss(data, data.tokens["weight"])[0].backward()
    assert all(p.grad is not None for p in model.trainable().values())


def test_experts_of_a_base_that_clients_share_are_not_adapted_and_that_is_said() -> None:
    decide = Decisions()
    lora.prepare_shared_base(LoraConfig(), causal("qwen3_moe"), decide=decide)
    assert any("all but experts and routers" in str(one) for one in decide.entries)
    decide = Decisions()
    lora.prepare_shared_base(LoraConfig(), causal("qwen3"), decide=decide)
    assert not decide.entries
