"""Build the sampler of a running server: check its model, and what its log-probabilities mean."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

from runner.core.errors import EnvironmentProblem
from runner.interfaces import Decide, GenerativeModel
from runner.sampler.config import ServerSamplerConfig
from runner.sampler.sampling import SamplingRule, check_token_ids
from runner.sampler.server.openai_client import OpenAiClient
from runner.sampler.server.openai_protocol import FIX, LogprobsMode, detect_logprobs_mode, has_raw_logprobs
from runner.sampler.server.openai_sampler import OpenAiSampler
from runner.sampler.server.openai_server import OpenAiServer

NO_START_TIME = "/metrics has no process start time: a restart with nearly the same weights is not detected"
NO_WEIGHTS = "sampler.weight_sync=none sends no weights: it samples with the weights that it was started with"


def build(
    config: ServerSamplerConfig, *, model: GenerativeModel, decide: Decide, folder: Path, recomputed: bool
) -> OpenAiSampler:
    """A sampler that sends requests to the server at config.url.

    folder: an empty one, which the sampler removes, for the configs of the model; recomputed: the log-probabilities
    that the server reports are compared only. Raises SpecError and EnvironmentProblem where this server cannot be
    used, SamplerError where none answers.
    """
    with ExitStack() as undone:
        undone.callback(shutil.rmtree, folder, ignore_errors=True)
        config.preflight()
        vocabulary = model.limits().vocab_size
        check_token_ids(config, vocabulary)
        key = None if config.api_key_env is None else os.environ[config.api_key_env]
        server = OpenAiServer(OpenAiClient(config.url, key, config.retries), config.model, config.patience_s)
        rule = SamplingRule(config.temperature, config.top_k, config.top_p, config.min_p)
        decide.record_fact("sampler", f"{server}, model {server.model}", "sampler.url")
        if not server.reports_start:
            decide.record_fact(
                "sampler restarts", "detected only by its log-probabilities of fixed tokens", NO_START_TIME
            )
        mode = detect_logprobs_mode(server, vocabulary)
        _check_logprobs(mode, server, rule, recomputed, decide)
        if config.weight_sync == "none":
            decide.record_fact("sampler weights", "not the trainer's", NO_WEIGHTS)
        else:
            model.save_configs(folder)
        sampler = OpenAiSampler(config, server, rule, model, folder, has_raw_logprobs=has_raw_logprobs(mode, rule))
        undone.pop_all()
    return sampler


def _check_logprobs(
    mode: LogprobsMode, server: OpenAiServer, rule: SamplingRule, recomputed: bool, decide: Decide
) -> None:
    """Whether the log-probabilities that come with answers will do. Raises EnvironmentProblem if not."""
    subject, reported = "sampler log-probabilities", f"the server's are {mode}"
    if has_raw_logprobs(mode, rule):
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
