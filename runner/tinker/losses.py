"""The losses that the protocol names, and data as packed batches.

    row          x0 x1 x2 · · ·  y          ids of a datum, and room for the last target
    target [N]   y0 y1 y2 · · ·             target i is predicted at x_i, so it belongs to token i+1 of the row

Every loss is a sum over positions, without normalization. lp = log π(target), w = weight, q = the log-probability when
the target was sampled, a = advantage, r = exp(lp − q). N positions of a datum, K targets of a position, T tokens.

    cross_entropy         −Σ w·lp
    importance_sampling   −Σ r·a
    ppo                   −Σ min(r·a, clip(r, low, high)·a)          Schulman et al., 1707.06347
    cispo                 −Σ stop_gradient(clip(r, low, high))·lp·a   MiniMax-M1, 2506.13585
    dro                   −Σ (lp·a − ½·beta·(lp − q)²)                Richemond et al., 2405.19107

Formulas, defaults and names are those of the SDK's documentation. Where a is 0, r·a is 0 whatever r is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runner.core.batch import Batch
from runner.core.errors import DataError
from runner.core.metrics import Metrics
from runner.interfaces import LOGPROBS, Loss, ModelLimits, Outputs
from runner.tinker.messages import Datum


def cross_entropy(lp: Tensor, w: Tensor, q: Tensor, a: Tensor) -> Tensor:
    """The loss of each position; all arguments [T]."""
    return -w * lp


def importance_sampling(lp: Tensor, w: Tensor, q: Tensor, a: Tensor) -> Tensor:
    """The loss of each position; all arguments [T]."""
    return -_ratio(lp, q, a) * a


def ppo(
    lp: Tensor, w: Tensor, q: Tensor, a: Tensor, *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2
) -> Tensor:
    """The loss of each position; all arguments [T]."""
    ratio = _ratio(lp, q, a)
    return -torch.minimum(ratio * a, ratio.clamp(clip_low_threshold, clip_high_threshold) * a)


def cispo(
    lp: Tensor, w: Tensor, q: Tensor, a: Tensor, *, clip_low_threshold: float = 0.0, clip_high_threshold: float = 4.0
) -> Tensor:
    """The loss of each position; all arguments [T]."""
    return -_ratio(lp, q, a).clamp(clip_low_threshold, clip_high_threshold).detach() * lp * a


def dro(lp: Tensor, w: Tensor, q: Tensor, a: Tensor, *, beta: float = 0.05) -> Tensor:
    """The loss of each position; all arguments [T]."""
    return -(lp * a - 0.5 * beta * (lp - q).square())


def _ratio(lp: Tensor, q: Tensor, a: Tensor) -> Tensor:
    """r, and 1 where it is multiplied by 0, so that it cannot overflow there."""
    return torch.where(a != 0, lp - q, 0).exp()


LOSSES: Mapping[str, Callable[..., Tensor]] = {
    one.__name__: one for one in (cross_entropy, importance_sampling, ppo, cispo, dro)
}


@dataclass(frozen=True, slots=True)
class SummedLoss:
    """A loss of this module, as the learner takes it. options: its keyword arguments."""

    name: str
    options: Mapping[str, float]
    needs: frozenset[str] = LOGPROBS

    def __call__(self, batch: Batch, outputs: Outputs) -> Loss:
        return Loss(self.values(batch, outputs["logprobs"]).sum(), Metrics())

    def values(self, batch: Batch, logprobs: Tensor) -> Tensor:
        """The loss of each token, [T], 0 at the first ones of rows."""
        own = batch.tokens
        values = LOSSES[self.name](logprobs, own["weight"], own["old_logprobs"], own["advantages"], **self.options)
        return torch.where(own["parent"] >= 0, values, 0)


def check_loss(name: str, config: Mapping[str, float | str]) -> SummedLoss:
    """The loss of a request. Raises DataError for an unknown one, and for options it does not have."""
    if name not in LOSSES:
        text = f"loss_fn '{name}' is not supported; there are: {', '.join(LOSSES)}"
        raise DataError(f"{text}. For others, use forward_backward_custom")
    known = LOSSES[name].__kwdefaults__ or {}
    if wrong := sorted(config.keys() - known.keys()):
        raise DataError(f"loss_fn '{name}' has no option '{wrong[0]}'; it has: {', '.join(known) or 'none'}")
    for option, value in config.items():
        if isinstance(value, str) or not np.isfinite(value):
            raise DataError(f"loss_fn_config {option}={value}: expected a number")
    return SummedLoss(name, {option: float(value) for option, value in config.items()})


TARGETS = "target_tokens"


def check_data(data: Sequence[Datum], loss: str, limits: ModelLimits, *, forward_only: bool) -> None:
    """Raise DataError, naming the datum, for what the loss cannot be computed of."""
    if not data:
        raise DataError("the request has no data; send at least one datum")
    needed = {TARGETS} if loss == "cross_entropy" else {TARGETS, "logprobs", "advantages"}
    allowed = {TARGETS, "weights"} if loss == "cross_entropy" else needed
    for index, datum in enumerate(data):
        if problem := _objection(datum, needed, None if forward_only else allowed, limits):
            raise DataError(f"datum {index}: {problem}")


def _objection(datum: Datum, needed: set[str], allowed: set[str] | None, limits: ModelLimits) -> str | None:
    """What is wrong with a datum. allowed: names of inputs, None = any, which are not read."""
    length, inputs = len(datum.ids), datum.inputs
    if not length:
        return "its model_input is empty"
    longest, why = limits.length_limit or (length + 1, "")
    if length + 1 > longest:
        return f"{length} tokens and a target exceed {longest}: {why}"
    if missing := sorted(needed - inputs.keys()):
        return f"loss_fn_inputs lack {', '.join(missing)}"
    if allowed is not None and (unknown := sorted(inputs.keys() - allowed)):
        return f"loss_fn_inputs have {unknown[0]}, which this loss does not read; leave it out"
    targets = inputs[TARGETS]
    if targets.dtype.kind != "i":
        return f"target_tokens are {targets.dtype.name}; send int64"
    if targets.ndim not in (1, 2) or len(targets) != length or not targets.size:
        return f"target_tokens have shape {list(targets.shape)}, but model_input has {length} tokens"
    if targets.ndim == 2 and "advantages" in needed:
        return "target_tokens of two dimensions are for cross_entropy"
    for name in (needed | {"weights"}) & inputs.keys() - {TARGETS}:
        if inputs[name].shape != targets.shape:
            return f"{name} have shape {list(inputs[name].shape)}, but target_tokens {list(targets.shape)}"
        if not np.isfinite(inputs[name]).all():
            return f"{name} have a value that is NaN or infinite"
    for name, ids in (("model_input", datum.ids), (TARGETS, targets)):
        if ids.min() < 0 or ids.max() >= limits.vocab_size:
            return f"{name} has the id {ids.min() if ids.min() < 0 else ids.max()}; ids are below {limits.vocab_size}"
    return None


def pack_data(data: Sequence[Datum]) -> Batch:
    """A row of N+1 tokens for each datum, or K of them where a position has K targets; each row is a unit.

    The channel `targets` has what is predicted in the place of each token. Others: weight (1 unless given),
    old_logprobs and advantages (0 unless given).
    """
    rows = [(datum, at) for datum in data for at in range(datum.inputs[TARGETS][0].size)]
    lengths = torch.tensor([len(datum.ids) + 1 for datum, _ in rows])
    starts = torch.cumsum(lengths, 0) - lengths
    index = torch.arange(int(lengths.sum()))
    positions = index - torch.repeat_interleave(starts, lengths)
    ids = [np.append(datum.ids, _column(datum, at, TARGETS, 0)[-1]) for datum, at in rows]

    def join(name: str, default: float) -> Tensor:
        return torch.from_numpy(np.concatenate([np.append(0, _column(datum, at, name, default)) for datum, at in rows]))

    tokens = {
        "ids": torch.from_numpy(np.concatenate(ids)),
        "positions": positions,
        "parent": torch.where(positions == 0, -1, index - 1),
        TARGETS: join(TARGETS, 0),
        "weight": join("weights", 1.0).float(),
        "old_logprobs": join("logprobs", 0.0).float(),
        "advantages": join("advantages", 0.0).float(),
    }
    return Batch(tokens, {"lengths": lengths, "unit": torch.arange(len(rows)), "start": torch.zeros_like(lengths)})


def _column(datum: Datum, at: int, name: str, default: float) -> np.ndarray:
    """What a loss reads for target `at` of each position, [N]."""
    targets, values = datum.inputs[TARGETS], datum.inputs.get(name)
    if values is None or values.shape != targets.shape:
        return np.full(len(targets), default)
    return values if targets.ndim == 1 else values[:, at]


def split_logprobs(logprobs: Tensor, data: Sequence[Datum]) -> list[np.ndarray]:
    """Log-probabilities [T] of a `pack_data` as those of each datum, float32, shaped as its targets."""
    values, at, found = logprobs.detach().float().cpu().numpy(), 0, []
    for datum in data:
        size, targets = len(datum.ids), datum.inputs[TARGETS]
        width = 1 if targets.ndim == 1 else targets.shape[1]
        rows = values[at : at + width * (size + 1)].reshape(width, size + 1)[:, 1:]
        found.append(rows.T.reshape(targets.shape).copy())
        at += width * (size + 1)
    return found
