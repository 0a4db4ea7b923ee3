"""A client of `run tinker` without the SDK: supervised, then reinforcement learning of a tiny model.

    TINKER_BASE_URL=http://127.0.0.1:8010 TINKER_API_KEY=tml-local python -m runner.tinker.demo_client

The tiny model's ids below 256 are bytes. It learns a sentence from its bytes, and to sample lower-case letters from a
reward alone. Requests are JSON, as SDK 0.24 sends them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

SENTENCE = b"a tiny model learns a sentence from its bytes"
PROMPT = b"letters: "
SFT_STEPS, RL_STEPS, SAMPLES, TOKENS = 50, 15, 32, 8


class Client:
    """A session of the server with one training client."""

    def __init__(self) -> None:
        self._host = urlsplit(os.environ["TINKER_BASE_URL"]).netloc
        self._number = 0  # of the newest request
        session = self.post("create_session")["session_id"]
        lora = {"rank": 8, "seed": 0}
        own = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
        self._model = self.wait(self.post("create_model", **own))["model_id"]

    def post(self, path: str, /, **body: Any) -> Any:
        """The answer to a request; None where a result is not there yet."""
        connection = HTTPConnection(self._host)
        headers = {"X-API-Key": os.environ["TINKER_API_KEY"], "Content-Type": "application/json"}
        connection.request("POST", f"/api/v1/{path}", json.dumps(body), headers)
        answer = connection.getresponse()
        found = json.loads(answer.read())
        connection.close()
        if "error" in found:
            raise SystemExit(f"{path}: {found['error']}")
        return None if answer.status == 408 else found

    def wait(self, started: Any) -> Any:
        """The result of a request that the server computes."""
        while (result := self.post("retrieve_future", request_id=started["request_id"])) is None:
            continue
        return result

    def run(self, path: str, /, **body: Any) -> Any:
        """The result of a request of the training client."""
        self._number += 1
        return self.wait(self.post(path, model_id=self._model, seq_id=self._number, **body))

    def train(self, loss: str, data: Sequence[Any], lr: float) -> float:
        """The loss of a step."""
        passed = self.run("forward_backward", forward_backward_input={"data": data, "loss_fn": loss})
        self.run("optim_step", adam_params={"learning_rate": lr, "grad_clip_norm": 1.0})
        return float(passed["metrics"]["loss:sum"])

    def sample(self, prompt: bytes, count: int, tokens: int, temperature: float) -> list[Any]:
        """Answers with the newest weights."""
        sampler = self.run("save_weights_for_sampler", sampling_session_seq_id=self._number)["sampling_session_id"]
        params = {"max_tokens": tokens, "temperature": temperature, "seed": self._number, "stop": []}
        given = {"prompt": {"chunks": [{"tokens": list(prompt)}]}, "num_samples": count, "sampling_params": params}
        return list(self.wait(self.post("asample", sampling_session_id=sampler, seq_id=0, **given))["sequences"])


def datum(ids: Sequence[int], **inputs: Sequence[float]) -> Any:
    """A row that predicts its next tokens."""
    given = {name: {"data": list(values), "dtype": "float32"} for name, values in inputs.items()}
    targets = {"target_tokens": {"data": list(ids[1:]), "dtype": "int64"}}
    return {"model_input": {"chunks": [{"tokens": list(ids[:-1])}]}, "loss_fn_inputs": targets | given}


def learn_sentence() -> None:
    """Supervised fine-tuning on one sentence."""
    client, row = Client(), datum(SENTENCE)
    losses = [client.train("cross_entropy", [row], 3e-3) / (len(SENTENCE) - 1) for _ in range(SFT_STEPS)]
    path = client.run("save_weights", path="sentence")["path"]
    print(f"sft      loss per token {losses[0]:.2f} → {losses[-1]:.2f} in {SFT_STEPS} steps; saved {path}", flush=True)
    start, rest = SENTENCE[:6], len(SENTENCE) - 6
    [answer] = client.sample(start, 1, rest, 0.0)
    text = (start + bytes(token for token in answer["tokens"] if token < 256)).decode(errors="replace")
    print(f"sample   {start.decode()}: {text}", flush=True)


def learn_letters() -> None:
    """Reinforcement learning by importance sampling: the reward is the share of lower-case letters."""
    client, rewards = Client(), list[float]()
    for _ in range(RL_STEPS):
        answers = client.sample(PROMPT, SAMPLES, TOKENS, 1.0)
        scores = [sum(97 <= token < 123 for token in one["tokens"]) / TOKENS for one in answers]
        rewards.append(sum(scores) / SAMPLES)
        before, data = [0.0] * (len(PROMPT) - 1), []
        for one, score in zip(answers, scores, strict=True):
            own = {"logprobs": before + one["logprobs"], "advantages": before + [score - rewards[-1]] * TOKENS}
            data.append(datum([*PROMPT, *one["tokens"]], **own))
        client.train("importance_sampling", data, 2e-2)
    print(f"rl       reward {rewards[0]:.2f} → {rewards[-1]:.2f} in {RL_STEPS} steps", flush=True)


if __name__ == "__main__":
    learn_sentence()
    learn_letters()
