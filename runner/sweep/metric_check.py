"""Check from its spec whether a job can measure a metric, so that a sweep by a missing one is refused."""

from __future__ import annotations

from collections.abc import Sequence

from runner.core.errors import Problem
from runner.spec.job import JobSpec
from runner.spec.suggest import nearest_word

EVAL = (
    "loss", "exact_match", "accuracy", "chosen", "rejected", "margin", "chosen_logprob", "rejected_logprob",
    "kl_baseline", "divergence", "nll",
)  # fmt: skip
TRAIN = ("loss", "grad_norm", "lr", "tokens", "accuracy", "kl_baseline")
SAMPLED = ("rollout", "mismatch", "correction", "sampler", "weight_sync")  # what only rollouts have
OTHERS = ("reward", "policy", "critic", "distill", "perf", "time", "device")


def metric_problems(metrics: Sequence[str], specs: Sequence[JobSpec]) -> list[Problem]:
    """One for each metric that none of the jobs can measure."""
    found = []
    for metric in metrics:
        reasons = [reason for spec in specs if (reason := missing_reason(metric, spec))]
        if len(reasons) == len(specs):
            found.append(Problem("sweep.metric", f"no job measures {metric}: {reasons[0]}"))
    return found


def missing_reason(metric: str, spec: JobSpec) -> str | None:
    """Why a job cannot measure a metric, and what to type; None where it can, or a plug-in of it may."""
    algorithm = spec.algorithm
    if spec.callbacks.by_name or not type(algorithm).__module__.startswith("runner."):
        return None
    group = metric.partition("/")[0]
    known = [*(f"train/{one}" for one in TRAIN), *(f"eval/{one}" for one in EVAL)]
    if group not in ("train", "eval", *SAMPLED, *OTHERS) or (group in ("train", "eval") and metric not in known):
        meant = nearest_word(metric, [*known, "reward/mean"])
        return "there is no such metric" + (f"; did you mean {meant}?" if meant else " (docs/metrics.md)")
    preferences = algorithm.item_kind in ("pairs", "judged")
    here = f"algorithm={algorithm.name}"
    if group == "eval" and not spec.evaluation.every:
        return "evaluation.every=0 evaluates nothing; type evaluation.every=50"
    if group in SAMPLED and not algorithm.needs_sampler:
        return f"{here} samples nothing; name another metric"
    if group == "reward" and not (algorithm.needs_reward or preferences):
        return f"{here} has no reward; name another metric"
    if group == "policy" and not (algorithm.needs_sampler or preferences):
        return f"{here} has none of its policy; name another metric"
    heads = algorithm.trained_models()
    if group == "critic" and not ("critic" in heads or "lm+value" in heads.values()):
        return f"{here} has no critic; name another metric"
    if group == "distill" and "teacher" not in algorithm.frozen_models():
        return f"{here} has no teacher; name another metric"
    return None
