"""Models from folders: what loads, what is refused, and what is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from runner.adapter import lora
from runner.adapter.config import LoraConfig
from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem, RunnerError, SecurityError, SpecError
from runner.model import hf, tiny
from runner.model.causal_lm import CausalLM
from runner.model.config import HfConfig, TinyConfig
from runner.model.tiny import byte_tokenizer
from tests.model.zoo import CPU, LOGPROBS, batch, causal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Qwen3 model folder as `save` leaves it."""
    causal("qwen3", seed=4).save(tmp_path / "model")
    return tmp_path / "model"


def build(path: Path | str, decide: Decisions | None = None, **options: Any) -> CausalLM:
    config = HfConfig(path=str(path), **options)
    tokenizer = hf.tokenizer(config)
    return hf.build(config, tokenizer=tokenizer, device=CPU, seed=0, decide=decide or Decisions(strict=True))


def edit(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | values))


def test_a_folder_loads_with_its_weights_and_its_tokenizer(folder: Path) -> None:
    model, wanted = build(folder), causal("qwen3", seed=4)
    torch.testing.assert_close(
        model.outputs(batch(), LOGPROBS)["logprobs"], wanted.outputs(batch(), LOGPROBS)["logprobs"]
    )
    assert model.tokenizer.chat_template == wanted.tokenizer.chat_template
    assert model.layout == "packed"


def test_a_home_folder_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert build("~/model").layout == "packed"


def test_bfloat16_weights(folder: Path) -> None:
    model = build(folder, dtype="bfloat16")
    assert {p.dtype for p in model.trainable().values()} == {torch.bfloat16}
    model.save(folder.parent / "half")
    assert load_file(folder.parent / "half" / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


def test_from_scratch_keeps_the_architecture_and_draws_from_the_seed(folder: Path) -> None:
    drawn, again = build(folder, from_scratch=True), build(folder, from_scratch=True)
    given = dict(build(folder).trainable())
    assert drawn.trainable().keys() == given.keys()
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(drawn.trainable()[name], again.trainable()[name])
    assert not torch.equal(drawn.trainable()[name], given[name])


@pytest.mark.parametrize("path", ["/no/such/folder", "./missing", "~/missing", "a/b/c"])
def test_a_folder_that_is_not_there(path: str) -> None:
    with pytest.raises(EnvironmentProblem, match="no such folder"):
        build(path)


def test_a_hub_id_that_cannot_be_reached() -> None:
    with pytest.raises(EnvironmentProblem, match="nobody/nothing cannot be loaded"):
        build("nobody/nothing")


def test_an_empty_folder_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"is not a model folder: it has no config\.json"):
        build(tmp_path)


def test_pickles_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(SecurityError, match=r"pytorch_model\.bin"):
        hf.build(HfConfig(path=str(folder)), tokenizer=None, device=CPU, seed=0, decide=Decisions())


def test_a_config_that_points_to_a_pickle_is_refused(folder: Path) -> None:
    edit(folder / "config.json", transformers_weights="adapter_model.bin")
    with pytest.raises(SecurityError, match="only safetensors"):
        build(folder)


def test_code_in_the_model_folder_is_not_run(folder: Path) -> None:
    edit(
        folder / "config.json",
        model_type="theirs",
        auto_map={"AutoConfig": "theirs.C", "AutoModelForCausalLM": "theirs.M"},
    )
    (folder / "theirs.py").write_text("raise SystemExit('ran')")
    with pytest.raises(SecurityError, match=r"\(model_type=theirs\) contains [^!]*model\.trust_remote_code=true"):
        hf.build(HfConfig(path=str(folder)), tokenizer=None, device=CPU, seed=0, decide=Decisions())


def test_an_attention_kernel_named_by_the_model_is_not_fetched(folder: Path) -> None:
    edit(folder / "config.json", attn_implementation="somebody/kernel")
    assert build(folder).layout == "packed"


def test_missing_weights_are_an_error_and_never_random(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EnvironmentProblem, match=r"lacks 1 .*model\.norm\.weight"):
        build(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("how", ["path", "init_from", "tiny"])
def test_weights_that_are_no_numbers_are_refused_by_name(folder: Path, value: float, how: str) -> None:
    source = folder
    if how == "tiny":
        given: dict[str, Any] = {"tokenizer": byte_tokenizer(512), "device": CPU, "seed": 0, "decide": Decisions()}
        config = TinyConfig(hidden_size=32, intermediate_size=48, layers=2)
        source = folder.parent / "other"
        tiny.build(config, **given).save(source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EnvironmentProblem, match=r"NaN or infinity: model\.layers\.1\.mlp\.up_proj\.weight \(1 numb"):
        if how == "path":
            build(folder)
        elif how == "init_from":
            config = HfConfig(path=str(folder))
            tokenizer = byte_tokenizer(512)
            hf.build(config, tokenizer=tokenizer, device=CPU, seed=0, decide=Decisions(), init_from=str(folder))
        else:
            tiny.build(config, **given, init_from=str(source))


def test_weights_without_a_place_are_a_decision(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"mtp.weight": torch.zeros(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    decisions = Decisions()
    build(folder, decisions)
    assert "mtp.weight" in decisions.entries[0].reason


def test_a_tokenizer_that_does_not_fit(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=200, pad_token_id=0, eos_token_id=0)
    with pytest.raises(EnvironmentProblem, match=r"259 ids.*\n.*model\.tokenizer"):
        build(folder, from_scratch=True)


def test_sampling_options_that_could_not_be_saved_are_mended_at_the_start(folder: Path) -> None:
    edit(folder / "generation_config.json", do_sample=False, temperature=0.6)
    with pytest.raises(EnvironmentProblem, match="strict"):
        build(folder)
    decisions = Decisions()
    build(folder, decisions).save(folder.parent / "again")
    assert [(d.feature, d.got) for d in decisions.entries] == [("generation_config", "do_sample=true")]
    assert json.loads((folder.parent / "again" / "generation_config.json").read_text())["do_sample"] is True


@pytest.fixture
def with_adapter(folder: Path) -> Path:
    """A model folder that has an adapter in it as well, which transformers would load and save instead."""
    lora.attach(LoraConfig(rank=2), build(folder), decide=Decisions()).save(folder)
    assert (folder / "config.json").exists() and (folder / "adapter_config.json").exists()
    return folder


def test_an_adapter_beside_a_model_is_refused_and_not_trained_unasked(with_adapter: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"a model .* and an adapter"):
        build(with_adapter)
    config = HfConfig(path="hub/other", tokenizer=str(with_adapter))
    assert len(hf.tokenizer(config)) == 259, "its tokenizer may be used"


def test_an_adapter_beside_a_model_of_the_hub_is_refused(with_adapter: Path) -> None:
    cached_on_hub(with_adapter, "hub/adapted", "a" * 40)
    with pytest.raises(EnvironmentProblem, match=r"hub/adapted has a model .* and an adapter"):
        build("hub/adapted")


def test_an_export_that_lacks_what_has_learnt_is_an_error(with_adapter: Path, tmp_path: Path) -> None:
    """As transformers would write it of a model that an adapter slipped into."""
    module = AutoModelForCausalLM.from_pretrained(with_adapter)
    module.requires_grad_(True)
    model = CausalLM(module, byte_tokenizer(512), TinyConfig(), seed=0, decide=Decisions())
    with pytest.raises(RunnerError, match="the export is incomplete"):
        model.save(tmp_path / "export")


def cached_on_hub(folder: Path, name: str, commit: str) -> None:
    """Put a model folder where the hub's cache would have it, as the newest commit of its main branch."""
    home = Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    shutil.copytree(folder, home / "snapshots" / commit, dirs_exist_ok=True)
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / "main").write_text(commit)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"model_type": "clip"}, "model_type=clip, which is no language model"),
        ({"model_type": "t5"}, "model_type=t5, which is an encoder-decoder"),
        ({"model_type": "roberta"}, "model_type=roberta, which is an encoder"),  # each token would see all others
        (
            {"model_type": "qwen2_5_omni"},
            "of text, images, sound and video, of which sound and video are not supported",
        ),
        ({"model_type": "qwen2_5_omni_thinker"}, "model_type=qwen2_5_omni_thinker, which is a model of text, images,"),
        ({"model_type": "qwen3_omni_moe_thinker"}, "of which sound and video are not supported"),
        ({"model_type": "new_model"}, "model type `new_model`"),
        ({"hidden_size": 8}, "Should have a `model_type` key"),
    ],
    ids=lambda value: str(value.get("model_type")) if isinstance(value, dict) else "",
)
def test_a_model_of_another_kind_is_named_in_one_sentence(
    config: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EnvironmentProblem) as found:
        hf.build(HfConfig(path=str(tmp_path)), tokenizer=byte_tokenizer(64), device=CPU, seed=0, decide=Decisions())
    assert complaint in str(found.value) and len(str(found.value).replace(str(tmp_path), "")) < 320


def test_the_commit_of_the_hub_is_found_and_kept_for_all_files(folder: Path) -> None:
    first, second = "1" * 40, "2" * 40
    cached_on_hub(folder, "hub/moving", first)
    assert build("hub/moving").base_fingerprint == {"commit": first}
    cached_on_hub(folder, "hub/moving", second)
    moved = build("hub/moving")
    assert moved.base_fingerprint == {"commit": second} and moved.config.revision == second  # type: ignore[attr-defined]
    pinned = build("hub/moving", revision=first)
    assert pinned.base_fingerprint == {"commit": first} and pinned.config.revision == first  # type: ignore[attr-defined]


def test_a_folder_is_known_by_what_is_in_it_and_not_by_where_it_is(folder: Path) -> None:
    def frozen(path: Path) -> dict[str, str]:
        model = build(path)
        model.module.requires_grad_(False)
        return model.base_fingerprint

    moved = shutil.copytree(folder, folder.parent / "moved")
    assert frozen(moved) == frozen(folder) and frozen(folder).keys() == {"config", "weights"}
    assert build(folder).base_fingerprint.keys() == {"config"}, "a checkpoint holds all that learns"
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, moved / "model.safetensors", metadata={"format": "pt"})
    assert frozen(moved)["weights"] != frozen(folder)["weights"]
    edit(moved / "config.json", rms_norm_eps=1e-3)
    assert build(moved).base_fingerprint != build(folder).base_fingerprint


def test_random_weights_are_known_by_their_seed_and_architecture(folder: Path) -> None:
    origin = build(folder, from_scratch=True).base_fingerprint
    assert origin["drawn"] == "from seed 0" and origin["config"] == build(folder).base_fingerprint["config"]


def test_rows_that_are_too_long_are_found_before_the_weights_are_read(folder: Path) -> None:
    edit(folder / "config.json", max_position_embeddings=64)
    (folder / "model.safetensors").unlink()
    config = HfConfig(path=str(folder))
    with pytest.raises(
        SpecError, match=r"data\.max_length: sequences of 65 tokens .* the model has 64 positions; .* 64,"
    ):
        hf.build(config, tokenizer=hf.tokenizer(config), device=CPU, seed=0, decide=Decisions(), longest=65)
