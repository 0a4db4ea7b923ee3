"""The learner: one trained model behind three verbs, which an algorithm calls without seeing how it is sharded.

    mini-batch ──cut by token budget──▶ micro-batches ──forward·backward──▶ summed gradients ──optim_step──▶ weights

Legend: N rows, T tokens. Gradients are summed. The loss has been divided by the total it means;
nothing divides here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from runner.batch import Batch, Places, micro_batches, places
from runner.errors import CheckpointError, RunnerError, TrainingDiverged
from runner.metrics import Metrics
from runner.protocols import LinearLossFn, LogitsLossFn, LossFn, Outputs, State, Terms
from runner.randomness import derive

log = logging.getLogger("runner")


class ScoringModel(Protocol):
    """What scoring needs of a model adapter."""

    @property
    def padded(self) -> bool: ...  # whether every row takes as many places as the longest

    def outputs(self, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]: ...


class TrainableModel(ScoringModel, Protocol):
    """What the learner needs of a model adapter."""

    def linear(
        self, batch: Batch, coefficients: Tensor, terms: Terms | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]: ...

    def trainable(self) -> dict[str, nn.Parameter]: ...

    def train(self) -> None: ...

    def eval(self) -> None: ...


class LocalLearner:
    """One model and its optimizer in this process.

    factor:  the schedule, step (0-based) → factor on the learning rate
    budget:  tokens of one micro-batch on the device
    seed:    every dropout stream is derived from (seed, step, micro-batch)
    prefix:  of the names of its metrics
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
        prefix: str = "train",
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._lr, self._clip, self._factor = lr, clip_norm, factor
        self._budget, self._seed, self._device, self._prefix = budget, seed, device, prefix
        self._parameters = model.trainable()
        self._step = self._micro = 0
        self._said_oversized = False

    def begin_step(self, step: int) -> None:
        """Set what is a pure function of the step: the learning rate and the dropout streams."""
        self._step, self._micro = step, 0
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr * self._factor(step)

    @torch.no_grad()
    def forward(self, batch: Batch, needs: frozenset[str]) -> Outputs:
        """Score a batch of any size without gradient and without dropout; [T] outputs on the learner's device."""
        self.model.eval()
        return score(self.model, batch, needs, budget=self._budget, device=self._device)

    def forward_backward(
        self, batch: Batch, loss: LossFn, keep: frozenset[str] = frozenset()
    ) -> tuple[Metrics, Outputs]:
        """Add the loss's gradient on a mini-batch; returns metrics and, detached, the outputs named in `keep`.

        Raises TrainingDiverged if the loss is not finite.
        """
        self.model.train()
        metrics, kept, total = Metrics(), [], torch.zeros((), device=self._device)
        oversized: list[int] = []
        for micro in micro_batches(batch, self._budget, padded=self.model.padded):
            oversized += self._oversized(micro)
            torch.manual_seed(derive(self._seed, "dropout", self._step, self._micro))
            self._micro += 1
            value, outputs = self._backward(micro, loss)
            total += value.total.detach()
            metrics.merge(value.metrics)
            kept.append({name: outputs[name].detach() for name in keep})
        self._say_once(oversized)
        if not torch.isfinite(total):
            raise TrainingDiverged(
                f"step {self._step + 1}: the loss is {float(total)}; nothing was updated with it. "
                "Lower optimizer.lr, or look at the data of this step"
            )
        return metrics, joined(kept, keep)

    def _backward(self, micro: Batch, loss: LossFn) -> tuple[Any, Mapping[str, Tensor]]:
        batch = micro.to(self._device)
        if isinstance(loss, LinearLossFn):
            total, outputs = self._linear(micro, batch, loss)
            total.backward()  # type: ignore[no-untyped-call]
            return loss(batch, outputs), outputs
        outputs = self.model.outputs(batch, loss.needs)
        value = loss(batch, outputs)
        value.total.backward()  # type: ignore[no-untyped-call]
        return value, outputs

    def _linear(self, micro: Batch, batch: Batch, loss: LinearLossFn) -> tuple[Tensor, dict[str, Tensor]]:
        """`TrainableModel.linear` of a micro-batch, which is on the CPU, and as `batch` on the device."""
        terms = None
        if isinstance(loss, LogitsLossFn):
            terms, batch = loss.terms, replace(batch, tokens={**batch.tokens, **loss.beside(batch)})
        return self.model.linear(batch, loss.coefficients(micro), terms)

    @torch.no_grad()
    def measure(self, batch: Batch, loss: LossFn) -> Outputs:
        """What `loss` reads of the model on a batch of any size, [T] or [N] on the learner's device, without dropout:
        the outputs that it needs, or its own terms."""
        if not isinstance(loss, LogitsLossFn):
            return self.forward(batch, loss.needs)
        self.model.eval()
        pieces = micro_batches(batch, self._budget, padded=self.model.padded)
        found = [self._linear(micro, micro.to(self._device), loss)[1] for micro in pieces]
        return joined(found, frozenset(found[0]))

    def _oversized(self, micro: Batch) -> list[int]:
        """The tokens that a micro-batch takes, if they are above the budget."""
        taken = sum(places(micro), Places()).count(self.model.padded)
        return [taken] if taken > self._budget else []

    def _say_once(self, oversized: list[int]) -> None:
        if not oversized or self._said_oversized:
            return
        self._said_oversized = True
        log.info(
            "step %d: %d items are longer than algorithm.micro_batch_tokens=%d (the longest: %d tokens%s); "
            "such an item runs alone, now and later; this is said once",
            self._step + 1,
            len(oversized),
            self._budget,
            max(oversized),
            ", padding included" if self.model.padded else "",
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
        metrics.add(f"{self._prefix}/grad_norm", norm)
        metrics.add(f"{self._prefix}/lr", self.optimizer.param_groups[0]["lr"])
        return metrics

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """What learns, under the names it has in the model's module."""
        yield from ((name, parameter.detach()) for name, parameter in self._parameters.items())

    def state_dict(self) -> State:
        """Trained parameters and the optimizer's state: tensors under `param/` and `optim/<key>/`, the rest plain.

        Raises RunnerError for an optimizer that keeps state of no parameter, or under a name with a slash.
        """
        tensors = {f"param/{name}": p.detach() for name, p in self._parameters.items()}
        values: dict[str, dict[str, Any]] = {}
        own, names = self.optimizer.state_dict(), self._names()
        for index, entry in own["state"].items():
            if index not in names or any("/" in key for key in entry):
                raise RunnerError(f"{type(self.optimizer).__name__} keeps state under {index!r} that cannot be saved")
            for key, value in entry.items():
                if isinstance(value, Tensor):
                    tensors[f"optim/{key}/{names[index]}"] = value
                else:
                    values.setdefault(names[index], {})[key] = value
        groups = [{key: value for key, value in group.items() if key != "params"} for group in own["param_groups"]]
        return {"tensors": tensors, "optimizer": {"groups": groups, "values": values}}

    def load_state_dict(self, state: State) -> None:
        """Restore `state_dict`. Raises CheckpointError unless names and shapes are exactly this model's."""
        tensors: Mapping[str, Tensor] = state["tensors"]
        load_parameters(self._parameters, tensors)
        entries: dict[str, dict[str, Any]] = {name: dict(v) for name, v in state["optimizer"]["values"].items()}
        for full, tensor in tensors.items():
            kind, _, rest = full.partition("/")
            if kind == "optim":
                key, _, name = rest.partition("/")
                entries.setdefault(name, {})[key] = tensor
        own, saved = self.optimizer.state_dict(), state["optimizer"]["groups"]
        names = self._names()
        if len(saved) != len(own["param_groups"]) or entries.keys() - set(names.values()):
            raise CheckpointError("the checkpoint's optimizer groups its parameters in another way than this one")
        own["param_groups"] = [_restored(*pair) for pair in zip(own["param_groups"], saved, strict=True)]
        own["state"] = {index: entries[name] for index, name in names.items() if name in entries}
        self.optimizer.load_state_dict(own)

    def _names(self) -> dict[int, str]:
        """The names of the parameters by the numbers they have in the optimizer's state."""
        names = {id(p): name for name, p in self._parameters.items()}
        ordered = (p for group in self.optimizer.param_groups for p in group["params"])
        return {index: names[id(p)] for index, p in enumerate(ordered)}


def _restored(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group with the saved values; JSON has made lists of its tuples."""
    return {**group, **{k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in saved.items()}}


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


def score(
    model: ScoringModel, batch: Batch, needs: frozenset[str], *, budget: int, device: torch.device
) -> dict[str, Tensor]:
    """The outputs named in `needs` on a batch of any size, [T] or [N] on `device`, in micro-batches of `budget`."""
    pieces = micro_batches(batch, budget, padded=model.padded)
    return joined([model.outputs(micro.to(device), needs) for micro in pieces], needs)


def joined(parts: list[dict[str, Tensor]], names: frozenset[str]) -> dict[str, Tensor]:
    """The outputs of micro-batches as those of the whole batch."""
    return {name: torch.cat([part[name] for part in parts]) for name in names}
