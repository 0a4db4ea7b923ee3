"""What training over HTTP costs beside the learner's own time: one forward_backward and one optim_step.

    python benchmarks/tinker.py [--sdk PYTHON] [--rows 16] [--tokens 64] [--rounds 5] [--steps 10] [--out FILE]

learner   forward_backward and optim_step of `LocalLearner`, on a batch that is packed already
service   the verbs of the server: checks, packing, log-probabilities of every datum
http      the same by HTTP, four requests of bytes that are made already, with http.client
sdk       the same with the SDK of Tinker; --sdk: the Python of an environment that has it (make test-tinker makes one)

The tiny model, a LoRA of rank 8, one thread of torch, one server in this process. The arms take turns; seconds are
those of an arm's fastest step in a round, so that other work on the machine counts little; a ratio is of its round.
Exits with 1 if the arms do not compute the same losses; speed never fails it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runner.cli.job import SERVER
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.rank_info import RankInfo
from runner.core.signals import StopSignal
from runner.interfaces import LOGPROBS
from runner.interfaces.learning import OptimSettings
from runner.run_dir.folder import RunFolder
from runner.tinker.checkpoints import LoraSettings
from runner.tinker.losses import check_loss, pack_data
from runner.tinker.messages import MESSAGES, Datum
from runner.tinker.server import BuiltServer, build_server, lead

LORA = LoraSettings(rank=8, seed=7, alpha=32.0)
SETTINGS = OptimSettings(1e-4, (0.9, 0.95), 1e-12)
Arm = Callable[[], float]  # makes a step; its loss


class NoRecords:
    """Metrics of training clients go nowhere."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given: None


def make_data(rows: int, tokens: int) -> list[Datum]:
    """Rows of next-token targets."""
    ids = np.asarray([[(7 * row + 3 * at) % 250 for at in range(tokens + 1)] for row in range(rows)])
    return [Datum(row[:-1], {"target_tokens": row[1:], "weights": np.ones(tokens, np.float32)}) for row in ids]


def learner_arm(built: BuiltServer, data: list[Datum]) -> Arm:
    """The learner by itself."""
    built.service.create("alone", LORA)
    learner, batch, loss = built.service._tenant("alone").learner, pack_data(data), check_loss("cross_entropy", {})

    def step() -> float:
        _, outputs = learner.forward_backward(batch, loss, LOGPROBS)
        learner.optim_step(SETTINGS)
        return float(loss.values(batch, outputs["logprobs"]).sum(dtype=torch.float64))

    return step


def service_arm(built: BuiltServer, data: list[Datum]) -> Arm:
    """The server's verbs."""
    built.service.create("service", LORA)

    def step() -> float:
        passed = built.service.run_pass("service", data, "cross_entropy", {}, False)
        built.service.optim_step("service", SETTINGS)
        return passed.metrics["loss:sum"]

    return step


class HttpClient:
    """Steps by four requests over one connection."""

    def __init__(self, url: str, data: list[Datum]) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"))
        session = self.post("create_session", {})["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 8, "seed": 7}}
        self._model = self.result(self.post("create_model", body))["model_id"]
        self._request = MESSAGES["PassRequest"](model_id=self._model, loss_fn="cross_entropy")
        for datum in data:
            row = self._request.data.add(chunks=[{"text": {"tokens": datum.ids.astype("<i4").tobytes()}}])
            for name, dtype, number in (("target_tokens", "<i8", 2), ("weights", "<f4", 1)):
                values = datum.inputs[name].astype(dtype)
                row.inputs.add(key=name, value={"dense": values.tobytes(), "dtype": number, "shape": values.shape})
        self._seq_id = 0

    def send(self, path: str, body: bytes, kind: str) -> bytes:
        """The body of the answer."""
        headers = {"Content-Type": kind, "X-API-Key": "tml-local", "Accept": "application/x-protobuf"}
        self._connection.request("POST", f"/api/v1/{path}", body, headers)
        return self._connection.getresponse().read()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """JSON for JSON."""
        return json.loads(self.send(path, json.dumps(body).encode(), "application/json"))

    def result(self, started: Mapping[str, Any]) -> Any:
        """The result of a request that has one in JSON."""
        return self.post("retrieve_future", started)

    def step(self) -> float:
        """A pass and a step."""
        self._connection.close()  # an idle one may have been closed by the server
        self._request.seq_id, self._seq_id = self._seq_id + 1, self._seq_id + 2
        passed = json.loads(self.send("forward_backward", self._request.SerializeToString(), "application/x-protobuf"))
        adam = {"learning_rate": 1e-4}
        stepped = self.post("optim_step", {"model_id": self._model, "seq_id": self._seq_id, "adam_params": adam})
        content = self.send("retrieve_future", json.dumps(passed).encode(), "application/json")
        self.result(stepped)
        metrics = {one.key: one.value for one in MESSAGES["PassResponse"].FromString(content).metrics}
        return float(metrics["loss:sum"])


@contextmanager
def sdk_client(python: str, url: str, asked: argparse.Namespace) -> Iterator[Callable[[], float]]:
    """Steps in a process of the SDK's environment; each call returns the seconds of the fastest step."""
    own = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0", "PYTHONPATH": ""}
    script = str(Path(__file__).parent / "arms" / "tinker_sdk.py")
    numbers = [str(n) for n in (asked.rows, asked.tokens, asked.steps)]
    with subprocess.Popen(
        [python, script, *numbers], env=os.environ | own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def run() -> float:
            print(file=process.stdin, flush=True)
            return float(process.stdout.readline())

        yield run
        process.stdin.close()


@contextmanager
def served(built: BuiltServer, spec: Any) -> Iterator[str]:
    """The URL of the server, which a thread runs."""
    stop, ready, said = StopSignal(), threading.Event(), list[str]()

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("ready"):
            ready.set()

    thread = threading.Thread(target=lead, args=(spec, built, NoRecords(), say, stop), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield said[-1].split("TINKER_BASE_URL=")[1].split()[0]
    finally:
        stop.number = signal.SIGTERM
        thread.join()


def timed(step: Arm, steps: int, losses: list[float]) -> float:
    """The seconds of the fastest step."""
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def measure(asked: argparse.Namespace, folder: Path) -> tuple[list[dict[str, float]], dict[str, list[float]]]:
    """Seconds of a step by arm, round by round, and the losses of the arms."""
    words = [f"{group}={name}" for group, name in SERVER.items()]
    spec = compose_job([*words, "model=tiny", "tracker=none", "tinker.port=0"]).spec
    built = build_server(spec, RunFolder(folder), Decisions(), RankInfo())
    data = make_data(asked.rows, asked.tokens)
    arms = {"learner": learner_arm(built, data), "service": service_arm(built, data)}
    losses: dict[str, list[float]] = {name: [] for name in (*arms, "http")}
    rounds: list[dict[str, float]] = []
    with served(built, spec) as url:
        arms["http"] = HttpClient(url, data).step
        with sdk_client(asked.sdk, url, asked) if asked.sdk else nothing() as sdk:
            for _ in range(asked.rounds + 1):
                rounds.append({} if sdk is None else {"sdk": sdk()})  # first: it creates its client in the first round
                rounds[-1] |= {name: timed(step, asked.steps, losses[name]) for name, step in arms.items()}
    return rounds[1:], losses  # the first round warms up


@contextmanager
def nothing() -> Iterator[None]:
    """No SDK."""
    yield None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sdk", help="Python of an environment with the SDK")
    for name, value in (("rows", 16), ("tokens", 64), ("rounds", 5), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rounds, losses = measure(asked, Path(folder))
    for name in reversed(rounds[0]):
        seconds, ratios = [one[name] for one in rounds], [one[name] / one["learner"] for one in rounds]
        each = " · ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{name:8} {1000 * statistics.median(seconds):6.1f} ms   {statistics.median(ratios):.2f} ({each})")
    if asked.out:
        asked.out.write_text(json.dumps({"rounds": rounds, "losses": losses}, indent=1) + "\n")
    if any(not np.allclose(values, losses["learner"], rtol=1e-6) for values in losses.values()):
        print("error: the arms do not compute the same losses", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
