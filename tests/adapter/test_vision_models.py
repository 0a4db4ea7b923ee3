"""Image-text models of ten families: the whole model is loaded, its language model is trained, nothing is dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from runner.adapter import lora
from runner.adapter.config import LoraConfig, NoAdapterConfig
from runner.build import build_device, build_model, build_tokenizer
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import SpecError
from runner.model import hf
from runner.model.config import HfConfig
from runner.model.model_parts import part_finder
from tests.model.vision_zoo import CONFIGS, write_folder
from tests.model.zoo import CPU, LOGPROBS, batch, reference, rows

FAMILIES = pytest.mark.parametrize("kind", CONFIGS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write_folder(kind, tmp_path_factory.mktemp(kind)) for kind in CONFIGS}


def built(folder: Path, decide: Decisions | None = None, **options: Any) -> Any:
    config = HfConfig(path=str(folder), **options)
    return hf.build(config, tokenizer=hf.tokenizer(config), device=CPU, seed=0, decide=decide or Decisions())


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def parts(names: Any, inner: Any) -> set[str]:
    part_of = part_finder(inner)
    return {part_of(name.removeprefix("base_model.model.")) for name in names}


@FAMILIES
def test_text_trains_the_language_model_and_every_tensor_is_exported(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    decide, said = Decisions(strict=kind != "qwen3_5"), Decisions(strict=True)
    model = lora.train_all(NoAdapterConfig(), built(folders[kind], decide), decide=said)
    assert "model.freeze: [vision, aligner]" in str(said.entries[-1])
    assert model.layout == ("padded" if kind == "qwen3_5" else "packed")  # it has linear attention
    data = batch()
    with torch.no_grad():
        plain = AutoModelForImageTextToText.from_pretrained(folders[kind]).eval()
        wanted = reference(plain, rows())
    torch.testing.assert_close(model.outputs(data, LOGPROBS)["logprobs"].double(), wanted, atol=1e-4, rtol=1e-4)
    assert parts(model.trainable(), model.inner) == {"language"}
    model.linear_loss(data, data.tokens["weight"])[0].backward()
    torch.optim.SGD(model.trainable().values(), lr=0.1).step()
    model.save(tmp_path / "export")
    before, after = tensors(folders[kind]), tensors(tmp_path / "export")
    assert before.keys() == after.keys()
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "export")
    for name, value in again.state_dict().items():
        same = torch.equal(value, plain.state_dict()[name])
        assert same or part_finder(again)(name) == "language", name
    trained = [p for n, p in again.named_parameters() if not torch.equal(p, plain.get_parameter(n))]
    assert len(trained) >= len(model.trainable()) - 2  # an expert that no token chose keeps its values


@FAMILIES
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj",)])
def test_an_adapter_is_in_the_language_model(kind: str, targets: Any, folders: dict[str, Path]) -> None:
    model = lora.attach(LoraConfig(rank=2, targets=targets), built(folders[kind]), decide=Decisions())
    assert parts(model.trainable(), model.inner) == {"language"}


def test_what_is_frozen_can_be_chosen(folders: dict[str, Path]) -> None:
    every = lora.train_all(NoAdapterConfig(), built(folders["qwen2_5_vl"], freeze=()), decide=Decisions())
    assert all(p.requires_grad for p in every.module.parameters())
    aligner = built(folders["gemma3"], freeze=("vision", "language"))
    assert parts(lora.train_all(NoAdapterConfig(), aligner, decide=Decisions()).trainable(), aligner.inner) == {
        "aligner"
    }
    adapted = lora.attach(LoraConfig(rank=2), built(folders["qwen3_vl"], freeze=()), decide=Decisions())
    assert parts(adapted.trainable(), adapted.inner) == {"language", "vision", "aligner"}
    with pytest.raises(SpecError, match=r"model\.freeze: all parts are frozen"):
        lora.train_all(
            NoAdapterConfig(),
            built(folders["gemma3"], freeze=("vision", "aligner", "language")),
            decide=Decisions(),
        )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's
def test_an_adapter_that_is_continued_keeps_its_frozen_parts(folders: dict[str, Path], tmp_path: Path) -> None:
    base = AutoModelForImageTextToText.from_pretrained(folders["qwen2_5_vl"])
    settings = peft.LoraConfig(r=2, target_modules=["qkv", "q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(base, settings).save_pretrained(tmp_path)
    decide = Decisions(strict=True)
    model = lora.attach(LoraConfig(), built(tmp_path), decide=decide)
    assert parts(model.trainable(), model.inner) == {"language"}
    assert "adapter: 4 of 8 tensors frozen" in str(decide.entries[-1])
    every = lora.attach(LoraConfig(), built(tmp_path, freeze=()), decide=decide)
    assert parts(every.trainable(), every.inner) == {"language", "vision"}
    words = ["+recipe=sft_demo", "model=hf", f"model.path={tmp_path}", "adapter=lora", "model.freeze=[language,vision]"]
    spec = compose_job(words).spec
    with pytest.raises(SpecError, match=r"model\.freeze: all weights of the adapter .* are in frozen parts;"):
        build_model(spec, build_tokenizer(spec, decide), build_device(spec, decide), decide)


def test_a_model_of_text_has_nothing_to_freeze(tmp_path: Path) -> None:
    from tests.model.zoo import causal

    causal("qwen3").save(tmp_path)
    with pytest.raises(SpecError, match=r"model\.freeze: Qwen3ForCausalLM has no vision part; leave it out"):
        lora.train_all(NoAdapterConfig(), built(tmp_path, freeze=()), decide=Decisions())


def test_tensors_that_the_architecture_does_not_have_are_in_the_export_too(tmp_path: Path) -> None:
    folder = write_folder("qwen3_5", tmp_path / "model")
    save_file({"mtp.fc.weight": torch.randn(4, 4).bfloat16()}, folder / "model-extra.safetensors", {"format": "pt"})
    (folder / "preprocessor_config.json").write_text("{}")
    built(folder).save(tmp_path / "export")
    before, after = tensors(folder), tensors(tmp_path / "export")
    assert before.keys() == after.keys() and torch.equal(before["mtp.fc.weight"], after["mtp.fc.weight"])
    assert (tmp_path / "export" / "preprocessor_config.json").read_text() == "{}"


def test_the_attention_of_the_vision_part_stays_its_own(folders: dict[str, Path]) -> None:
    config = built(folders["gemma3"]).inner.config
    assert (config.text_config._attn_implementation, config.vision_config._attn_implementation) == ("ragged", "sdpa")
