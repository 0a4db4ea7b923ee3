"""The sampler of a running server: who it is, what its log-probabilities mean, and whether that will do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from runner.errors import EnvironmentProblem
from runner.protocols import Decide
from runner.sampler.bounds import check_ids
from runner.sampler.config import VllmServerConfig
from runner.sampler.draw import Rule
from runner.sampler.remote.check import Limits
from runner.sampler.server.client import Client
from runner.sampler.server.mode import FIX, Mode, fits, mode_of
from runner.sampler.server.sampler import ServerSampler
from runner.sampler.server.server import Server
from runner.sampler.server.sync import sync_of
from runner.sampler.server.wire import Asking
from runner.sampler.stops import Stops

FIXED_TOKENS = 16
TIMEOUT_S = 1800.0
UNSENT = "nothing is sent to it (sampler.sync=none): what it draws is of the weights that it was started with"


class Described(Protocol):
    """What this sampler needs of the policy."""

    tokenizer: Any

    @property
    def ends(self) -> frozenset[int]: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def longest(self) -> tuple[int, str] | None: ...

    def blueprint(self, folder: Path) -> None: ...


def build(
    config: VllmServerConfig, *, model: Described, decide: Decide, folder: Path, recomputed: bool
) -> ServerSampler:
    """A sampler that asks the server at config.url.

    folder: an empty one of its own; recomputed: what the server says of its own answers' log-probabilities is only
    compared. Raises SpecError, EnvironmentProblem where this server cannot be used, SamplerFault where none answers.
    """
    config.preflight()
    check_ids(config, model.vocabulary)
    key = None if config.key_variable is None else os.environ[config.key_variable]
    server = Server(Client(config.url, key, config.retries), config.model, config.timeout_s or TIMEOUT_S)
    rule = Rule(config.temperature, config.top_k, config.top_p, config.min_p)
    decide.state("sampler", f"{server}, model {server.model}", "sampler.url")
    _judge(mode_of(server, model.vocabulary), server, rule, recomputed, decide)
    if config.sync == "none":
        decide.state("sampler weights", "not the trainer's", UNSENT)
    blueprint = folder / "blueprint"
    if config.sync != "none":
        blueprint.mkdir()
        model.blueprint(blueprint)
    ends = model.ends | set(config.stop_tokens)
    return ServerSampler(
        config,
        server,
        sync_of(config.sync, server, Path(config.folder) if config.folder else folder, blueprint),
        Stops(model.tokenizer, ends, config.stop),
        Asking(rule, ends, config.stop),
        Limits(model.vocabulary, config.max_new_tokens),
        _shorter(model.longest, server),
        _fixed_row(model.vocabulary),
    )


def _judge(mode: Mode, server: Server, rule: Rule, recomputed: bool, decide: Decide) -> None:
    """Whether the log-probabilities that come with answers will do. Raises EnvironmentProblem if not."""
    if fits(mode, rule):
        decide.state("sampler log-probabilities", "of what is drawn from", f"the server's are {mode}")
        return
    what = {"raw": "of temperature 1 and uncut, whatever is drawn from", "tempered": "of the uncut distribution"}[mode]
    if not recomputed:
        text = f"{server} reports log-probabilities {what}"
        raise EnvironmentProblem(f"{text}, and this algorithm learns from those of what is drawn from; {FIX}")
    text = f"{FIX} to compare them with the trainer's; what is learnt is not touched, as the trainer computes its own"
    decide.state("sampler log-probabilities", f"{what}: sampler/* compares unlike things", text)


def _shorter(own: tuple[int, str] | None, server: Server) -> tuple[int, str] | None:
    """The tighter of the model's and the server's limits on a prompt and its answer."""
    if server.longest is None or (own is not None and own[0] <= server.longest):
        return own
    return server.longest, "the server's --max-model-len"


def _fixed_row(vocabulary: int) -> Sequence[int]:
    draws = np.random.Generator(np.random.Philox(key=1))
    return [int(token) for token in draws.integers(0, vocabulary, FIXED_TOKENS)]
