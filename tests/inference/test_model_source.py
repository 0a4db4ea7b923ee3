"""Every notation of a model means one model, and what is loaded computes what transformers and peft compute."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from runner.cli.main import main
from runner.core.errors import CheckpointError, EnvironmentProblem
from runner.inference.model_source import load_source, parse_source
from tests.inference.model_folders import write_adapter, write_base
from tests.model.zoo import causal


def in_process(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(words)
    return (code, *capsys.readouterr())


pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's
IDS = [257, 104, 105, 258]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, and adapters a/ and b/ onto it."""
    root = tmp_path_factory.mktemp("models")
    base = write_base(root / "base")
    write_adapter(root / "a", base)
    write_adapter(root / "b", base, seed=2, r=3, use_rslora=True)
    return root


def logits(model: object) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([IDS])).logits  # type: ignore[operator]


def reference(base: Path, adapter: Path | None = None) -> torch.Tensor:
    """What transformers and peft compute of the folders."""
    made = AutoModelForCausalLM.from_pretrained(base)
    return logits(made if adapter is None else peft.PeftModel.from_pretrained(made, adapter))


def test_a_model_of_few_positions_is_loaded(tmp_path: Path) -> None:
    causal("gpt2", n_positions=40).save(tmp_path)
    loaded = load_source(parse_source(str(tmp_path)), device="cpu")
    assert loaded.model.limits().length_limit == (40, "the model has 40 positions")


def test_a_folder_is_what_transformers_loads(folders: Path) -> None:
    source = parse_source(str(folders / "base"))
    assert (source.kind, source.name, source.adapters) == ("folder", "base", ())
    loaded = load_source(source, device="cpu")
    with loaded.model._generation_mode():  # type: ignore[attr-defined]
        torch.testing.assert_close(logits(loaded.model.inner), reference(folders / "base"))
    assert loaded.tokenizer.chat_template and loaded.prompt_style == "chat" and loaded.step is None


def test_an_adapter_is_found_with_its_base(folders: Path) -> None:
    source = parse_source(str(folders / "a"))
    assert (source.kind, source.name, source.path) == ("folder", "a", str(folders / "base"))
    loaded = load_source(source, device="cpu")
    with loaded.model._generation_mode():  # type: ignore[attr-defined]
        torch.testing.assert_close(logits(loaded.model.module), reference(folders / "base", folders / "a"))
    assert loaded.adapters == {"a": "default"}


def test_several_adapters_stand_over_one_base(folders: Path) -> None:
    loaded = load_source(parse_source(str(folders / "base"), adapters=[str(folders / "a"), f"two={folders / 'b'}"]))
    assert list(loaded.adapters) == ["a", "two"]
    with loaded.model._generation_mode():  # type: ignore[attr-defined]
        for name, folder in (("a", folders / "a"), ("two", folders / "b")):
            loaded.model.module.set_adapter(loaded.adapters[name])  # type: ignore[operator]
            torch.testing.assert_close(logits(loaded.model.module), reference(folders / "base", folder))


def test_a_base_that_has_moved_is_given(folders: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(folders / "a", tmp_path / "a")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for named, complaint in (("/elsewhere/base", "is not a model folder here"), (None, "does not name")):
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": named}))
        with pytest.raises(EnvironmentProblem, match=rf"{complaint}.*--base FOLDER"):
            parse_source(str(adapter))
    assert parse_source(str(adapter), base=str(folders / "base")).path == str(folders / "base")
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "owner/name"}))
    assert (parse_source(str(adapter)).kind, parse_source(str(adapter)).path) == ("hub", "owner/name")


def test_an_adapter_of_another_base_is_refused(folders: Path, tmp_path: Path) -> None:
    other = write_base(tmp_path / "llama", "llama")
    config = json.loads((other / "config.json").read_text())
    assert config["hidden_size"] == 32
    adapter = write_adapter(tmp_path / "gpt2", other, kind="gpt2", target_modules=["c_attn"])
    with pytest.raises(CheckpointError, match=r"gpt2 does not fit its base.*\n.*model\.base=FOLDER"):
        load_source(parse_source(str(adapter)), device="cpu")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"peft_type": "IA3"}, "an adapter of type IA3; only LORA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa changed the base weights"),
    ],
)
def test_an_adapter_that_cannot_be_used_is_named(
    change: dict[str, str], error: str, folders: Path, tmp_path: Path
) -> None:
    adapter = shutil.copytree(folders / "a", tmp_path / "a")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(EnvironmentProblem, match=error):
        parse_source(str(adapter))


def test_words_that_mean_no_model_are_answered(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folders / "base", tmp_path / "trainer" / "checkpoint-3")
    for text, complaint in (
        ("nonsense", "no such folder; expected latest, a run"),
        ("./typo", "no such folder"),
        ("tinker://a:train:0/weights/b", r"no such folder; type .*: outputs/RUN/clients/\*/weights/NAME"),
        ("trainer", r"is not a model: .*did you mean trainer/checkpoint-3\?"),
    ):
        with pytest.raises(EnvironmentProblem, match=complaint):
            parse_source(text)
    with pytest.raises(EnvironmentProblem, match="--checkpoint best is for a run"):
        parse_source(str(folders / "base"), checkpoint="best")
    with pytest.raises(EnvironmentProblem, match="--base x is for an adapter"):
        parse_source(str(folders / "base"), base="x")
    with pytest.raises(EnvironmentProblem, match="two adapters have the same name"):
        parse_source(str(folders / "a"), adapters=[str(folders / "a")])
    with pytest.raises(EnvironmentProblem, match=r"no adapter_config\.json"):
        parse_source(str(folders / "base"), adapters=["trainer"])


@pytest.mark.parametrize(
    ("variable", "name"), [("HF_ENDPOINT", "owner/name"), ("MODELSCOPE_ENDPOINT", "modelscope:owner/name")]
)
def test_a_hub_that_accepts_and_never_answers_is_given_up(
    variable: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace(snapshot_download=lambda path: time.sleep(60)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []
        threading.Thread(target=lambda: held.append(server.accept()[0]), daemon=True).start()
        monkeypatch.setenv(variable, f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr("runner.model.model_folder.ANSWER_S", 0.2)
        for unset in ("HF_HUB_OFFLINE", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(unset, raising=False)
        begun = time.monotonic()
        code, _, err = in_process(["infer", name, "hi"], capsys)
        assert (code, time.monotonic() - begun < 50) == (2, True) and "does not respond within 0.2 s" in err
        for accepted in held:
            accepted.close()


def test_infer_answers_with_a_folder_and_an_adapter(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The likeliest tokens of transformers, from the command line."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders / "base")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)["input_ids"]
    for where in (folders / "base", folders / "a"):
        model = AutoModelForCausalLM.from_pretrained(folders / "base")
        model = model if where.name == "base" else peft.PeftModel.from_pretrained(model, where)
        wanted = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :]
        code, out, err = in_process(["infer", str(where), "--max-new-tokens", "8", "device=cpu", "hi"], capsys)
        assert (code, out) == (0, tokenizer.decode(wanted, skip_special_tokens=True) + "\n"), err


@pytest.mark.parametrize("verb", ["infer", "chat"])
def test_a_verb_of_one_adapter_refuses_several(verb: str, folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapters = [f"--adapter={folders / name}" for name in ("a", "b")]
    assert main([verb, str(folders / "base"), *adapters]) == 2
    assert f"run {verb} takes one adapter; run serve supports several by name" in capsys.readouterr().err
