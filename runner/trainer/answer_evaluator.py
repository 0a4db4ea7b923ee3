"""Evaluation of answers to held-out questions by a reward: one greedy answer, or n sampled ones.

    question ──▶ policy ⇄ environment ──n answers──▶ reward ──▶ reward/mean, mean@n, pass@k, exact_match, length

Answers are sampled with seeds of their own, the same at each evaluation: training is not changed, and the same random
numbers make two steps easier to compare.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from runner.algorithm.rollouts import AnswerSampler, Group, RolloutCollector, RolloutSample
from runner.core.errors import OutOfMemory
from runner.interfaces import EvalQuestion, Prompt, Request, Rollout
from runner.trainer.evaluation_metrics import component_means, pass_metrics, with_interval
from runner.trainer.evaluator import Report


@dataclass(frozen=True, slots=True)
class ShorteningSampler:
    """Shortens each request to what the model has room for, where `Sampler` would raise an error."""

    sampler: AnswerSampler

    @property
    def max_new_tokens(self) -> int:
        """Of one answer."""
        return self.sampler.max_new_tokens

    @property
    def max_model_len(self) -> int | None:
        """Tokens of prompt and answer together; None = no limit."""
        return self.sampler.max_model_len

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        """One rollout per request, in their order; an empty one, cut off, where there is no room at all."""
        longest = self.max_model_len
        rooms = [r.max_new_tokens if longest is None else longest - len(r.prompt) for r in requests]
        limited = [
            replace(r, max_new_tokens=min(r.max_new_tokens, room)) for r, room in zip(requests, rooms, strict=True)
        ]
        rollouts = iter(self.sampler.sample([r for r in limited if r.max_new_tokens > 0]))
        return [next(rollouts) if r.max_new_tokens > 0 else Rollout((), (), None, 0, "length") for r in limited]


def question_prompts(questions: Sequence[EvalQuestion]) -> list[Prompt]:
    """The questions as prompts to sample answers to, with the columns that rewards read."""
    return [Prompt(q.prompt_ids, q.prompt, q.messages, q.columns) for q in questions]


@dataclass(frozen=True, slots=True)
class AnswerEvaluator:
    """Measures the answers that `collector` draws to `questions`, with its reward where it has one.

    prefix: of the metrics, e.g. eval or eval/gsm8k; pass_threshold: an answer passes whose reward is at least this;
    without a reward, one that equals the expected answer; comparable: the questions whose expected answer can be given;
    exact_match: whether it is measured; section: of the job that sets max_new_tokens, for messages
    """

    questions: Sequence[EvalQuestion]
    comparable: Sequence[EvalQuestion]
    collector: RolloutCollector
    prefix: str
    section: str
    pass_threshold: float
    exact_match: bool = True

    def evaluate(self) -> Report:
        """reward/mean, reward/<part>, mean@n, pass@k, exact_match, length, truncated_frac, and intervals.

        Raises OutOfMemory, naming the option, where the device cannot draw so many answers at once.
        """
        start = time.perf_counter()
        groups = self._collect()
        values = {**self._rewards(groups), **self._passes(groups), **_lengths(groups)}
        named = {f"{self.prefix}/{name}": value for name, value in values.items()}
        return Report({**named, "time/eval_s": time.perf_counter() - start}, self._records(groups))

    def _collect(self) -> list[Group]:
        try:
            return self.collector.collect_groups(question_prompts(self.questions), step=0, round=0)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"out of device memory while sampling for evaluation: {str(error).splitlines()[0]}\n"
                f"  lower evaluation.batch_size or {self.section}.max_new_tokens"
            ) from error

    def _rewards(self, groups: Sequence[Group]) -> dict[str, float]:
        if self.collector.reward is None:
            return {}
        samples = [one for group in groups for one in group.samples]
        scored = [[s.reward for s in group.samples if s.reward is not None] for group in groups]
        return {
            **with_interval("reward/mean", [fmean(rewards) for rewards in scored if rewards], share=False),
            **{f"reward/{name}": mean for name, mean in component_means([s.components for s in samples]).items()},
            "reward/num_failed": float(sum(s.reward is None for s in samples)),
        }

    def _passes(self, groups: Sequence[Group]) -> dict[str, float]:
        """mean@n and pass@k, by the reward or the expected answer; exact_match, of those that can be compared."""
        comparable = {id(question) for question in self.comparable}
        pairs = list(zip(self.questions, groups, strict=True))
        exact = [[_is_exact(q, s) for s in group.samples] for q, group in pairs if id(q) in comparable]
        found = with_interval("exact_match", [fmean(one) for one in exact], share=True) if self.exact_match else {}
        if self.collector.reward is not None:
            passed = [[s.reward is not None and s.reward >= self.pass_threshold for s in g.samples] for g in groups]
            return {**pass_metrics(passed), **found}
        return {**(pass_metrics(exact) if exact else {}), **found}

    def _records(self, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """Each answer as a line of samples.jsonl, the first one to every question first."""
        name, rewarded = self.prefix.partition("/")[2], self.collector.reward is not None
        comparable = {id(question) for question in self.comparable}
        return [
            {
                **({"set": name} if name else {}),
                **({"sample": number} if self.collector.group_size > 1 else {}),
                "prompt": question.prompt,
                **({"turns": list(group.samples[number].history)} if group.samples[number].history else {}),
                "answer": group.samples[number].text,
                **_score_record(question, group.samples[number], id(question) in comparable, rewarded),
            }
            for number in range(self.collector.group_size)
            for question, group in zip(self.questions, groups, strict=True)
        ]


def _score_record(question: EvalQuestion, sample: RolloutSample, comparable: bool, rewarded: bool) -> Mapping[str, Any]:
    """What is known of an answer: expected answer, whether it is equal, reward, why it ended."""
    return {
        **({"expected": question.answer} if question.answer else {}),
        **({"exact": _is_exact(question, sample)} if comparable else {}),
        **({"reward": sample.reward} if rewarded else {}),
        "finish": sample.finish,
    }


def _is_exact(question: EvalQuestion, sample: RolloutSample) -> bool:
    return sample.text.strip() == question.answer.strip()


def _lengths(groups: Sequence[Group]) -> dict[str, float]:
    outcomes = [one for group in groups for one in group.outcomes]
    return {
        "length": fmean(one.length for one in outcomes),
        "truncated_frac": fmean(one.finish == "length" for one in outcomes),
    }
