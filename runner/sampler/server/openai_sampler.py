"""The sampler of a running server: one request per completion, so that each has its own seed.

    requests ──max_num_seqs at a time──▶ /v1/completions ──ids, log-probabilities──▶ checked, cut at our stop criteria
                                                                                          │
    has the server still these weights?  ◀──────────────────── fingerprint after each call┘   no: load, sample again

A server that was restarted has the weights that it was started with, and does not report that. Its fingerprint is the
time at which its process began, and its log-probabilities of a fixed row of tokens.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from runner.core.errors import SamplerError
from runner.interfaces import GenerativeModel, Request, Rollout
from runner.sampler.config import ServerSamplerConfig
from runner.sampler.sampling import SamplingRule, StopCriteria, answer_limit
from runner.sampler.server.openai_client import GarbledError, StatusError
from runner.sampler.server.openai_protocol import RequestTemplate, ServerFingerprint, parse_completion, read_fingerprint
from runner.sampler.server.openai_server import OpenAiServer
from runner.sampler.server.openai_weight_sync import make_weight_sync
from runner.sampler.server.pool_metrics import PoolMetrics
from runner.sampler.server.protocol import AnswerLimits, InvalidAnswerError, check_rollout
from runner.weight_sync.weight_store import StoredWeights

log = logging.getLogger("runner")

FIXED_TOKENS = 16
TRIES = 2  # of a request whose answer cannot be one
GONE = 404  # of a model's name that the server does not know


class LostAdapterError(Exception):
    """The server does not know the adapter any more."""


class OpenAiSampler:
    """Samples rollouts from a server; see `Sampler` for its methods."""

    def __init__(
        self,
        config: ServerSamplerConfig,
        server: OpenAiServer,
        rule: SamplingRule,
        model: GenerativeModel,
        folder: Path,
        *,
        has_raw_logprobs: bool,
    ) -> None:
        """Sample from `server`, under `rule`; has_raw_logprobs: whether answers come with raw_logprobs.

        folder: with the configs of `model`, removed when it is closed. Raises EnvironmentProblem where the server
        takes no weights in the way of sampler.weight_sync.
        """
        self.temperature, self.max_new_tokens = config.temperature, config.max_new_tokens
        shared, bounds = Path(config.folder) if config.folder else None, model.limits()
        ends, self._strings = bounds.stop_token_ids | set(config.stop_token_ids), frozenset(config.stop)
        self._server, self._sync = server, make_weight_sync(config.weight_sync, server, shared, folder)
        self._stops = StopCriteria(model.tokenizer, ends, config.stop)
        self._template = RequestTemplate(rule, ends, config.stop)
        self._limits = AnswerLimits(bounds.vocab_size, config.max_new_tokens)
        self._longest, self._fixed_row = bounds.length_limit, _fixed_row(bounds.vocab_size)
        if server.longest is not None and (self._longest is None or server.longest < self._longest[0]):
            self._longest = server.longest, "the server's --max-model-len"
        self._folder, self._has_raw_logprobs = folder, has_raw_logprobs
        self._pool = ThreadPoolExecutor(config.max_num_seqs, "sampler")
        self._sleeps, self._asleep, self._sends_weights = config.sleep, False, config.weight_sync != "none"
        self._version = 0
        self._weights: StoredWeights | None = None
        self._metrics = PoolMetrics()
        self._fingerprint = self._now()

    @property
    def max_model_len(self) -> int | None:
        """See `Sampler`."""
        return None if self._longest is None else self._longest[0]

    def load_weights(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Bring the server to these weights; with sampler.weight_sync=none it keeps its own (version 0).

        Raises SamplerError if it refuses them, StorageError if they cannot be written.
        """
        if not self._sends_weights:
            return
        if not isinstance(weights, StoredWeights):
            raise ValueError("a server reads weights from files, see runner/weight_sync/weight_store.py")
        begun, started = time.monotonic(), self._server.process_start()
        self._wake()
        self._sync.load(weights)
        self._version, self._weights, self._fingerprint = version, weights, replace(self._now(), started=started)
        self._metrics.add("load_s", time.monotonic() - begun)

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        """One rollout per request, in their order.

        Raises ValueError and DataError for an invalid request, SamplerError for no response.
        """
        limits = [answer_limit(request, self.max_new_tokens, self._longest) for request in requests]
        begun = time.monotonic()
        self._wake()
        found = self._all(requests, limits)
        if found is None:
            self._resync()
            found = self._all(requests, limits)
        if found is None:
            raise SamplerError(f"{self._server} lost its weights twice in one step; check it, then: run resume")
        tokens = sum(len(rollout.ids) for rollout in found)
        self._metrics.record_batch(tokens, time.monotonic() - begun, len(requests))
        return found

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """See `Sampler`; the server counts as one engine."""
        self._wake()
        return [[self._score_row(row) for row in rows]]

    def pop_metrics(self) -> dict[str, float]:
        """As of `SamplerPool`, and the requests that were repeated after no response."""
        retried, self._server.client.retried = self._server.client.retried, 0
        return {**self._metrics.pop(), "retries": float(retried)}

    def release_memory(self) -> None:
        """With sampler.sleep it sleeps until the next request."""
        if self._sleeps and not self._asleep:
            self._server.sleep()
            self._asleep = True

    def close(self) -> None:
        """Cancel running requests, and remove what was written; the server keeps running."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._server.shorten_timeouts()
        with ExitStack() as ends:  # each of them, also where another one fails
            ends.callback(shutil.rmtree, self._folder, ignore_errors=True)
            ends.callback(self._pool.shutdown)
            ends.callback(self._server.client.close)
            ends.callback(self._sync.close)
            if self._asleep:
                self._server.wake()

    def _wake(self) -> None:
        if self._asleep:
            self._server.wake()
            self._asleep = False

    def _now(self) -> ServerFingerprint:
        return read_fingerprint(self._server, self._fixed_row, self._sync.model)

    def _resync(self) -> None:
        """Send the server the weights again that it has lost."""
        if self._weights is None:
            text = "has other weights than at the start of the run, but sampler.weight_sync=none sends none"
            raise SamplerError(f"{self._server} {text}; start it with the same weights, then type: run resume")
        log.warning("%s lost weight version %d; sending it again", self._server, self._version)
        self._metrics.add("resyncs")
        before = self._fingerprint
        self.load_weights(self._weights, self._version)
        self._metrics.add("restarts", before.started != self._fingerprint.started)
        if before.scores is not None and replace(before, started=self._fingerprint.started).is_other(self._fingerprint):
            raise SamplerError(
                f"{self._server} received its weights again, but its log-probabilities differ from before"
            )

    def _all(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Rollout] | None:
        """All answers, or None if they are not of the weights that were loaded."""
        until, end = self._server.until(), threading.Event()
        tasks = [
            self._pool.submit(self._one, request, limit, until, end)
            for request, limit in zip(requests, limits, strict=True)
        ]
        try:
            wait(tasks, return_when=FIRST_EXCEPTION)
        finally:
            end.set()
            for task in tasks:
                task.cancel()
        failed = [error for task in tasks if not task.cancelled() and task.done() and (error := task.exception())]
        if any(isinstance(error, LostAdapterError) for error in failed):
            return None
        if failed:
            raise failed[0]
        return None if self._fingerprint.is_other(self._now()) else [task.result() for task in tasks]

    def _one(self, request: Request, limit: int, until: float, end: threading.Event) -> Rollout:
        for last in (False, True):
            try:
                return self._request(request, limit, until)
            except (InvalidAnswerError, GarbledError) as error:
                self._metrics.add("rejected")
                if last or end.is_set():
                    text = f"{self._server} returned {TRIES} invalid responses: {error}"
                    raise SamplerError(f"{text}; check the server") from error
                log.warning("%s returned an invalid response; retrying: %s", self._server, error)
            except StatusError as error:
                if error.status == GONE and self._sync.model != self._server.model:
                    raise LostAdapterError from error
                raise SamplerError(f"{self._server} refuses to sample: {error}") from error
        raise AssertionError("the last try returns or raises")

    def _request(self, request: Request, limit: int, until: float) -> Rollout:
        body = self._template.body(self._sync.model, request.prompt, limit, request.seed)
        found = parse_completion(self._server.client.post("/v1/completions", body, until), request.prompt)
        raw: Sequence[float] | None = None
        if request.raw and self._has_raw_logprobs:
            raw = found.logprobs
        elif request.raw and self.temperature == 1:  # the only one that prompts are scored at
            raw = self._score_row([*request.prompt, *found.ids])[len(request.prompt) - 1 :]
        rollout = Rollout(found.ids, found.logprobs, raw, self._version, "stop")
        check_rollout(rollout, request, self._version, self._limits, "the answer")
        return self._cut_at_stop(rollout, limit, found.stopped_by)

    def _cut_at_stop(self, rollout: Rollout, limit: int, stopped_by: str | None) -> Rollout:
        """The answer up to its end here: a server may see the end later, but never earlier, except strings."""
        found = self._stops.first_stop(rollout.ids, limit)
        if found is None and stopped_by in self._strings:
            found = len(rollout.ids), "stop"  # its text, made token by token, has the string, and ours has not
        if found is None:
            last = rollout.ids[-1]
            raise InvalidAnswerError(
                f"it ends after {len(rollout.ids)} of {limit} tokens, with id {last}, which is no stop token"
            )
        size, finish = found
        raw = None if rollout.raw_logprobs is None else rollout.raw_logprobs[:size]
        return Rollout(rollout.ids[:size], rollout.logprobs[:size], raw, rollout.version, finish)

    def _score_row(self, row: Sequence[int]) -> list[float]:
        try:
            return self._server.score(row, self._sync.model)
        except (InvalidAnswerError, StatusError, GarbledError) as error:
            raise SamplerError(f"{self._server} does not return prompt log-probabilities: {error}") from error


def _fixed_row(vocabulary: int) -> Sequence[int]:
    """Ids by whose log-probabilities weights are known."""
    draws = np.random.Generator(np.random.Philox(key=1))
    return [int(token) for token in draws.integers(0, vocabulary, FIXED_TOKENS)]
