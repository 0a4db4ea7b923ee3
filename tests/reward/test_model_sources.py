"""`reward=model` takes a model as every option does: a folder, a run, an adapter."""

from __future__ import annotations

import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2ForCausalLM, Qwen2ForSequenceClassification

from runner.build.rewards import reward_origins
from runner.cli.job_builder import compose_job
from runner.core.errors import CheckpointError, EnvironmentProblem, SpecError
from runner.launch.local import check_spec
from runner.model.tiny import byte_tokenizer
from runner.reward.config import ModelRewardConfig
from runner.run_dir.manifest import check_compatible
from runner.spec.saved_spec import KEY, SCHEMA
from tests.command import run
from tests.model.test_hf import cached_on_hub
from tests.reward.samples import made
from tests.reward.test_model import POSITIONS, completion, qwen
from tests.reward.test_trial import SMALL

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, a language model; adapter/, a reward model's adapter onto it, as `adapter=lora` exports it."""
    root, tokenizer = tmp_path_factory.mktemp("models"), byte_tokenizer(POSITIONS)
    torch.manual_seed(0)
    Qwen2ForCausalLM(qwen()).save_pretrained(root / "base")
    tokenizer.save_pretrained(root / "base")
    inner = Qwen2ForSequenceClassification.from_pretrained(root / "base", num_labels=1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS")
    module = peft.get_peft_model(inner, config)
    for parameter in module.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    module.save_pretrained(root / "adapter")
    tokenizer.save_pretrained(root / "adapter")
    (root / "run").mkdir()
    (root / "run" / "spec.yaml").write_text("name: trained\n")
    (root / "run" / "export").symlink_to(root / "adapter")
    return root


def test_the_adapter_of_a_reward_model_scores_as_peft_does(folders: Path) -> None:
    tokenizer = byte_tokenizer(POSITIONS)
    group = [completion(tokenizer, "2+2?", text) for text in ("4", "five", "")]
    base = Qwen2ForSequenceClassification.from_pretrained(folders / "base", num_labels=1)
    module = peft.PeftModel.from_pretrained(base, folders / "adapter").eval()
    with torch.no_grad():
        wanted = [float(module(torch.tensor([[*c.prompt.ids, *c.ids]])).logits) for c in group]
    [found] = made(ModelRewardConfig(path=str(folders / "adapter")), tokenizer=tokenizer).score([group])
    assert found == pytest.approx(wanted, abs=1e-5) and len(set(wanted)) == 3


def test_the_base_of_an_adapter_is_that_of_its_commit(folders: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    Qwen2ForCausalLM(qwen()).save_pretrained(tmp_path / "newer")
    adapter = shutil.copytree(folders / "adapter", tmp_path / "adapter")
    settings = peft.LoraConfig.from_pretrained(adapter)
    settings.base_model_name_or_path, settings.revision = "hub/judged", "1" * 40
    settings.save_pretrained(adapter)
    cached_on_hub(folders / "base", "hub/judged", "1" * 40)
    cached_on_hub(tmp_path / "newer", "hub/judged", "2" * 40)
    tokenizer = byte_tokenizer(POSITIONS)
    group = [completion(tokenizer, "2+2?", "4")]
    scores = [
        made(ModelRewardConfig(path=str(at)), tokenizer=tokenizer).score([group])
        for at in (folders / "adapter", adapter)
    ]
    assert scores[0] == scores[1]


JOB = ("model=tiny", "data=demo", "algorithm=grpo", "sampler=torch")


def test_a_run_is_its_export_alone_and_in_a_sum(folders: Path) -> None:
    for words in (("reward=model", f"reward.path={folders / 'run'}"), _sum(folders / "run")):
        said = check_spec(compose_job([*JOB, *words]).spec).reward.model_dump_json()
        assert f'"path":"{folders / "run" / "export"}"' in said or f'"path":"{folders / "adapter"}"' in said


def test_what_is_no_reward_model_is_refused_before_torch(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"base is a language model \(Qwen2ForCausalLM\)"):
        check_spec(compose_job([*JOB, "reward=model", f"reward.path={folders / 'base'}"]).spec)
    (tmp_path / "spec.yaml").write_text("name: new\n")
    with pytest.raises(SpecError, match=r"reward\.path: .* is a run without an export"):
        check_spec(compose_job([*JOB, "reward=model", f"reward.path={tmp_path}"]).spec)


def _sum(path: Path) -> tuple[str, str]:
    return "reward=sum", f"reward.parts=[{{name:model,path:'{path}'}},{{name:length,target:4}}]"


@pytest.mark.slow
def test_a_resumed_run_has_the_reward_model_that_it_began_with(folders: Path, tmp_path: Path) -> None:
    path = shutil.copytree(folders / "adapter", tmp_path / "adapter") / "adapter_model.safetensors"
    run(*SMALL, *_sum(path.parent), "steps=1", "checkpoint.every=1", cwd=tmp_path)
    before, tensors = path.read_bytes(), load_file(path)
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, path, {"format": "pt"})
    said = run("resume", "latest", "steps=2", cwd=tmp_path, code=4)
    assert "another reward.parts[0]: adapter of reward.parts[0].path: was" in said
    path.write_bytes(before)
    run("resume", "latest", "steps=2", cwd=tmp_path)


def test_the_base_of_an_adapter_and_a_whole_model_are_compared_too(folders: Path) -> None:
    spec = compose_job([*JOB, *_sum(folders / "adapter")]).spec
    assert reward_origins(spec)["reward.parts[0]"].keys() == {"adapter", "config", "weights"}
    frozen = reward_origins(spec)
    same = {KEY: SCHEMA, "data": "d", "model": {}, "frozen": frozen}
    check_compatible(same, same)
    check_compatible(same, same | {"frozen": {}})  # of a version that compared no reward models
    changed = {"reward.parts[0]": frozen["reward.parts[0]"] | {"weights": "0"}}
    with pytest.raises(CheckpointError, match=r"weights of reward\.parts\[0\]\.path: was 0"):
        check_compatible(same, same | {"frozen": changed})
    spec = compose_job([*JOB, "reward=model", f"reward.path={folders / 'base'}"]).spec
    assert reward_origins(spec)["reward"].keys() == {"config", "weights"}
    assert reward_origins(compose_job([*JOB, "reward=exact"]).spec) == {}
