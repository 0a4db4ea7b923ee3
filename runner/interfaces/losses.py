"""The mathematics that a package can add: policy losses, advantages, KL estimators, aggregations,
off-policy corrections, preference losses, divergences.

    @policy_loss("sapo", paper="SAPO 2511.20347", formula="−A·(4/tau)·sigmoid(tau·(r − 1))")
    def sapo(ratio: Tensor, advantages: Tensor, *, tau: Annotated[float, Field(gt=0, description="…")] = 1.0): ...

One pure function is the whole declaration. A positional parameter is an input and must have one of the names below. A
keyword-only parameter with a pydantic `Field` in its annotation is an option: its name, type, default, bounds and
description become the option `algorithm.<name>`, which is null unless it is set; then the function gets its default.
A keyword-only parameter without a `Field` is a constant.

The value of `algorithm.policy_loss`, `advantage`, `kl_estimator`, `loss_aggregation`, `correction`, `loss` or
`divergence` is the registered name. A package lists the modules of its functions as entry points:

    [project.entry-points."runner.losses"]
    mine = "mine.losses"

The function's module is imported before a job is decoded: take `torch` from here, which is imported at its first use.

Legend: T tokens, N rows (a row is a sampled answer, or a prompt that several answers share), P pairs. Inputs of
advantages and aggregations are on the CPU, all others on the device that trains. Tensors are float [T] unless said
otherwise.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from runner.core.errors import RunnerError

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor
else:

    class _Lazy:
        """A module that is imported at its first attribute: what is registered can be explained without torch."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(importlib.import_module(self._name), attribute)

    torch = _Lazy("torch")

Kind = Literal[
    "policy_loss", "advantage", "kl_estimator", "aggregation", "correction", "preference_loss", "divergence"
]  # fmt: skip

# kind → the inputs that a function may take, by name
INPUTS: dict[Kind, dict[str, str]] = {
    "policy_loss": {
        "ratio": "importance ratio π / π_old of the token, or of its row; carries the policy's gradient",
        "logprobs": "log π of each token; carries the policy's gradient",
        "old_logprobs": "log π_old, the policy before the update; without gradient",
        "advantages": "advantage of each token; without gradient",
        "mask": "bool [T]: the tokens that are trained on; the values elsewhere are arbitrary",
        "row": "int64 [T]: the row of each token; a row is never split over micro-batches",
    },
    "advantage": {
        "rewards": "float64 [N]: the reward of each row less its KL penalty; NaN = unscored, or no sample",
        "group": "int64 [N]: equal for the rows of one prompt",
        "lengths": "int64 [N]: the policy's own tokens of each row, also where the loss leaves them out",
        "token_rewards": "float64 [T]: a row's reward on its last trained token, less the KL penalty of each token",
        "mask": "bool [T]: the trained tokens",
        "row": "int64 [T]: the row of each token",
    },
    "kl_estimator": {
        "logprobs": "log π of each token; carries the policy's gradient where the penalty is in the loss",
        "reference_logprobs": "log π_ref of each token; without gradient",
        "ratio": "importance ratio π / π_old of the token; 1 where the penalty is in the reward",
        "max_log_ratio": "float: bound of a log-ratio that is exponentiated, on both sides of 0; None = none",
    },
    "preference_loss": {
        "chosen_log_ratios": "float [P]: Σ (log π − log π_ref) over the chosen answer's tokens",
        "rejected_log_ratios": "float [P]: the same of the rejected answer",
        "chosen_logprobs": "float [P]: Σ log π over the chosen answer's tokens",
        "rejected_logprobs": "float [P]: the same of the rejected answer",
        "chosen_lengths": "int64 [P]: tokens of the chosen answer, at least 1",
        "rejected_lengths": "int64 [P]: tokens of the rejected answer, at least 1",
    },
    "aggregation": {
        "mask": "[T]: not 0 on the trained tokens of this mini-batch; a fractional value scales its token",
        "row": "int64 [T]: the row of each token",
        "group": "int64 [T]: the prompt of each token",
        "tokens": "int: trained tokens of the mini-batch, over all ranks",
        "rows": "int: rows of the mini-batch with a trained token, over all ranks",
        "groups": "int: prompts of the mini-batch with a trained token, over all ranks",
        "max_length": "float: most tokens of an answer: sampler.max_new_tokens × the turns of an episode",
    },
    "correction": {
        "log_ratio": "log ρ of each token (correction_level=token) or of its row; without gradient; 0 outside the mask",
        "mask": "bool [T]: the trained tokens",
        "row": "int64 [T]: the row of each token",
    },
    "divergence": {
        "teacher": "float [S, V]: log P of each trained token; without gradient",
        "student": "float [S, V]: log Q of each trained token; carries the student's gradient",
    },
}


class ImportanceWeights(NamedTuple):
    """weights: float [T], without gradient; affected: bool [T], where a bound truncated or masked."""

    weights: Tensor
    affected: Tensor


class PreferenceLosses(NamedTuple):
    """Float [P] each: losses, and implicit rewards of the chosen and the rejected completions (metrics)."""

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a function: its type with bounds, its default (null means it) and its description."""

    annotation: Any
    default: Any
    description: str


@dataclass(frozen=True, slots=True)
class Registration:
    """A function with what is known of it before anything runs.

    per_token: of an advantage, whether the function returns [T] instead of [N]
    kl_in: of a KL estimator, where its penalty may be added
    for_stale: of a correction, whether it corrects samples that are several updates old
    """

    kind: Kind
    name: str
    paper: str
    formula: str
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    options: Mapping[str, Option]
    per_token: bool = False
    kl_in: Literal["loss", "reward"] = "loss"
    for_stale: bool = False


if TYPE_CHECKING:
    PolicyLossFn = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
    TensorFn = Callable[..., Tensor]
    PreferenceLossFn = Callable[..., PreferenceLosses]
    CorrectionFn = Callable[..., ImportanceWeights]
P = TypeVar("P", bound="PolicyLossFn")
T = TypeVar("T", bound="TensorFn")
D = TypeVar("D", bound="PreferenceLossFn")
C = TypeVar("C", bound="CorrectionFn")


def policy_loss(name: str, *, paper: str, formula: str) -> Callable[[P], P]:
    """Register a value of `algorithm.policy_loss`: the policy's loss per token.

    The function returns (loss [T], diagnostics). Each diagnostic is a tensor [T] by name, and its mean over the
    trained tokens is the metric policy/<name>; `clip_frac_low`, `clip_frac_high` and `clip_frac_dual`, bool, mark
    where a bound took effect and are 0 unless given. In the formula r is the ratio, A the advantage, π the policy.
    """
    return lambda function: _register(function, "policy_loss", name, paper, formula)


def advantage(name: str, *, paper: str, formula: str, per_token: bool = False) -> Callable[[T], T]:
    """Register a value of `algorithm.advantage`, which rewards become before the first update of a step.

    The function returns one number for each row, [N], or with `per_token` for each token, [T]; 0 where unscored.
    One that takes `group` compares the samples of a prompt, so it needs group_size above 1.
    """
    return lambda function: _register(function, "advantage", name, paper, formula, per_token=per_token)


def kl_estimator(name: str, *, paper: str, formula: str, kl_in: Literal["loss", "reward"] = "loss") -> Callable[[T], T]:
    """Register a value of `algorithm.kl_estimator`: estimates [T] of KL(policy ‖ reference) per token.

    kl_in: where the penalty may be added; one in the reward needs no gradient. In the formula d = log π − log π_ref.
    """
    return lambda function: _register(function, "kl_estimator", name, paper, formula, kl_in=kl_in)


def preference_loss(name: str, *, paper: str, formula: str) -> Callable[[D], D]:
    """Register a value of `algorithm.loss` of algorithm=dpo: the loss of each pair, as `PreferenceLosses`.

    A function that takes no log-ratio needs no reference model, and none is loaded. In the formula p is the sum of
    log π, d that of log π − log π_ref, n the number of tokens; _c is the chosen answer, _r the rejected one.
    """
    return lambda function: _register(function, "preference_loss", name, paper, formula)


def aggregation(name: str, *, paper: str, formula: str) -> Callable[[T], T]:
    """Register a value of `algorithm.loss_aggregation`: weights [T] such that loss is Σ weight·loss.

    The weights have the mask's dtype where that is floating, else torch's default. They carry the denominator of the
    whole optimizer step, so the loss does not depend on micro-batches or ranks.
    """
    return lambda function: _register(function, "aggregation", name, paper, formula)


def correction(name: str, *, paper: str, formula: str, for_stale: bool = False) -> Callable[[C], C]:
    """Register a value of `algorithm.correction`: weights [T] of the policy loss, as `ImportanceWeights`.

    They correct the difference between sampler and trainer.

    for_stale: whether it corrects samples that are several updates old, which lag above 1 needs. In the formula
    ρ = π_old / π_sampler.
    """
    return lambda function: _register(function, "correction", name, paper, formula, for_stale=for_stale)


def divergence(name: str, *, paper: str, formula: str) -> Callable[[T], T]:
    """Register a value of `algorithm.divergence` of algorithm=distill: divergence [S] per token, in nats.

    In the formula P is the teacher's distribution, Q the student's.
    """
    return lambda function: _register(function, "divergence", name, paper, formula)


def result_fault(one: Registration, result: Any, size: int) -> str | None:
    """What is wrong with the shapes and data types that a function returned; None if nothing is.

    size: the number of tokens, rows or pairs that it was called with: T, N, P, or S of a divergence
    """
    unit = {"preference_loss": "pair", "advantage": "token" if one.per_token else "row"}.get(one.kind, "token")
    if one.kind == "policy_loss":
        fits = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
        parts = {"the loss": result[0]} | dict(result[1]) if fits else {}
    elif one.kind in ("correction", "preference_loss"):
        record = ImportanceWeights if one.kind == "correction" else PreferenceLosses
        fits = isinstance(result, tuple) and len(result) == len(record._fields)
        parts = dict(zip(record._fields, result, strict=True)) if fits else {}
    else:
        parts = {"the result": result}
    if not parts:
        return f"expected {RESULTS[one.kind]}, got {_describe(result)}"
    for name, value in parts.items():
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != (size,):
            return f"{name}: expected a tensor of shape [{size}], a number for each {unit}, got {_describe(value)}"
        may_be_bool = name == "affected" or (one.kind == "policy_loss" and name != "the loss")
        if not (value.is_floating_point() or (may_be_bool and value.dtype == torch.bool)):
            return f"{name}: expected a floating data type, got {_describe(value)}"
    return None


RESULTS = {
    "policy_loss": "(loss [T], diagnostics by name, [T] each)",
    "correction": "ImportanceWeights(weights, affected), [T] each",
    "preference_loss": "PreferenceLosses(losses, chosen_rewards, rejected_rewards), [P] each",
}


def _describe(value: Any) -> str:
    """A value in an error message: a tensor by its shape and data type."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    return f"{value!r:.80} ({type(value).__name__})"


def registration_of(value: object) -> Registration | None:
    """What a decorator of this module attached to a function; None for anything else."""
    found = getattr(value, "registration", None) if isinstance(value, FunctionType) else None
    return found if isinstance(found, Registration) else None


F = TypeVar("F", bound=Callable[..., Any])


def _register(function: F, kind: Kind, name: str, paper: str, formula: str, **traits: Any) -> F:
    """The function with its `registration`. Raises RunnerError for an input that this kind does not have."""
    parameters = inspect.signature(function).parameters.values()
    inputs = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
    if unknown := [name for name in inputs if name not in INPUTS[kind]]:
        raise RunnerError(
            f"{kind} '{name}' ({function.__module__}): no input named {', '.join(unknown)}; "
            f"there are: {', '.join(INPUTS[kind])}. An option comes after a * in the parameters"
        )
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    registration = Registration(kind, name, paper, formula, function, inputs, _options(function, keywords), **traits)
    function.registration = registration  # type: ignore[attr-defined]
    return function


def _options(function: Callable[..., Any], keywords: Mapping[str, Any]) -> dict[str, Option]:
    """The keyword-only parameters annotated with a `Field`. Raises RunnerError for one without a default."""
    own = {name: function.__annotations__.get(name, Any) for name in keywords}  # inputs are not evaluated: no torch
    hints = get_type_hints(SimpleNamespace(__annotations__=own), function.__globals__, include_extras=True)
    found = {}
    for name, hint in hints.items():
        metadata = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        field = next((a for a in metadata if isinstance(a, FieldInfo)), None)
        if field is None:
            continue
        if keywords[name] is inspect.Parameter.empty or not field.description:
            raise RunnerError(
                f"{function.__module__}.{function.__name__}: option {name} needs a default and a "
                'description: NAME: Annotated[float, Field(gt=0, description="…")] = 1.0'
            )
        bounded = Annotated[(get_args(hint)[0], *field.metadata)] if field.metadata else get_args(hint)[0]
        found[name] = Option(bounded, keywords[name], field.description)
    return found
