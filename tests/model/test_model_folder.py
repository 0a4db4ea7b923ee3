"""Model folders as downloads and tools leave them: each damage ends with exit code 2 or 4, naming file and cause."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runner.cli.main import main
from tests.inference.model_folders import write_adapter, write_base

WEIGHTS, SHARDS = "model.safetensors", ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00ff\nsize 1234\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("models") / "base")


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def split(folder: Path) -> Path:
    """Cut the weights in two files with an index; returns the index."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(weights)
    parts = names[:5], names[5:]
    for shard, part in zip(SHARDS, parts, strict=True):
        save_file({name: weights[name] for name in part}, folder / shard, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    files = {name: shard for shard, part in zip(SHARDS, parts, strict=True) for name in part}
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
    return index


def pointer(folder: Path) -> None:
    (folder / WEIGHTS).write_text(POINTER)


def pointer_for_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(POINTER)


def empty_shard(folder: Path) -> None:
    split(folder)
    (folder / SHARDS[1]).write_bytes(b"")


def truncated(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-100])


def cut_in_the_header(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:50])


def overlapping(folder: Path) -> None:
    """Two tensors of the same size at one place, and the end of the file as it was."""
    content = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    one, other = (header[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "kv")
    assert one["shape"] == other["shape"]
    one["data_offsets"] = other["data_offsets"]
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def offsets_of_another_kind(folder: Path) -> None:
    head = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, "x"]}}).encode()
    (folder / WEIGHTS).write_bytes(len(head).to_bytes(8, "little") + head + bytes(4))


def gguf(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "model-q4.gguf").write_bytes(b"GGUF\x03\0\0\0")


def gguf_alone(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "model-q4.gguf").write_bytes(b"GGUF\x03\0\0\0")


def index_without_metadata(folder: Path) -> None:
    index = split(folder)
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))


def no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def no_layer(folder: Path) -> None:
    """Weights of another model, which has the tensors of the first layers alone."""
    rewrite(folder, lambda weights: [weights.pop(name) for name in list(weights) if ".layers.1." in name])


def missing_shard(folder: Path) -> None:
    split(folder)
    (folder / SHARDS[0]).unlink()


def transposed(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda weights: weights.update({name: weights[name].T.contiguous()}))


def int8(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda weights: weights.update({name: weights[name].to(torch.int8)}))


def quantized(folder: Path) -> None:
    edit(folder / "config.json", quantization_config={"quant_method": "awq", "bits": 4})


def another_vocabulary(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=512)


def small_vocabulary(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=100, pad_token_id=0, eos_token_id=0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rewrite(folder, lambda weights, name=name: weights.update({name: weights[name][:100].clone()}))  # type: ignore[misc]


def without_tokenizer(folder: Path) -> None:
    for path in (*folder.glob("tokenizer*"), *folder.glob("*.jinja")):
        path.unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "qwen3", ')


def unknown_architecture(folder: Path) -> None:
    edit(folder / "config.json", model_type="nobody_knows", architectures=["NobodyForCausalLM"])


SPOILT: list[tuple[Callable[[Path], object], int, str]] = [
    (pointer, 4, r"model.safetensors is a Git-LFS pointer"),
    (pointer_for_tokenizer, 4, r"tokenizer.json is a Git-LFS pointer"),
    (empty_shard, 4, "model-00002-of-00002.safetensors is empty"),
    (truncated, 4, "model.safetensors is incomplete or damaged: it has"),
    (cut_in_the_header, 4, "model.safetensors is incomplete or damaged: its header is incomplete"),
    (overlapping, 4, "model.safetensors is incomplete or damaged: its header cannot be read (model.layers.0"),
    (offsets_of_another_kind, 4, "model.safetensors is incomplete or damaged: its header cannot be read ("),
    (gguf, 2, "model-q4.gguf is a GGUF file"),
    (gguf_alone, 2, "model-q4.gguf is a GGUF file"),
    (index_without_metadata, 4, "model.safetensors.index.json has no metadata"),
    (no_weights, 4, "model has no weights (*.safetensors)"),
    (no_layer, 4, "has no weights of layer 1; its config.json says that it has 2 layers"),
    (missing_shard, 4, "lacks model-00001-of-00002.safetensors"),
    (transposed, 4, "model.layers.0.mlp.up_proj.weight has shape [32, 48]"),
    (int8, 2, "model.layers.0.mlp.up_proj.weight in model.safetensors is I8"),
    (quantized, 2, "quantization_config has awq"),
    (another_vocabulary, 4, "lm_head.weight has shape [300, 32], but [512, 32] in config.json"),
    (small_vocabulary, 2, "the tokenizer has 259 ids, and the embedding 100"),
    (without_tokenizer, 2, "has no tokenizer"),
    (broken_config, 4, "config.json cannot be read"),
    (unknown_architecture, 2, "nobody_knows"),
]


TRAINED = (pointer, no_weights, no_layer, index_without_metadata, transposed, without_tokenizer)
CASES = [("infer", *case) for case in SPOILT] + [("run", *case) for case in SPOILT if case[0] in TRAINED]


@pytest.mark.parametrize(("verb", "spoil", "code", "said"), CASES, ids=[f"{v}-{f.__name__}" for v, f, *_ in CASES])
def test_a_spoilt_folder_is_named_with_its_file_and_cause(
    verb: str,
    spoil: Callable[[Path], object],
    code: int,
    said: str,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    spoil(shutil.copytree(base, tmp_path / "model"))
    train = ["+recipe=sft_demo", "model=hf", "model.path=model", "steps=1", "tracker=none", "evaluation.every=0"]
    words = [*train, "data.items=64", "data.held_out=8"] if verb == "run" else ["infer", "model", "hi", "device=cpu"]
    assert main(words) == code
    shown = capfd.readouterr().err
    assert said in shown and "Traceback" not in shown and "bug" not in shown, shown


def test_a_damaged_adapter_is_named(base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    adapter = write_adapter(tmp_path / "a", base)
    weights = adapter / "adapter_model.safetensors"
    for spoil, said in (
        (lambda: weights.write_bytes(weights.read_bytes()[:-8]), "adapter_model.safetensors is incomplete or damaged"),
        (lambda: weights.write_text(POINTER), "adapter_model.safetensors is a Git-LFS pointer"),
        (weights.unlink, "a has no weights (*.safetensors)"),
    ):
        spoil()
        assert main(["infer", str(adapter), "hi", "device=cpu"]) == 4
        assert said in capfd.readouterr().err


def test_an_adapter_whose_weights_are_no_numbers_is_refused_by_name(
    base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "a", base)
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = sorted(tensors)[0]
    tensors[name].view(-1)[1] = float("nan")
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    assert main(["infer", str(adapter), "hi", "device=cpu"]) == 2
    assert f"NaN or infinity: {name} (1 numbers)" in capfd.readouterr().err


OPD = ["+recipe=grpo_demo", "algorithm=opd", "reward=none", "init_from=null"]
ROUTES = {  # by the option that names the folder
    "model.path": [["infer", "model", "hi"], ["chat", "model"], ["serve", "model"], ["eval", "model"]],
    "model.path of a job": [["+recipe=sft_demo", "model=hf", "model.path=model"]],
    "init_from": [["+recipe=sft_demo", "init_from=model"]],
    "algorithm.teacher": [[*OPD, "algorithm.teacher=model"]],
    "algorithm.reference_path": [["+recipe=dpo_demo", "init_from=null", "algorithm.reference_path=model"]],
    "reward.path": [["+recipe=grpo_demo", "init_from=null", "reward=model", "reward.path=model"]],
}


@pytest.mark.parametrize("method", ["bitsandbytes", "compressed-tensors", "gptq", "awq", "fp8"])
@pytest.mark.parametrize("option", ROUTES)
def test_a_quantized_source_is_refused_by_name_on_every_route(
    option: str,
    method: str,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    edit(shutil.copytree(base, tmp_path / "model") / "config.json", quantization_config={"quant_method": method})
    for words in ROUTES[option]:
        job = ["tracker=none", "data.items=64", "data.held_out=8", "steps=1"] if "=" in words[0] else []
        assert main([*words, *job]) == 2, words
        shown = capfd.readouterr().err
        assert f"{option.split()[0]}=" in shown and f"quantization_config has {method}" in shown, shown
        assert "use the model that it was made of" in shown and "Traceback" not in shown
        assert ("model.quantization=nf4" in shown) == (method == "bitsandbytes")


@pytest.mark.slow
def test_missing_weights_are_seen_before_torch_is_imported(base: Path, tmp_path: Path) -> None:
    no_weights(shutil.copytree(base, tmp_path / "model"))
    write_adapter(tmp_path / "adapter", tmp_path / "model")
    program = (
        "import sys; from runner.cli.main import main; code = main(); print('torch' in sys.modules); sys.exit(code)"
    )
    data = ["data.items=64", "data.held_out=8", "tracker=none"]
    sft, opd = ["+recipe=sft_demo", *data], ["+recipe=grpo_demo", "tracker=none", "algorithm=opd", "reward=none"]
    for words in (
        ["infer", "model", "hi"],
        ["infer", "adapter", "hi"],
        ["serve", "model"],
        ["eval", "model"],
        ["export", "adapter", "--merge", "--out", "merged"],
        [*sft, "model=hf", "model.path=model"],
        [*sft, "init_from=model"],
        [*opd, "algorithm.teacher=model"],
        ["tinker", "model=hf", "model.path=model"],
    ):
        done = subprocess.run([sys.executable, "-c", program, *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout.split()[-1:] == ["False"] and done.returncode in (2, 4), (words, done.stderr)
        assert "no weights" in done.stderr
