"""The sampler of a running server against a real vLLM server, on the CPU, in float32.

Log-probabilities are held to those of a plain pass: 1e-4 on average, 1e-3 at most.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request as UrlRequest
from urllib.request import urlopen

import numpy as np
import pytest
import torch

from runner.adapter.config import LoraConfig
from runner.adapter.lora import attach
from runner.core.auto_choices import Decisions
from runner.core.errors import SamplerError
from runner.interfaces import Request, Rollout
from runner.sampler.config import ServerSamplerConfig
from runner.sampler.server.build import build
from runner.sampler.server.openai_sampler import OpenAiSampler
from runner.weight_sync.store_dir import reserve_dir
from runner.weight_sync.sync_probe import SyncProbe
from runner.weight_sync.weight_store import WeightStore
from tests.model.zoo import module
from tests.ports import free_port
from tests.sampler.vllm.engines import LENGTH, MEAN, NEEDED, PROMPTS, SHAPE, model

pytestmark = [*NEEDED, pytest.mark.timeout(600)]
START_S, END_S = 400.0, 30.0
WORST = 1e-3
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
RULE: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9}


class Served:
    """`vllm serve` by its module, as the wheel for the CPU lacks the command; the model is that of the other tests."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        model().save(folder / "model")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.folder / "model")]
        words += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "policy"]
        words += ["--dtype", "float32", "--max-model-len", str(LENGTH), "--enforce-eager"]
        words += ["--logprobs-mode", "processed_logprobs", "--enable-lora", "--max-lora-rank", "8"]
        words += ["--no-enable-chunked-prefill"]  # on the CPU 0.32 dies of a request with a seed that is read in pieces
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                words, env=os.environ | ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + START_S
        while not self.answers():
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()[-3000:]
            time.sleep(0.5)

    def answers(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False

    def stop(self) -> None:
        """End it and what it has started, which leaves its shared memory behind when it is killed."""
        shared = {path for pid in self.members() for path in mapped(pid)}
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        for pid in self.members():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(END_S)
        for path in shared:
            path.unlink(missing_ok=True)

    def members(self) -> list[int]:
        """Its processes, all of one session."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                if int(path.read_text().rpartition(")")[2].split()[3]) == self.process.pid:
                    found.append(int(path.parent.name))
        return found


def mapped(pid: int) -> set[Path]:
    """The shared memory that a process has."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/" in line and "(deleted)" not in line}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("served"))
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[WeightStore]:
    made = WeightStore(reserve_dir(tmp_path / "run", 0, tmp_path))
    yield made
    made.close()


@pytest.fixture
def asking(served: Served, tmp_path: Path) -> Iterator[Any]:
    made: list[OpenAiSampler] = []

    def ask(policy: Any, recomputed: bool = False, **options: Any) -> OpenAiSampler:
        own = tmp_path / str(len(made))
        own.mkdir()
        config = ServerSamplerConfig(url=served.url, max_new_tokens=16, max_num_seqs=8, timeout_s=120.0, **options)
        made.append(build(config, model=policy, decide=Decisions(), folder=own, recomputed=recomputed))
        return made[-1]

    yield ask
    for one in made:
        one.close()


def asked() -> list[Request]:
    return [Request(p, 100 * g + k, 8 + k, g) for g, p in enumerate(PROMPTS) for k in range(3)]


def whole(policy: Any) -> Any:
    """The policy as a plain model, its adapter merged."""
    made = module("qwen2", **SHAPE)
    made.load_state_dict(dict(policy.hf_tensors("all")))
    return made


@torch.no_grad()
def plain(policy: Any, ids: Sequence[int], temperature: float = 1.0, top_p: float = 1.0) -> np.ndarray:
    """Of all ids but the first, by one pass and a sort."""
    logits = policy(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, :-1].double() / temperature
    p, order = logits.softmax(-1).sort(-1, descending=True)
    p = torch.where(p.cumsum(-1) - p >= top_p, 0, p)
    p = torch.zeros_like(p).scatter(-1, order, p / p.sum(-1, keepdim=True))
    found: np.ndarray = p.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].log().numpy()
    return found


def check(policy: Any, got: Sequence[Rollout], **rule: float) -> None:
    plainly = [
        plain(policy, (*request.prompt, *rollout.ids), **rule)[len(request.prompt) - 1 :]
        for request, rollout in zip(asked(), got, strict=True)
    ]
    differences = np.abs(np.concatenate(plainly) - np.concatenate([rollout.logprobs for rollout in got]))
    assert differences.mean() < MEAN and differences.max() < WORST


def moved(policy: Any, by: float) -> None:
    with torch.no_grad():
        for at, parameter in enumerate(policy.trainable().values()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(at))
            parameter.add_(noise, alpha=by)


def sent(sampler: OpenAiSampler, policy: Any, shelf: WeightStore, version: int, way: str) -> None:
    """Through the probe, as a run does it."""
    probe = SyncProbe.from_seed(0, 256, 1e-4)
    probe.expect(version, [plain(whole(policy), row).tolist() for row in probe.rows])
    probe.load(sampler, shelf.put(version, policy.hf_tensors(way)), version)


def test_draws_by_the_rule_and_reports_what_was_drawn_from(asking: Any) -> None:
    policy = model()
    sampler = asking(policy, recomputed=True, **RULE)  # a ratio could not be taken to these log-probabilities
    got = sampler.sample(asked())
    check(whole(policy), got, **RULE)
    assert len({tuple(one.ids) for one in got}) == len(got) and sampler.max_model_len == LENGTH
    again = sampler.sample(asked()[::-1])[::-1]
    assert sum(a.ids == b.ids for a, b in zip(got, again, strict=True)) >= len(got) - 1  # rounding may move a draw
    [scores] = sampler.score(PROMPTS[2:])
    for row, found in zip(PROMPTS[2:], scores, strict=True):
        np.testing.assert_allclose(found, plain(whole(policy), row), atol=WORST)


def test_adapters_by_name(asking: Any, shelf: WeightStore) -> None:
    policy = attach(LoraConfig(rank=4, alpha=16.0), model(), decide=Decisions())
    sampler = asking(policy, weight_sync="adapter")
    for version in (1, 2):
        moved(policy, 0.1)
        sent(sampler, policy, shelf, version, "adapter")
        check(whole(policy), sampler.sample(asked()))


def test_an_exported_adapter_is_loaded_and_answers_greedily(served: Served, tmp_path: Path) -> None:
    policy = attach(LoraConfig(rank=4, alpha=16.0), model(), decide=Decisions())
    moved(policy, 0.1)
    policy.save(tmp_path)
    post(served, "/v1/load_lora_adapter", lora_name="exported", lora_path=str(tmp_path))
    prompt, merged = list(PROMPTS[2]), whole(policy)
    options = {"temperature": 0, "logprobs": 1, "return_tokens_as_token_ids": True}
    said = json.loads(post(served, "/v1/completions", model="exported", prompt=prompt, max_tokens=8, **options))
    found = said["choices"][0]["logprobs"]
    ids = [int(token.removeprefix("token_id:")) for token in found["tokens"]]
    np.testing.assert_allclose(found["token_logprobs"], plain(merged, prompt + ids)[len(prompt) - 1 :], atol=WORST)
    with torch.no_grad():
        likeliest = merged(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].argmax(-1)
    assert likeliest.tolist() == ids
    base = plain(whole(model()), prompt + ids)[len(prompt) - 1 :]
    assert base != pytest.approx(found["token_logprobs"], abs=WORST)


def post(served: Served, route: str, **body: Any) -> str:
    request = UrlRequest(served.url + route, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=120) as answer:
        return str(answer.read().decode())


def test_weights_read_anew_and_a_server_that_was_started_anew(asking: Any, shelf: WeightStore, served: Served) -> None:
    policy = model()
    sampler = asking(policy, weight_sync="reload")
    for version in (1, 2):
        moved(policy, 0.02)
        sent(sampler, policy, shelf, version, "all")
        check(whole(policy), sampler.sample(asked()))
    served.stop()
    served.start()
    check(whole(policy), sampler.sample(asked()))
    assert sampler.pop_metrics()["resyncs"] == 1


def test_what_it_refuses_is_said_in_its_words(asking: Any, shelf: WeightStore) -> None:
    policy = attach(LoraConfig(rank=16), model(), decide=Decisions())
    with pytest.raises(SamplerError, match=r"refuses /v1/load_lora_adapter.*rank"):
        sent(asking(policy, weight_sync="adapter"), policy, shelf, 1, "adapter")
