"""GRPO over HTTP and through the SDK, by importance sampling, against algorithm=grpo on the same samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from runner import build
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.batch import Batch
from runner.core.signals import StopSignal
from runner.run_dir.folder import RunFolder
from runner.tinker.checkpoints import CheckpointPath
from runner.tinker.messages import Datum
from runner.trainer.learner import LocalLearner
from runner.trainer.loop import run_loop
from tests.tinker.servers import SIZES, Client, running
from tests.tinker.test_sdk import needs_sdk, sdk_steps

# A large eps: Adam divides by the gradient's size, so the rounding of one that is nearly 0 would become a whole step.
ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-4, "weight_decay": 0.1, "grad_clip_norm": 1.0}
LORA = {"rank": 16, "seed": 0, "train_unembed": False}
JOB = (
    "model=tiny",
    *(f"model.{name}={size}" for name, size in SIZES.items()),
    "adapter=lora",
    "data=demo",
    "algorithm=grpo",
    "algorithm.batch_size=2",
    "algorithm.group_size=4",
    "algorithm.share_prompts=false",
    "sampler=torch",
    "sampler.max_new_tokens=6",
    "reward=function",
    "steps=4",
    "schedule=constant",
    "optimizer.lr=1e-3",
    "optimizer.eps=1e-4",
    "optimizer.weight_decay=0.1",
    "evaluation.every=0",
    "tracker=none",
)


def run_grpo(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Batch], list[float], dict[str, Any]]:
    """The batches that a job trains on, the gradient norm of each step, and the trained weights."""
    batches, norms = list[Batch](), list[float]()
    compute = LocalLearner.forward_backward

    def record(self: LocalLearner, batch: Batch, *more: Any) -> Any:
        batches.append(batch)
        return compute(self, batch, *more)

    monkeypatch.setattr(LocalLearner, "forward_backward", record)
    folder.mkdir()
    (folder / "reward.py").write_text("def score(completions, **row):\n    return [len(str(x)) for x in completions]\n")
    spec, own = compose_job([*JOB, f"reward.path={folder}/reward.py:score"]).spec, RunFolder(folder)
    sinks = build.OutputSinks(step=(lambda step, values: norms.append(values["train/grad_norm"]),))
    job = build.build(spec, own, build.build_store(spec, own), Decisions(), StopSignal(), sinks).job
    run_loop(job, 0)
    monkeypatch.setattr(LocalLearner, "forward_backward", compute)
    return batches, norms, {name: value.clone() for name, value in job.learners["policy"].weights()}


def datums(batch: Batch) -> list[Datum]:
    """The rows of a batch; advantages with the weights that make the step's mean a sum."""
    own, found = {name: values.numpy() for name, values in batch.tokens.items()}, []
    lengths = batch.rows["lengths"].numpy()
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        ids, weight, sampled, advantages = (
            own[name][end - length : end] for name in ("ids", "weight", "sampled", "advantages")
        )
        inputs = {"target_tokens": ids[1:], "logprobs": sampled[1:], "advantages": (advantages * weight)[1:]}
        found.append(Datum(ids[:-1], inputs))
    return found


def train_by_http(url: str, batches: Sequence[Sequence[Datum]], cwd: Path) -> tuple[list[float], str]:
    """The gradient norm of each step, and the path of the trained weights."""
    client, found = Client(url), []
    model_id = client.train(client.session(), **LORA)
    for step, batch in enumerate(batches):
        passed = client.begin_pass(model_id, 2 * step + 1, batch, "importance_sampling")
        stepped = client.begin_step(model_id, 2 * step + 2, **ADAM)
        assert "loss:sum" in client.result(passed)["metrics"]
        found.append(client.result(stepped)["metrics"]["grad_norm:mean"])
    saved = client.post("save_weights", {"model_id": model_id, "seq_id": 2 * len(batches) + 1, "path": "end"})
    return found, client.result(saved)["path"]


def train_by_sdk(url: str, batches: Sequence[Sequence[Datum]], cwd: Path) -> tuple[list[float], str]:
    """The same through the SDK."""
    rows = [
        [
            {
                "ids": [*datum.ids.tolist(), int(datum.inputs["target_tokens"][-1])],
                "inputs": {name: datum.inputs[name].tolist() for name in ("logprobs", "advantages")},
            }
            for datum in batch
        ]
        for batch in batches
    ]
    given = {"lora": LORA, "adam": ADAM, "loss": "importance_sampling", "batches": rows}
    found = sdk_steps(url, given, cwd)
    return found["norms"], found["path"]


@pytest.mark.slow
@pytest.mark.parametrize("train", [train_by_http, pytest.param(train_by_sdk, marks=needs_sdk)])
def test_grpo_through_the_server_is_the_job(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, norms, trained = run_grpo(tmp_path / "job", monkeypatch)
    assert len(batches) == 4 and min(norms) > 0, "rewards differ within groups"
    with running(tmp_path / "server") as (url, _, built):
        found, path = train(url, list(map(datums, batches)), tmp_path)
        file = built.store.path(CheckpointPath.parse(path)) / "adapter_model.safetensors"
    np.testing.assert_allclose(found, norms, rtol=1e-5)
    adapter = load_file(file)
    assert len(adapter) == len(trained)
    for name, value in trained.items():
        [own] = [other for key, other in adapter.items() if name.replace(".default.", ".").endswith(key)]
        torch.testing.assert_close(torch.from_numpy(own), value, rtol=0, atol=1e-6)
