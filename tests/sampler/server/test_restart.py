"""A server that goes away and comes back, says less than it did, or is gone at the end; and a run that was killed."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from runner.adapter.config import LoraConfig
from runner.adapter.lora import attach
from runner.build.samplers import _shared_memory_bytes
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import SamplerError
from runner.sampler.config import ServerSamplerConfig
from runner.sampler.server import openai_client as client_module
from runner.sampler.server.build import build
from runner.sampler.server.openai_client import OpenAiClient
from runner.sampler.server.openai_protocol import ServerFingerprint
from runner.sampler.server.openai_sampler import OpenAiSampler
from runner.tools.plan.estimate import Estimate, estimate
from runner.weight_sync.store_dir import reserve_dir
from runner.weight_sync.weight_store import WeightStore
from tests.model.zoo import causal
from tests.sampler.server.standin import V32, StandIn, served
from tests.sampler.server.test_server import asked, check, made, moved, sampling, stand_in, whole

NEARLY = 1e-3  # a step that moves the log-probabilities of fixed tokens by less than other kernels do


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "FIRST_WAIT_S", 0.01)


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[WeightStore]:
    made = WeightStore(reserve_dir(tmp_path / "run", 0, tmp_path))
    yield made
    made.close()


@pytest.fixture
def disk() -> Iterator[Path]:
    """One that both see."""
    made = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


def lora(rank: int = 4) -> Any:
    return attach(LoraConfig(rank=rank, alpha=16.0), causal("qwen3"), decide=Decisions())


@contextmanager
def coming_back(server: StandIn, url: str, client: OpenAiClient) -> Iterator[None]:
    """Nobody listens until a request has failed; then there is a restarted server, with what it was started with."""
    end = threading.Event()

    def come() -> None:
        while not client.retried and not end.wait(0.01):
            pass
        server.start()
        with served(server, urlsplit(url).port or 0):
            end.wait()

    thread = threading.Thread(target=come)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("what", ["load", "sleep", "wake"])
def test_a_server_that_is_just_being_started_is_waited_for(what: str, tmp_path: Path, shelf: WeightStore) -> None:
    policy, server = lora(), stand_in()
    with served(server) as url:
        sampler = made(url, tmp_path / "own", policy, weight_sync="adapter", sleep=True, retries=10)
        moved(policy, 0.2)
        version = shelf.put(1, policy.hf_tensors("adapter"))
        if what != "load":
            sampler.load_weights(version, 1)
        if what == "wake":
            sampler.release_memory()
    with coming_back(server, url, sampler._server.client), closing(sampler):
        if what == "load":
            sampler.load_weights(version, 1)
        elif what == "sleep":
            sampler.release_memory()
            assert server.asleep
        check(whole(policy), asked(1), sampler.sample(asked(1)), temperature=1.0)
        assert sampler.pop_metrics()["retries"] > 0


@pytest.mark.parametrize(("again", "times"), [(False, 1), (True, 4)])
def test_what_may_have_been_delivered_is_sent_once_more_only_where_it_may_be(again: bool, times: int) -> None:
    came: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            with suppress(OSError):  # it was shut down
                while True:
                    caller, _ = listening.accept()
                    came.append(1)
                    caller.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        client = OpenAiClient(f"http://127.0.0.1:{listening.getsockname()[1]}", None, 3)
        with pytest.raises(SamplerError, match=f"after {times} requests?: "):
            client.post("/collective_rpc", {}, time.monotonic() + 200, again=again)
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert len(came) == times


@pytest.mark.parametrize("at", ["load", "check"])
@pytest.mark.parametrize(
    ("what", "kind"), [("/metrics", "cut"), ("/metrics", "503"), ("/metrics", "404"), ("score", "garbled")]
)
def test_no_answer_to_who_it_is_hides_that_it_was_started_anew(
    what: str, kind: str, at: str, tmp_path: Path, shelf: WeightStore
) -> None:
    policy, server = causal("qwen3"), stand_in()
    with sampling(server, tmp_path / "own", policy, weight_sync="reload") as sampler:
        moved(policy, NEARLY)
        server.broken = {what: [kind]} if at == "load" else {}
        sampler.load_weights(shelf.put(1, policy.hf_tensors("all")), 1)
        server.start()
        server.broken = {what: [kind]} if at == "check" else {}
        sampler.sample(asked(1))
        assert sampler.pop_metrics()["resyncs"] == 1
        trained, held = policy.inner.lm_head.weight, server.model.lm_head.weight
        assert not server.broken.get(what) and torch.equal(held, trained)


def test_a_server_that_never_says_when_it_began_is_asked_once_and_that_is_said(tmp_path: Path) -> None:
    server, decide = stand_in(version=replace(V32, metrics=False)), Decisions()
    with served(server) as url:
        config = ServerSamplerConfig(url=url, max_num_seqs=4, max_new_tokens=16)
        sampler = build(config, model=causal("qwen3"), decide=decide, folder=tmp_path / "own", recomputed=False)
        assert len(sampler.sample(asked(1))) == 3
        sampler.close()
    assert server.calls.count("/metrics") == 1
    assert [one.got for one in decide.entries if one.feature == "sampler restarts"] == [
        "detected only by its log-probabilities of fixed tokens"
    ]


def test_a_server_that_does_not_wake_at_the_end_keeps_neither_adapter_nor_folder(
    tmp_path: Path, shelf: WeightStore, disk: Path
) -> None:
    policy, server = lora(), stand_in()
    with served(server) as url:
        sampler = made(url, tmp_path / "own", policy, weight_sync="adapter", folder=str(disk), sleep=True)
        sampler.load_weights(shelf.put(1, policy.hf_tensors("adapter")), 1)
        sampler.release_memory()
        server.broken = {"/wake_up": ["500"]}
        with pytest.raises(SamplerError, match="refuses /wake_up"):
            sampler.close()
    assert not server.adapters and not [*disk.iterdir()]


def test_a_server_that_is_gone_is_said_goodbye_to_once(tmp_path: Path, shelf: WeightStore, disk: Path) -> None:
    policy = lora()
    with served(stand_in()) as url:
        sampler = made(url, tmp_path / "own", policy, weight_sync="adapter", folder=str(disk), sleep=True)
        sampler.load_weights(shelf.put(1, policy.hf_tensors("adapter")), 1)
        sampler.release_memory()
    with pytest.raises(SamplerError, match="after 1 request: "):
        sampler.close()
    assert not [*disk.iterdir()] and not (tmp_path / "own").exists()


@pytest.mark.parametrize("sync", ["adapter", "reload"])
def test_a_run_that_goes_on_removes_what_it_left_when_it_was_killed(
    sync: str, tmp_path: Path, shelf: WeightStore, disk: Path
) -> None:
    policy = lora()
    version = shelf.put(1, policy.hf_tensors("adapter" if sync == "adapter" else "all"))
    with served(stand_in()) as url:
        killed, resumed = (made(url, tmp_path / "own", policy, weight_sync=sync, folder=str(disk)) for _ in range(2))
        killed.load_weights(version, 1)
        left = {path.name for path in disk.glob("run-*/*")}
        resumed.load_weights(version, 1)
        now = {path.name for path in disk.glob("run-*/*")}
        assert len(left) == len(now) == len([*disk.iterdir()]) == 1 and left != now
        resumed.close()
        assert not [*disk.iterdir()]
        killed.close()


@pytest.mark.parametrize(("sync", "sent"), [("adapter", ["adapter"]), ("reload", ["changed", "fixed"])])
def test_there_is_room_for_what_the_server_has_beside_the_newest_version(
    sync: str, sent: list[str], tmp_path: Path, shelf: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, most = lora(64), 0

    def look(*_: object) -> None:
        nonlocal most
        held = {path.stat().st_ino: path.stat().st_size for path in shelf.folder.rglob("*.safetensors")}
        most = max(most, sum(held.values()))

    monkeypatch.setattr(OpenAiSampler, "_now", lambda *_: ServerFingerprint("", None))
    with sampling(stand_in(), tmp_path / "own", policy, weight_sync=sync) as sampler:
        told = "load_adapter" if sync == "adapter" else "reload"
        monkeypatch.setattr(sampler._server, told, look)
        for way in sent[1:]:
            shelf.keep(policy.hf_tensors(way))
        for step in (1, 2, 3):
            shelf.drop_below(step)
            version = shelf.put(step, policy.hf_tensors(sent[0]))
            look()
            sampler.load_weights(version, step)
    sizes = [policy.hf_tensor_bytes(way) for way in sent]
    words = [
        "+recipe=grpo_demo",
        "sampler=server",
        "sampler.url=http://localhost:1",
        f"sampler.weight_sync={sync}",
    ]
    spec = compose_job([*words, "adapter=lora"]).spec
    assert _shared_memory_bytes(spec, (sizes[0], sum(sizes[1:]))) == pytest.approx(most, rel=0.1)
    elsewhere = compose_job([*words, "adapter=lora", "sampler.folder=/shared/weights"]).spec
    assert _shared_memory_bytes(elsewhere, (3, 4)) == 3 + 4
    here, there = estimate(spec), estimate(elsewhere)
    assert here.shelf[0].bytes - there.shelf[0].bytes == _planned(here, sync)


def _planned(plan: Estimate, sync: str) -> int:
    """Bytes of what the server has beside the newest version."""
    model = plan.models["policy"]
    if sync == "adapter":
        return 2 * model.all.trained_bytes
    return sum(part.frozen_bytes for part in model.layers)
