"""Evaluation of a job: answers to held-out questions, loss on held-out items, and named sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from runner.algorithm.episode import AnswerSampler
from runner.algorithm.rollouts import RolloutCollector
from runner.algorithm.sft import CrossEntropy
from runner.build.components import Models
from runner.build.data import build_data
from runner.build.environments import EnvironmentBuilder, build_extend
from runner.build.rewards import MakeReward, refuse_missing_columns
from runner.core.auto_choices import Decisions
from runner.core.errors import Problem, SpecError
from runner.core.rng import derive_seed
from runner.interfaces import (
    Algorithm,
    Data,
    Environments,
    EvalQuestion,
    ExtendConversation,
    GenerativeModel,
    Prompt,
    Reward,
    TokenizedExample,
    as_generative,
)
from runner.parallelism.parallel_context import ParallelContext
from runner.parallelism.rollout_partition import PartitionedSampler
from runner.sampler.config import TorchSamplerConfig
from runner.sampler.torch import TorchSampler
from runner.spec.base import ItemKind
from runner.spec.evaluation import AnswersConfig, EvaluationSet, prefix_set_errors
from runner.spec.job import JobSpec
from runner.trainer.answer_evaluator import AnswerEvaluator, ShorteningSampler, eligible_questions, question_prompts
from runner.trainer.choice_evaluator import ChoiceEvaluator
from runner.trainer.evaluator import (
    HeldOutLoss,
    LearnsFromItems,
    MemoizedModel,
    Report,
    ScoreItems,
    question_loss,
    score_items,
)
from runner.trainer.reference_model import FrozenModel

Evaluation = Callable[[int], Report]  # after a number of steps


def no_reward(spec: JobSpec, prompts: Sequence[Prompt], option: str) -> None:
    """Nothing scores."""


def has_cross_entropy_alone(algorithm: LearnsFromItems) -> bool:
    """Whether the loss of the algorithm is that of the expected answers, which every policy measures."""
    return all(isinstance(loss, CrossEntropy) for loss in algorithm.losses.values())


def build_evaluation(
    spec: JobSpec,
    data: Data,
    models: Models,
    algorithm: Algorithm,
    world: ParallelContext,
    environments: Environments | None,
    decide: Decisions,
    extend: ExtendConversation | None = None,
    make_reward: MakeReward = no_reward,
    builder: EnvironmentBuilder | None = None,
) -> Evaluation | None:
    """The evaluation of the job, None if there is nothing to evaluate.

    make_reward, builder: of the rewards and environments of the job, or of a set
    """
    own: list[Evaluation] = []
    questions, items = data.held_out_questions(), data.held_out_items()
    given = items or [question.item for question in questions]
    if given and isinstance(algorithm, LearnsFromItems) and not has_cross_entropy_alone(algorithm):
        shown = spec.evaluation.logged_samples if items else 0  # questions are shown with their answers
        held_out = HeldOutLoss(algorithm, given, spec.algorithm.batch_size, shown, models.model.tokenizer)
        known = {
            role: MemoizedModel(one) if isinstance(one, FrozenModel) else one for role, one in models.by_role.items()
        }
        own.append(lambda step: held_out.evaluate(known))
    policy = as_generative(models.model)
    builder = builder or EnvironmentBuilder(models.model.tokenizer, decide, None)
    parts = (world, decide, make_reward, builder, environments, extend, partial(score_items, models.main))
    answers = None if policy is None else AnswerParts(spec, policy, *parts)
    if questions and answers is not None:
        # pairs and labeled completions have a loss of their own, of the same name
        own += _own_answers(spec, questions, answers, with_loss=not (own and items))
    sets = [] if answers is None else [build_set(one, answers).evaluate for one in spec.evaluation.decoded_sets()]
    if answers is None and spec.evaluation.sets:
        text = f"algorithm={spec.algorithm.name} trains a model that does not generate text; leave it out"
        raise SpecError([Problem("evaluation.sets", text)])
    if not own and not sets:
        decide(
            "evaluation",
            f"every {spec.evaluation.every} steps",
            "none",
            f"data={spec.data.name} has no held-out rows; set data.holdout=0.05, or evaluation.every=0",
        )
        return None
    return partial(_merge_evaluations, own, sets, spec.evaluation.logged_samples)


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """What evaluates answers of the policy, of the job's own questions or of a set's."""

    spec: JobSpec
    policy: GenerativeModel
    world: ParallelContext
    decide: Decisions
    make_reward: MakeReward
    builder: EnvironmentBuilder
    environments: Environments | None
    extend: ExtendConversation | None
    score: ScoreItems
    make_sampler: Callable[[AnswersConfig], AnswerSampler] | None = None  # None = the policy writes the answers itself

    def evaluator(
        self,
        name: str,
        options: AnswersConfig,
        questions: Sequence[EvalQuestion],
        reward: Reward | None,
        with_loss: bool = True,
    ) -> AnswerEvaluator:
        """The evaluator of answers to these questions; name: of the set, empty for the job's own."""
        section, prefix = (f"evaluation.sets.{name}", f"eval/{name}") if name else ("evaluation", "eval")
        most, tokenizer = options.max_new_tokens, self.policy.tokenizer
        comparable = eligible_questions(questions, tokenizer, most, self.decide, prefix, section)
        chosen = comparable if reward is None else [question for question in questions if question.prompt_ids]
        _check_room(chosen, most, self.policy.length_limit, self.decide, section)
        # training on an episode is not training on a single answer, which has no loss then
        has_loss = with_loss and self.environments is None
        loss_of = self._with_loss(questions, prefix) if has_loss else []
        loss = partial(question_loss, loss_of, self.score, self.spec.evaluation.batch_size)
        collector = self.collector(name, options, reward)
        names = (prefix, section, options.pass_threshold)
        return AnswerEvaluator(chosen, comparable, collector, loss, *names, is_greedy=not options.samples)

    def _with_loss(self, questions: Sequence[EvalQuestion], prefix: str) -> list[TokenizedExample]:
        """Plain texts, and prompts with an expected answer, that are not longer than the model allows."""
        items = [q.item for q in questions if (q.answer or not q.prompt_ids) and any(q.item.weights)]
        longest = self.policy.length_limit
        fitting = [item for item in items if longest is None or len(item.ids) <= longest[0]]
        if longest is not None and len(fitting) < len(items):
            text = f"{len(fitting)}; {len(items) - len(fitting)} are left out"
            reason = f"prompt and expected answer have more than {longest[0]} tokens ({longest[1]})"
            self.decide(f"{prefix}/loss", f"{len(items)} questions", text, reason)
        return fitting

    def collector(self, name: str, options: AnswersConfig, reward: Reward | None) -> RolloutCollector:
        """What writes the answers and has them scored; name: of the set, empty for the job's own."""
        tokenizer, seed = self.policy.tokenizer, derive_seed(self.spec.seed, "evaluation", name)
        sampler = (self.make_sampler or self._sampler)(options)
        return RolloutCollector(sampler, reward, tokenizer, seed, options.samples or 1, self.environments, self.extend)

    def _sampler(self, options: AnswersConfig) -> ShorteningSampler:
        """The policy itself, whatever samples for training: its weights are those of the step."""
        # an evaluated answer ends where a sampled one of the job does
        strings, ids = self.spec.sampler.stop_criteria() if self.spec.algorithm.needs_sampler else ((), ())
        config = TorchSamplerConfig(
            temperature=options.temperature,
            top_k=None if options.samples else 1,  # the likeliest token
            max_new_tokens=options.max_new_tokens,
            max_num_seqs=self.spec.evaluation.batch_size,
            stop=strings,
            stop_token_ids=ids,
        )
        sampler = TorchSampler(config, self.policy, decide=self.decide if options.samples else Decisions())
        full_params = partial(self.world.summon_full_params, self.policy)
        partitioned = PartitionedSampler(sampler, self.world.world_peers, full_params, self.policy.tokenizer)
        return ShorteningSampler(partitioned)


def _own_answers(
    spec: JobSpec, questions: Sequence[EvalQuestion], answers: AnswerParts, with_loss: bool
) -> list[Evaluation]:
    """Evaluators of the job's own held-out questions; eval/exact_match is that of greedy answers."""
    options, reward = spec.evaluation, answers.make_reward(spec, question_prompts(questions), "reward")
    scored = answers.evaluator("", options, questions, reward, with_loss)
    if not options.samples or not scored.comparable:
        return [scored.evaluate]
    greedy = answers.collector("", options.model_copy(update={"samples": 0, "temperature": 1.0}), None)
    beside = replace(scored, questions=scored.comparable, collector=greedy, loss=dict, is_greedy=True)
    return [scored.evaluate, beside.exact_match]


def build_set(one: EvaluationSet, answers: AnswerParts) -> AnswerEvaluator | ChoiceEvaluator:
    """The evaluator of a named set, with its own components and otherwise the job's."""
    spec = answers.spec.model_copy(update=dict(one.components))
    spec = spec.model_copy(update={"reward": spec.reward.with_dtype(spec.model.compute_dtype)})
    with prefix_set_errors(one.name):
        config = spec.data.as_held_out() if "data" in one.components else spec.data
        if any(config.pixel_limits().values()) and config.pixel_limits() != answers.spec.data.pixel_limits():
            text = "images are processed as in training; set data.min_pixels and data.max_pixels of the job"
            raise SpecError([Problem("data", text)])
        # rows of the job itself have answers in the form that it learns from
        is_own = spec.data == answers.spec.data and spec.algorithm.item_kind == "sft"
        kind: ItemKind = "sft" if is_own else "prompts"
        data = build_data(spec, answers.policy.tokenizer, answers.decide, config, kind)
        refuse_missing_columns(spec, data)
        if "environment" in one.components:
            environments = answers.builder.build(spec, answers.world.world_peers)
            extend = build_extend(spec, answers.policy.tokenizer, environments, answers.decide)
            answers = replace(answers, environments=environments, extend=extend)
        questions = data.held_out_questions()[: one.options.limit]
        if not questions:
            raise SpecError([Problem("data", f"data={config.name} has no held-out rows; set them")])
        if one.options.choices is not None:
            tokenizer, rows, key = answers.policy.tokenizer, spec.evaluation.batch_size, f"evaluation.sets.{one.name}"
            where = (one.options.choices, f"eval/{one.name}", f"{key}.choices")
            return ChoiceEvaluator(questions, *where, tokenizer, answers.score, rows)
        reward = answers.make_reward(spec, question_prompts(questions), f"evaluation.sets.{one.name}.reward")
    return answers.evaluator(one.name, one.options, questions, reward)


def _check_room(
    chosen: Sequence[EvalQuestion], wanted: int, longest: tuple[int, str] | None, decide: Decisions, section: str
) -> None:
    """Say how many answers may be shorter than `wanted` tokens because of the model's maximum length.

    Raises SpecError if all of them may.
    """
    if longest is None or not chosen:
        return
    key, (most, reason) = f"{section}.max_new_tokens", longest
    rooms = [most - len(question.prompt_ids) for question in chosen]
    less = [room for room in rooms if room < wanted]
    if len(less) == len(rooms):
        text = f"no completion can have {wanted} tokens: {reason}, and the shortest held-out prompt has"
        raise SpecError([Problem(key, f"{text} {most - max(rooms)}; the maximum is {max(rooms)}")])
    if less:
        decide(key, f"{wanted} tokens", f"{min(less)} to {max(less)} for {len(less)} of {len(rooms)} questions", reason)


def _merge_evaluations(own: Sequence[Evaluation], sets: Sequence[Evaluation], keep: int, step: int = 0) -> Report:
    """Merge evaluations; later numbers win over earlier ones of the same name, times are summed.

    keep: most samples of the job's own questions, and of each set
    """
    first, others = [evaluate(step) for evaluate in own], [evaluate(step) for evaluate in sets]
    values = {name: value for report in (*first, *others) for name, value in report.values.items()}
    values["time/eval_s"] = sum(report.values["time/eval_s"] for report in (*first, *others))
    samples = [sample for report in first for sample in report.samples][:keep]
    return Report(values, [*samples, *(sample for report in others for sample in report.samples[:keep])])
