"""Policy optimization as a whole: real sampling, real gradients, and what must not change them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.algorithm import experience_state, rollouts
from runner.algorithm.explain import policy as formula
from runner.algorithm.policy.config import GrpoConfig, PolicyConfig, PpoConfig
from runner.algorithm.policy.policy_gradient import add_advantages
from runner.core.batch import Batch
from runner.core.errors import EnvironmentProblem, TrainingDiverged
from runner.core.metrics import Metrics
from runner.environment.config import NoEnvironmentConfig
from runner.interfaces import Completion, EnvironmentFactory, StepResult
from runner.sampler.config import TorchSamplerConfig
from runner.trainer.callbacks import BaseCallback, LogStep
from runner.trainer.loop import TrainingJob, run_loop
from tests.algorithm import harness
from tests.algorithm.harness import Nods, even_bytes, job_of

SMALL: dict[str, Any] = {"batch_size": 4, "micro_batch_tokens": 10**6}


def first_gradients(config: PolicyConfig, **options: Any) -> dict[str, Tensor]:
    """The gradients of the first mini-batch of a job's first step, by role and name."""
    job = job_of(config, **options)
    job.publish(0)
    batch = next(iter(job.algorithm.prepare(job.algorithm.collect(0), job.models)))
    found = {}
    for role, loss in job.algorithm.losses.items():
        learner: Any = job.learners[role]
        learner.begin_step(0)
        learner.forward_backward(batch, loss)
        found.update({f"{role}.{n}": p.grad for n, p in learner.model.trainable().items() if p.grad is not None})
    return found


def assert_near(one: Mapping[str, Tensor], two: Mapping[str, Tensor], tolerance: float) -> None:
    assert one.keys() == two.keys() and one
    for name in one:
        assert float((one[name] - two[name]).norm()) <= tolerance * float(two[name].norm()) + 1e-9, name


VARIANTS: dict[str, PolicyConfig] = {
    "grpo": GrpoConfig(**SMALL),
    "gspo": GrpoConfig(
        **SMALL, importance_sampling_level="sequence", loss_aggregation="seq_mean_token_mean", mini_batches=2
    ),
    "kl": GrpoConfig(**SMALL, kl_estimator="k3", kl_coef=0.3, entropy_coef=0.1, loss_aggregation="prompt_mean"),
    "pp": GrpoConfig(
        **SMALL, advantage="reinforce_pp", zero_variance="keep", kl_estimator="k1", kl_in="reward", kl_coef=0.1
    ),
    "ppo": PpoConfig(**SMALL, group_size=4, kl_estimator="k1", kl_coef=0.1),
    "ppo shared": PpoConfig(**SMALL, group_size=4, kl_estimator="k1", kl_coef=0.1, entropy_coef=0.1, critic="shared"),
    "decoupled": GrpoConfig(**SMALL, lag=1, correction="decoupled"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_sharing_prompts_and_cutting_micro_batches_change_no_gradient(name: str) -> None:
    config = VARIANTS[name]
    wanted = first_gradients(config)
    for change in ({"share_prompts": False}, {"micro_batch_tokens": 30}, {"micro_batch_tokens": 1}):
        got = first_gradients(config.model_copy(update=change))
        assert_near(got, wanted, 2e-6 if name != "ppo" else 1e-5)


def test_the_gradient_is_that_of_the_formula_written_out() -> None:
    """GRPO by hand: a plain forward of every answer, group means and deviations, mean over tokens."""
    config = GrpoConfig(**SMALL, group_size=3)
    job = job_of(config)
    got = first_gradients(config)
    job.publish(0)
    experience = job.algorithm.collect(0)
    learner: Any = job.learners["policy"]
    causal, total, tokens = learner.model.causal, torch.zeros(()), 0
    causal._attn = causal.config._attn_implementation
    with learner.model._own_attention():
        for group in experience.groups:
            rewards = torch.tensor([s.reward for s in group.samples], dtype=torch.float64)
            if rewards.unique().numel() == 1:
                continue
            scale = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            for one, advantage in zip(group.samples, scale.tolist(), strict=True):
                ids = torch.tensor([[*group.prompt.ids, *one.ids]])
                logits = causal(input_ids=ids).logits[0].log_softmax(-1)
                start = len(group.prompt.ids)
                picked = logits[start - 1 : -1].gather(1, ids[0, start:, None])
                total, tokens = total - advantage * picked.sum(), tokens + len(one.ids)
    names, parameters = zip(*learner.model.trainable().items(), strict=True)
    wanted = torch.autograd.grad(total / tokens, parameters)
    assert_near(got, {f"policy.{n}": g for n, g in zip(names, wanted, strict=True)}, 2e-5)


def test_the_temperature_of_the_sampler_is_that_of_the_trainer() -> None:
    seen: list[Mapping[str, float]] = []
    job = job_of(
        GrpoConfig(**SMALL), steps=2, temperature=0.6, callbacks=[LogStep([lambda step, values: seen.append(values)])]
    )
    run_loop(job, 0)
    assert max(v["mismatch/logprob_diff"] for v in seen) < 1e-4


def test_an_experience_survives_its_encoding() -> None:
    job = job_of(GrpoConfig(**SMALL), rate=lambda c: None if c.ids[0] % 3 == 0 else even_bytes(c))
    job.publish(0)
    experience = job.algorithm.collect(5)
    assert experience_state.decode_experience(experience_state.encode_experience(experience)) == experience


def in_two_rows(sample: rollouts.RolloutSample) -> rollouts.RolloutSample:
    """The same episode as a program may have it: its first tokens in a row, and as context of the row of the others."""
    half = len(sample.ids) // 2
    if not half:
        return sample
    first = replace(sample, ids=sample.ids[:half], mask=sample.mask[:half], logprobs=sample.logprobs[:half])
    return replace(sample, mask=array("d", [0.0]) * half + array("d", sample.mask[half:]), extra_rows=(first,))


@pytest.mark.parametrize("mean", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize("name", ["kl", "pp", "ppo"])
def test_an_episode_in_several_rows_is_one_sample(name: str, mean: str) -> None:
    """It enters each mean once, and time goes on from row to row, so that no gradient changes."""
    config = VARIANTS[name].model_copy(update={"loss_aggregation": mean})
    if "advantage" in type(config).model_fields and name == "kl":
        config = config.model_copy(update={"advantage": "opo"})
    found = []
    for change in (lambda sample: sample, in_two_rows):
        job = job_of(config)
        job.publish(0)
        experience = map_samples(job.algorithm.collect(0), change)
        assert experience_state.decode_experience(experience_state.encode_experience(experience)) == experience
        assert rollouts.rollout_metrics(experience)["rollout/length"] > 1
        [batch] = islice(job.algorithm.prepare(experience, job.models), 1)
        for role, loss in job.algorithm.losses.items():
            learner: Any = job.learners[role]
            learner.begin_step(0)
            learner.forward_backward(batch, loss)
            gradients = {f"{role}.{n}": p.grad for n, p in learner.model.trainable().items() if p.grad is not None}
            found.append(gradients)
    for one, two in zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True):
        assert_near(two, one, 1e-4)


def sampled_as_if_less_likely(sample: rollouts.RolloutSample) -> rollouts.RolloutSample:
    return replace(sample, logprobs=array("d", [one - 0.1 for one in sample.logprobs]))


def map_samples(experience: Any, change: Any) -> Any:
    """The experience with each of its samples changed."""
    return replace(
        experience, groups=tuple(replace(g, samples=tuple(map(change, g.samples))) for g in experience.groups)
    )


def test_the_ratio_of_a_sequence_is_that_of_all_rows_of_an_episode() -> None:
    config = GrpoConfig(**SMALL, correction="tis", correction_level="sequence", correction_max=99.0)
    found = []
    for change in (lambda sample: sample, in_two_rows):
        job = job_of(config)
        job.publish(0)
        experience = map_samples(map_samples(job.algorithm.collect(0), sampled_as_if_less_likely), change)
        [batch] = islice(job.algorithm.prepare(experience, job.models), 1)
        found.append(batch.tokens["importance"][batch.tokens["weight"] != 0].sort().values)
    assert found[0].max() > 1.4, "0.1 for each of its tokens"
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=0)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_sampler_that_reports_other_numbers_is_seen_at_any_lag(lag: int) -> None:
    job = job_of(GrpoConfig(**SMALL, lag=lag))
    job.publish(0)
    experience = map_samples(job.algorithm.collect(0), sampled_as_if_less_likely)
    [batch] = islice(job.algorithm.prepare(experience, job.models), 1)
    learner: Any = job.learners["policy"]
    learner.begin_step(0)
    metrics, _ = learner.forward_backward(batch, job.algorithm.losses["policy"])
    assert metrics.result()["mismatch/logprob_diff"] == pytest.approx(0.1, rel=1e-2)


def test_equal_rewards_teach_nothing() -> None:
    for config in (GrpoConfig(**SMALL), GrpoConfig(**SMALL, zero_variance="keep")):
        assert all(not g.any() for g in first_gradients(config, rate=lambda c: 0.5).values())


def test_a_kl_of_weight_0_needs_no_reference_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    facts: list[tuple[str, ...]] = []
    monkeypatch.setattr(harness.silent, "record_fact", lambda *words: facts.append(words))
    config = GrpoConfig(**SMALL, kl_estimator="k3", kl_coef=0.0)
    job = job_of(config)
    assert not config.frozen_models() and "reference" not in job.models
    assert any("no reference model is loaded" in fact[2] for fact in facts)
    assert_near(first_gradients(config), first_gradients(GrpoConfig(**SMALL)), 0)


def equal(completion: Completion) -> float:
    return 0.5


@pytest.mark.parametrize("advantage", ["leave_one_out", "group_mean_std", "batch_std"])
def test_a_kl_in_the_reward_makes_equal_raw_rewards_worth_learning_from(advantage: str) -> None:
    options = {"advantage": advantage, "kl_estimator": "k1", "kl_in": "reward", "kl_coef": 0.5}
    dropping, keeping = (
        first_gradients(GrpoConfig(**SMALL, **options, zero_variance=what), rate=equal)  # type: ignore[arg-type]
        for what in ("drop", "keep")
    )
    assert any(g.any() for g in dropping.values())
    assert_near(dropping, keeping, 0)


def test_a_group_of_equal_answers_is_dropped_with_a_kl_in_the_reward_too() -> None:
    options: Any = {"advantage": "leave_one_out", "kl_estimator": "k1", "kl_in": "reward", "kl_coef": 0.5}
    job = job_of(GrpoConfig(**SMALL, **options), rate=equal, top_k=1)  # greedy: the samples of a group are the same
    job.publish(0)
    batch = next(iter(job.algorithm.prepare(job.algorithm.collect(0), job.models)))
    assert batch.totals["tokens"] == 0 and not batch.tokens["weight"].any()


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "prompt_mean"])
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_dropped_groups_are_counted_or_not(aggregation: str, mini_batches: int) -> None:
    """Counted, their advantages are 0, as with zero_variance=keep; not counted, the others weigh more."""

    def some(completion: Completion) -> float:
        return 0.5 if len(completion.prompt.ids) % 2 else even_bytes(completion)

    base = GrpoConfig(**SMALL, loss_aggregation=aggregation, mini_batches=mini_batches)
    counted, kept = (
        first_gradients(base.model_copy(update=more), rate=some)
        for more in ({"count_dropped_groups": True}, {"zero_variance": "keep"})
    )
    assert_near(counted, kept, 1e-6)
    if mini_batches == 1:
        job = job_of(base, rate=some)
        job.publish(0)
        experience: Any = job.algorithm.collect(0)
        size: Any = {
            "token_mean": lambda group: sum(len(one.ids) for one in group.samples),
            "seq_mean_token_mean": lambda group: len(group.samples),
            "prompt_mean": lambda group: 1,
        }[aggregation]
        share = sum(size(g) for g in experience.groups if not g.has_reward_variance)
        share /= sum(map(size, experience.groups))
        assert 0 < share < 1
        dropped = first_gradients(base, rate=some)
        assert_near(counted, {name: g * (1 - share) for name, g in dropped.items()}, 1e-5)


@pytest.mark.parametrize("mini_batches", [1, 2, 4])
@pytest.mark.parametrize("kind", [partial(GrpoConfig, count_dropped_groups=True), partial(PpoConfig, group_size=2)])
def test_the_measured_loss_is_the_mean_of_the_losses_of_the_mini_batches(
    kind: Callable[..., PolicyConfig], mini_batches: int
) -> None:
    """However they are cut, and where groups or whole mini-batches train nothing."""
    config = kind(batch_size=4, mini_batches=mini_batches, epochs=2, micro_batch_tokens=20, entropy_coef=0.1)

    def some(completion: Completion) -> float | None:
        return (0.5 if config.name == "grpo" else None) if len(completion.prompt.ids) % 2 else even_bytes(completion)

    job = job_of(config, rate=some)
    job.publish(0)
    metrics, losses = Metrics(), list[float]()
    for batch in job.algorithm.prepare(job.algorithm.collect(0), job.models):
        learner: Any = job.learners["policy"]
        learner.begin_step(0)
        loss = job.algorithm.losses["policy"]
        losses.append(float(loss(batch, learner.forward(batch, loss.needs)).total))
        metrics.merge(learner.update(batch, loss)())
    assert metrics.result()["train/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert sum(losses) < -0.1


def test_no_kl_and_no_entropy_of_counted_groups_is_trained() -> None:
    config = GrpoConfig(**SMALL, kl_estimator="k3", kl_coef=1.0, entropy_coef=0.1, count_dropped_groups=True)
    assert all(not g.any() for g in first_gradients(config, rate=equal).values())
    half = first_gradients(config, rate=lambda c: 0.5 if len(c.prompt.ids) % 2 else even_bytes(c))
    uncounted = first_gradients(
        config.model_copy(update={"count_dropped_groups": None}),
        rate=lambda c: 0.5 if len(c.prompt.ids) % 2 else even_bytes(c),
    )
    ratios = [float((g * uncounted[n]).sum() / uncounted[n].square().sum()) for n, g in half.items() if g.any()]
    assert max(ratios) - min(ratios) < 1e-4 and 0 < ratios[0] < 0.9


def test_an_unscored_answer_is_as_if_it_had_not_been_drawn() -> None:
    """The loss divides by the others' tokens, and the group's mean is theirs."""

    def some(completion: Completion) -> float | None:
        return None if completion.ids[0] % 2 else even_bytes(completion)

    job = job_of(GrpoConfig(**SMALL), rate=some)
    job.publish(0)
    experience = job.algorithm.collect(0)
    batch = next(iter(job.algorithm.prepare(experience, job.models)))
    learnt = [s for g in experience.groups if g.has_reward_variance for s in g.samples if s.reward is not None]
    assert batch.totals["tokens"] == sum(len(s.ids) for s in learnt)
    assert batch.totals["rows"] == len(learnt)
    values, records = job.algorithm.describe(0, experience)
    assert values["reward/num_failed"] > 0 and values["reward/mean"] > 0
    # All of them, the first of each prompt first; watch.logged_rollouts cuts.
    assert len(records) == sum(len(group.samples) for group in experience.groups) > len(experience.groups)


LAGGED = {"lag": 1}
CHOICES: list[PolicyConfig] = [
    kind(**SMALL, **more, **where)
    for kind in (GrpoConfig, PpoConfig)
    for more in ({}, {"epochs": 2}, {"mini_batches": 2}, LAGGED, {"correction": "tis"}, {**LAGGED, "epochs": 2})
    for where in ({}, {"kl_estimator": "k1", "kl_in": "reward"}, {"kl_estimator": "k3", "kl_in": "loss"})
]


@pytest.mark.parametrize("config", CHOICES, ids=str)
def test_what_is_explained_is_what_is_done(config: PolicyConfig) -> None:
    """The line of π_old against the channel that the losses read."""
    job = job_of(config.model_copy(update={"group_size": 2}))
    job.publish(0)
    policy: Any = job.models["policy"]
    forward, asked = policy.forward, []

    def heard(batch: Any, needs: frozenset[str]) -> Any:
        asked.extend(needs & {"logprobs"})
        return forward(batch, needs)

    policy.forward = heard
    batch = next(iter(job.algorithm.prepare(job.algorithm.collect(0), job.models)))
    done = "the policy itself"
    if "old" in batch.tokens:
        done = "computed by the trainer" if asked else "the policy that sampled"
    words: Any = SimpleNamespace(sampler=TorchSamplerConfig(), environment=NoEnvironmentConfig())
    [said] = [line for line in formula(config, words) if line.startswith("  π_old")]
    assert done in said


def test_the_constant_of_dr_grpo_is_the_longest_episode() -> None:
    config = GrpoConfig(**SMALL, loss_aggregation="seq_mean_token_sum_norm", zero_variance="keep", share_prompts=False)
    for environments, longest in ((None, 6), (EnvironmentFactory(Nods, 3), 18)):
        job = job_of(config, environments=environments)
        job.publish(0)
        batch = next(iter(job.algorithm.prepare(job.algorithm.collect(0), job.models)))
        weights = batch.tokens["weight"].unique().tolist()
        assert weights == pytest.approx([0, 1 / (batch.totals["rows"] * longest)])


def test_the_numbers_of_a_step_are_of_all_that_it_drew() -> None:
    """Groups that were replaced, and those drawn beyond what is trained on, count as much as the others."""
    config = GrpoConfig(**SMALL, zero_variance="resample", max_resample_rounds=20, group_size=2)
    job = job_of(config, rate=lambda c: float(c.ids[0] % 4 == 0))
    job.publish(0)
    algorithm: Any = job.algorithm
    experience = algorithm.collect(0)
    rounds = range(experience.rounds)
    drawn = [g for r in rounds for g in algorithm.collector.collect_groups(algorithm.parts.data.take(0, 4, r), 0, r)]
    answers = [one for group in drawn for one in group.samples]
    values, _ = algorithm.describe(0, experience)
    assert len(drawn) == 4 * experience.rounds > len(experience.groups)
    assert values["reward/mean"] == pytest.approx(sum(one.reward for one in answers) / len(answers))
    assert values["reward/zero_variance"] == pytest.approx(sum(not g.has_reward_variance for g in drawn) / len(drawn))
    assert 0 < values["reward/zero_variance"] < 1
    assert values["rollout/length"] == pytest.approx(sum(len(one.ids) for one in answers) / len(answers))
    assert values["rollout/tokens"] == sum(len(one.ids) for one in answers)
    assert values["rollout/truncated_frac"] == sum(one.finish == "length" for one in answers) / len(answers)
    again = algorithm.decode(algorithm.encode(experience))
    assert again == experience and algorithm.describe(0, again)[0] == values


def test_groups_without_contrast_are_replaced_up_to_the_cap() -> None:
    never = job_of(GrpoConfig(**SMALL, zero_variance="resample", max_resample_rounds=3), rate=lambda c: 1.0)
    never.publish(0)
    assert never.algorithm.collect(0).rounds == 3
    rare = job_of(
        GrpoConfig(**SMALL, zero_variance="resample", max_resample_rounds=20, group_size=2),
        rate=lambda c: float(c.ids[0] % 4 == 0),
    )
    rare.publish(0)
    experience = rare.algorithm.collect(0)
    assert 1 < experience.rounds < 20 and len(experience.groups) == 4
    assert all(group.has_reward_variance for group in experience.groups)
    assert len({g.prompt.ids for g in experience.groups}) > 1


def test_answers_that_were_cut_off_can_be_left_out() -> None:
    config = GrpoConfig(**SMALL, mask_truncated=True)
    job = job_of(config)
    job.publish(0)
    experience = job.algorithm.collect(0)
    whole = [s for g in experience.groups if g.has_reward_variance for s in g.samples if s.finish == "stop"]
    batch = next(iter(job.algorithm.prepare(experience, job.models)))
    assert batch.totals["tokens"] == sum(len(s.ids) for s in whole)


@pytest.mark.parametrize(
    ("finish", "said"),
    [
        ("failed", "every episode of the step failed"),
        ("length", "had room for a turn: the sampler has room for"),
    ],
)
def test_a_step_without_an_episode_says_why(finish: str, said: str) -> None:
    job = job_of(GrpoConfig(**SMALL), environments=EnvironmentFactory(Nods, 2))
    job.publish(0)
    experience = job.algorithm.collect(0)
    empty = tuple(
        replace(g, samples=tuple(replace(s, ids=(), finish=finish) for s in g.samples)) for g in experience.groups
    )
    with pytest.raises(EnvironmentProblem, match=said):
        next(iter(job.algorithm.prepare(replace(experience, groups=empty), job.models)))


@pytest.mark.parametrize("options", [{"advantage": "opo"}, {"kl_estimator": "k1", "kl_in": "reward", "kl_coef": 0.5}])
def test_answers_left_out_of_the_loss_stay_in_the_baseline_of_the_others(options: dict[str, Any]) -> None:
    found = []
    for masked in (False, True):
        job = job_of(
            GrpoConfig(**SMALL, **options, mask_truncated=masked, zero_variance="keep"), stop_token_ids=[0, 3, 9]
        )
        job.publish(0)
        found.append(next(iter(job.algorithm.prepare(job.algorithm.collect(0), job.models))).tokens)
    trained = found[1]["weight"] != 0
    assert 0 < int(trained.sum()) < int((found[0]["weight"] != 0).sum())
    assert torch.equal(found[0]["advantages"][trained], found[1]["advantages"][trained])


def test_opo_weighs_a_truncated_answer_by_its_length() -> None:
    mask = torch.tensor([0.0] * 2 + [1.0] * 10 + [0.0, 1.0] * 250)
    rows = {"lengths": torch.tensor([12, 500]), "unit": torch.arange(2), "start": torch.zeros(2).long()}
    rows |= {"branch": torch.arange(2), "tree": torch.zeros(2).long(), "is_extra": torch.zeros(2)}
    rows["reward"] = torch.tensor([1.0, 0.0])
    weight = mask * (torch.arange(len(mask)) < 12)
    batch = Batch({"ids": torch.zeros(512).long(), "weight": weight, "action_mask": mask}, rows)
    found = add_advantages(GrpoConfig(**SMALL, advantage="opo", mask_truncated=True), batch, 0.0).tokens["advantages"]
    assert found[0] == pytest.approx(1 - 10 / 260)


def test_updates_of_a_step_without_a_ratio_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, ...]] = []
    monkeypatch.setattr(harness.silent, "record_fact", lambda *words: said.append(words))
    job_of(GrpoConfig(**SMALL, policy_loss="reinforce"))
    job_of(GrpoConfig(**SMALL, epochs=2))
    assert not said
    job_of(GrpoConfig(**SMALL, policy_loss="reinforce", mini_batches=2))
    [(name, value, why)] = said
    assert (name, value) == ("algorithm.policy_loss", "reinforce")
    assert why == "it has no importance ratio, so 1 of 2 updates of a step are off-policy; clip has one"


@pytest.mark.parametrize("kind", [GrpoConfig, PpoConfig])
def test_epochs_and_mini_batches_are_optimizer_steps_over_the_same_samples(kind: Any) -> None:
    config = kind(**SMALL, group_size=4, epochs=3, mini_batches=2)
    job = job_of(config, lr=0.0)
    job.publish(0)
    experience = job.algorithm.collect(0)
    parts = list(job.algorithm.prepare(experience, job.models))
    assert len(parts) == 6
    tokens = [p.totals["tokens"] for p in parts]
    assert sum(tokens[:2]) == sum(tokens[2:4]) == sum(tokens[4:])
    assert all("old" in p.tokens for p in parts)


def test_at_learning_rate_zero_further_epochs_are_on_policy() -> None:
    seen: list[Mapping[str, float]] = []
    config = GrpoConfig(**SMALL, epochs=3, mini_batches=2)
    run_loop(job_of(config, lr=0.0, callbacks=[LogStep([lambda step, values: seen.append(values)])]), 0)
    assert seen[0]["policy/ratio"] == pytest.approx(1, abs=1e-5) and seen[0]["policy/clip_frac_high"] == 0


def test_a_sampler_that_disagrees_stops_the_run() -> None:
    job = job_of(GrpoConfig(**SMALL, max_logprob_diff=1e-3))
    sampler: Any = job.algorithm.parts.sampler  # type: ignore[attr-defined]
    honest = sampler.sample

    def other(requests: Any) -> Any:
        from dataclasses import replace

        return [replace(r, raw_logprobs=tuple(x - 0.1 for x in r.raw_logprobs)) for r in honest(requests)]

    sampler.sample = other
    with pytest.raises(TrainingDiverged, match=r"sampler and trainer differ by 0\.1"):
        run_loop(job, 0)


class Stop(BaseCallback):
    """Ends a run after so many steps, keeping the state that a checkpoint would."""

    def __init__(self, job: TrainingJob, after: int) -> None:
        self.job, self.after = job, after
        self.state: dict[str, Any] = {}

    def on_step(self, end: StepResult) -> None:
        if end.step == self.after:
            parts = {**self.job.learners, "algorithm": self.job.algorithm, "feed": self.job.feed}
            self.state = {name: part.state_dict() for name, part in parts.items()}
            raise KeyboardInterrupt


def curve_and_weights(job: TrainingJob, first: int) -> tuple[list[dict[str, float]], list[Tensor]]:
    """Every number of a run's steps but speed and memory, and the weights at its end."""
    seen: list[dict[str, float]] = []

    def keep(step: int, values: Mapping[str, float]) -> None:
        seen.append({name: value for name, value in values.items() if not name.startswith(("perf/", "time/"))})

    job.callbacks.append(LogStep([keep]))  # type: ignore[attr-defined]
    run_loop(job, first)
    return seen, [t.clone() for learner in job.learners.values() for _, t in learner.weights()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "config",
    [
        GrpoConfig(**SMALL, kl_estimator="k3", kl_target=0.01),
        GrpoConfig(**SMALL, lag=1),
        GrpoConfig(**SMALL, lag=3, correction="decoupled"),
        GrpoConfig(**SMALL, lag=1, zero_variance="resample", group_size=2),
        PpoConfig(**SMALL, mini_batches=2, epochs=2),
        PpoConfig(**SMALL, mini_batches=2, lag=1, critic="shared"),
    ],
    ids=["adaptive", "lag1", "lag3", "resampled", "ppo", "ppo shared, lag1"],
)
def test_a_resumed_run_is_the_same_bit_for_bit(config: PolicyConfig) -> None:
    assert_resumes(config)


def test_a_resumed_run_of_several_turns_is_the_same_bit_for_bit() -> None:
    options: dict[str, Any] = {"environments": EnvironmentFactory(Nods, 3), "stop_token_ids": range(0, 512, 2)}
    job = job_of(GrpoConfig(**SMALL, lag=1), **options)
    job.publish(0)
    experience: Any = job.algorithm.collect(0)
    assert any(one.history for group in experience.groups for one in group.samples), "or no episode has several turns"
    assert_resumes(GrpoConfig(**SMALL, lag=1), **options)


def assert_resumes(config: PolicyConfig, **options: Any) -> None:
    wanted, end = curve_and_weights(job_of(config, steps=7, callbacks=[], **options), 0)
    job = job_of(config, steps=7, callbacks=[], **options)
    stop = Stop(job, 3)
    job.callbacks.append(stop)  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        run_loop(job, 0)
    again = job_of(config, steps=7, callbacks=[], **options)
    parts: dict[str, Any] = {**again.learners, "algorithm": again.algorithm, "feed": again.feed}
    for name, part in parts.items():
        state = stop.state[name]
        part.load_state_dict({**state, "tensors": {n: t.clone() for n, t in state.get("tensors", {}).items()}})
    got, there = curve_and_weights(again, 3)
    assert got == wanted[3:]
    assert all(torch.equal(a, b) for a, b in zip(there, end, strict=True))


@pytest.mark.parametrize("lag", [0, 1])
def test_staleness_is_the_lag(lag: int) -> None:
    seen: list[float] = []
    job = job_of(GrpoConfig(**SMALL, lag=lag), steps=4)
    job_callbacks = [LogStep([lambda step, values: seen.append(values["rollout/staleness"])])]
    run_loop(job_of(GrpoConfig(**SMALL, lag=lag), steps=4, callbacks=job_callbacks), 0)
    assert seen == [float(min(step, lag)) for step in range(4)]
    assert job.algorithm.lag == lag
