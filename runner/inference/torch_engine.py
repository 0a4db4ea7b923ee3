"""The engine that runs the model in this process, over a key-value cache with continuous batching.

    waiting ──room for a row──▶ rows ◀──step── logits ──sample──▶ one event for each row; a finished row makes room

A request's tokens are a function of the weights, its prompt, its parameters and its seed. In another batch logits
differ by rounding: a greedy token differs only where two logits are that close, a sampled one only where its uniform
number falls between two such sums.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runner.core.errors import DataError, TrainingDiverged
from runner.core.media import MEDIA_ID
from runner.inference.engine import FinishReason, GenerationRequest, SamplingParams, TokenEvent, TokenScore
from runner.interfaces import Decide, GenerativeModel
from runner.interfaces.media import images_of, vocabulary_ids
from runner.model.generation import DecodingBatch
from runner.sampler.sampling import SamplingRule, StopCriteria, sample_tokens, truncate_logits, uniform_stream

MAX_NUM_SEQS = 32
LEAST_TEMPERATURE = 1e-20  # logits that are divided by less may not be finite
SCORE_TOKENS = 256  # of a row that are scored at once: their logits are [256, V] in float32


@dataclass(slots=True)
class _RunningRow:
    """A request that has a row, or waits for one."""

    request: GenerationRequest
    rule: SamplingRule | None  # None = greedy
    stops: StopCriteria
    stream: Iterator[tuple[int, int]]
    ids: list[int] = field(default_factory=list)
    is_finished: bool = False

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The request's."""
        return self.request.prompt_ids


class TorchEngine:
    """Generates answers to requests, token by token; runs the model in this process.

    From its first step or score until `leave_generation_mode` or `close` the model is in generation mode: its own
    attention, a single adapter merged into its base where that is exact. Gradients are off within a call only.

    max_num_seqs: most requests that run at once, of each adapter; adapters: names that a request may choose, with
    their names in the peft model, to which others may join; None = the model has none, or a single one that always
    answers
    """

    def __init__(
        self,
        model: GenerativeModel,
        *,
        decide: Decide,
        max_num_seqs: int = MAX_NUM_SEQS,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        """Raises SpecError for a model that cannot generate with a cache."""
        # adapters that take turns cannot be merged into the base
        self._model, self._generator = model, model.batch_decoder(decide=decide, merge=adapters is None)
        self._max_num_seqs, self._adapters = max_num_seqs, None if adapters is None else dict(adapters)
        self.limits = model.limits()  # what bounds an answer
        self._batches: dict[str | None, DecodingBatch[_RunningRow]] = {}  # of each adapter, in a cache of its own
        self._failed: list[str] = []
        self._mode = ExitStack()
        self._is_generating = False
        self.weight_version = 0

    # --- requests ---

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return sum(not row.is_finished for batch in self._batches.values() for row in batch.rows)

    @property
    def num_waiting(self) -> int:
        """Requests that have none yet."""
        return sum(len(batch.waiting) for batch in self._batches.values())

    def image_ids(self) -> set[int]:
        """The images of unfinished requests."""
        rows = [row for batch in self._batches.values() for row in (*batch.waiting, *batch.rows) if not row.is_finished]
        return {one for row in rows for one in row.prompt_ids if one >= MEDIA_ID}

    @property
    def is_idle(self) -> bool:
        """Whether no request is waiting or running."""
        return not self.num_waiting and not self.num_running

    def submit(self, request: GenerationRequest) -> None:
        """Let a request wait for a row. Raises DataError for one that cannot be answered."""
        self.check_request(request)
        params = request.params
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.limits.stop_token_ids)
        stops = StopCriteria(self._model.tokenizer, ends, params.stop)
        row = _RunningRow(request, self._sampling_rule(params), stops, uniform_stream(params.seed))
        if (adapter := params.adapter) not in self._batches:
            decoder = self._generator.make_decoder(self._max_num_seqs)
            self._batches[adapter] = DecodingBatch(decoder, self._max_num_seqs)
        self._batches[adapter].waiting.append(row)

    def check_request(self, request: GenerationRequest) -> None:
        """Raise DataError for a request that cannot be answered."""
        params = request.params
        self._check_ids(request.prompt_ids)
        self._check_adapter(params.adapter)
        if 0 < params.temperature < LEAST_TEMPERATURE:
            raise DataError(f"temperature={params.temperature:g} is too low; set 0 for the likeliest tokens")
        vocabulary = self.limits.vocab_size
        if wrong := [i for i in params.stop_token_ids if not 0 <= i < vocabulary]:
            raise DataError(f"stop_token_ids has {wrong[0]}; the model has the ids 0 to {vocabulary - 1}")
        if params.max_new_tokens < 1:
            raise DataError(f"max_new_tokens={params.max_new_tokens}; a completion needs at least one token")
        limit = self.limits.length_limit
        if limit is not None and len(request.prompt_ids) + params.max_new_tokens > limit[0]:
            raise DataError(
                f"a prompt of {len(request.prompt_ids)} tokens and {params.max_new_tokens} new ones exceed "
                f"{limit[0]}: {limit[1]}"
            )

    def cancel(self, id: str) -> None:
        """Drop a request; its row makes room at the next step."""
        for batch in self._batches.values():
            batch.waiting = deque(row for row in batch.waiting if row.request.id != id)
            for row in batch.rows:
                row.is_finished = row.is_finished or row.request.id == id

    @torch.no_grad()
    def step(self) -> list[TokenEvent]:
        """One token of each running request, and the first token of those that join now.

        Raises TrainingDiverged if logits are not finite; those of one adapter of several end its requests alone, which
        `pop_failed` then returns.
        """
        if self.is_idle:
            return []
        self.enter_generation_mode()
        events: list[TokenEvent] = []
        # Switching adapters takes longer than a token of a small model, so those with nothing to do are left out.
        for adapter, batch in self._batches.items():
            if not batch.waiting and not batch.rows:
                continue
            with self._with_adapter(adapter):
                for advance in (batch.decode, batch.admit):
                    if found := advance():
                        events += self._sample_or_fail(*found)
        return events

    def pop_failed(self) -> list[str]:
        """Ids of requests whose adapter gave logits that are not finite, since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def _sample_or_fail(self, logits: Tensor, rows: Sequence[_RunningRow]) -> list[TokenEvent]:
        try:
            return self._sample(logits, rows)
        except TrainingDiverged:
            if not self._adapters:
                raise
            for row in rows:
                row.is_finished = True
            self._failed += [row.request.id for row in rows]
            return []

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids:
            raise DataError("the prompt is empty; expected at least one token")
        vocabulary = self.limits.vocab_size
        images = images_of(self._model.tokenizer) or ()
        if wrong := next((i for i in ids if not (i in images if i >= MEDIA_ID else 0 <= i < vocabulary)), None):
            raise DataError(f"the prompt has the token id {wrong}; the model has the ids 0 to {vocabulary - 1}")

    def _check_adapter(self, adapter: str | None) -> None:
        known = self._adapters or {}
        if adapter is not None and adapter not in known:
            raise DataError(f"no adapter is named '{adapter}'; adapters: {', '.join(known) or 'none'}")

    def _sampling_rule(self, params: SamplingParams) -> SamplingRule | None:
        if params.temperature == 0:
            return None
        top_k = params.top_k if params.top_k is not None and params.top_k < self.limits.vocab_size else None
        return SamplingRule(params.temperature, top_k, params.top_p, params.min_p)

    # --- tokens ---

    def _sample(self, logits: Tensor, rows: Sequence[_RunningRow]) -> list[TokenEvent]:
        """The next token of each row, from logits [B, V]."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        raw = logits.log_softmax(-1)
        if not bool(raw.isfinite().any(-1).all()):
            raise TrainingDiverged(
                "the model's logits are not finite, so nothing can be sampled; its weights are damaged"
            )
        ids, logprobs = logits.argmax(-1), raw.amax(-1)
        tops = _top_logprobs(raw, max(row.request.params.logprobs for row in rows))
        groups = defaultdict[SamplingRule, list[int]](list)
        for at, row in enumerate(rows):
            if row.rule is not None:
                groups[row.rule].append(at)
        for rule, members in groups.items():  # a row is sampled by itself, whatever shares its batch
            u = torch.tensor([next(rows[at].stream) for at in members], device=logits.device)
            which = torch.tensor(members, device=logits.device)
            sampled = sample_tokens(logits[which], u, rule)
            ids[which], logprobs[which] = sampled.ids, sampled.logprobs.to(logprobs.dtype)
            for at in members:
                params = rows[at].request.params
                if params.logprobs and params.logprobs_mode == "processed":
                    values, kept = truncate_logits(logits[at : at + 1] / rule.temperature, rule)
                    tops[at] = _top_logprobs(values.log_softmax(-1), params.logprobs, kept)[0]
        raw_logprobs = raw.gather(1, ids[:, None])[:, 0]
        columns = (ids.tolist(), logprobs.tolist(), raw_logprobs.tolist(), tops)
        return [self._extend(row, *values) for row, *values in zip(rows, *columns, strict=True)]

    def _extend(
        self, row: _RunningRow, token: int, logprob: float, raw: float, top: list[tuple[int, float]]
    ) -> TokenEvent:
        """Add a token to a row's answer, which it may finish."""
        params = row.request.params
        row.ids.append(token)
        found = row.stops.finish_reason(row.ids, params.max_new_tokens)
        finish: FinishReason | None = "stop" if found == "stop" else "length" if found else None
        row.is_finished = finish is not None
        return TokenEvent(
            row.request.id, token, logprob, raw, tuple(top[: params.logprobs]), self.weight_version, finish
        )

    @torch.no_grad()
    def score(self, ids: Sequence[int], logprobs: int, adapter: str | None = None) -> list[TokenScore]:
        """Log-probabilities of all tokens but the first; in an image, those of its placeholder.

        Raises DataError for ids outside the vocabulary.
        """
        self._check_ids(ids)
        self._check_adapter(adapter)
        limit = self.limits.length_limit
        if limit is not None and len(ids) > limit[0]:
            raise DataError(f"{len(ids)} tokens exceed {limit[0]}: {limit[1]}")
        targets = vocabulary_ids(ids, images_of(self._model.tokenizer))
        self.enter_generation_mode()
        found: list[TokenScore] = []
        with self._with_adapter(adapter):
            for first, logits in self._generator.prompt_logits(ids[:-1], SCORE_TOKENS):
                raw = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
                next_ids = torch.tensor(targets[first + 1 : first + 1 + len(raw)], device=raw.device)
                values = raw.gather(1, next_ids[:, None])[:, 0].tolist()
                tops = _top_logprobs(raw, logprobs)
                found += [TokenScore(value, tuple(top)) for value, top in zip(values, tops, strict=True)]
        return found

    # --- weights ---

    def add_adapter(self, name: str, peft_name: str) -> None:
        """Let requests choose one more adapter, which the model has as `peft_name`; between two steps."""
        assert self._adapters is not None, "an engine without adapters may have merged the model's own"
        self.leave_generation_mode()  # which has cast the weights that there were
        self._adapters[name] = peft_name

    def remove_adapter(self, name: str) -> list[str]:
        """Drop an adapter and its requests, whose ids are returned; between two steps."""
        assert self._adapters is not None
        self.leave_generation_mode()
        batch = self._batches.pop(name, None)
        del self._adapters[name]
        rows = [] if batch is None else [*batch.waiting, *(row for row in batch.rows if not row.is_finished)]
        return [row.request.id for row in rows]

    def close(self) -> None:
        """Drop all requests and leave the model as it was, until the next step."""
        self._batches.clear()
        self.leave_generation_mode()

    def enter_generation_mode(self) -> None:
        """Prepare the model for steps, which do it themselves; collective where it is sharded."""
        if not self._is_generating:
            self._mode.enter_context(self._generator.generation_mode())
            self._is_generating = True

    def leave_generation_mode(self) -> None:
        """Let others compute with the model until the next step, which enters the mode again.

        Requests keep their rows; adapters are merged then, from the weights that there are.
        """
        self._mode.close()
        self._is_generating = False

    def _with_adapter(self, adapter: str | None) -> AbstractContextManager[object]:
        """With this adapter active; None = the base alone, where there may be several."""
        if self._adapters is None:
            return nullcontext()
        if adapter is None:
            return self._model.adapter_disabled()
        return self._model.adapter_active(self._adapters[adapter])


def _top_logprobs(logprobs: Tensor, count: int, ids: Tensor | None = None) -> list[list[tuple[int, float]]]:
    """The likeliest ids of each row [B, V] with their log-probabilities, likeliest first; ids: of columns."""
    if count == 0:
        return [[] for _ in range(len(logprobs))]
    values, places = logprobs.topk(min(count, logprobs.shape[1]))
    ids = places if ids is None else ids.gather(1, places)
    return [
        [(i, v) for i, v in zip(row_ids, row_values, strict=True) if v > -math.inf]
        for row_ids, row_values in zip(ids.tolist(), values.tolist(), strict=True)
    ]
