"""What goes with a job that is handed over to a Ray cluster, what is refused before that, and its arrival there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runner import __version__
from runner.cli.compose import compose_job
from runner.errors import DataError, EnvironmentProblem, SpecError
from runner.launch.ray import arrival
from runner.launch.ray.parcel import LIMIT_BYTES, Parcel, packed
from runner.launch.ray.submission import fit_to_travel, knock, need_client
from runner.launch.verdict import JobFailed
from runner.registry import default_registry
from runner.spec.decode import decode
from tests.ports import free_port

HERE = ("device=cpu", "launch=ray", "launch.address=http://head:8265")
PAIRS = "".join(json.dumps({"prompt": f"say {n}", "completion": str(n)}) + "\n" for n in range(40))
REWARD = "def score(completions):\n    return [float(len(str(text)) % 7) for text in completions]\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's, with a file of data, and a place beside it."""
    here = tmp_path / "here"
    (here / "data").mkdir(parents=True)
    (here / "data" / "pairs.jsonl").write_text(PAIRS)
    (tmp_path / "beside.jsonl").write_text(PAIRS)
    monkeypatch.chdir(here)
    return here


def parcel_of(*words: str) -> Parcel:
    return packed(compose_job([*words, *HERE]).spec)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["launch.address=ray://head:10001"], "launch.address: .* type http://HOST:8265"),
        (["launch.address=http://"], "launch.address: expected http://HOST:8265"),
        (["launch.address=http://me:word@head:8265"], "launch.address: an address with a password"),
        (["launch.address=http://head:8265", "device=auto"], "device: .* type device=npu, cuda or cpu"),
        (["launch.address=http://head:8265", "launch.folder=runs"], "launch.folder: begins with / or ~/"),
        (["launch.address=auto", "launch.folder=/shared"], "launch.folder: is for launch.address=http"),
        (["launch.folder=/shared"], "launch.folder: is for launch.address=http"),
    ],
)
def test_what_cannot_be_is_refused_by_its_option(words: list[str], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        compose_job(["+recipe=sft_demo", "launch=ray", *words])


def test_relative_paths_travel_and_absolute_ones_are_the_clusters(folder: Path, tmp_path: Path) -> None:
    words = ("data=file", "data.path=data/pairs.jsonl", "data.eval_path=../beside.jsonl", "model=tiny", "steps=2")
    parcel = parcel_of(*words)
    beside = next(name for name in parcel.files if name.startswith("beside/"))
    assert parcel.files == {
        "data/pairs.jsonl": folder / "data" / "pairs.jsonl",
        beside: tmp_path / "beside.jsonl",
    }
    assert beside.endswith("/beside.jsonl") and ".." not in beside
    there = f"outputs/.carried/{parcel.key}"
    assert parcel.spec["data"]["path"] == f"{there}/data/pairs.jsonl"
    assert parcel.spec["data"]["eval_path"] == f"{there}/{beside}"
    assert parcel.spec["launch"]["address"] == "auto" and parcel.spec["launch"]["folder"] is None
    decode(parcel.spec, {}, default_registry())
    on_cluster = parcel_of("data=file", "data.path=/nowhere/here/pairs.jsonl", "model=hf", "model.path=/models/it")
    assert on_cluster.files == {} and on_cluster.spec["data"]["path"] == "/nowhere/here/pairs.jsonl"


@pytest.mark.slow
def test_a_reward_function_travels_alone_and_in_a_sum(folder: Path) -> None:
    (folder / "mine.py").write_text(REWARD)
    parcel = parcel_of("+recipe=grpo_demo", "init_from=null", "reward=function", "reward.path=mine.py:score")
    assert list(parcel.files) == ["mine.py"]
    assert parcel.spec["reward"]["path"] == f"outputs/.carried/{parcel.key}/mine.py:score"
    parts = "reward.parts=[{name:function,path:'mine.py:score'},{name:length,max:8,cache:2}]"
    summed = parcel_of("+recipe=grpo_demo", "init_from=null", "reward=sum", parts)
    assert f"outputs/.carried/{summed.key}/mine.py:score" in json.dumps(summed.spec["reward"])


@pytest.mark.slow
def test_the_key_is_of_the_content_and_the_zip_has_all_of_it(folder: Path, tmp_path: Path) -> None:
    words = ("data=file", "data.path=data", "model=tiny")
    (folder / "data" / ".gitignore").write_text("*\n")
    first = parcel_of(*words)
    assert first.key == parcel_of(*words).key
    first.write(tmp_path / "job.zip")
    with zipfile.ZipFile(tmp_path / "job.zip") as archive:
        assert sorted(archive.namelist()) == sorted(
            ["arrival.py", "spec.yaml", "files/data/.gitignore", "files/data/pairs.jsonl"]
        )
        assert archive.read("files/data/pairs.jsonl").decode() == PAIRS
    (folder / "data" / "pairs.jsonl").write_text(PAIRS + PAIRS)
    assert parcel_of(*words).key != first.key


@pytest.mark.slow
def test_mistakes_here_are_said_here(folder: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.jsonl: no such file"):
        parcel_of("data=file", "data.path=nothing.jsonl", "model=tiny")
    with pytest.raises(SpecError, match=r"reward\.path"):
        parcel_of("+recipe=grpo_demo", "init_from=null", "reward=function", "reward.path=absent.py:score")
    with pytest.raises(SpecError, match=r"init_from: runs/absent: no such folder here"):
        parcel_of("+recipe=grpo_demo", "init_from=runs/absent")
    (folder / "recipes").mkdir()
    (folder / "recipes" / "mine.yaml").write_text("# @package _global_\nsteps: 2\n")
    with pytest.raises(SpecError, match=r"init_from: recipe:mine is a recipe of yours, and not on the cluster"):
        parcel_of("+recipe=grpo_demo", "init_from=recipe:mine")


@pytest.mark.slow
def test_too_much_is_refused_with_the_biggest_of_it(folder: Path) -> None:
    with (folder / "data" / "huge.jsonl").open("w") as file:
        file.write(PAIRS)
        file.truncate(LIMIT_BYTES + 1)
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    os.truncate(os.open(model / "model.safetensors", os.O_RDWR | os.O_CREAT), LIMIT_BYTES + 1)
    with pytest.raises(EnvironmentProblem) as caught:
        parcel_of("data=file", "data.path=data/pairs.jsonl", "model=hf", "model.path=model")
    assert "names 100.0 MiB of this folder" in str(caught.value) and "model/model.safetensors" in str(caught.value)
    assert "huge" not in str(caught.value), "which nobody named"


def test_neither_secrets_nor_what_is_of_this_machine_goes() -> None:
    environment = {
        "NCCL_DEBUG": "INFO", "TOKENIZERS_PARALLELISM": "false", "WANDB_PROJECT": "p", "OMP_NUM_THREADS": "2",
        "WANDB_API_KEY": "k", "HF_TOKEN": "t", "HUGGINGFACE_HUB_TOKEN": "t", "WANDB_BASE_URL": "https://me:pw@host",
        "WANDB_X_EXTRA_HTTP_HEADERS": "{}", "HF_HUB_COOKIE": "c", "HF_HUB_AUTH": "a", "WANDB_NOTES": "a basic run",
        "WANDB_HTTP": '{"Authorization": "Bearer abcdef0123"}', "HF_HUB": "authorization=Basic%20dXNlcjpwdw==",
        "WANDB_AUTHOR": "me",
        "HF_HOME": "/data/hf", "HTTPS_PROXY": "http://proxy:1", "PYTHONPATH": "lib", "PATH": "/bin", "MY_KEY": "x",
    }  # fmt: skip
    goes, stays = fit_to_travel(environment)
    harmless = {"NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "WANDB_PROJECT", "OMP_NUM_THREADS"}
    assert set(goes) == harmless | {"WANDB_NOTES", "WANDB_AUTHOR"}
    secrets = {name for name, why in stays.items() if "secret" in why}
    plain = {"WANDB_API_KEY", "HF_TOKEN", "HUGGINGFACE_HUB_TOKEN", "WANDB_BASE_URL"}
    in_headers = {"WANDB_X_EXTRA_HTTP_HEADERS", "HF_HUB_COOKIE", "HF_HUB_AUTH", "WANDB_HTTP", "HF_HUB"}
    assert secrets == plain | in_headers
    assert set(stays) - secrets == {"HF_HOME", "HTTPS_PROXY", "PYTHONPATH"}, "PATH and MY_KEY are no job's at all"


@pytest.mark.parametrize(
    ("code", "ends", "words"),
    [
        (3, 3, "ended with exit code 3; what"),
        (-9, 75, "was killed .SIGKILL.; what it said is above"),
        (-99, 75, "was killed .signal 99.; what"),
        (None, 75, "no more room"),
    ],
)
def test_a_job_that_was_killed_ends_with_75(
    code: int | None, ends: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    pytest.importorskip("aiohttp")
    from ray.job_submission import JobStatus

    from runner.launch.ray import jobs

    found = SimpleNamespace(status=JobStatus.FAILED, driver_exit_code=code, message="no more room")

    async def followed(self: object, job: str) -> object:
        return found

    monkeypatch.setattr(jobs.Jobs, "_followed", followed)
    with pytest.raises(JobFailed, match=words) as caught:
        jobs.Jobs(cast(Any, None), "http://head:8265").follow("raysubmit_1", "/shared")
    assert caught.value.exit_code == ends


@contextmanager
def somebody(code: int, said: bytes) -> Iterator[str]:
    """A server of another kind, or of another Ray."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "said", "text"),
    [
        (404, b"", "is not Ray's dashboard .HTTP 404"),
        (200, b"<html>", "is not Ray's dashboard .no version of Ray"),
        (200, b'{"ray_version": 7}', "is not Ray's dashboard"),
        (200, b'{"ray_version": "2.9.3"}', "is Ray 2.9.3, and 2.60 or newer is needed"),
        (401, b"", "wants a token: type export RAY_AUTH_TOKEN"),
    ],
)
def test_who_is_no_cluster_of_ours_is_said(
    code: int, said: bytes, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with somebody(code, said) as address, pytest.raises(EnvironmentProblem, match=text):
        knock(address)
    with pytest.raises(EnvironmentProblem, match=r"nobody answers .*--dashboard-host"):
        knock(f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    with somebody(502, b"") as proxy, pytest.raises(EnvironmentProblem, match="by way of http_proxy; no_proxy=head"):
        monkeypatch.setenv("http_proxy", proxy)
        knock("http://head:8265")


def arrived(parcel: Path, *words: str, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *python, arrival.__file__, *words]
    return subprocess.run(command, cwd=parcel, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_a_cluster_without_this_runner_says_what_to_type(tmp_path: Path) -> None:
    there = str(tmp_path / "there")
    bare = arrived(tmp_path, __version__, there, "key", python=("-S", "-E"))
    assert bare.returncode == 2 and "No module named 'runner'" in bare.stderr
    assert f"pip install 'posttrain-run[ray-jobs]=={__version__}' for this Python, on each node" in bare.stderr
    other = arrived(tmp_path, "9.9", there, "key")
    assert other.returncode == 2
    assert f"the cluster has runner {__version__}, and the job comes from 9.9" in other.stderr
    (tmp_path / "file").touch()
    closed = arrived(tmp_path, __version__, str(tmp_path / "file" / "in"), "key")
    assert closed.returncode == 2 and "set launch.folder" in closed.stderr
    assert not Path(there).exists()


@pytest.mark.slow
def test_files_are_kept_once_and_nothing_of_rays_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "files" / "data").mkdir(parents=True)
    (tmp_path / "files" / "data" / "pairs.jsonl").write_text(PAIRS)
    (tmp_path / "there").mkdir()
    place = tmp_path / "there" / "key"
    arrival.keep(str(tmp_path / "files"), str(place))
    (tmp_path / "files" / "data" / "pairs.jsonl").write_text("of another job with the same key: cannot be")
    arrival.keep(str(tmp_path / "files"), str(place))
    assert (place / "data" / "pairs.jsonl").read_text() == PAIRS
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["key"]
    given = {"runtime_env": {"working_dir": "gcs://it.zip", "env_vars": {"NCCL_DEBUG": "INFO"}}, "metadata": {"a": "b"}}
    monkeypatch.setenv(arrival.OF_RAY, json.dumps(given))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}/lib/mine")
    arrival.tidy(str(tmp_path))
    assert json.loads(os.environ[arrival.OF_RAY]) == {"runtime_env": {}, "metadata": {"a": "b"}}
    assert "OMP_NUM_THREADS" not in os.environ and os.environ["PYTHONPATH"] == "/lib/mine"


def test_without_rays_client_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r"needs ray and aiohttp: pip install 'posttrain-run\[ray-jobs\]'"):
        need_client()
