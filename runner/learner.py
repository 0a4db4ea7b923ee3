"""The learner: one trained model behind three verbs, which an algorithm calls without seeing how it is sharded.

    mini-batch ──cut by token budget──▶ micro-batches ──forward·backward──▶ summed gradients ──optim_step──▶ weights

Legend: N rows, T tokens. Gradients are summed. The loss has been divided by the total it means;
nothing divides here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from runner.batch import Batch, micro_batches
from runner.errors import CheckpointError, TrainingDiverged
from runner.metrics import Metrics
from runner.protocols import LinearLossFn, LossFn, Outputs, State
from runner.randomness import derive

log = logging.getLogger("runner")


class TrainableModel(Protocol):
    """What the learner needs of a model adapter."""

    def outputs(self, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]: ...

    def linear(self, batch: Batch, coefficients: Tensor) -> tuple[Tensor, dict[str, Tensor]]: ...

    def trainable(self) -> dict[str, nn.Parameter]: ...

    def train(self) -> None: ...

    def eval(self) -> None: ...


class LocalLearner:
    """One model and its optimizer in this process.

    factor:  the schedule, step (0-based) → factor on the learning rate
    budget:  tokens of one micro-batch on the device
    seed:    every dropout stream is derived from (seed, step, micro-batch)
    """

    def __init__(
        self,
        model: TrainableModel,
        optimizer: torch.optim.Optimizer,
        *,
        lr: float,
        clip_norm: float | None,
        factor: Callable[[int], float],
        budget: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._lr, self._clip, self._factor = lr, clip_norm, factor
        self._budget, self._seed, self._device = budget, seed, device
        self._parameters = model.trainable()
        self._step = self._micro = 0

    def begin_step(self, step: int) -> None:
        """Set what is a pure function of the step: the learning rate and the dropout streams."""
        self._step, self._micro = step, 0
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr * self._factor(step)

    @torch.no_grad()
    def forward(self, batch: Batch, needs: frozenset[str]) -> Outputs:
        """Score a batch of any size without gradient and without dropout; [T] outputs on the learner's device."""
        self.model.eval()
        parts = [self.model.outputs(micro.to(self._device), needs) for micro in micro_batches(batch, self._budget)]
        return _joined(parts, needs)

    def forward_backward(
        self, batch: Batch, loss: LossFn, keep: frozenset[str] = frozenset()
    ) -> tuple[Metrics, Outputs]:
        """Add the loss's gradient on a mini-batch; returns metrics and, detached, the outputs named in `keep`.

        Raises TrainingDiverged if the loss is not finite.
        """
        self.model.train()
        metrics, kept, total = Metrics(), [], torch.zeros((), device=self._device)
        for micro in micro_batches(batch, self._budget):
            self._say_if_oversized(micro)
            torch.manual_seed(derive(self._seed, "dropout", self._step, self._micro))
            self._micro += 1
            value, outputs = self._backward(micro.to(self._device), loss)
            total += value.total.detach()
            metrics.merge(value.metrics)
            kept.append({name: outputs[name].detach() for name in keep})
        if not torch.isfinite(total):
            raise TrainingDiverged(
                f"step {self._step + 1}: the loss is {float(total)}; nothing was updated with it. "
                "Lower optimizer.lr, or look at the data of this step"
            )
        return metrics, _joined(kept, keep)

    def _backward(self, micro: Batch, loss: LossFn) -> tuple[Any, Mapping[str, Tensor]]:
        if isinstance(loss, LinearLossFn):
            total, outputs = self.model.linear(micro, loss.coefficients(micro))
            total.backward()  # type: ignore[no-untyped-call]
            return loss(micro, outputs), outputs
        outputs = self.model.outputs(micro, loss.needs)
        value = loss(micro, outputs)
        value.total.backward()  # type: ignore[no-untyped-call]
        return value, outputs

    def _say_if_oversized(self, micro: Batch) -> None:
        if micro.num_tokens > self._budget:
            log.info(
                "step %d: a unit of %d tokens is above algorithm.micro_batch_tokens=%d and runs alone",
                self._step + 1,
                micro.num_tokens,
                self._budget,
            )

    def optim_step(self) -> Metrics:
        """Clip, step, clear. Raises TrainingDiverged, with the weights untouched, if a gradient is not finite."""
        parameters = list(self._parameters.values())
        grads = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if not torch.isfinite(norm):
            raise TrainingDiverged(
                f"step {self._step + 1}: the gradient norm is {float(norm)}; nothing was updated with it. "
                "Lower optimizer.lr, or look at the data of this step"
            )
        if self._clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self._clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        metrics = Metrics()
        metrics.add("train/grad_norm", norm)
        metrics.add("train/lr", self.optimizer.param_groups[0]["lr"])
        return metrics

    def state_dict(self) -> State:
        """Trained parameters and optimizer state, as tensors under `param/` and `optim/<key>/`."""
        tensors = {f"param/{name}": p.detach() for name, p in self._parameters.items()}
        for name, parameter in self._parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optim/{key}/{name}"] = value
        return {"tensors": tensors}

    def load_state_dict(self, state: State) -> None:
        """Restore `state_dict`. Raises CheckpointError unless names and shapes are exactly this model's."""
        tensors: dict[str, Tensor] = dict(state["tensors"])
        load_parameters(self._parameters, tensors)
        own = self.optimizer.state_dict()
        order = [p for group in self.optimizer.param_groups for p in group["params"]]
        names = {id(p): name for name, p in self._parameters.items()}
        own["state"] = {
            index: restored
            for index, parameter in enumerate(order)
            if (restored := _optimizer_entry(tensors, names[id(parameter)]))
        }
        self.optimizer.load_state_dict(own)


def load_parameters(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Copy the `param/` tensors into `parameters`. Raises CheckpointError unless names and shapes agree exactly."""
    saved = {name.removeprefix("param/"): t for name, t in tensors.items() if name.startswith("param/")}
    differing = sorted(saved.keys() ^ parameters.keys())
    if differing:
        raise CheckpointError(f"the checkpoint and this model differ in {len(differing)} parameters: {differing[:5]}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != saved[name].shape or parameter.dtype != saved[name].dtype:
                raise CheckpointError(
                    f"{name}: {saved[name].dtype}{list(saved[name].shape)} in the checkpoint, "
                    f"{parameter.dtype}{list(parameter.shape)} in this model"
                )
            parameter.copy_(saved[name])


def _optimizer_entry(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The optimizer's tensors of one parameter: `optim/<key>/<name>` → key."""
    suffix = f"/{name}"
    return {
        full[len("optim/") : -len(suffix)]: tensor
        for full, tensor in tensors.items()
        if full.startswith("optim/") and full.endswith(suffix) and "/" not in full[len("optim/") : -len(suffix)]
    }


def _joined(parts: list[dict[str, Tensor]], names: frozenset[str]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in names}
