"""Random combinations of options: the gradients of every optimizer step of steps 1 and 2 against `dense_reference`.

Of the job the reference gets the first weights, the ids that were drawn, their rewards, and which prompts a mini-batch
has. Log-probabilities, also those that the sampler reports, advantages, losses and updates it computes itself. The
combinations are drawn when the test runs; a failure prints the seed, which `RUN_COMBINATION_SEED` repeats.
"""

from __future__ import annotations

import os
import random
import secrets
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.algorithm.policy.config import GrpoConfig, PolicyConfig, PpoConfig
from runner.core.batch import Batch
from runner.interfaces import Completion, EnvironmentFactory
from runner.trainer.loop import TrainingJob, run_loop
from tests.algorithm.harness import Nods, even_bytes, job_of
from tests.algorithm.policy import dense_reference as dense

COMBINATIONS, FAST, STEPS, LR, TOLERANCE = 30, 10, 2, 0.05, 1e-4
COMPARING = ("group_mean_std", "group_mean", "leave_one_out", "batch_std", "opo", "reinforce_pp_baseline")


def draw_options(draw: random.Random) -> dict[str, Any]:
    """A combination that `run` accepts, every option with its value."""
    ppo = draw.random() < 0.2
    correction = draw.choice(["none", "none", "tis", "mis", "decoupled"])
    sequence = draw.random() < 0.2
    aggregations = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "prompt_mean"]
    kl_in = draw.choice(["loss", "reward"])
    estimators = ["k1"] if kl_in == "reward" else ["k2", "k3", "k3_ratio", "k3_plus"]
    advantage = draw.choice([*COMPARING, "none", "reinforce_pp"])
    keeping = ["keep"] if ppo or advantage not in COMPARING else ["drop", "drop", "keep", "resample"]
    found = {
        "name": "ppo" if ppo else "grpo",
        "batch_size": 3,
        "group_size": draw.choice([2, 3]),
        "epochs": draw.choice([1, 1, 2]),
        "mini_batches": draw.choice([1, 1, 2]),
        "share_prompts": draw.random() < 0.5,
        "micro_batch_tokens": draw.choice([1, 30, 10**6]),
        "policy_loss": draw.choice(["clip", "clip", "cispo", "sapo", "reinforce"]),
        "importance_sampling_level": "sequence" if sequence else "token",
        "loss_aggregation": "seq_mean_token_mean" if sequence else draw.choice(aggregations),
        "kl_estimator": draw.choice(["none", *estimators]),
        "kl_in": kl_in,
        "kl_coef": draw.choice([0.0, 0.1, 0.5]),
        "max_log_ratio": draw.choice([20.0, None, 0.05]),
        "entropy_coef": draw.choice([0.0, 0.02]),
        "mask_truncated": draw.random() < 0.3,
        "correction": correction,
        "correction_level": draw.choice(["token", "sequence"]),
        "lag": draw.choice([0, 1, 2] if correction == "decoupled" else [0, 1]),
    }
    if found["kl_estimator"] == "k1" and found["kl_coef"] == 0:
        found["kl_coef"] = 0.3
    if ppo:
        options = {"gamma": 0.9, "lam": draw.choice([0.0, 0.8, 1.0]), "value_clip": draw.choice([None, 0.01])}
        found |= {**options, "normalize_advantages": draw.random() < 0.5, "whiten_ddof": draw.choice([0, 1])}
    else:
        found |= {"advantage": advantage, "zero_variance": draw.choice(keeping), "gamma": 0.9}
        found |= {"advantage_eps": draw.choice([0.0, 1e-4, 0.1]), "whiten_ddof": draw.choice([0, 1])}
        found["count_dropped_groups"] = found["zero_variance"] == "drop" and draw.random() < 0.5
    found |= {"clip_low": draw.choice([0.01, 0.2]), "clip_high": draw.choice([0.01, 0.28]), "dual_clip": None}
    if draw.random() < 0.3:
        found["dual_clip"] = 1.02
    found |= {"tau_positive": 1.0, "tau_negative": 1.05, "correction_max": 1.01, "correction_min": 0.99}
    return found


def config_of(options: dict[str, Any]) -> PolicyConfig:
    """The same as a job has it: options that the chosen functions do not read are left out."""
    kind: Any = PpoConfig if options["name"] == "ppo" else GrpoConfig
    used = {name: value for name, value in options.items() if name in kind.model_fields}
    if options["zero_variance"] != "drop" if "zero_variance" in options else True:
        used.pop("count_dropped_groups", None)
    return kind(**used)  # type: ignore[no-any-return]


class Recorder:
    """Keeps what a learner is given and the gradients that it makes of it."""

    def __init__(self, learner: Any) -> None:
        self.learner, self.batches, self.gradients = learner, list[tuple[int, Batch]](), list[dict[str, Tensor]]()
        forward_backward, optim_step = learner.forward_backward, learner.optim_step

        def recorded(batch: Batch, *more: Any, **options: Any) -> Any:
            self.batches.append((learner._step, batch))
            return forward_backward(batch, *more, **options)

        def stepped() -> Any:
            found = learner.model.trainable().items()
            self.gradients.append({n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in found})
            return optim_step()

        learner.forward_backward, learner.optim_step = recorded, stepped


def weights_of(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone().double() for name, p in model.module.named_parameters()}


def sequences(batch: Batch) -> set[tuple[int, ...]]:
    """Every row of ids from its root on."""
    ids, parents = batch.tokens["ids"].tolist(), batch.tokens["parent"].tolist()
    found = set()
    for end in torch.cumsum(batch.rows["lengths"], 0).tolist():
        at, row = end - 1, list[int]()
        while at >= 0:
            row.append(ids[at])
            at = parents[at]
        found.add(tuple(row[::-1]))
    return found


def rate(completion: Completion) -> float | None:
    """Some answers have no score, and some prompts make all of theirs equal."""
    if completion.ids[0] % 7 == 0:
        return None
    return 0.5 if len(completion.prompt.ids) % 3 == 0 else even_bytes(completion)


def groups_of(experience: Any) -> list[dense.Group]:
    return [
        dense.Group(g.prompt.ids, [dense.Sample(s.ids, s.mask, s.reward, s.finish) for s in g.samples])
        for g in experience.groups
    ]


def update(weights: dict[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
    """The gradients; the weights take a step of SGD."""
    names = list(weights)
    grads = torch.autograd.grad(loss, [weights[n] for n in names], allow_unused=True)
    found = {n: torch.zeros_like(weights[n]) if g is None else g for n, g in zip(names, grads, strict=True)}
    for name in names:
        weights[name] = (weights[name] - LR * found[name]).detach().requires_grad_()
    return found


def compare(job: TrainingJob, options: dict[str, Any], said: str) -> int:
    """Run the job and its reference; returns how many gradients were not zero."""
    algorithm: Any = job.algorithm
    recorders = {role: Recorder(learner) for role, learner in job.learners.items()}
    policy = {n: p.requires_grad_() for n, p in weights_of(recorders["policy"].learner.model).items()}
    critic = None
    if "critic" in recorders:
        critic = {n: p.requires_grad_() for n, p in weights_of(recorders["critic"].learner.model).items()}
    frozen: Any = job.models.get("reference")
    others = {} if frozen is None else {"reference": weights_of(frozen.model)}
    experiences: list[Any] = []
    prepare = algorithm.prepare

    def listening(experience: Any, models: Any) -> Any:
        experiences.append(experience)
        return prepare(experience, models)

    algorithm.prepare = listening
    run_loop(job, 0)
    history, at, learned = [dict(policy)], 0, 0
    for step, experience in enumerate(experiences):
        groups = groups_of(experience)
        sampled = history[max(step - options["lag"], 0)]
        dense.prepare(groups, policy, sampled, others | ({} if critic is None else {"critic": critic}), options)
        for rows in [sequences(batch) for own, batch in recorders["policy"].batches if own == step]:
            part = [g for g in groups if any((*g.prompt, *one.ids) in rows for one in g.samples)]
            found = dense.losses(part, policy, critic, options)
            learned += check(recorders["policy"].gradients[at], update(policy, found[0]), f"step {step}: {said}")
            if critic is not None:
                learned += check(recorders["critic"].gradients[at], update(critic, found[1]), f"critic: {said}")
            at += 1
        history.append(dict(policy))
    assert at == len(recorders["policy"].gradients)
    return learned


def check(got: dict[str, Tensor], wanted: dict[str, Tensor], said: str) -> bool:
    """Whether there is a gradient; raises AssertionError if it is another one."""
    assert got.keys() == wanted.keys()
    a, b = (torch.cat([one[name].double().flatten() for name in wanted]) for one in (got, wanted))
    far, size = float((a - b).norm()), float(b.norm())
    # Advantages and sampled log-probabilities are float32: where samples of norm 1 cancel, 1e-6 of them is left.
    assert far <= TOLERANCE * size + 2e-6, f"{far:.3g} off a gradient of norm {size:.3g}; {said}"
    return size > 1e-5


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.slow) if n >= FAST else n for n in range(COMBINATIONS)]
)
def test_gradients_are_those_of_a_dense_reference(number: int) -> None:
    seed = int(os.environ.get("RUN_COMBINATION_SEED", secrets.randbits(32)))
    draw = random.Random(seed)
    options = draw_options(draw)
    turns = draw.choice([1, 1, 2])
    sampling: Any = {"temperature": draw.choice([1.0, 0.7]), **draw.choice([{}, {"top_p": 0.9}, {"top_k": 50}])}
    job = job_of(
        config_of(options),
        steps=STEPS,
        rate=rate,
        lr=LR,
        sgd=True,
        double=True,
        environments=EnvironmentFactory(Nods, turns) if turns > 1 else None,
        stop_token_ids=tuple(range(0, 512, 3)),
        **sampling,
    )
    options |= {"temperature": sampling["temperature"], "loss_norm_length": 6.0 * turns}
    compare(job, options, f"RUN_COMBINATION_SEED={seed} {options}, {turns} turns, {sampling}")
