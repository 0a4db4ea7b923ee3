"""The sampler that runs the model itself: in this process, on the model's device, in plain PyTorch.

    requests ──distinct prompts once──▶ rows with a key-value cache ◀──step── logits ──sample──▶ rollouts

A request's tokens are a function of the weights, its prompt and its seed. In another batch logits differ by rounding,
and a token with them only where its uniform number falls between two such sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from runner.core.batch import pack
from runner.core.errors import TrainingDiverged
from runner.interfaces import Decide, GenerativeModel, Request, Rollout
from runner.interfaces.model import RecordExperts
from runner.interfaces.sampling import NewestWeights, RequestSource
from runner.sampler.config import TorchSamplerConfig
from runner.sampler.sampling import (
    SamplingRule,
    StopCriteria,
    answer_limit,
    check_token_ids,
    sample_tokens,
    uniform_stream,
)


@dataclass(slots=True)
class RunningSequence:
    """A rollout in the making."""

    prompt_ids: tuple[int, ...]
    stream: Iterator[tuple[int, int]]
    limit: int
    number: int = 0  # of the request, as its source counts
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] | None = None
    versions: list[int] = field(default_factory=list)
    finish: str | None = None
    experts: list[Tensor] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether it has its last token."""
        return self.finish is not None

    def to_rollout(self, *, with_versions: bool) -> Rollout:
        """The finished answer."""
        assert self.finish is not None
        same = self.raw_logprobs == self.logprobs  # nothing was truncated: one array, which ranks send once
        raw = self.logprobs if same else self.raw_logprobs
        versions = self.versions if with_versions else ()
        experts = torch.cat(self.experts).cpu().numpy() if self.experts else None
        return Rollout(self.ids, self.logprobs, raw, self.versions[0], self.finish, versions, experts)


class TorchSampler:
    """Samples rollouts from `model`, which is the trainer's own or a copy that `load_weights` fills."""

    def __init__(self, config: TorchSamplerConfig, model: GenerativeModel, *, decide: Decide) -> None:
        """Raises SpecError for ids outside the vocabulary, and for a model that cannot be sampled from."""
        self._model = model
        self._writer = model.batch_decoder(decide=decide)
        check_token_ids(config, self._writer.vocab_size)
        self._rule = SamplingRule(config.temperature, config.top_k, config.top_p, config.min_p)
        self._stops = StopCriteria(
            model.tokenizer, self._writer.stop_token_ids | set(config.stop_token_ids), config.stop
        )
        self._rows, self.max_new_tokens = config.max_num_seqs, config.max_new_tokens
        self.temperature = config.temperature
        self._version = 0
        self._newest: NewestWeights | None = None

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of a prompt and its answer together; None = no limit."""
        return None if self._writer.length_limit is None else self._writer.length_limit[0]

    def load_weights(self, tensors: Mapping[str, Tensor] | None, version: int) -> None:
        """Copy `tensors`, named as the model's trainable parameters, and call these weights `version`.

        None: the weights are the trainer's own. Newer ones that it has loaded by itself stay. Raises ValueError unless
        names and shapes are the model's.
        """
        if self._newest is not None and version < self._version:
            return
        if tensors is not None:
            copy_weights(self._model.trainable(), tensors)
        self._version = version

    def set_weight_source(self, newest: NewestWeights) -> None:
        """Load the newest weights from now on as soon as they are there, between two tokens."""
        self._newest = newest

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        """One rollout per request, in their order.

        The end token is part of the ids, a stop string's ids stay. Raises ValueError for an empty prompt, DataError
        for one that leaves no room for its answer, TrainingDiverged if logits are not finite.
        """
        answers = [self._sequence(request) for request in requests]
        if load := self._newer_weights():
            load()
        self._writer.decode(answers, self._sample_next, self._rows, self._newer_weights, self._recorder)
        return [answer.to_rollout(with_versions=self._newest is not None) for answer in answers]

    def sample_continuously(self, source: RequestSource) -> None:
        """See `ContinuousSampler`; raises as `sample`."""
        if load := self._newer_weights():
            load()

        def arrivals(idle: bool) -> list[RunningSequence]:
            return [self._sequence(request, number) for number, request in source.take(idle)]

        def choose(logits: Tensor, answers: Sequence[RunningSequence]) -> None:
            self._sample_next(logits, answers)
            for answer in answers:
                if answer.is_finished:
                    source.answer(answer.number, answer.to_rollout(with_versions=self._newest is not None))

        self._writer.decode((), choose, self._rows, self._newer_weights, self._recorder, arrivals)

    @property
    def _recorder(self) -> RecordExperts[RunningSequence] | None:
        """What keeps the experts of each answer, where they are replayed."""
        routing = self._model.routing
        is_replayed = routing is not None and routing.replays == "sampler"
        return (lambda answer, experts: answer.experts.append(experts)) if is_replayed else None

    def _sequence(self, request: Request, number: int = 0) -> RunningSequence:
        limit = answer_limit(request, self.max_new_tokens, self._writer.length_limit)
        raw: list[float] | None = [] if request.raw else None
        return RunningSequence(request.prompt, uniform_stream(request.seed), limit, number, raw_logprobs=raw)

    @torch.no_grad()
    def score(self, rows: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """See `Sampler`; there is one engine. A model that is also trained is left in evaluation mode."""
        self._model.eval()
        batch = pack(rows, [[1.0] * len(row) for row in rows]).to(self._model.device)
        found = self._model.outputs(batch, frozenset({"logprobs"}))["logprobs"].split([len(row) for row in rows])
        return [[row[1:].tolist() for row in found]]

    def pop_metrics(self) -> dict[str, float]:
        """Nothing that the step's own numbers do not say."""
        return {}

    def release_memory(self) -> None:
        """The cache of keys and values lives no longer than a call."""

    def close(self) -> None:
        """It has started nothing."""

    def _newer_weights(self) -> Callable[[], None] | None:
        """What loads weights that are newer than its own, where it follows them and there are some."""
        if self._newest is None or (found := self._newest())[0] <= self._version:
            return None
        return partial(self.load_weights, found[1], found[0])

    def _sample_next(self, logits: Tensor, answers: Sequence[RunningSequence]) -> None:
        """Sample the next id of each answer from logits [n, V], which may finish it."""
        u = torch.tensor([next(answer.stream) for answer in answers], device=logits.device)
        drawn = sample_tokens(logits, u, self._rule, raw=any(answer.raw_logprobs is not None for answer in answers))
        ids, logprobs = drawn.ids.tolist(), drawn.logprobs.tolist()
        raw = [math.nan] * len(ids) if drawn.raw_logprobs is None else drawn.raw_logprobs.tolist()
        if not math.isfinite(sum(logprobs)):
            raise TrainingDiverged("the policy's logits are not finite, so nothing can be sampled; lower optimizer.lr")
        for answer, token, logprob, raw_logprob in zip(answers, ids, logprobs, raw, strict=True):
            answer.ids.append(token)
            answer.logprobs.append(logprob)
            answer.versions.append(self._version)
            if answer.raw_logprobs is not None:
                answer.raw_logprobs.append(raw_logprob)
            answer.finish = self._stops.finish_reason(answer.ids, answer.limit)


@torch.no_grad()
def copy_weights(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Overwrite a model's parameters. Raises ValueError unless names and shapes are the same."""
    differing = sorted(parameters.keys() ^ tensors.keys())
    differing += [n for n, p in parameters.items() if n in tensors and p.shape != tensors[n].shape]
    if differing:
        raise ValueError(f"these weights do not match the sampler's: {len(differing)} differ, such as {differing[:3]}")
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
