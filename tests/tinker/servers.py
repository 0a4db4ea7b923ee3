"""A server's parts in this process, over a small model, and a client that speaks its protocol."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from runner.cli.job import SERVER
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.rank_info import RankInfo
from runner.core.signals import StopSignal
from runner.run_dir.folder import RunFolder
from runner.spec.job import JobSpec
from runner.tinker.checkpoints import ClientRecord, LoraSettings
from runner.tinker.messages import MESSAGES, Datum
from runner.tinker.server import BuiltServer, build_server, lead

NO_REUSE = httpx.Limits(max_keepalive_connections=0)  # so that no test leaves an open socket
SIZES = {"hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 2, "kv_heads": 2, "max_positions": 256}
LORA = LoraSettings(rank=4, seed=7, alpha=32.0)
ROWS = ((5, 9, 11, 40, 41), (257, 104, 105, 258, 33, 45), (7, 8, 9))
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}


def spec_of(*words: str) -> JobSpec:
    """The job of `run tinker` with a small model."""
    chosen = [f"{group}={name}" for group, name in SERVER.items()]
    sizes = [f"model.{name}={size}" for name, size in SIZES.items()]
    return compose_job([*chosen, "model=tiny", "tracker=none", *sizes, *words]).spec


def built_server(folder: Path, *words: str) -> BuiltServer:
    return build_server(spec_of(*words), RunFolder(folder), Decisions(), RankInfo())


def supervised(rows: Sequence[Sequence[int]] = ROWS, weight: float = 1.0) -> list[Datum]:
    """Next-token targets of rows, all of them with the same weight."""
    return [
        Datum(np.asarray(row[:-1]), {"target_tokens": np.asarray(row[1:]), "weights": np.full(len(row) - 1, weight)})
        for row in rows
    ]


class Records:
    """What the server records of its training clients."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, Mapping[str, float]]] = []
        self.ended: list[str] = []
        self.said: list[str] = []
        self.stop = StopSignal()

    def open(self, record: ClientRecord) -> None:
        """Nothing to open."""

    def add_pass(self, model_id: str, metrics: Mapping[str, float]) -> None:
        """Only steps are kept."""

    def log_step(self, model_id: str, metrics: Mapping[str, float]) -> None:
        self.steps.append((model_id, metrics))

    def close(self, model_id: str) -> None:
        self.ended.append(model_id)


@contextmanager
def running(folder: Path, *words: str) -> Iterator[tuple[str, Records, BuiltServer]]:
    """The URL of a server that a thread runs."""
    spec, stop, said = spec_of("tinker.port=0", *words), StopSignal(), list[str]()
    ready, records = threading.Event(), Records()
    built = build_server(spec, RunFolder(folder), Decisions(), RankInfo())

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("ready"):
            ready.set()

    thread = threading.Thread(target=lead, args=(spec, built, records, say, stop), daemon=True)
    thread.start()
    assert ready.wait(250)
    try:
        records.said, records.stop = said, stop
        yield said[-1].split("TINKER_BASE_URL=")[1].split()[0], records, built
    finally:
        stop.number = signal.SIGTERM
        thread.join(250)


class Client:
    """Requests of one key."""

    def __init__(self, url: str, key: str = "tml-one") -> None:
        self.http = httpx.Client(
            base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=250, limits=NO_REUSE, verify=False
        )

    def post(self, path: str, body: Mapping[str, Any], status: int = 200) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def result(self, started: Mapping[str, Any]) -> Any:
        while True:
            answer = self.http.post("retrieve_future", json={"request_id": started["request_id"]})
            if answer.status_code != 408:
                return answer.json()

    def session(self) -> str:
        return str(self.post("create_session", {"tags": []})["session_id"])

    def train(self, session: str, number: int = 0, **lora: Any) -> str:
        """The id of a new training client."""
        settings = {"rank": 4, "seed": 7, **lora}
        body = {"session_id": session, "model_seq_id": number, "base_model": "tiny", "lora_config": settings}
        return str(self.result(self.post("create_model", body))["model_id"])

    def begin_pass(self, model_id: str, seq_id: int, data: Sequence[Datum], loss: str = "cross_entropy") -> Any:
        answer = self.http.post(
            "forward_backward",
            content=encode_pass(model_id, seq_id, data, loss),
            headers={"Content-Type": "application/x-protobuf"},
        )
        return answer.json()

    def begin_step(self, model_id: str, seq_id: int, **settings: float) -> Any:
        return self.post("optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": {**ADAM, **settings}})


def encode_pass(model_id: str, seq_id: int, data: Sequence[Datum], loss: str) -> bytes:
    """A forward_backward request as the SDK sends it."""
    request = MESSAGES["PassRequest"](model_id=model_id, seq_id=seq_id, loss_fn=loss)
    for datum in data:
        row = request.data.add(chunks=[{"text": {"tokens": datum.ids.astype("<i4").tobytes()}}])
        for name, values in datum.inputs.items():
            dtype, number = ("<i8", 2) if name == "target_tokens" else ("<f4", 1)
            tensor = {"dense": values.astype(dtype).tobytes(), "dtype": number, "shape": values.shape}
            row.inputs.add(key=name, value=tensor)
    return bytes(request.SerializeToString())
