"""A running server: its model, its version, and all requests but those for completions.

    0.10.2 and newer   token ids come as they are (return_token_ids)
    0.16 and newer     weights are read again from a path in one call; before, the model's path is changed first
    all of them        endpoints for development (VLLM_SERVER_DEV_MODE=1), adapters (VLLM_ALLOW_RUNTIME_LORA_UPDATING=1)

A request finds out which of these a server supports. Its version is used in messages only.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from runner.core.errors import EnvironmentProblem, SamplerError
from runner.sampler.server.openai_client import GarbledError, OpenAiClient, StatusError
from runner.sampler.server.openai_protocol import Json, parse_scores, score_request

STARTED = re.compile(r"^process_start_time_seconds ([0-9.eE+]+)$", re.MULTILINE)
RESETS, RESET_WAIT_S = 20, 0.25  # of a prefix cache whose blocks are still held
CLOSE_TIMEOUT_S = 10.0  # of requests at the end, which are not necessary
ADAPTERS = (
    "vllm serve: VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora; run serve engine=torch: weight_updates=true"
)
NO_RELOAD = "vllm-ascend (0.23) cannot reload weights: type sampler.weight_sync=adapter, or sampler=vllm"
DEVELOPMENT = "vllm serve: VLLM_SERVER_DEV_MODE=1, on a private network only; run serve: weight_updates=true"


class OpenAiServer:
    """One server, and one model of it.

    version: "" where it does not report one; longest: most tokens of a prompt and its answer; reports_start: whether it
    reports when its process began
    """

    def __init__(self, client: OpenAiClient, model: str | None, timeout_s: float) -> None:
        """Query its model and version.

        Raises EnvironmentProblem where it has not the model, SamplerError if it does not answer.
        """
        self.client, self._timeout_s = client, timeout_s
        self.url = client.url
        self.version = self._version()
        card = self._card(model)
        self.model: str = card["id"]
        self.longest: int | None = card.get("max_model_len")
        self._reloads_in_one_step = True
        self.reports_start = bool(self._process_start())

    def __str__(self) -> str:
        return f"vLLM {self.version} at {self.url}" if self.version else self.url

    def until(self) -> float:
        """Deadline of a request that starts now."""
        return time.monotonic() + self._timeout_s

    def score(self, row: Sequence[int], model: str) -> list[float]:
        """Log-probabilities of the row's ids but the first. Raises InvalidAnswerError if there are none."""
        answer = self.client.post("/v1/completions", score_request(model, row), self.until())
        return parse_scores(answer, row)

    def process_start(self) -> str:
        """When its process began, "" where it does not report that. Raises SamplerError if it does not answer.

        A restarted server has lost the weights that were sent to it. A server that did not report a time at first gets
        no further request for it.
        """
        return self._process_start() if self.reports_start else ""

    def check_adapters(self) -> None:
        """Raise EnvironmentProblem where no adapter can be loaded."""
        self._expect("/v1/load_lora_adapter", {"lora_name": "", "lora_path": ""}, ADAPTERS)

    def check_development(self) -> None:
        """Raise EnvironmentProblem where the endpoints for development are off."""
        self._expect("/collective_rpc", {}, DEVELOPMENT)

    def load_adapter(self, name: str, folder: Path) -> None:
        """Make the server read an adapter. Raises SamplerError with its message."""
        self._do("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, ADAPTERS)

    def unload_adapter(self, name: str) -> None:
        """Make the server forget an adapter; one that was restarted has forgotten already."""
        try:
            self.client.post("/v1/unload_lora_adapter", {"lora_name": name}, self.until(), again=False)
        except GarbledError:
            return  # text, after a success
        except StatusError as error:
            if error.status not in (400, 404):
                raise SamplerError(f"{self} does not unload the adapter {name}: {error}") from error

    def reload(self, folder: Path) -> None:
        """Make the server read all weights again from a folder. Raises SamplerError with its message."""
        if self._reloads_in_one_step:
            try:
                self._call("reload_weights", {"weights_path": str(folder)})
            except StatusError as error:
                self._in_two_steps(folder, f"; in one step: {error}")
                self._reloads_in_one_step = False
        else:
            self._in_two_steps(folder)
        self._reset_cache()

    def sleep(self) -> None:
        """Make it free its cache and keep its weights in the host's memory."""
        self._do("/sleep?level=1", {}, DEVELOPMENT)

    def wake(self) -> None:
        """Make it allocate its memory again."""
        self._do("/wake_up", {}, DEVELOPMENT)

    def shorten_timeouts(self) -> None:
        """From here on send each request once, with a short timeout."""
        self._timeout_s, self.client.retries = min(self._timeout_s, CLOSE_TIMEOUT_S), 0

    def _process_start(self) -> str:
        try:
            found = STARTED.search(self.client.text("/metrics", self.until()))
        except (StatusError, EnvironmentProblem):  # a proxy may refuse this page alone
            return ""
        return found[1] if found else ""

    def _version(self) -> str:
        try:
            found = self.client.get("/version", self.until())
        except (StatusError, GarbledError):
            return ""
        return str(found.get("version", "")) if isinstance(found, dict) else ""

    def _card(self, model: str | None) -> Json:
        try:
            answer = self.client.get("/v1/models", self.until())
            cards = [one for one in answer["data"] if isinstance(one.get("id"), str) and not one.get("parent")]
        except (StatusError, GarbledError, KeyError, TypeError, AttributeError) as error:
            text = f"{self.url} does not list its models ({self.url}/v1/models: {error})"
            raise EnvironmentProblem(f"{text}; sampler.url must be an OpenAI-compatible server") from error
        found = [one for one in cards if model in (None, one["id"])]
        if len(found) != 1:
            names = ", ".join(one["id"] for one in cards) or "none"
            raise EnvironmentProblem(f"{self.url} has the models {names}; type sampler.model=NAME for one of them")
        return dict(found[0])

    def _in_two_steps(self, folder: Path, before: str = "") -> None:
        try:
            self._call("update_config", {"overrides": {"model_config": {"model": str(folder)}}})
            self._call("reload_weights", {})
        except StatusError as error:
            raise SamplerError(
                f"{self} cannot load the weights in {folder}, in two steps: {error}{before}; {NO_RELOAD}"
            ) from error

    def _call(self, method: str, options: Json) -> None:
        with suppress(GarbledError):  # text, after a success
            self.client.post("/collective_rpc", {"method": method, "kwargs": options}, self.until(), again=False)

    def _reset_cache(self) -> None:
        """Drop what older weights have computed; old versions do not report it, newer ones whether they did."""
        for _ in range(RESETS):
            answer = self._do("/reset_prefix_cache", {}, DEVELOPMENT)
            if not isinstance(answer, dict) or answer.get("success", True):
                return
            time.sleep(RESET_WAIT_S)
        text = "did not reset its prefix cache of older weights, because it has other requests"
        raise SamplerError(f"{self} {text}; stop other clients, or start it with --no-enable-prefix-caching")

    def _do(self, path: str, body: Json, instead: str) -> object:
        try:
            return self.client.post(path, body, self.until(), again=False)
        except GarbledError:
            return None  # text, which old versions return after a success
        except StatusError as error:
            raise SamplerError(f"{self} refuses {path}: {error}; {instead}") from error

    def _expect(self, path: str, body: Json, instead: str) -> None:
        """Raise EnvironmentProblem if there is no such endpoint; `body` is a request without effect."""
        try:
            self.client.post(path, body, self.until(), again=False)
        except (StatusError, GarbledError) as error:
            if isinstance(error, StatusError) and error.status in (404, 405):
                raise EnvironmentProblem(f"{self} has no {path}: {instead}") from None
