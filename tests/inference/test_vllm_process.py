"""`vllm serve` as a child: its command, and its supervision with a program in its place that speaks HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import pytest
import torch
import yaml
from safetensors.torch import save_file

from runner.checkpoint.format import MANIFEST_FILE, Manifest, encode_manifest
from runner.cli.job_builder import compose_job
from runner.core.device_kinds import KINDS
from runner.core.errors import EnvironmentProblem
from runner.inference.engine_process import EngineSettings
from runner.inference.model_source import AdapterSource, Checkpoint, ModelSource
from runner.inference.serve import ServeSettings
from runner.inference.vllm_process import chat_options, exported_source, vllm_command, vllm_environment
from runner.launch.export import CardFacts, write_card
from runner.model.tiny import byte_tokenizer
from tests.inference.scripted import serve

STAND_IN = """\
#!{python}
import http.server, json, os, signal, sys, time
words = sys.argv[1:]
if "--busy" in words:
    signal.signal(signal.SIGTERM, lambda *_: print("draining", flush=True))
print("this is the log of", *words, flush=True)
if "--fail" in words:
    sys.exit("no card is free")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({{"words": words, "key": os.environ.get("VLLM_API_KEY")}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
time.sleep(3600 if "--hang" in words else 0.3)
address = words[words.index("--host") + 1], int(words[words.index("--port") + 1])
http.server.ThreadingHTTPServer(address, Handler).serve_forever()
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder, beside a program named vllm that is found first."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    folder = tmp_path / "Qwen"
    folder.mkdir()
    write_model(folder)
    return folder


def write_model(folder: Path) -> None:
    """A folder that looks like a model's."""
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    save_file({"w": torch.zeros(1)}, folder / "model.safetensors")


def test_it_is_started_awaited_and_stopped(model: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k")
    key.chmod(0o600)
    words = ["engine=vllm", "device=cpu", "--api-key-file", str(key), "--", "--max-model-len", "128"]
    with serve(model, *words, cwd=tmp_path) as server:
        answer = httpx.get(server.url.replace("/v1", "/health"), timeout=60).json()
        assert answer["key"] == "k" and "k" not in answer["words"]
        assert answer["words"][:2] == ["serve", str(model)] and answer["words"][-2:] == ["--max-model-len", "128"]
        printed = server.printed.read_text()
        assert "/invocations generates without one. Let other machines reach /v1 alone" in printed
        assert f"engine=vllm: vllm serve {model} --host 127.0.0.1 --port {server.address[1]}" in printed
        assert "this is the log of serve" in (tmp_path / "outputs" / "vllm-Qwen.log").read_text()
        assert server.stop(signal.SIGTERM) == 143
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url, timeout=60)


def test_requests_in_flight_end_within_grace_s_unless_a_second_signal_comes(model: Path, tmp_path: Path) -> None:
    with serve(model, "engine=vllm", "device=cpu", "grace_s=1000", "--", "--busy", cwd=tmp_path) as server:
        server.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + 100
        while "draining" not in (tmp_path / "outputs" / "vllm-Qwen.log").read_text():
            assert time.monotonic() < end
            time.sleep(0.05)
        assert server.process.poll() is None
        assert server.stop(signal.SIGTERM) == 143


def start(model: Path, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runner", "serve", str(model), "engine=vllm", "device=cpu", "port=0", *words]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)


def test_one_that_ends_or_does_not_answer_is_an_error(model: Path, tmp_path: Path) -> None:
    ended = start(model, tmp_path, "--", "--fail")
    assert ended.returncode == 75 and "vLLM exited with code 1" in ended.stderr and "no card is free" in ended.stderr
    late = start(model, tmp_path, "start_timeout_s=0.5", "--", "--hang")
    assert late.returncode == 6 and "within 0.5 s; its log is outputs/vllm-Qwen.log" in late.stderr


def test_it_ends_with_its_parent(model: Path, tmp_path: Path) -> None:
    with serve(model, "engine=vllm", "device=cpu", cwd=tmp_path) as server:
        server.stop(signal.SIGKILL)
        end = time.monotonic() + 100
        while time.monotonic() < end:
            try:
                httpx.get(server.url, timeout=60)
            except httpx.TransportError:  # it may end in the middle of an answer
                return
            time.sleep(0.05)
        pytest.fail("it still answers")


def test_the_command_has_the_options_that_training_was_done_with(tmp_path: Path) -> None:
    for name, rank in (("a", 4), ("b", 48)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"r": rank}))
    adapters = tuple(AdapterSource(name, str(tmp_path / name)) for name in "ab")
    source = ModelSource("a", "folder", "a", "/base", adapters=adapters)
    settings = ServeSettings(port=9000, grace_s=2.5, logprobs_mode="processed", vllm_options=("--seed", "1"))
    command = vllm_command(
        source, EngineSettings(source="a", max_num_seqs=7, trust_remote_code=True), settings, KINDS["npu"]
    )
    assert command == [
        *("vllm", "serve", "/base", "--host", "127.0.0.1", "--port", "9000", "--served-model-name", "a-base"),
        *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", "--max-num-seqs", "7"),
        *("--shutdown-timeout", "3", "--allowed-media-domains", "none.invalid"),
        *("--enforce-eager", "--trust-remote-code", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "64"),
        *("--lora-modules", f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}", "--seed", "1"),
    ]
    plain = vllm_command(
        ModelSource("m", "folder", "m", "/m"), EngineSettings(source="m"), ServeSettings(), KINDS["cuda"]
    )
    on_cpu = vllm_command(
        ModelSource("m", "folder", "m", "/m"), EngineSettings(source="m"), ServeSettings(), KINDS["cpu"]
    )
    assert "--no-enable-chunked-prefill" in on_cpu and "--no-enable-chunked-prefill" not in plain
    assert "--enforce-eager" not in plain and "--enable-lora" not in plain and "raw_logprobs" in plain


def test_vllm_gets_the_chat_template_and_end_tokens_of_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_tokenizer(name: str, template: str) -> str:
        tokenizer = byte_tokenizer(16)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    base, equal, other = (write_tokenizer(name, t) for name, t in (("base", "a"), ("equal", "a"), ("other", "b")))

    def found(*names: str) -> Sequence[str]:
        adapters = tuple(AdapterSource(name, str(tmp_path / name)) for name in names)
        source = ModelSource("x", "folder", "other", base, adapters=adapters)
        return chat_options(source, EngineSettings(source="x"), tmp_path / "vllm-x")

    plain = ["--generation-config", "vllm"]
    assert found() == found("equal") == found("without") == plain and not capsys.readouterr().err
    assert found("other") == ["--tokenizer", other, *plain]
    assert "the base other-base is served with the chat template of its adapters" in capsys.readouterr().err
    with pytest.raises(EnvironmentProblem, match="another chat template"):
        found("equal", "other")
    assert not (tmp_path / "vllm-x").exists()
    (Path(equal) / "generation_config.json").write_text('{"eos_token_id": [5, 3], "temperature": 0.6}')
    (Path(other) / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert found("equal") == ["--generation-config", str(tmp_path / "vllm-x")]
    assert json.loads((tmp_path / "vllm-x" / "generation_config.json").read_text()) == {"eos_token_id": [3, 5]}
    assert found("other") == ["--tokenizer", other, "--generation-config", str(tmp_path / "vllm-x")]
    assert json.loads((tmp_path / "vllm-x" / "generation_config.json").read_text()) == {"eos_token_id": [7]}
    command = vllm_command(
        ModelSource("x", "folder", "m", "/m"),
        EngineSettings(source="x"),
        ServeSettings(),
        KINDS["cuda"],
        found("other"),
    )
    assert "vllm" not in command[1:] and command[command.index("--tokenizer") + 1] == other


def test_weights_can_be_replaced_only_where_that_was_typed() -> None:
    before = {"PATH": "/bin", "VLLM_SERVER_DEV_MODE": "1"}
    assert vllm_environment(before, None, ServeSettings(), KINDS["npu"]) == {"PATH": "/bin"}
    found = vllm_environment(before, "k", ServeSettings(weight_updates=True), KINDS["npu"])
    own = {"VLLM_API_KEY": "k", "VLLM_SERVER_DEV_MODE": "1", "VLLM_ASCEND_ENABLE_NZ": "0"}
    assert found == {"PATH": "/bin", **own}


def write_run(root: Path, steps: Sequence[int], exports: Mapping[str, int | None]) -> Path:
    """A run's folder with checkpoints whose eval/loss grows, and exports with their cards; None = without one."""
    spec = compose_job(["+recipe=sft_demo", "checkpoint.best=eval/loss"]).spec
    for step in steps:
        (folder := root / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
        (folder / MANIFEST_FILE).write_bytes(encode_manifest(Manifest(step, "", {"eval/loss": float(step)}, {})))
    (root / "spec.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    for name, exported in exports.items():
        (root / name).mkdir(parents=True)
        write_model(root / name)
        if exported is not None:
            write_card(root / name, spec, CardFacts(exported, {}))
    return root


def run_source(root: Path, checkpoint: Checkpoint = "last") -> ModelSource:
    return ModelSource("latest", "run", "demo", str(root), checkpoint)


def test_a_run_is_served_from_its_export(tmp_path: Path) -> None:
    run = run_source(tmp_path)
    with pytest.raises(EnvironmentProblem, match="latest has none; type: run export latest"):
        exported_source(run)
    write_run(tmp_path, [], {"export": None})
    found, step = exported_source(run)
    assert (found.kind, found.name, found.path) == ("folder", "demo", str((tmp_path / "export").resolve()))
    assert step is None


@pytest.mark.parametrize(
    ("checkpoint", "exports", "folder", "step"),
    [
        ("last", {"export": 3}, "export", 3),
        ("last", {"export": 4}, "export", 4),
        ("last", {"export": 2, "export-step-3": 3}, "export-step-3", 3),
        (2, {"export": 3, "export-step-2": 2}, "export-step-2", 2),
        ("best", {"export": 3, "export-step-2": 2}, "export-step-2", 2),
        ("best", {"export": 2}, "export", 2),
    ],
)
def test_the_export_served_is_that_of_the_checkpoint(
    checkpoint: Checkpoint, exports: dict[str, int | None], folder: str, step: int, tmp_path: Path
) -> None:
    found, exported = exported_source(run_source(write_run(tmp_path, [2, 3], exports), checkpoint))
    assert (Path(found.path).name, exported) == (folder, step)


@pytest.mark.parametrize(
    ("checkpoint", "exports", "text"),
    [
        ("last", {"export": 2}, r"none of checkpoint 3; type: run export latest\n  export/ is of step 2: --check"),
        (2, {"export": 3}, "none of checkpoint 2; type: run export latest --checkpoint 2"),
        (2, {"export": None}, "none of checkpoint 2; type: run export latest --checkpoint 2$"),
        ("best", {"export": 3}, "none of checkpoint 2; type: run export latest --checkpoint best"),
    ],
)
def test_an_export_of_another_checkpoint_is_not_served(
    checkpoint: Checkpoint, exports: dict[str, int | None], text: str, tmp_path: Path
) -> None:
    with pytest.raises(EnvironmentProblem, match=text):
        exported_source(run_source(write_run(tmp_path, [2, 3], exports), checkpoint))


def test_an_export_that_does_not_say_its_step_is_served_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exported_source(run_source(write_run(tmp_path, [2, 3], {"export": None})))[1] is None
    assert "export does not say its step; it may be older than the newest checkpoint, 3" in capsys.readouterr().err
