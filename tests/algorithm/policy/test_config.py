"""What policy optimization refuses, what stands for null, and what `run explain loss` prints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from runner.algorithm.kl_divergence import KlController
from runner.algorithm.loss_registry import functions, resolved_options
from runner.algorithm.policy.config import GrpoConfig, PpoConfig
from runner.cli.job_builder import compose_job
from runner.cli.main import main
from runner.core.errors import SpecError
from runner.spec.registry import default_registry

BASE = ("algorithm=grpo", "sampler=torch", "reward=exact", "model=tiny", "data=demo")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["algorithm=rloo", "algorithm.lag=1"],
            "algorithm.lag: policy_loss=reinforce has no importance ratio, so nothing corrects samples of older "
            "weights; type algorithm.correction=tis, or algorithm.policy_loss=clip",
        ),
        (["algorithm.lag=2"], "algorithm.lag: 2 needs algorithm.correction=decoupled"),
        (
            ["algorithm.dual_clip=3", "algorithm.policy_loss=cispo"],
            "algorithm.dual_clip: not used with policy_loss=cispo; it belongs to policy_loss=clip",
        ),
        (["algorithm.kl_coef=0.1"], "algorithm.kl_coef: not used with kl_estimator=none"),
        (
            ["algorithm.correction_min=0.5", "algorithm.correction=tis"],
            "algorithm.correction_min: not used with correction=tis",
        ),
        (["algorithm.kl_estimator=k1"], "algorithm.kl_estimator: k1 has no gradient in expectation as a loss"),
        (
            ["algorithm.kl_estimator=k3", "algorithm.kl_in=reward"],
            "algorithm.kl_estimator: in the reward only k1 is unbiased",
        ),
        (
            ["algorithm.importance_sampling_level=sequence"],
            "algorithm.loss_aggregation: importance_sampling_level=sequence needs seq_mean_token_mean",
        ),
        (
            ["algorithm.kl_estimator=k2", "algorithm.reference=adapter"],
            "algorithm.reference: there is no adapter to disable",
        ),
        (
            ["algorithm.group_size=1"],
            "algorithm.group_size: advantage=group_mean_std compares the completions of a group",
        ),
        (["algorithm.gamma=0.9"], "algorithm.gamma: not used with advantage=group_mean_std"),
        (
            ["algorithm.advantage=none"],
            "algorithm.zero_variance: advantage=none also uses equal rewards; type keep",
        ),
        (
            ["algorithm.max_logprob_diff=0.1", "algorithm.lag=1"],
            "algorithm.max_logprob_diff: at lag=1 the two differ by design",
        ),
        (
            ["algorithm.kl_estimator=k3", "algorithm.kl_coef=0", "algorithm.kl_target=1"],
            "algorithm.kl_target: an adaptive coefficient",
        ),
        (["sampler=none"], "sampler: algorithm=grpo needs one; type sampler=torch"),
        (
            ["algorithm=ppo", "algorithm.critic=shared", "algorithm.critic_lr=1e-3"],
            "algorithm.critic_lr: critic=shared is trained with optimizer.lr",
        ),
        (["adapter=lora", "adapter.dropout=0.1"], "adapter.dropout: algorithm=grpo trains without dropout"),
        (
            ["algorithm=ppo", "adapter=lora", "adapter.dropout=0.1"],
            "adapter.dropout: algorithm=ppo trains without dropout; leave it out, or type algorithm.dropout=true",
        ),
        (
            ["algorithm=opd", "algorithm.teacher=x", "reward=none", "adapter=lora", "adapter.dropout=0.1"],
            "adapter.dropout: algorithm=opd trains without dropout",
        ),
        (["environment=calculator", "environment.max_turns=1"], "environment.max_turns: "),
        (["algorithm.max_resample_rounds=2"], "algorithm.max_resample_rounds: not used with zero_variance=drop"),
        (["algorithm=ppo", "algorithm.max_resample_rounds=2"], "algorithm.max_resample_rounds: "),
        (
            ["algorithm.kl_estimator=k3", "algorithm.kl_coef=0", "algorithm.reference=copy"],
            "algorithm.reference: kl_coef=0 loads no reference model",
        ),
        (
            ["algorithm=ppo", "algorithm.normalize_advantages=false", "algorithm.whiten_ddof=1"],
            "algorithm.whiten_ddof: not used with normalize_advantages=false",
        ),
        (["algorithm.whiten_ddof=1"], "algorithm.whiten_ddof: not used with advantage=group_mean_std"),
        (
            ["algorithm.zero_variance=keep", "algorithm.count_dropped_groups=true"],
            "algorithm.count_dropped_groups: not used with zero_variance=keep",
        ),
        (
            ["algorithm.zero_variance=resample", "algorithm.kl_estimator=k1", "algorithm.kl_in=reward"],
            "algorithm.zero_variance: groups are replaced before the KL in their rewards is computed",
        ),
        (
            ["algorithm=ppo", "algorithm.value_coef=0.5"],
            "algorithm.value_coef: a separate critic has its own loss",
        ),
    ],
)
def test_a_contradiction_is_one_problem_that_says_what_to_type(words: list[str], said: str, workdir: Path) -> None:
    kept = [w for w in BASE if w.partition("=")[0] not in {x.partition("=")[0] for x in words}]
    with pytest.raises(SpecError) as caught:
        compose_job([*kept, *words])
    [found] = caught.value.problems
    assert f"{found.key}: {found.message}".startswith(said)


def test_lag_with_its_correction_is_accepted(workdir: Path) -> None:
    assert compose_job([*BASE, "algorithm.lag=3", "algorithm.correction=decoupled"]).spec.algorithm.steps_ahead() == 3
    assert compose_job([*BASE, "algorithm.lag=1"]).spec.algorithm.steps_ahead() == 1
    corrected = ["algorithm.policy_loss=reinforce", "algorithm.lag=1", "algorithm.correction=tis"]
    assert compose_job([*BASE, *corrected]).spec.algorithm.steps_ahead() == 1


@pytest.mark.parametrize("group", ["sampler=torch", "reward=exact", "environment=calculator"])
def test_an_algorithm_that_does_not_sample_refuses_what_samples(group: str, workdir: Path) -> None:
    with pytest.raises(SpecError, match="trains on a data set"):
        compose_job(["algorithm=sft", "model=tiny", "data=demo", group])


def test_what_stands_for_null_depends_on_the_choice() -> None:
    assert resolved_options(GrpoConfig(), "policy_loss") == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    assert resolved_options(GrpoConfig(policy_loss="cispo"), "policy_loss") == {"clip_low": 1.0, "clip_high": 4.0}
    assert (
        GrpoConfig(kl_estimator="k3").resolved_options.kl_in == "loss"
        and PpoConfig(kl_estimator="k1").resolved_options.kl_in == "reward"
    )
    assert resolved_options(GrpoConfig(correction="tis"), "correction") == {"correction_max": 2.0}
    assert resolved_options(GrpoConfig(correction="decoupled"), "correction") == {"correction_max": math.inf}
    assert resolved_options(GrpoConfig(clip_high=0.28), "policy_loss")["clip_high"] == 0.28


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            ["algorithm=dapo"],
            [
                "clip(r, 1 − clip_low, 1 + clip_high)",
                "algorithm.clip_low=0.2 ",
                "clip_high=0.28 ",
                "replaced by new prompts, up to 4 rounds",
            ],
        ),
        (
            ["algorithm=gspo"],
            ["algorithm.clip_low=0.0003 ", "GSPO 2507.18071", "exp(mean over the completion's tokens"],
        ),
        (
            ["algorithm=dr_grpo", "sampler.max_new_tokens=77"],
            ["1 / (completions of the mini-batch × loss_norm_length)", "algorithm.loss_norm_length=77 "],
        ),
        (
            ["algorithm=dr_grpo", "sampler.max_new_tokens=77", "environment=calculator", "environment.max_turns=3"],
            ["algorithm.loss_norm_length=231 "],
        ),
        (
            ["algorithm=ppo", "algorithm.kl_estimator=k1"],
            ["the policy before the step's first update, computed by the trainer", " − β·KL per token"],
        ),
        (["algorithm=grpo_paper"], ["L + β·KL", "exp(−d) − 1 + d", "β   0.04", "all equal are kept"]),
        (["algorithm=sapo"], ["(loss_aggregation=seq_mean_token_mean"]),
        (["algorithm=ppo"], ["GAE (1506.02438) with γ = 1, λ = 0.95", "critic = "]),
        (
            ["algorithm=ppo", "algorithm.critic=shared", "algorithm.value_coef=0.5"],
            ["(L + 0.5·E)", "  E   ½(V_t − (A_t + V_t,old))²", "(critic=shared)"],
        ),
        (["algorithm=grpo", "algorithm.lag=1"], ["the policy that sampled, 1 step older"]),
        (
            ["algorithm=grpo", "algorithm.correction=mis"],
            ["ρ where correction_min ≤ ρ ≤ correction_max, else 0", "correction_max=5 ", "of the token"],
        ),
    ],
)
def test_explain_loss_prints_the_formula_in_force(
    words: list[str], lines: list[str], workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "loss", "sampler=torch", "reward=exact", *words]) == 0
    printed = capsys.readouterr().out
    assert all(line in printed for line in lines), printed


@pytest.mark.parametrize(
    ("words", "formula", "lacking"),
    [
        (["algorithm=gspo"], "clip_low=0.0003", "sampler: algorithm=grpo needs one"),
        (["algorithm=dr_grpo"], "loss_norm_length=sampler.max_new_tokens", "reward: algorithm=grpo needs one"),
        (["algorithm=opd"], "log π_teacher − log π_old", "algorithm.teacher: must be given"),
        (["algorithm=gspo", "algorithm.grup_size=4"], "clip_low=0.0003", "did you mean 'group_size'?"),
    ],
)
def test_a_formula_is_printed_of_a_job_that_lacks_parts(
    words: list[str], formula: str, lacking: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "loss", *words]) == 0
    lines, _, note = capsys.readouterr().out.partition("note: the job spec has")
    assert formula in lines and lacking in note


def test_no_formula_is_printed_of_what_is_no_algorithm(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "loss", "algorithm=gsppo"]) == 2
    captured = capsys.readouterr()
    assert "did you mean 'gspo'?" in captured.err and not captured.out


def test_a_wrong_value_is_noted_below_the_formula(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "loss", "algorithm=gspo", "algorithm.lag=x"]) == 0
    formula, _, note = capsys.readouterr().out.partition("note: ")
    assert formula.startswith("loss = ") and "algorithm.lag: expected" in note


@pytest.mark.parametrize("name", sorted({*default_registry().classes("algorithm")} - {"tinker"}))  # clients name theirs
def test_every_algorithm_says_what_its_loss_is(name: str, workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cls: Any = default_registry().classes("algorithm")[name]
    beside = [*(["sampler=torch"] if cls.needs_sampler else []), *(["reward=exact"] if cls.needs_reward else [])]
    beside += ["algorithm.teacher=x"] if "teacher" in cls.model_fields else []
    assert main(["explain", "loss", f"algorithm={name}", *beside]) == 0
    assert capsys.readouterr().out.startswith("loss = ")


@pytest.mark.parametrize("loss", sorted(functions("preference_loss")))
def test_every_pair_loss_prints_its_constants(loss: str, workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "loss", "algorithm=dpo", f"algorithm.loss={loss}"]) == 0
    printed = capsys.readouterr().out
    function = functions("preference_loss")[loss]
    assert f"{function.formula}   (loss={loss}; {function.paper})" in printed
    assert all(f"  algorithm.{name}={option.default:g}   " in printed for name, option in function.options.items())


def test_the_kl_coefficient_goes_towards_its_target() -> None:
    control = KlController(0.1, target=0.05)
    control.observe(0.10, samples=1000)  # far above: the error is bounded at 0.2
    assert control.coefficient == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    control.observe(0.0, samples=1000)
    assert control.coefficient == pytest.approx(0.1 * (1 + 0.2 * 0.1) * (1 - 0.2 * 0.1))
    fixed: Any = KlController(0.1, target=None)
    fixed.observe(9.0, samples=10**6)
    assert fixed.coefficient == 0.1
