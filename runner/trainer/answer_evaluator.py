"""Evaluation of answers to held-out questions by a reward: one greedy answer, or n sampled ones.

    question ──▶ policy ⇄ environment ──n answers──▶ reward ──▶ reward/mean, mean@n, pass@k, exact_match, length

Answers are sampled with seeds of their own, the same at each evaluation: training is not changed, and the same random
numbers make two steps easier to compare.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from runner.algorithm.episode import AnswerSampler
from runner.algorithm.rollouts import Group, RolloutCollector, RolloutSample
from runner.core.chat_answer import END_THINK, THINK
from runner.core.errors import OutOfMemory
from runner.interfaces import Decide, EvalQuestion, Prompt, Request, Rollout
from runner.interfaces.media import sample_images
from runner.trainer.evaluation_metrics import pass_metrics, score_metrics, with_interval
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


def eligible_questions(
    questions: Sequence[EvalQuestion], tokenizer: Any, max_new_tokens: int, decide: Decide, prefix: str, section: str
) -> list[EvalQuestion]:
    """The questions whose expected answer fits in `max_new_tokens`; decides for leaving out the others."""
    with_answer = [q for q in questions if q.prompt_ids and q.answer]
    found = [q for q in with_answer if _fits(q, tokenizer, max_new_tokens)]
    if left_out := len(with_answer) - len(found):
        reason = f"their expected answers are longer than {section}.max_new_tokens={max_new_tokens}"
        text = f"{len(found)}; {left_out} are left out"
        decide(f"{prefix}/exact_match", f"{len(with_answer)} questions", text, reason)
    return found


def _fits(question: EvalQuestion, tokenizer: Any, max_new_tokens: int) -> bool:
    """Whether the first tokens of the expected answer hold all of its text."""
    ids = question.answer_ids or question.item.ids[len(question.prompt_ids) :]
    best = tokenizer.decode(list(ids[:max_new_tokens]))
    return bool(best.strip().startswith(question.answer.strip()))


@dataclass(frozen=True, slots=True)
class AnswerEvaluator:
    """Measures the answers that `collector` draws to `questions`, with its reward where it has one.

    loss: measures the loss of expected answers; prefix: of the metrics, e.g. eval or eval/gsm8k; pass_threshold: an
    answer passes whose reward is at least this; without a reward, one that equals the expected answer; comparable: the
    questions whose expected answer can be given; section: of the job that sets max_new_tokens, for messages; is_greedy:
    whether the answers are not sampled
    """

    questions: Sequence[EvalQuestion]
    comparable: Sequence[EvalQuestion]
    collector: RolloutCollector
    loss: Callable[[], Mapping[str, float]]
    prefix: str
    section: str
    pass_threshold: float
    is_greedy: bool

    def evaluate(self, step: int = 0) -> Report:
        """loss, reward/mean, reward/<part>, mean@n, pass@k, exact_match, length, truncated_frac.

        Each with its interval. Raises OutOfMemory, naming the option, where the device cannot draw so many answers.
        """
        start = time.perf_counter()
        groups = self._collect(step) if self.questions else []
        values = {**self.loss(), **self._rewards(groups), **self._passes(groups), **_lengths(groups)}
        named = {f"{self.prefix}/{name}": value for name, value in values.items()}
        return Report({**named, "time/eval_s": time.perf_counter() - start}, self._records(groups))

    def exact_match(self, step: int = 0) -> Report:
        """The same with exact_match alone, for greedy answers beside sampled ones."""
        report = self.evaluate(step)
        kept = (f"{self.prefix}/exact_match", "time/")
        return Report({name: v for name, v in report.values.items() if name.startswith(kept)}, report.samples)

    def _collect(self, step: int) -> list[Group]:
        try:
            return self.collector.collect_groups(question_prompts(self.questions), step=0, round=0, finished=step)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"out of device memory while sampling for evaluation: {str(error).splitlines()[0]}\n"
                f"  lower evaluation.batch_size or {self.section}.max_new_tokens"
            ) from error

    def _rewards(self, groups: Sequence[Group]) -> dict[str, float]:
        if self.collector.reward is None or not groups:
            return {}
        samples = [one for group in groups for one in group.samples]
        values = score_metrics("reward/mean", _question_scores(groups, lambda s: s.reward))
        for part in dict.fromkeys(name for one in samples for name in one.components):
            scores = _question_scores(groups, lambda s, part=part: s.components.get(part))  # type: ignore[misc]
            values |= score_metrics(f"reward/{part}", scores)
        return {**values, "reward/num_failed": float(sum(s.reward is None for s in samples))}

    def _passes(self, groups: Sequence[Group]) -> dict[str, float]:
        """mean@n and pass@k, by the reward or the expected answer; exact_match, of those that can be compared.

        mean@1 of greedy answers by the expected answer is exact_match, and left out.
        """
        comparable = {id(question) for question in self.comparable}
        pairs = list(zip(self.questions, groups, strict=True))
        exact = [[_is_exact(q, s) for s in group.samples] for q, group in pairs if id(q) in comparable]
        passed = [] if self.is_greedy else exact
        if self.collector.reward is not None:
            passed = [[s.reward is not None and s.reward >= self.pass_threshold for s in g.samples] for g in groups]
        shares = with_interval("exact_match", [fmean(one) for one in exact], share=True)
        return {**(pass_metrics(passed) if passed else {}), **shares}

    def _records(self, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """Each answer as a line of samples.jsonl, the first one to every question first."""
        name, rewarded = self.prefix.partition("/")[2], self.collector.reward is not None
        comparable = {id(question) for question in self.comparable}
        return [
            {
                **({"set": name} if name else {}),
                **({"sample": number} if self.collector.group_size > 1 else {}),
                "prompt": question.prompt,
                **sample_images(self.collector.tokenizer, question.prompt_ids),
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
    """Whether it is the expected completion; reasoning is compared only where that one has some."""
    thought, end, expected = question.answer.rpartition(END_THINK)
    if question.follows_reasoning and not end:  # which ends with other marks
        return sample.text.strip().endswith(question.answer.strip())
    if thought.strip().removeprefix(THINK).strip():  # a chat template also writes empty reasoning
        return sample.text.strip() == question.answer.strip()
    if end and THINK not in thought and END_THINK not in sample.text:
        return False  # the prompt opens reasoning, and the completion has nothing else
    return sample.text.rpartition(END_THINK)[2].strip() == expected.strip()


def _lengths(groups: Sequence[Group]) -> dict[str, float]:
    lengths = [fmean(one) for one in _question_scores(groups, lambda sample: sum(sample.mask))]
    truncated = _question_scores(groups, lambda sample: sample.finish == "length")
    return {**with_interval("length", lengths, share=False), **score_metrics("truncated_frac", truncated)}


def _question_scores(groups: Sequence[Group], score: Callable[[RolloutSample], float | None]) -> list[list[float]]:
    """The scores of each question's answers; an answer without a score counts for nothing."""
    scored = ([s for sample in group.samples if (s := score(sample)) is not None] for group in groups)
    return [scores for scores in scored if scores]
