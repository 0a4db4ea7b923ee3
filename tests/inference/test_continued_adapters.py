"""An adapter that was trained elsewhere is trained further: under which reference, and merged where nothing adapts."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from runner.adapter import lora
from runner.adapter.config import LoraConfig, NoAdapterConfig
from runner.core.auto_choices import Decisions
from runner.core.errors import CheckpointError, SpecError
from runner.inference.model_source import load_source, parse_source
from runner.model import hf
from runner.model.config import HfConfig
from runner.model.export import merge_temporarily
from runner.model.model_folder import weights_digest
from tests import command
from tests.inference.model_folders import write_adapter, write_base
from tests.model.zoo import CPU, LOGPROBS, batch, reference, rows

JOB = ("model=hf", "tracker=none", "data.items=32", "data.held_out=8", "algorithm.batch_size=8", "evaluation.every=0")
JOB = (*JOB, "schedule=constant", "checkpoint.best=null", "steps=2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_adapter(root / "a", write_base(root / "base"))
    return root


def run(cwd: Path, *words: str) -> str:
    return command.run(*words, *JOB, cwd=cwd, RUNNER_CACHE=str(cwd / "cache"))


def losses(cwd: Path) -> list[float]:
    lines = (cwd / "outputs/latest/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["train/loss"] for line in lines]


def built(path: Path, decide: Decisions, **options: Any) -> Any:
    config = HfConfig(path=str(path), **options)
    return hf.build(config, tokenizer=hf.tokenizer(config), device=CPU, seed=0, decide=decide)


def test_full_fine_tuning_of_an_adapter_begins_with_it_in_the_weights(folders: Path) -> None:
    decide = Decisions(strict=True)
    adapted = built(folders / "a", decide)
    wanted = adapted.outputs(batch(), LOGPROBS)["logprobs"].detach()
    merged = lora.train_all(NoAdapterConfig(), adapted, decide=decide)
    assert merged.module is merged.inner and "merged into its base" in str(decide.entries[-1])
    torch.testing.assert_close(merged.outputs(batch(), LOGPROBS)["logprobs"].detach(), wanted)
    plain = built(folders / "base", decide)
    assert merged.trainable().keys() == plain.module.state_dict().keys() - {"lm_head.weight"} | {"lm_head.weight"}


@pytest.mark.parametrize(("kind", "merges"), [("qwen3", False), ("qwen2", True)])
def test_an_adapter_with_biases_is_merged_where_the_layers_have_one(kind: str, merges: bool, tmp_path: Path) -> None:
    """peft only warns when such an adapter is made, and fails when it is merged: so do rollouts, exports and syncs."""
    with warnings.catch_warnings(action="ignore"):
        write_adapter(tmp_path / "a", write_base(tmp_path / "base", kind), kind=kind, lora_bias=True)
        adapted = built(tmp_path / "a", Decisions())
    wanted = adapted.outputs(batch(), LOGPROBS)["logprobs"].detach()
    with merge_temporarily(adapted.module):
        torch.testing.assert_close(adapted.outputs(batch(), LOGPROBS)["logprobs"].detach(), wanted)
    if merges:
        merged = lora.train_all(NoAdapterConfig(), adapted, decide=Decisions())
        torch.testing.assert_close(merged.outputs(batch(), LOGPROBS)["logprobs"].detach(), wanted)
        return
    for merge in (lambda: lora.train_all(NoAdapterConfig(), adapted, decide=Decisions()), adapted.merge_on_save):
        with pytest.raises(SpecError, match=r"a bias \(lora_bias\) on .*q_proj, which has none itself"):
            merge()
    with pytest.raises(SpecError, match="lora_bias"):
        next(adapted.hf_tensors("all"))


def test_an_adapter_is_continued_with_its_own_settings(folders: Path) -> None:
    decide = Decisions(strict=True)
    model = lora.attach(LoraConfig(rank=16, alpha=4), built(folders / "a", decide), decide=decide)
    said = [str(entry) for entry in decide.entries]
    assert any("adapter.rank: 2" in text and "16 is not used" in text for text in said)
    assert not any("adapter.alpha" in text for text in said), "from the loaded adapter; the option's"
    stored = load_file(folders / "a" / "adapter_model.safetensors")
    assert sum(p.numel() for p in model.trainable().values()) == sum(tensor.numel() for tensor in stored.values())
    changed = built(folders / "a", decide).base_fingerprint
    assert changed["adapter"] and changed.keys() > built(folders / "base", decide).base_fingerprint.keys()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"rank": 4}, r"adapter\.rank: 4, but the adapter .* has 2; type adapter\.rank=2"),
        ({"dropout": 0.1}, r"adapter\.dropout: 0\.1, but .* has 0\.0"),
        ({"targets": ("q_proj",)}, r"adapter\.targets: \[q_proj\], but .* has \[q_proj,v_proj\]"),
        ({"modules_to_save": ("lm_head",)}, r"adapter\.modules_to_save: \[lm_head\], but .* has \[\]"),
        ({"dora": True, "rslora": True}, r"(?s)adapter\.dora: True.*adapter\.rslora: True"),
    ],
    ids=["rank", "dropout", "targets", "modules_to_save", "kinds"],
)
def test_an_option_that_the_adapter_does_not_have_is_refused(
    options: dict[str, Any], complaint: str, folders: Path
) -> None:
    with pytest.raises(SpecError, match=complaint):
        lora.attach(LoraConfig(**options), built(folders / "a", Decisions()), decide=Decisions())


def test_what_is_typed_as_the_adapter_has_it_is_accepted_and_narrower_targets_are_named(folders: Path) -> None:
    decide = Decisions(strict=True)
    lora.attach(LoraConfig(rank=2, alpha=4, targets=("v_proj", "q_proj")), built(folders / "a", decide), decide=decide)
    assert not any(entry.feature.startswith("adapter.") for entry in decide.entries)
    lora.attach(LoraConfig(), built(folders / "a", decide), decide=decide)
    said = {entry.feature: str(entry) for entry in decide.entries}
    assert "[q_proj,v_proj]" in said["adapter.targets"] and "all-linear is not used" in said["adapter.targets"]


def test_an_adapter_of_routers_is_frozen_with_them(folders: Path, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "qwen3_moe")
    write_adapter(tmp_path / "a", base, kind="qwen3_moe", target_parameters=["mlp.gate.weight"])
    for freeze, trained in ((None, True), (("router",), False)):
        model = lora.attach(LoraConfig(), built(tmp_path / "a", Decisions(), freeze=freeze), decide=Decisions())
        assert any("mlp.gate" in name for name in model.trainable()) is trained
    with pytest.raises(SpecError, match=r"model\.freeze: .* has no routers; leave router out"):
        lora.attach(LoraConfig(), built(folders / "a", Decisions(), freeze=("router",)), decide=Decisions())


def test_a_base_with_other_weights_is_refused_where_the_adapter_records_its_own(folders: Path, tmp_path: Path) -> None:
    """Shapes alone would let any fine-tuned model of the family pass."""
    other = write_base(tmp_path / "other", seed=9)
    decide = Decisions()
    built(folders / "a", decide, base=str(other))
    assert any(entry.feature == "adapter's base" and "not compared" in entry.reason for entry in decide.entries)
    shutil.copytree(folders / "a", tmp_path / "ours")
    digest = built(folders / "a", Decisions()).base_fingerprint["weights"]
    (tmp_path / "ours" / "README.md").write_text(f"---\nbase_weights: {digest}\n---\n")
    with pytest.raises(CheckpointError, match=r"other has other weights \(sha256 .* than the base of the adapter"):
        built(tmp_path / "ours", Decisions(), base=str(other))
    decide = Decisions(strict=True)
    built(tmp_path / "ours", decide)
    assert not any(entry.feature == "adapter's base" for entry in decide.entries), "it was compared"
    with pytest.raises(CheckpointError, match="other weights"):
        load_source(parse_source(str(tmp_path / "ours"), base=str(other)), device="cpu")
    more = parse_source(str(other), adapters=[f"x={folders / 'a'}", f"y={tmp_path / 'ours'}"])
    with pytest.raises(CheckpointError, match="other weights"):
        load_source(more, device="cpu")


@pytest.mark.slow
def test_dpo_continues_the_adapter_of_sft_from_itself_or_from_the_base(folders: Path, tmp_path: Path) -> None:
    sft = run(tmp_path, "+recipe=sft_demo", f"model.path={folders / 'base'}", "adapter=lora", "adapter.rank=4")
    assert "error" not in sft
    trained = (tmp_path / "outputs/latest").resolve()
    words = ("+recipe=dpo_demo", f"model.path={folders / 'base'}", "adapter=lora", f"init_from={trained}")
    said = run(tmp_path, *words)
    assert "algorithm.reference: copy (the adapter that the model came with" in said
    own = losses(tmp_path)
    assert own[0] == pytest.approx(math.log(2), abs=1e-6), "policy and reference are the same before the first step"
    export = (tmp_path / "outputs/latest/export").resolve()
    assert json.loads((export / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folders / "base")
    assert f"base_weights: {weights_digest(folders / 'base')}" in (export / "README.md").read_text()
    with pytest.warns(FutureWarning):  # peft's own
        peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folders / "base"), export)
    run(tmp_path, *words, "algorithm.reference=cached")
    assert losses(tmp_path) == pytest.approx(own, abs=1e-6)
    run(tmp_path, "+recipe=dpo_demo", f"model.path={folders / 'a'}", "adapter=lora", "init_from=null")
    assert losses(tmp_path)[0] == pytest.approx(math.log(2), abs=1e-6)
    said = run(
        tmp_path, "+recipe=dpo_demo", f"model.path={folders / 'a'}", "adapter=lora", "init_from=null",
        "algorithm.reference=adapter",
    )  # fmt: skip
    assert "the base, without the adapter it came with" in said
    assert abs(losses(tmp_path)[0] - math.log(2)) > 1e-4


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # TRL's, and of what it imports
def test_an_adapter_that_trl_has_trained_is_trained_further(folders: Path, tmp_path: Path) -> None:
    """And computes what peft computes of the same folder, before and after."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    row = {"prompt": [{"role": "user", "content": "hi"}], "completion": [{"role": "assistant", "content": "hello"}]}
    options = {"max_steps": 2, "learning_rate": 0.1, "report_to": "none", "use_cpu": True, "save_strategy": "no"}
    trainer = SFTTrainer(
        str(folders / "base"),
        args=SFTConfig(str(tmp_path / "trl"), bf16=False, gradient_checkpointing=False, **options),
        train_dataset=Dataset.from_list([row] * 4),
        peft_config=peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "trl"))
    said = run(tmp_path, "+recipe=sft_demo", f"model.path={tmp_path / 'trl'}", "adapter=lora")
    assert "continued (the model came with the adapter" in said and "adapter.rank: 2" in said
    export = (tmp_path / "outputs/latest/export").resolve()
    for folder in (tmp_path / "trl", export):
        plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folders / "base"), folder)
        ours = built(folder, Decisions()).outputs(batch(), LOGPROBS)["logprobs"].detach()
        torch.testing.assert_close(ours, reference(plain, rows()).float().detach(), atol=1e-5, rtol=1e-5)
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "trl", export))
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's
def test_an_adapter_with_trainable_tokens_computes_what_peft_computes(folders: Path, tmp_path: Path) -> None:
    """Its two rows are those of two tokens, and no embedding that was resized."""
    folder = write_adapter(tmp_path / "tokens", folders / "base", trainable_token_indices=[3, 5])
    ours = built(folder, Decisions()).outputs(batch(), LOGPROBS)["logprobs"].detach()
    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folders / "base"), folder)
    torch.testing.assert_close(ours, reference(plain, rows()).float().detach(), atol=1e-5, rtol=1e-5)
