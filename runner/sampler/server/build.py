"""Build the sampler of a running server: check who it is and what its log-probabilities mean."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from runner.core.errors import EnvironmentProblem
from runner.interfaces import Decide, ModelLimits
from runner.sampler.config import ServerSamplerConfig
from runner.sampler.sampling import SamplingRule, StopCriteria, check_token_ids
from runner.sampler.server.openai_client import OpenAiClient
from runner.sampler.server.openai_protocol import FIX, LogprobsMode, RequestTemplate, detect_logprobs_mode, reports_raw
from runner.sampler.server.openai_sampler import OpenAiSampler
from runner.sampler.server.openai_server import OpenAiServer
from runner.sampler.server.openai_weight_sync import make_weight_sync
from runner.sampler.server.protocol import AnswerLimits

FIXED_TOKENS = 16
UNTOLD = "/metrics has no process start time: a restart with nearly the same weights is not detected"
UNSENT = "sampler.weight_sync=none sends no weights: it samples with the weights that it was started with"


class PolicyInfo(Protocol):
    """What this sampler needs of the policy."""

    tokenizer: Any

    def limits(self) -> ModelLimits: ...

    def save_configs(self, folder: Path) -> None: ...


def build(
    config: ServerSamplerConfig, *, model: PolicyInfo, decide: Decide, folder: Path, recomputed: bool
) -> OpenAiSampler:
    """A sampler that sends requests to the server at config.url.

    folder: an empty one of its own, which it removes, for what the server has to know of the model; recomputed: what
    the server says of its own answers' log-probabilities is only compared. Raises SpecError and EnvironmentProblem
    where this server cannot be used, SamplerError where none answers.
    """
    with ExitStack() as undone:
        undone.callback(shutil.rmtree, folder, ignore_errors=True)
        config.preflight()
        made = _built(config, model, decide, folder, recomputed)
        undone.pop_all()
        return made


def _built(
    config: ServerSamplerConfig, model: PolicyInfo, decide: Decide, folder: Path, recomputed: bool
) -> OpenAiSampler:
    bounds = model.limits()
    check_token_ids(config, bounds.vocab_size)
    key = None if config.api_key_env is None else os.environ[config.api_key_env]
    server = OpenAiServer(OpenAiClient(config.url, key, config.retries), config.model, config.patience_s)
    rule = SamplingRule(config.temperature, config.top_k, config.top_p, config.min_p)
    decide.record_fact("sampler", f"{server}, model {server.model}", "sampler.url")
    if not server.tells:
        decide.record_fact("sampler restarts", "detected only by its log-probabilities of fixed tokens", UNTOLD)
    mode = detect_logprobs_mode(server, bounds.vocab_size)
    _check_logprobs(mode, server, rule, recomputed, decide)
    if config.weight_sync == "none":
        decide.record_fact("sampler weights", "not the trainer's", UNSENT)
    else:
        model.save_configs(folder)
    ends = bounds.stop_token_ids | set(config.stop_token_ids)
    return OpenAiSampler(
        config,
        server,
        make_weight_sync(config.weight_sync, server, Path(config.folder) if config.folder else None, folder),
        StopCriteria(model.tokenizer, ends, config.stop),
        RequestTemplate(rule, ends, config.stop),
        AnswerLimits(bounds.vocab_size, config.max_new_tokens),
        _shorter(bounds.length_limit, server),
        _fixed_row(bounds.vocab_size),
        folder,
        reports_raw=reports_raw(mode, rule),
    )


def _check_logprobs(
    mode: LogprobsMode, server: OpenAiServer, rule: SamplingRule, recomputed: bool, decide: Decide
) -> None:
    """Whether the log-probabilities that come with answers will do. Raises EnvironmentProblem if not."""
    subject, reported = "sampler log-probabilities", f"the server's are {mode}"
    if reports_raw(mode, rule):
        decide.record_fact(subject, "at the sampling temperature, before truncation", reported)
        return
    if rule.temperature == 1:  # then truncation is all that is in them
        decide.record_fact(subject, "from a second request per completion (prompt_logprobs)", reported)
        return
    remedy = f"type sampler.temperature=1, or leave top_k, top_p and min_p out and {FIX}" if rule.truncates else FIX
    if not recomputed:
        text = f"{server} reports {mode} log-probabilities, but this algorithm needs those at temperature"
        raise EnvironmentProblem(f"{text} {rule.temperature:g} and before truncation; {remedy}")
    decide.record_fact(subject, "not compared with the trainer's (no mismatch/*)", f"{reported}; {remedy}")


def _shorter(own: tuple[int, str] | None, server: OpenAiServer) -> tuple[int, str] | None:
    """The tighter of the model's and the server's limits on a prompt and its answer."""
    if server.longest is None or (own is not None and own[0] <= server.longest):
        return own
    return server.longest, "the server's --max-model-len"


def _fixed_row(vocabulary: int) -> Sequence[int]:
    draws = np.random.Generator(np.random.Philox(key=1))
    return [int(token) for token in draws.integers(0, vocabulary, FIXED_TOKENS)]
