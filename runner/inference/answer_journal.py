"""Answers of an engine, each written down: an interrupted evaluation computes only the rest.

requests ──known?──▶ journal ──────────────────────────▶ rollouts
            └─ no ──▶ Engine ──▶ a line of the journal ──▶
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core.fsync_io import storage_errors
from runner.core.media import without_media
from runner.inference.engine import FinishReason, GenerationRequest, SamplingParams
from runner.interfaces import Request, Rollout

if TYPE_CHECKING:
    from runner.inference.torch_engine import TorchEngine


class AnswerJournal:
    """A file of answers of one model, a JSON line each.

    num_known: answers that were in the file, as far as they were requested again
    """

    def __init__(self, path: Path) -> None:
        """Raises StorageError where the file cannot be read or written."""
        self.path, self.num_known = path, 0
        with storage_errors(f"cannot read {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if lines and not lines[-1].endswith(b"\n"):
            self._append(b"\n")  # what follows a torn line is a line of its own
        self._answers = dict(self._read(lines))

    def _read(self, lines: Sequence[bytes]) -> Iterator[tuple[str, Rollout]]:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                ids, finish = [*map(int, row["ids"])], str(row["finish"])
                yield str(row["key"]), Rollout(ids, (math.nan,) * len(ids), None, 0, finish)
            except (ValueError, KeyError, TypeError, OverflowError):
                print(f"{self.path}: line {number} is damaged; its question is repeated", file=sys.stderr)

    def find(self, key: str) -> Rollout | None:
        """The answer, if it is known."""
        found = self._answers.get(key)
        self.num_known += found is not None
        return found

    def add(self, key: str, rollout: Rollout, more: Mapping[str, Any]) -> None:
        """Write an answer down. Raises StorageError."""
        line = {"key": key, **more, "finish": rollout.finish, "ids": list(rollout.ids)}
        self._append(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._answers[key] = rollout

    def _append(self, line: bytes) -> None:
        with storage_errors(f"cannot write {self.path}"), self.path.open("ab") as file:
            file.write(line)


@dataclass(frozen=True, slots=True)
class JournaledSampler:
    """Answers requests by an engine, those that a journal knows without it; log-probabilities are NaN.

    temperature: 0 = greedy; on_answer: called after each new answer; stop, stop_token_ids: see `SamplingParams`
    """

    engine: TorchEngine
    tokenizer: Any
    journal: AnswerJournal
    temperature: float
    max_new_tokens: int
    on_answer: Callable[[], None]
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of prompt and answer together; None = no limit."""
        limit = self.engine.limits.length_limit
        return None if limit is None else limit[0]

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        """One rollout per request, in their order. Raises DataError for a prompt that cannot be answered."""
        keys = [self._key(request) for request in requests]
        found = {key: rollout for key in dict.fromkeys(keys) if (rollout := self.journal.find(key)) is not None}
        missing = {key: request for key, request in zip(keys, requests, strict=True) if key not in found}
        for key, ids, finish in self._generate(missing):
            rollout = Rollout(ids, (math.nan,) * len(ids), None, 0, finish)
            prompt, text = (self.tokenizer.decode(without_media(one)) for one in (missing[key].prompt, rollout.ids))
            self.journal.add(key, rollout, {"prompt": prompt, "seed": missing[key].seed, "text": text})
            found[key] = rollout
            self.on_answer()
        return [found[key] for key in keys]

    def _generate(self, missing: Mapping[str, Request]) -> Iterator[tuple[str, list[int], FinishReason]]:
        """Submit all requests; each answer, when it ends. Whatever ends this cancels the others."""
        ids = dict[str, list[int]]()
        try:
            for key, request in missing.items():
                params = SamplingParams(
                    self.temperature,
                    max_new_tokens=request.max_new_tokens,
                    seed=request.seed,
                    stop=self.stop,
                    stop_token_ids=self.stop_token_ids,
                )
                self.engine.submit(GenerationRequest(key, request.prompt, params))
                ids[key] = []
            while not self.engine.is_idle:
                for event in self.engine.step():
                    ids[event.request_id].append(event.token_id)
                    if event.finish_reason is not None:
                        yield event.request_id, ids.pop(event.request_id), event.finish_reason
        finally:
            for key in ids:
                self.engine.cancel(key)

    def _key(self, request: Request) -> str:
        """What an answer of the journal's model depends on: prompt, sampling, and what ends it."""
        ends = sorted({*self.engine.limits.stop_token_ids, *self.stop_token_ids})
        facts: list[Any] = [request.prompt, request.max_new_tokens, self.temperature, self.temperature and request.seed]
        facts += [ends, self.stop]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
