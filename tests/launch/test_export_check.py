"""An export answers like the run, or is refused: by tokens, template and log-probabilities, in another process."""

from __future__ import annotations

import json
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from runner.adapter import lora
from runner.adapter.config import LoraConfig
from runner.build.components import build_device, build_model, build_tokenizer
from runner.cli.job_builder import compose_job
from runner.cli.main import main
from runner.core.auto_choices import Decisions
from runner.core.errors import ParityError
from runner.data.config import ChatConfig
from runner.inference.model_source import load_source, parse_source
from runner.launch import export_check
from runner.launch.export import CardFacts, write_export
from runner.launch.export_check import ExportCheck, _compare_answers, _own_answers, check_export, run_prompts
from runner.model import hf
from runner.model.config import HfConfig
from runner.model.hf import image_reader
from runner.model.model_folder import base_quantization, says_plain_text
from runner.model.tiny import byte_tokenizer
from runner.run_dir.folder import RunFolder
from runner.spec.base import Dtype
from tests.inference.model_folders import write_adapter, write_base
from tests.model.vision_zoo import write_folder
from tests.model.zoo import CPU

PROMPTS = ["sort 31", "hello"]
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_adapter(root / "a", write_base(root / "base"))
    write_adapter(root / "b", root / "base", seed=2)
    return root


def adapted(folders: Path, scheme: Literal["int8"] | None = None) -> Any:
    config = HfConfig(path=str(folders / "a"), quantization=scheme)
    decide = Decisions()
    model = hf.build(config, tokenizer=hf.tokenizer(config), device=CPU, seed=0, decide=decide)
    model = lora.attach(LoraConfig(), model, decide=decide)
    model.eval()
    return model


@pytest.mark.slow
def test_an_adapter_and_its_merge_answer_like_the_run_and_one_disturbed_weight_does_not(
    folders: Path, tmp_path: Path
) -> None:
    model = adapted(folders)
    model.merge_on_save()
    model.save(tmp_path / "merged")
    found = check_export(model, tmp_path / "merged", PROMPTS, "chat")
    assert (found.num_prompts, found.num_tokens > 0, found.max_logprob_diff < 1e-4) == (2, True, True)
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] += 0.5
    save_file(weights, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ParityError, match="does not generate like the run: log-probabilities"):
        check_export(model, tmp_path / "merged", PROMPTS, "chat")


@pytest.mark.slow
def test_a_changed_template_a_coarse_merge_and_a_folder_that_does_not_load_are_found(
    folders: Path, tmp_path: Path
) -> None:
    model = adapted(folders)
    model.save(tmp_path / "adapter")
    assert check_export(model, tmp_path / "adapter", PROMPTS, "chat").max_logprob_diff < 1e-4
    changed = byte_tokenizer(512)
    changed.chat_template = str(changed.chat_template).replace("'\\n' }}\n{%- endfor", "'\\n\\n' }}\n{%- endfor")
    assert changed.chat_template != byte_tokenizer(512).chat_template
    changed.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ParityError, match="gives other tokens for 'sort 31'"):
        check_export(model, tmp_path / "adapter", PROMPTS, "chat")
    model.merge_on_save()
    model.save(tmp_path / "merged")
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    coarse = {name: value.bfloat16().float() for name, value in weights.items()}
    save_file(coarse, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ParityError, match="log-probabilities of the completion"):
        check_export(model, tmp_path / "merged", PROMPTS, "chat")
    (tmp_path / "merged" / "config.json").unlink()
    with pytest.raises(ParityError, match="transformers cannot load it"):
        check_export(model, tmp_path / "merged", PROMPTS, "chat")


@pytest.mark.slow
def test_an_adapter_is_compared_on_the_dequantized_base_that_it_was_trained_on(folders: Path, tmp_path: Path) -> None:
    model = adapted(folders, "int8")
    model.save(tmp_path / "adapter")
    assert check_export(model, tmp_path / "adapter", PROMPTS, "chat").max_logprob_diff < 1e-4
    with pytest.raises(ParityError, match="log-probabilities of the completion"):
        _compare_answers(model, tmp_path / "adapter", [(one, None) for one in PROMPTS], "chat", None)  # on its own base


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_greedy_tokens_are_counted_in_bfloat16_and_refused_in_float32(
    dtype: Dtype, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = HfConfig(path=str(folders / "base"), dtype=dtype)
    model: Any = hf.build(config, tokenizer=hf.tokenizer(config), device=CPU, seed=0, decide=Decisions())
    asked: list[tuple[str, Path | None]] = [(prompt, None) for prompt in PROMPTS]
    names = ("prompt_ids", "greedy_ids", "logprobs")
    found = [dict(zip(names, one, strict=True)) for one in zip(*_own_answers(model, asked, "chat"), strict=True)]
    found[1]["greedy_ids"] = [0]
    (tmp_path / "found.json").write_text(json.dumps({"stack": "another", "answers": found}))
    probe = tmp_path / "probe.py"  # which answers like a folder whose rounding chose another token
    probe.write_text("from pathlib import Path; input(); print(Path(__file__).with_name('found.json').read_text())")
    monkeypatch.setattr(export_check, "PROBE", probe)
    if dtype == "float32":
        with pytest.raises(ParityError, match="the greedy completion of 'hello' has other tokens"):
            check_export(model, folders / "base", PROMPTS, "chat")
    else:
        text = str(check_export(model, folders / "base", PROMPTS, "chat"))
        assert ": 1 of 2 greedy completions are the same, log-probabilities within 0.0e+00 (another)" in text


def test_the_runs_own_prompts_are_asked(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(512)
    rows = [{"step": at, "prompt": tokenizer.apply_chat_template(
        [{"role": "user", "content": f"sort {at % 10}"}], add_generation_prompt=True, tokenize=False)}
        for at in range(20)]  # fmt: skip
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = run_prompts(RunFolder(tmp_path), tokenizer, "chat", ChatConfig())
    assert len(asked) == len(set(asked)) == 8 and all(text.startswith("sort ") for text in asked)
    assert run_prompts(RunFolder(tmp_path / "none"), tokenizer, "chat", ChatConfig())[0] == "Hello"


def test_adapters_are_combined_and_merged_as_peft_does(folders: Path, tmp_path: Path, capsys: Any) -> None:
    base, a, b = (str(folders / name) for name in ("base", "a", "b"))
    words = ["export", base, "--adapter", a, "--adapter", b, "device=cpu"]
    assert main([*words, "--combine", "linear", "--weights", "1,0", "--out", str(tmp_path / "one")]) == 0
    assert main(["export", a, "--merge", "--out", str(tmp_path / "merged"), "device=cpu"]) == 0
    said = capsys.readouterr()
    assert said.out.split() == [str(tmp_path / "one"), str(tmp_path / "merged")]
    assert "convert_hf_to_gguf.py" in said.err and "ollama create merged" in said.err
    settings = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == base
    one, given = (load_file(path / "adapter_model.safetensors") for path in (tmp_path / "one", folders / "a"))
    for name in given:
        if name.endswith("lora_A.weight"):
            product = one[name.replace("lora_A", "lora_B")] @ one[name] * settings["lora_alpha"] / settings["r"]
            torch.testing.assert_close(product, given[name.replace("lora_A", "lora_B")] @ given[name] * 2)
    whole = tmp_path / "whole"
    assert main([*words, "--combine", "linear", "--weights", "1,0", "--merge", "--out", str(whole)]) == 0
    sums, merged = (load_file(path / "model.safetensors") for path in (whole, tmp_path / "merged"))
    torch.testing.assert_close(sums, merged)
    assert {path.name for path in tmp_path.iterdir()} == {"one", "merged", "whole"}
    capsys.readouterr()
    shutil.rmtree(tmp_path / "merged")
    for more, complaint in (
        ([], "type how to combine them: --combine"),
        (["--combine", "linear", "--weights", "1", "--out", "x"], "--weights has 1 numbers for 2 adapters"),
        (["--combine", "linear"], "--out FOLDER is required"),
        (["--combine", "linear", "--out", "x", "--push", "there"], "expected hub:OWNER/NAME"),
        (["--merge", "--weights", "1,2"], "--weights is for adapters that --combine combines; leave it out"),
        (["--combine", "linear", "--density", "0.2"], "--density is for --combine ties, dare_linear and dare_ties"),
    ):
        assert main([*words, *more]) == 2
        assert complaint in capsys.readouterr().err
    assert main(["export", base, "device=cpu"]) == 2 and "is already a full model" in capsys.readouterr().err


def test_combined_adapters_keep_the_scale_of_rslora_and_lose_no_tensor(
    folders: Path, tmp_path: Path, capsys: Any
) -> None:
    write_adapter(tmp_path / "rslora", folders / "base", use_rslora=True)
    words = ["export", str(folders / "base"), "--adapter", str(tmp_path / "rslora"), "--adapter", str(folders / "b")]
    words += ["device=cpu", "--combine", "linear"]
    assert main([*words, "--weights", "1,0", "--out", str(tmp_path / "one")]) == 0
    settings = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    assert not settings["use_rslora"]
    one, given = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "rslora"))
    for name in [name for name in given if name.endswith("lora_A.weight")]:
        product = one[name.replace("lora_A", "lora_B")] @ one[name] * settings["lora_alpha"] / settings["r"]
        torch.testing.assert_close(product, given[name.replace("lora_A", "lora_B")] @ given[name] * 4 / 2**0.5)
    for options in ({"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [1, 2]}):
        write_adapter(tmp_path / "more", folders / "base", **options)
        assert main([*words, "--adapter", str(tmp_path / "more"), "--out", str(tmp_path / "x")]) == 2
        [name] = options
        assert f"an adapter trains by {name}\n" in capsys.readouterr().err and not (tmp_path / "x").exists()
        shutil.rmtree(tmp_path / "more")


def test_what_adapters_record_is_recorded_of_them_together(folders: Path, tmp_path: Path, capsys: Any) -> None:
    plain = [shutil.copytree(folders / name, tmp_path / name) for name in ("a", "b")]
    for folder in plain:
        folder.joinpath("README.md").write_text("---\nprompt_style: text\nbase_quantization: int8\n---\n")
    words = ["export", str(folders / "base"), "device=cpu", "--adapter", str(plain[0])]
    one, merged = tmp_path / "one", tmp_path / "merged"
    for more in (
        ["--combine", "cat", "--adapter", str(plain[1]), "--out", str(one)],
        ["--merge", "--out", str(merged)],
    ):
        assert main([*words, *more]) == 0
    assert says_plain_text(one) and base_quantization(one) == "int8" and (one / "generation_config.json").is_file()
    assert says_plain_text(merged) and base_quantization(merged) is None
    capsys.readouterr()
    words += ["--combine", "cat", "--adapter", str(folders / "b"), "--out", str(tmp_path / "mixed")]
    assert main(words) == 2 and "on plain text, and others on chats" in capsys.readouterr().err


def test_a_hub_that_cannot_be_reached_leaves_the_export(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = ["export", str(folders / "a"), "--merge", "--out", str(tmp_path / "merged"), "device=cpu"]
    begun = time.monotonic()
    assert main([*words, "--push", "hub:owner/name"]) == 2 and time.monotonic() - begun < 250
    assert (
        f"complete in {tmp_path / 'merged'}" in capsys.readouterr().err
        and (tmp_path / "merged" / "config.json").exists()
    )


def test_an_image_is_asked_about_and_another_image_processor_is_noticed(tmp_path: Path) -> None:
    folder = write_folder("qwen2_5_vl", tmp_path)
    model = load_source(parse_source(str(folder)), device="cpu").model
    assert check_export(model, folder, ["hello"], "chat").num_prompts == 2
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [0.1, 0.1, 0.1]}))
    with pytest.raises(ParityError, match=r"completion of 'What is in the picture\?' differ by"):
        check_export(model, folder, [], "chat")


@pytest.mark.parametrize(
    ("kind", "algorithm", "tag"),
    [("qwen2_5_vl", "sft", "image-text-to-text"), ("qwen3", "rm", "text-classification")],
)
def test_an_adapter_is_loaded_by_the_class_of_its_base_and_task(
    kind: str, algorithm: str, tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_folder(kind, tmp_path / "base") if "vl" in kind else write_base(tmp_path / "base")
    words = ["model=hf", f"model.path={base}", "adapter=lora", "device=cpu", f"algorithm={algorithm}"]
    spec = compose_job([*words, "data=file", "data.path=rows.jsonl", "data.max_pixels=512"]).spec
    decide = Decisions()
    head = next(iter(spec.algorithm.trained_models().values()))
    model = build_model(spec, build_tokenizer(spec, decide), build_device(spec, decide), decide, head)
    for parameter in model.trainable().values():
        torch.nn.init.normal_(parameter, std=0.3)
    model.eval()
    export = tmp_path / "export"
    check = partial(check_export, model, prompts=["hello"], style="chat") if "vl" in kind else None
    found = write_export(model, export, spec, CardFacts(1, {}), check)
    assert isinstance(found, ExportCheck) is ("vl" in kind) and (not found or found.num_prompts == 2)
    card = (export / "README.md").read_text()
    assert f"pipeline_tag: {tag}\n" in card
    monkeypatch.chdir(export)
    exec(card.split("```python\n")[1].split("```")[0], scope := dict[str, Any]())
    assert type(scope["base"]) is type(model.inner)
    loaded, own = dict(scope["model"].named_parameters()), dict(model.module.named_parameters())
    assert all(torch.equal(loaded[name], parameter) for name, parameter in own.items() if parameter.requires_grad)
    if found:
        settings = json.loads((export / "preprocessor_config.json").read_text())
        reader = image_reader(HfConfig(path=str(export)), model.tokenizer)
        assert settings["size"]["longest_edge"] == 512 and reader is not None and '"longest_edge": 512' in reader.how
        both, sum_of = ["--adapter", str(export), "--adapter", f"b={export}"], tmp_path / "sum"
        assert main(["export", str(base), *both, "--combine", "linear", "--out", str(sum_of), "device=cpu"]) == 0
        assert "AutoModelForImageTextToText" in (sum_of / "README.md").read_text()
        assert json.loads((sum_of / "preprocessor_config.json").read_text())["size"]["longest_edge"] == 512
