"""Check from its spec whether a job can measure a metric, for all options that name one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from runner.core.errors import Problem
from runner.core.package import read_table
from runner.spec.evaluation import HIGH, LOW, EvaluationSet, decode_set, ks_of
from runner.spec.suggest import nearest_word

_TABLE = read_table(__file__, "measured.yaml")
MEASURED: dict[str, list[str]] = _TABLE["measured"]
HELD_OUT: dict[str, list[str]] = _TABLE["held_out"]
CHOICES = [f"{name}{end}" for name in ("accuracy", "accuracy_norm") for end in ("", LOW, HIGH)]  # multiple choice
SAMPLED = ("rollout", "mismatch", "correction", "sampler", "weight_sync")  # what only rollouts have
OF_MACHINE = ("device", "sampler")
OF_ONE_RANK = ("perf", "time", *OF_MACHINE)  # ranks of one job measure different values
ESTIMATE = re.compile(r"(pass|mean)@\d+")


def metric_problems(metrics: Sequence[str], specs: Sequence[Any]) -> list[Problem]:
    """One for each metric that none of the jobs (JobSpec) can measure."""
    found = []
    for metric in metrics:
        reasons = [reason for spec in specs if (reason := missing_reason(metric, spec))]
        if len(reasons) == len(specs):
            found.append(Problem("sweep.metric", f"no job measures {metric}: {reasons[0]}"))
    return found


def required_metric_problems(job: Any) -> Iterator[tuple[str, str]]:
    """(key, message) of each metric that a job (JobSpec) reads and cannot measure."""
    best, nothing = job.checkpoint.best, not (job.evaluation.every and (job.evaluation.sets or job.data.holds_out))
    # where nothing is evaluated, the run says that there is no best checkpoint
    if best and not (nothing and best.startswith("eval/")) and (why := missing_reason(best, job)):
        yield "checkpoint.best", why
    for name, callback in job.callbacks.by_name.items():
        for option, metric in callback.required_metrics():
            key = f"callbacks.{name}.{option}"
            if metric.partition("/")[0] in OF_ONE_RANK:
                yield key, f"each rank measures its own {metric}; name another metric"
            elif why := missing_reason(metric, job):
                yield key, why


def missing_reason(metric: str, spec: Any) -> str | None:
    """Why a job cannot measure a metric, and what to type; None where it can, or a plug-in of it may."""
    algorithm = spec.algorithm
    if not all(type(part).__module__.startswith("runner.") for part in (algorithm, *spec.callbacks.by_name.values())):
        return None
    group = metric.partition("/")[0]
    if group not in ("eval", "reward", "policy", *OF_MACHINE, *MEASURED):
        return _unknown(metric, possible_metrics(spec))
    preferences = algorithm.item_kind in ("pairs", "judged")
    here = f"algorithm={algorithm.name}"
    if group in SAMPLED and not algorithm.needs_sampler:
        return f"{here} does not sample; set another metric"
    if group == "reward" and not (algorithm.needs_reward or preferences):
        return f"{here} has no reward; set another metric"
    if group == "policy" and not (algorithm.needs_sampler or preferences):
        return f"{here} has no policy metrics; set another metric"
    heads = algorithm.trained_models()
    if group == "critic" and not ("critic" in heads or "lm+value" in heads.values()):
        return f"{here} has no critic; set another metric"
    if group == "distill" and "teacher" not in algorithm.frozen_models():
        return f"{here} has no teacher; set another metric"
    if metric in ("policy/kl", "policy/kl_coef") and not (preferences or algorithm.has_kl):
        return f"{here} compares with no reference model here; type algorithm.kl_estimator=k3, or set another metric"
    if group == "correction" and algorithm.correction == "none":
        return "algorithm.correction=none has no importance weights; type algorithm.correction=tis, or another metric"
    if group in OF_MACHINE or _of_plug_in(group, spec):
        return None
    possible = possible_metrics(spec)
    reason = _evaluation_reason(metric, spec) if group == "eval" else None
    return reason or (None if metric in possible else _unknown(metric, possible))


def possible_metrics(spec: Any) -> list[str]:
    """Metrics of a job of built-in components, for the groups that the job has; not those of the machine."""
    algorithm, found = spec.algorithm, {group: list(names) for group, names in MEASURED.items()}
    preferences = algorithm.item_kind in ("pairs", "judged")
    found["train"] += {"pairs": ["accuracy"], "judged": ["accuracy", "kl_baseline"]}.get(algorithm.item_kind, [])
    found["policy"] = list(_TABLE["preferences" if preferences else "policy"])
    scored = ["mean", "std", "num_failed", "zero_variance", *spec.reward.component_metrics()]
    margin = ["margin"] if algorithm.item_kind == "pairs" else []
    found["reward"] = ["chosen", "rejected", *margin] if preferences else scored
    found["eval"] = [
        *HELD_OUT.get(algorithm.item_kind, _TABLE["held_out_others"]),
        *_answer_metrics(spec.evaluation.samples, spec.reward, spec.environment),
    ]
    for one in _valid_sets(spec):
        reward, environment = (one.components.get(name, getattr(spec, name)) for name in ("reward", "environment"))
        is_choice = one.options.choices is not None
        measured = CHOICES if is_choice else _answer_metrics(one.options.samples, reward, environment)
        found["eval"] += [f"{one.name}/{name}" for name in measured]
    return [f"{group}/{name}" for group, names in found.items() for name in names]


def _evaluation_reason(metric: str, spec: Any) -> str | None:
    """Why a job cannot measure eval/NAME or eval/SET/NAME; None where it can or that is unknown."""
    options, reward, environment, section = spec.evaluation, spec.reward, spec.environment, "evaluation"
    if not options.every:
        return "evaluation.every=0 disables evaluation; type evaluation.every=50"
    first, _, rest = (name := metric.removeprefix("eval/")).partition("/")
    one = decode_set(first, options.sets[first]) if first in options.sets else None
    if isinstance(one, list):  # what is wrong with the set is said of it
        return None
    if one is not None and one.options.choices is not None:
        return None if rest in CHOICES else f"evaluation.sets.{first}.choices measures accuracy and accuracy_norm"
    if one is not None:
        options, reward, name = one.options, one.components.get("reward", reward), rest
        environment = one.components.get("environment", environment)
        section = f"evaluation.sets.{first}"
    elif rest and first != "reward":
        sets = ", ".join(options.sets) or "none"
        return f"{metric}: no evaluation set is named {first} (sets: {sets}); add evaluation.sets.{first}={{…}}"
    elif not spec.data.holds_out:
        return f"{metric}: data={spec.data.name} has no held-out rows; type data.holdout=0.05"
    name = name.removesuffix(LOW).removesuffix(HIGH)
    if name == "loss" and environment.name != "none" and (one is not None or spec.algorithm.item_kind not in HELD_OUT):
        return f"{metric} is not measured with environment={environment.name}: an episode has no expected completion"
    if name.startswith("reward/") and reward.name == "none":
        return f"{metric} needs a reward, and this job has none: set {section}.reward, or reward=NAME"
    if ESTIMATE.fullmatch(name):
        measured = _estimates(options.samples, reward)
        text = f"{name} is not measured with {section}.samples={options.samples}, only {', '.join(measured)}"
        return None if name in measured else text
    return None


def _answer_metrics(samples: int, reward: Any, environment: Any) -> list[str]:
    """Of the answers to held-out questions. An episode has no loss."""
    parts = [f"reward/{name}" for name in reward.component_metrics()]
    means = [*_estimates(samples, reward), "exact_match", "reward/mean", *parts, "length", "truncated_frac"]
    means += ["loss"] if environment.name == "none" else []
    return [*means, *(f"{name}{bound}" for name in means for bound in (LOW, HIGH)), "reward/num_failed"]


def _estimates(samples: int, reward: Any) -> list[str]:
    """mean@n and pass@k; mean@1 of greedy answers without a reward is called exact_match."""
    first = f"mean@{samples or 1}" if samples or reward.name != "none" else "exact_match"
    return [first, *(f"pass@{k}" for k in ks_of(samples))]


def _of_plug_in(group: str, spec: Any) -> bool:
    """Whether a plug-in may add metrics to this group."""
    rewards = [spec.reward, *(s.components.get("reward", spec.reward) for s in _valid_sets(spec))]
    if group in ("reward", "eval") and any(not type(one).__module__.startswith("runner.") for one in rewards):
        return True
    return group == "policy" and spec.algorithm.has_plug_in_loss


def _valid_sets(spec: Any) -> list[EvaluationSet]:
    """The evaluation sets without those that have problems of their own, which are reported elsewhere."""
    decoded = (decode_set(name, given) for name, given in spec.evaluation.sets.items())
    return [one for one in decoded if isinstance(one, EvaluationSet)]


def _unknown(metric: str, known: Iterable[str]) -> str:
    meant = nearest_word(metric, known)
    return "unknown metric" + (f"; did you mean {meant}?" if meant else " (docs/metrics.md)")
