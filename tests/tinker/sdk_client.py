"""A client that uses the SDK as its users do; prints what it found as JSON. Runs in the SDK's environment.

sdk_client.py everything             each call once
sdk_client.py steps FILE             a pass and a step for each batch of a file, then a saved state
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tinker
import torch
from tinker import types

ROW = [257, 104, 105, 258, 33, 45, 67, 100]


def datum(ids: list[int], targets: list[int], **inputs: list[float]) -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints(ids), loss_fn_inputs={"target_tokens": targets, **inputs})


def logprobs(output: Any) -> list[float]:
    return [float(value) for value in output.loss_fn_outputs[0]["logprobs"].data]


def everything() -> dict[str, Any]:
    service = tinker.ServiceClient()
    base = service.get_server_capabilities().supported_models[0].model_name
    training = await_client(service.create_lora_training_client(base_model=base, rank=8, seed=7))
    row = datum(ROW[:-1], ROW[1:], weights=[1.0] * 7)
    found: dict[str, Any] = {"sdk": version("tinker"), "rank": training.get_info().lora_rank, "losses": []}
    for _ in range(20):
        passed = training.forward_backward([row], "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-3))
        found["losses"].append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics
    path = training.save_state("a").result().path
    found["before"] = logprobs(training.forward([row], "cross_entropy").result())
    other = await_client(service.create_training_client_from_state_with_optimizer(path))
    found["after"] = logprobs(other.forward([row], "cross_entropy").result())
    for client in (training, other):
        client.forward_backward([row], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    found["continued"] = [logprobs(one.forward([row], "cross_entropy").result()) for one in (training, other)]
    found["custom"] = custom(training, row)
    for loss in ("importance_sampling", "ppo", "cispo", "dro"):
        rl = datum(ROW[:-1], ROW[1:], logprobs=found["before"], advantages=[0.5] * 7)
        found[loss] = training.forward_backward([rl], loss).result().metrics["loss:sum"]
    try:
        training.forward_backward([rl], "gspo").result()
    except tinker.RequestFailedError as error:
        found["gspo"] = str(error)
    found |= sampled(service, training, base)
    rest = service.create_rest_client()
    runs = rest.list_training_runs().result().training_runs
    run = training.get_info().model_id
    assert run in [one.training_run_id for one in runs]
    listed = [[one.checkpoint_id for one in rest.list_checkpoints(run).result().checkpoints]]
    rest.delete_checkpoint(run, "weights/a").result()
    found["listed"] = [*listed, [one.checkpoint_id for one in rest.list_checkpoints(run).result().checkpoints]]
    return found


def await_client(client: Any) -> Any:
    """The client of a future, as newer SDKs return it."""
    return client.result() if hasattr(client, "result") else client


def custom(training: Any, row: types.Datum) -> list[float]:
    """A custom loss, and cross-entropy weighted with its derivative by autograd, which must have the same gradient."""
    weights: list[float] = []

    def loss(data: Any, logprobs: Any) -> Any:
        [own] = logprobs
        total = (own.square() * torch.linspace(0.5, 1.5, len(own))).sum()
        copy = own.detach().clone().requires_grad_()
        (copy.square() * torch.linspace(0.5, 1.5, len(own))).sum().backward()
        weights[:] = (-copy.grad).tolist()
        return total, {"mine": float(total.detach())}

    value = training.forward_backward_custom([row], loss).result().metrics["mine"]
    norm = training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm:mean"]
    weighted = datum(ROW[:-1], ROW[1:], weights=weights)
    passed = training.forward_backward([weighted], "cross_entropy").result()
    expected = sum(w * lp**2 for w, lp in zip(torch.linspace(0.5, 1.5, 7).tolist(), logprobs(passed), strict=True))
    stepped = training.optim_step(types.AdamParams(learning_rate=0.0)).result()
    return [value, expected, norm, stepped.metrics["grad_norm:mean"]]


def sampled(service: Any, training: Any, base: str) -> dict[str, Any]:
    prompt, params = types.ModelInput.from_ints(ROW[:4]), types.SamplingParams(max_tokens=6, seed=3)
    ephemeral = await_client(training.save_weights_and_get_sampling_client())
    named = training.save_weights_for_sampler("b").result().path
    found = []
    for client in (ephemeral, await_client(service.create_sampling_client(model_path=named))):
        answer = client.sample(
            prompt=prompt, num_samples=2, sampling_params=params, include_prompt_logprobs=True, topk_prompt_logprobs=2
        ).result()
        found.append([[list(one.tokens), list(one.logprobs)] for one in answer.sequences])
    greedy = types.SamplingParams(max_tokens=3, temperature=0.0)
    alone = await_client(service.create_sampling_client(base_model=base))
    words = alone.sample(prompt=prompt, num_samples=1, sampling_params=greedy).result().sequences[0]
    prompt_logprobs = list(answer.prompt_logprobs)
    return {
        "samples": found,
        "base": len(words.tokens),
        "prompt": prompt_logprobs,
        "top": len(answer.topk_prompt_logprobs[1]),
    }


def steps(file: str) -> dict[str, Any]:
    given = json.loads(Path(file).read_text())
    service = tinker.ServiceClient()
    base = service.get_server_capabilities().supported_models[0].model_name
    training = await_client(service.create_lora_training_client(base_model=base, **given["lora"]))
    losses, norms = [], []
    for batch in given["batches"]:
        rows = [datum(row["ids"][:-1], row["ids"][1:], **row["inputs"]) for row in batch]
        passed = training.forward_backward(rows, given["loss"])
        stepped = training.optim_step(types.AdamParams(**given["adam"])).result()
        losses.append(passed.result().metrics["loss:sum"])
        norms.append(stepped.metrics["grad_norm:mean"])
    return {"losses": losses, "norms": norms, "path": training.save_state("end").result().path}


if __name__ == "__main__":
    print(json.dumps({"everything": everything, "steps": steps}[sys.argv[1]](*sys.argv[2:])))
