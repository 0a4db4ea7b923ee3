"""The SDK of Tinker and its cookbook, unmodified, against a real server; servers that are killed; several ranks.

`make test-tinker` makes the environment that RUN_TINKER_VENV names; without it the SDK's tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from runner.build.components import build_tokenizer
from runner.build.data import build_data
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.tinker.checkpoints import CheckpointPath, ClientStore
from tests import command
from tests.inference.scripted import serve
from tests.tinker.servers import SIZES, Client, supervised

ENVIRONMENT = Path(os.environ.get("RUN_TINKER_VENV", ""))
needs_sdk = pytest.mark.skipif("RUN_TINKER_VENV" not in os.environ, reason="make test-tinker sets RUN_TINKER_VENV")
pytestmark = pytest.mark.slow
TINY = ("model=tiny", *(f"model.{name}={size}" for name, size in SIZES.items()))


@contextmanager
def served(cwd: Path, *words: str, **environment: str) -> Iterator[tuple[str, command.Command, Path]]:
    """The URL of a server in a process, its process and its folder."""
    cwd.mkdir(exist_ok=True)
    (cwd / "printed").touch()
    started = command.Command(*words, cwd=cwd, printed=cwd / "printed", **environment)
    try:
        deadline = time.monotonic() + 300  # a busy machine builds the simulated NPU first
        while "TINKER_BASE_URL=" not in (said := started.said()):
            assert started.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.1)
        folder = next(line.split(maxsplit=1)[1] for line in said.splitlines() if line.startswith("folder"))
        yield said.split("TINKER_BASE_URL=")[1].split()[0], started, cwd / folder
    finally:
        if started.poll() is None:
            started.send_signal(signal.SIGTERM)
            assert started.wait(60) == 143, started.said()


def tinker_words(*words: str) -> tuple[str, ...]:
    return ("tinker", *TINY, "tracker=none", "tinker.port=0", *words)


def sdk(url: str, *words: str, cwd: Path, sdk_version: str | None = None) -> str:
    """What a program prints in the SDK's environment."""
    own = os.environ | {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0"}
    own |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "WANDB_MODE": "disabled"}
    own["PYTHONPATH"] = "" if sdk_version is None else str(ENVIRONMENT / "old" / sdk_version)
    arguments = [str(ENVIRONMENT / "bin/python"), *words]
    done = subprocess.run(arguments, cwd=cwd, env=own, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    return done.stdout


SCRIPT = str(Path(__file__).with_name("sdk_client.py"))


def sdk_steps(url: str, given: Mapping[str, Any], cwd: Path) -> Any:
    """What sdk_client.py finds in its steps over the batches of `given`."""
    (cwd / "given.json").write_text(json.dumps(given))
    return json.loads(sdk(url, SCRIPT, "steps", str(cwd / "given.json"), cwd=cwd).splitlines()[-1])


@needs_sdk
def test_each_sdk_trains_saves_samples_and_lists(tmp_path: Path) -> None:
    with served(tmp_path / "run", *tinker_words()) as (url, _, _):
        for sdk_version in (None, "0.25.0", "0.24.0"):
            found = json.loads(sdk(url, SCRIPT, "everything", cwd=tmp_path, sdk_version=sdk_version).splitlines()[-1])
            assert found["sdk"] == (sdk_version or "0.38.0") and found["rank"] == 8
            assert found["losses"] == sorted(found["losses"], reverse=True)
            assert found["before"] == found["after"] != found["continued"][0] == found["continued"][1]
            value, expected, norm, expected_norm = found["custom"]
            assert abs(value / expected - 1) < 1e-6 and abs(norm / expected_norm - 1) < 1e-6
            for loss in ("importance_sampling", "ppo"):
                assert -4 < found[loss] < -3
            assert "loss_fn 'gspo' is not supported" in found["gspo"]
            assert found["samples"][0] == found["samples"][1] and found["base"] == 3
            assert found["prompt"][0] is None and len(found["prompt"]) == 4 and found["top"] == 2
            assert found["listed"] == [["sampler_weights/b", "weights/a"], ["sampler_weights/b"]]


@needs_sdk
def test_sft_through_the_sdk_is_the_job(tmp_path: Path) -> None:
    chats = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n}{n}"}]}
        for n in range(6)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, chats)))
    words = [
        *TINY,
        "adapter=lora",
        "data=file",
        f"data.path={tmp_path}/rows.jsonl",
        "data.shuffle=false",
        "algorithm.batch_size=6",
        "steps=10",
        "optimizer.lr=1e-3",
        "optimizer.weight_decay=0.1",
        "tracker=none",
    ]
    command.run(*words, cwd=tmp_path)
    job = tmp_path / "outputs/latest"
    spec = compose_job(words).spec
    items = build_data(spec, build_tokenizer(spec, Decisions()), Decisions()).take(0, 6)
    total = sum(weight != 0 for item in items for weight in item.weights[1:])
    weights = ([weight / total for weight in item.weights[1:]] for item in items)
    rows = [{"ids": item.ids, "inputs": {"weights": own}} for item, own in zip(items, weights, strict=True)]
    given = {
        "lora": {"rank": 16, "seed": 0, "train_unembed": False},
        "adam": {
            "learning_rate": 1e-3,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-8,
            "weight_decay": 0.1,
            "grad_clip_norm": 1.0,
        },
        "loss": "cross_entropy",
        "batches": [rows] * 10,
    }
    with served(tmp_path / "run", *tinker_words()) as (url, _, folder):
        found = sdk_steps(url, given, tmp_path)
    lines = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    wanted = [line["train/loss"] for line in lines if "train/loss" in line]
    np.testing.assert_allclose(found["losses"], wanted, rtol=0, atol=1e-6)
    adapter = load_file(
        ClientStore(folder / "clients").path(CheckpointPath.parse(found["path"])) / "adapter_model.safetensors"
    )
    [file] = job.glob("checkpoints/step-00000010/*policy*.safetensors")
    trained = {name.replace(".default.", "."): value for name, value in load_file(file).items()}
    for name, value in adapter.items():
        [own] = [other for key, other in trained.items() if key.endswith(name) and "optim" not in key]
        np.testing.assert_allclose(value, own, rtol=0, atol=1e-6)


@needs_sdk
def test_the_cookbooks_loops_run_unmodified(tmp_path: Path) -> None:
    with served(tmp_path / "base", "tinker", "model=tiny", "tracker=none", "tinker.port=0") as (_, _, folder):
        shutil.copytree(folder / "base", tmp_path / "Qwen/Qwen3-8B")  # the cookbook chooses a renderer by the name
    write_data_sets(tmp_path)
    path = f"model.path={tmp_path}/Qwen/Qwen3-8B"
    with served(tmp_path / "run", "tinker", "model=hf", path, "tracker=none", "tinker.port=0") as (url, _, folder):
        common = ["model_name=Qwen/Qwen3-8B", "batch_size=4", "max_steps=2", "save_every=1"]
        sdk(
            url,
            "-m",
            "tinker_cookbook.recipes.sl_loop",
            *common,
            f"log_path={tmp_path}/sl",
            "max_length=256",
            cwd=tmp_path,
        )
        sdk(
            url,
            "-m",
            "tinker_cookbook.recipes.rl_loop",
            *common,
            f"log_path={tmp_path}/rl",
            "group_size=2",
            "max_tokens=8",
            cwd=tmp_path,
        )
        for name in ("sl", "rl"):
            assert len((tmp_path / name / "metrics.jsonl").read_text().splitlines()) >= 2
            assert "final" in (tmp_path / name / "checkpoints.jsonl").read_text()
        lines = [len(one.read_text().splitlines()) for one in (folder / "clients").glob("*/metrics.jsonl")]
        assert sorted(lines) == [0, 2], "without a reward, rl_loop makes no step"


def write_data_sets(root: Path) -> None:
    """Local folders by the names of the data sets that the loops load."""
    chats = [
        {"messages": [{"role": "user", "content": f"sort {n}"}, {"role": "assistant", "content": str(n)}]}
        for n in range(16)
    ]
    problems = [{"question": f"What is {n}+1?", "answer": f"#### {n + 1}"} for n in range(16)]
    for path, rows in (("HuggingFaceH4/no_robots", chats), ("openai/gsm8k/main", problems)):
        (root / path).mkdir(parents=True)
        for split in ("train", "test"):
            (root / path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = "".join(f"  - split: {one}\n    path: main/{one}.jsonl\n" for one in ("train", "test"))
    head = f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n"
    (root / "openai/gsm8k/README.md").write_text(head)


def numbers(client: Client, model_id: str, first: int, count: int) -> list[float]:
    """Losses and gradient norms of steps over fixed rows."""
    found = []
    for seq in range(first, first + 2 * count, 2):
        found.append(client.result(client.begin_pass(model_id, seq, supervised()))["metrics"]["loss:sum"])
        found.append(client.result(client.begin_step(model_id, seq + 1))["metrics"]["grad_norm:mean"])
    return found


POINTS = {"step": "tinker.optim_step:kill", "save": "replace_folder.before_renames:kill"}


@pytest.mark.parametrize("when", ["pass", "step", "save"])
def test_a_killed_server_continues_from_what_was_saved(tmp_path: Path, when: str) -> None:
    with served(tmp_path, *tinker_words("data=none")) as (url, _, folder):
        client = Client(url)
        model_id = client.train(client.session())
        numbers(client, model_id, 1, 2)
        state = client.result(client.post("save_weights", {"model_id": model_id, "seq_id": 5, "path": "a"}))["path"]
        wanted = numbers(client, model_id, 6, 2)
    with served(tmp_path, "resume", str(folder), **fail_at(when)) as (url, started, _):
        client = Client(url)
        killed = continue_from(client, state)
        for seq in range(1, 30) if when == "pass" else (1,):
            client.begin_pass(killed, seq, supervised([[1, 2] * 100] * 30))
        if when == "step":
            client.begin_step(killed, 2)
        elif when == "save":
            client.post("save_weights", {"model_id": killed, "seq_id": 2, "path": "b"})
        else:
            time.sleep(0.3)
            started.kill()
        assert started.wait(60) == -signal.SIGKILL
    with served(tmp_path, "resume", str(folder)) as (url, _, _):
        client = Client(url)
        answer = client.http.post("optim_step", json={"model_id": killed, "seq_id": 50})
        assert answer.status_code == 404 and "the server was restarted" in answer.text
        assert numbers(client, continue_from(client, state), 1, 2) == wanted
        assert client.http.get(f"training_runs/{killed}/checkpoints").json()["checkpoints"] == []
        assert not list((folder / "clients").glob("*/*/.staging-*"))


def fail_at(when: str) -> dict[str, str]:
    """The environment that kills a server in the first request of a kind."""
    return {"RUNNER_FAILPOINT": POINTS[when]} if when in POINTS else {}


def continue_from(client: Client, state: str) -> str:
    """The id of a new training client that continues a saved state."""
    body = {"session_id": client.session(), "model_seq_id": 0, "path": state, "optimizer": True}
    return str(client.result(client.post("load_weights", body))["model_id"])


RANKS: dict[str, Sequence[str]] = {
    "ddp": ("parallelism=ddp", "launch.devices=2"),
    "fsdp": ("parallelism=fsdp", "launch.devices=2"),
    "hsdp": ("parallelism=hsdp", "launch.devices=4"),
    "npu": ("device=npu_sim", "device.cards=2", "model.dtype=float32", "parallelism=fsdp", "launch.devices=2"),
}


@pytest.mark.parametrize("layout", RANKS)
def test_ranks_compute_what_one_process_does(tmp_path: Path, layout: str) -> None:
    def results(name: str, *words: str) -> tuple[list[float], Any]:
        with served(tmp_path / name, *tinker_words(*words)) as (url, _, _):
            client = Client(url)
            session = client.session()
            model_id = client.train(session)
            found = numbers(client, model_id, 1, 4)
            body = {"model_id": model_id, "seq_id": 9, "sampling_session_seq_id": 0}
            sampler = client.result(client.post("save_weights_for_sampler", body))["sampling_session_id"]
            prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
            params = {"max_tokens": 6, "seed": 3, "temperature": 1.0, "stop": []}
            started = [
                client.post(
                    "asample",
                    {
                        "sampling_session_id": sampler,
                        "seq_id": seq,
                        "prompt": prompt,
                        "num_samples": 2,
                        "sampling_params": params,
                        "prompt_logprobs": True,
                    },
                )
                for seq in range(3)
            ]
            return found, [client.result(one)["sequences"] for one in started]

    alone, several = results("one"), results("two", *RANKS[layout])
    np.testing.assert_allclose(several[0], alone[0], rtol=1e-6)
    tokens = [[[answer["tokens"] for answer in one] for one in found[1]] for found in (alone, several)]
    assert tokens[0] == tokens[1]


def test_the_demo_trains_over_http(tmp_path: Path) -> None:
    said = command.run("+recipe=tinker_demo", "tracker.mode=offline", cwd=tmp_path)
    assert "sample   a tiny: a tiny model learns a sentence from its bytes" in said
    first, last = (float(word) for word in said.split("reward ")[1].split(" in ")[0].split(" → "))
    assert first < 0.3 and last > 0.8
    run = tmp_path / "outputs/latest"
    clients = sorted(path.parent for path in run.glob("clients/*/client.json"))
    for client in clients:
        losses = [json.loads(line)["train/loss"] for line in (client / "metrics.jsonl").read_text().splitlines()]
        assert len(losses) > 10 and list(client.glob("wandb/offline-run-*/*.wandb")), "each is a run of the tracker"
    assert len(clients) == 2 and "2 training clients with " in command.run("status", "latest", cwd=tmp_path)
    [saved] = run.glob("clients/*/weights/sentence")
    command.run("export", str(saved), "--merge", "--out", "merged", cwd=tmp_path)
    greedy = ("a tiny", "--temperature", "0", "--max-new-tokens", "6")
    sources = (str(saved), "merged", str(run / "base"))
    words = [command.run("infer", one, *greedy, cwd=tmp_path).splitlines()[-1] for one in sources]
    assert words[0] == words[1] != words[2]
    chat = [{"role": "user", "content": "a tiny"}, {"role": "assistant", "content": "model"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": chat}))
    command.run("eval", *sources, "+evaluation.sets.mine={data: {name: file, path: rows.jsonl}}", cwd=tmp_path)
    [results] = tmp_path.glob("outputs/eval/*/results.json")
    losses = [one["loss"] for one in json.loads(results.read_text())["sets"]["mine"]["values"].values()]
    assert abs(losses[0] - losses[1]) < 1e-4 < abs(losses[0] - losses[2])
    with serve(saved, cwd=tmp_path) as server:
        body = {"model": server.model, "prompt": "a tiny", "max_tokens": 6, "temperature": 0}
        assert httpx.post(f"{server.url}/completions", json=body, timeout=60).json()["choices"][0]["text"] == words[0]


def test_a_client_program_that_fails_is_the_jobs_error(tmp_path: Path) -> None:
    said = command.run(*tinker_words("tinker.command=[python,-c,'raise SystemExit(3)']"), cwd=tmp_path, code=1)
    assert "ended with exit code 3" in said
    said = command.run(*tinker_words("tinker.command=[no_such_program]"), cwd=tmp_path, code=2)
    assert "tinker.command: no_such_program cannot be started: No such file or directory" in said


def test_another_host_needs_keys(tmp_path: Path) -> None:
    said = command.run(*tinker_words("tinker.host=0.0.0.0"), cwd=tmp_path, code=2)
    assert "other machines could use the server without a key" in said and "tinker.key_file=FILE" in said
