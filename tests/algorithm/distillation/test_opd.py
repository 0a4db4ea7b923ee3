"""On-policy distillation: what a sampled token is worth, what is said without a reward, and what goes with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.algorithm.policy.config import OpdConfig
from runner.cli.job_builder import compose_job
from runner.cli.main import main
from runner.core.errors import SpecError
from runner.spec.registry import default_registry
from runner.trainer.callbacks import LogStep
from runner.trainer.loop import TrainingJob, run_loop
from tests.algorithm.harness import job_of, make_model
from tests.algorithm.policy.test_policy_gradient import Stop, assert_near, curve_and_weights, first_gradients

SMALL: dict[str, Any] = {"teacher": "a/teacher", "batch_size": 4, "micro_batch_tokens": 10**6}
BASE = ("algorithm=opd", "algorithm.teacher=some/where", "sampler=torch", "model=tiny", "data=demo")
JSD = ("divergence=jsd", "beta=0.25", "temperature=2", "sft_coef=0.5", "top_k=9")
OFFLINE = ("algorithm=distill", "algorithm.teacher=some/where", "model=tiny", "data=demo")


def logprobs(model: Any, prompt: tuple[int, ...], answer: tuple[int, ...], temperature: float) -> Tensor:
    """log p of each of the answer's tokens, by a plain forward of the whole row."""
    ids = torch.tensor([[*prompt, *answer]])
    with model._own_attention():
        logits = model.causal(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_gradient_is_that_of_the_formula_written_out(temperature: float) -> None:
    """−Σ (log p_teacher − log p_student)·∇log p_student / tokens, both at the sampler's temperature."""
    config = OpdConfig(**SMALL, group_size=2)
    got = first_gradients(config, temperature=temperature)
    job = job_of(config, temperature=temperature)
    job.publish(0)
    experience, learner, teacher = job.algorithm.collect(0), job.learners["policy"], make_model(7)
    student: Any = learner.model  # type: ignore[attr-defined]
    total, tokens = torch.zeros(()), 0
    for group in experience.groups:
        for one in group.samples:
            ours = logprobs(student, group.prompt.ids, one.ids, temperature)
            theirs = logprobs(teacher, group.prompt.ids, one.ids, temperature)
            total = total - ((theirs - ours).detach() * ours).sum()
            tokens += len(one.ids)
    names, parameters = zip(*student.trainable().items(), strict=True)
    wanted = torch.autograd.grad(total / tokens, parameters)
    assert_near(got, {f"policy.{n}": g for n, g in zip(names, wanted, strict=True)}, 2e-5)


@pytest.mark.parametrize(
    "config",
    [
        OpdConfig(**SMALL, group_size=3),
        OpdConfig(**SMALL, mini_batches=2, policy_loss="cispo", loss_aggregation="prompt_mean"),
        OpdConfig(
            **SMALL,
            kl_estimator="k3",
            kl_coef=0.2,
            entropy_coef=0.1,
            importance_sampling_level="sequence",
            loss_aggregation="seq_mean_token_mean",
        ),
        OpdConfig(**SMALL, lag=1, correction="decoupled"),
    ],
    ids=["plain", "cispo", "kl", "decoupled"],
)
def test_sharing_prompts_and_cutting_micro_batches_change_no_gradient(config: OpdConfig) -> None:
    wanted = first_gradients(config)
    for change in ({"share_prompts": False}, {"micro_batch_tokens": 30}, {"micro_batch_tokens": 1}):
        assert_near(first_gradients(config.model_copy(update=change)), wanted, 1e-5)


def test_the_reverse_kl_falls_and_no_reward_is_spoken_of() -> None:
    seen: list[Mapping[str, float]] = []
    config = OpdConfig(**SMALL | {"batch_size": 32})
    job = job_of(config, steps=12, lr=1e-2, callbacks=[LogStep([lambda step, values: seen.append(values)])])
    wanted: Any = job.models["teacher"].model.causal  # type: ignore[attr-defined]
    wanted.lm_head.weight.data.mul_(15)  # decided, and the same whatever stands before
    wanted.model.embed_tokens.weight.data[:] = wanted.model.embed_tokens.weight.data[0]
    run_loop(job, 0)
    curve = [values["distill/reverse_kl"] for values in seen]
    assert sum(curve[-3:]) < 0.8 * sum(curve[:3]), curve
    assert not [name for values in seen for name in values if name.startswith("reward/")]
    experience = job.algorithm.collect(20)
    numbers, samples = job.algorithm.describe(20, experience)
    assert "rollout/length" in numbers and len(samples) == 32
    assert all("reward" not in sample and sample["answer"] is not None for sample in samples)
    assert job.algorithm.decode(job.algorithm.encode(experience)) == experience


def test_the_reverse_kl_is_measured_where_it_is_learnt() -> None:
    job = job_of(OpdConfig(**SMALL, mask_truncated=True))
    job.publish(0)
    experience = job.algorithm.collect(0)
    [batch] = job.algorithm.prepare(experience, job.models)
    cut = {len(one.ids) for group in experience.groups for one in group.samples if one.finish == "length"}
    assert cut == {6}, "some answers must be cut off, or nothing is left out"
    metrics, _ = job.learners["policy"].forward_backward(batch, job.algorithm.losses["policy"])
    mask = batch.tokens["weight"] != 0
    student = job.models["policy"].forward(batch, frozenset({"logprobs"}))["logprobs"]
    wanted = {"distill/reverse_kl": float((student - batch.tokens["teacher"])[mask].mean())} if mask.any() else {}
    found = {name: value for name, value in metrics.result().items() if name == "distill/reverse_kl"}
    assert found == pytest.approx(wanted, rel=1e-5), "a mean of nothing is absent"


@pytest.mark.parametrize(("epochs", "passes"), [(1, 0), (2, 1)])
def test_the_student_scores_its_samples_beforehand_only_where_it_moves(epochs: int, passes: int) -> None:
    job, seen = job_of(OpdConfig(**SMALL, epochs=epochs)), list[frozenset[str]]()
    student: Any = job.models["policy"]
    forward = student.forward

    def counted(batch: Any, needs: frozenset[str]) -> Any:
        seen.append(needs)
        return forward(batch, needs)

    student.forward = counted
    job.publish(0)
    first, *_ = job.algorithm.prepare(job.algorithm.collect(0), job.models)
    assert len(seen) == passes and ("old" in first.tokens) == ("advantages" in first.tokens) == bool(passes)
    if passes:
        torch.testing.assert_close(first.tokens["advantages"], first.tokens["teacher"] - first.tokens["old"])


def test_the_gradient_is_the_same_whether_old_is_scored_beforehand_or_not() -> None:
    """The first of several mini-batches' passes equals the only one: the policy has not moved yet."""
    once, twice = (first_gradients(OpdConfig(**SMALL, epochs=epochs)) for epochs in (1, 2))
    assert_near(once, twice, 1e-5)


def resumed(config: OpdConfig) -> tuple[TrainingJob, Any]:
    """A job that continues after three steps of another one, and the numbers of one left in peace."""
    wanted = curve_and_weights(job_of(config, steps=6, callbacks=[]), 0)
    job = job_of(config, steps=6, callbacks=[])
    stop = Stop(job, 3)
    job.callbacks.append(stop)  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        run_loop(job, 0)
    again = job_of(config, steps=6, callbacks=[])
    parts: dict[str, Any] = {**again.learners, "algorithm": again.algorithm, "feed": again.feed}
    for name, part in parts.items():
        state = stop.state[name]
        part.load_state_dict({**state, "tensors": {n: t.clone() for n, t in state.get("tensors", {}).items()}})
    return again, wanted


def test_a_resumed_run_is_the_same_bit_for_bit() -> None:
    again, (wanted, end) = resumed(OpdConfig(**SMALL, lag=1, epochs=2))
    got, there = curve_and_weights(again, 3)
    assert got == wanted[-len(got) :] and len(got) == 3
    assert all(torch.equal(a, b) for a, b in zip(there, end, strict=True))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["reward=exact"], "reward: algorithm=opd uses no reward; type reward=none"),
        (["sampler=none"], "sampler: algorithm=opd needs one; type sampler=torch"),
        (["algorithm.kl_coef=0.1"], "algorithm.kl_coef: not used with kl_estimator=none"),
        (["algorithm.kl_estimator=k3", "algorithm.kl_in=reward"], "algorithm.kl_in:"),
        (["algorithm.zero_variance=drop"], "algorithm.zero_variance:"),
        (["algorithm.max_resample_rounds=2"], "algorithm.max_resample_rounds:"),
        (["algorithm.lag=2"], "algorithm.lag: 2 needs algorithm.correction=decoupled"),
        (["algorithm=distill"], "sampler: algorithm=distill trains on a data set"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], said: str, workdir: Path) -> None:
    kept = [w for w in BASE if w.partition("=")[0] not in {x.partition("=")[0] for x in words}]
    with pytest.raises(SpecError) as caught:
        compose_job([*kept, *words])
    [found] = caught.value.problems
    assert f"{found.key}: {found.message}".startswith(said)


@pytest.mark.parametrize("name", ["opd", "distill"])
def test_a_teacher_must_be_named(name: str, workdir: Path) -> None:
    sampler = "torch" if name == "opd" else "none"
    with pytest.raises(SpecError, match=r"algorithm\.teacher: must be given: algorithm\.teacher=… .*recipe:NAME"):
        compose_job([f"algorithm={name}", f"sampler={sampler}", "model=tiny", "data=demo"])


@pytest.mark.parametrize("words", [["algorithm.beta=0.5"], ["algorithm.divergence=reverse_kl", "algorithm.beta=0.5"]])
def test_beta_belongs_to_jsd(words: list[str], workdir: Path) -> None:
    with pytest.raises(SpecError, match=r"algorithm\.beta: not used with divergence=\w+; it belongs to divergence=jsd"):
        compose_job([*OFFLINE, *words])
    compose_job([*OFFLINE, "algorithm.divergence=jsd", "algorithm.beta=0.5"])


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ([*BASE], ["log π_teacher − log π_old of the token", "the policy itself: one update per step"]),
        (
            [*OFFLINE, *(f"algorithm.{o}" for o in JSD)],
            [
                "(2²·D_t − 0.5·log π(token t)) / N",
                "beta·KL(P ‖ M) + (1 − beta)·KL(Q ‖ M)",
                "algorithm.beta=0.25 ",
                "softmax of the logits / 2",
                "9 most likely tokens and, as one event, all others",
            ],
        ),
    ],
)
def test_the_loss_is_explained(
    words: list[str], lines: list[str], workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "loss", *words]) == 0
    said = capsys.readouterr().out
    assert not [line for line in lines if line not in said], said
    assert "reward" not in said


def test_both_have_a_teacher_beside_what_else_is_frozen() -> None:
    made = default_registry().classes("algorithm")
    assert made["distill"](teacher="x", teacher_revision="main").frozen_models()["teacher"].revision == "main"  # type: ignore[attr-defined]
    assert list(OpdConfig(**SMALL, kl_estimator="k3").frozen_models()) == ["reference", "teacher"]
