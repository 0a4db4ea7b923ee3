"""The learner: one trained model behind three verbs, which an algorithm calls without seeing how it is sharded.

    mini-batch ──dealt out──▶ a rank's micro-batches ──forward·backward──▶ gradients
               gradients ──summed over ranks──▶ ──optim_step──▶ weights, the same on every rank

Legend: N rows, T tokens. Gradients are summed. The loss has been divided by the total it means;
nothing divides here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runner.core.batch import Batch, Places, places
from runner.core.errors import TrainingDiverged
from runner.core.metrics import Metrics
from runner.core.rng import derive
from runner.distributed.dtensor_utils import scale_to, whole
from runner.distributed.work_partition import ALONE, UNDIVIDED, Summed, deal, joined, own_part, spread
from runner.interfaces import (
    Gradients,
    LinearLossFn,
    LogitsLossFn,
    Loss,
    LossFn,
    Outputs,
    Peers,
    ScoringModel,
    Stage,
    State,
    TrainableModel,
)
from runner.trainer.learner_state import restore, state_of

log = logging.getLogger("runner")


@dataclass(frozen=True, slots=True)
class Done:
    """What a rank tells the others of its share of a mini-batch; oversized: the sizes of what was above the budget."""

    total: float
    metrics: Metrics
    oversized: list[int]


class LocalLearner:
    """One model and its optimizer in this process, which does its share of each mini-batch.

    factor:  the schedule, step (0-based) → factor on the learning rate
    budget:  tokens of one micro-batch on the device
    seed:    every dropout stream is derived from (seed, step, micro-batch, rank, layers before those of this rank), and
             the `seed` of an optimizer that has one from (seed, prefix)
    prefix:  of the names of its metrics
    peers:   who the work is shared with; all ranks call every verb, with the same arguments
    gradients: how those of all ranks become one; None = each of the peers has all parameters, or a piece of each
    stage:   which of the model's layers are here, and so the order of passes
    drawing: who draws dropout each for itself: the peers, and those who do a part of the same work; None = the peers
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
        peers: Peers = ALONE,
        gradients: Gradients | None = None,
        stage: Stage = UNDIVIDED,
        drawing: Peers | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._lr, self._clip, self._factor = lr, clip_norm, factor
        self._budget, self._seed, self._device, self._prefix = budget, seed, device, prefix
        self._peers, self._gradients, self._stage = peers, gradients or Summed(peers), stage
        self._drawing = drawing or peers
        self._parameters = model.trainable()
        if hasattr(optimizer, "seed"):  # it draws random bits
            optimizer.seed = derive(seed, "optimizer", prefix)
        self._step = self._micro = 0
        self._said_oversized = self._said_few = False

    def begin_step(self, step: int) -> None:
        """Set what is a pure function of the step: the learning rate and the dropout streams."""
        self._step, self._micro = step, 0
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr * self._factor(step)

    @torch.no_grad()
    def forward(self, batch: Batch, needs: frozenset[str]) -> Outputs:
        """Score a batch of any size without gradient and without dropout; [T] outputs on the learner's device."""
        self.model.eval()
        options: dict[str, Any] = {"peers": self._peers, "stage": self._stage}
        return score(self.model, batch, needs, budget=self._budget, device=self._device, **options)

    def forward_backward(
        self, batch: Batch, loss: LossFn, keep: frozenset[str] = frozenset()
    ) -> tuple[Metrics, Outputs]:
        """Add the gradient of this rank's share of a mini-batch; returns metrics and, detached, the outputs named in
        `keep`, of all of it.

        Raises TrainingDiverged, on all ranks, if the loss is not finite.
        """
        self.model.train()
        share = deal(batch, self._budget, self._peers, padded=self.model.padded)
        micros, waiting = list(share), dict[tuple[int, int], Tensor]()
        metrics, total = Metrics(), torch.zeros((), device=self._device)
        kept: list[Outputs] = []
        self._say_few(len(micros))
        for turn in self._stage.turns(len(micros)):
            if turn.backward:
                self._differentiate(waiting.pop(turn[:2]))
                continue
            self._stage.enter(turn)
            self._seed_dropout(turn.micro)
            micro, own = micros[turn.micro]
            waiting[turn[:2]], value, outputs = self._forward(micro, loss, own)
            if self._stage.ends:
                total += value.total.detach()
                metrics.merge(value.metrics)
                kept.append(own_part({name: outputs[name].detach() for name in keep}, own))
        self._micro += len(micros)
        done = Done(float(total), metrics.plain(), [size for micro in share.micros for size in self._oversized(micro)])
        found = joined(kept) if kept else {}
        return self._agreed(self._peers.gather(done)), share.gathered(self._peers, found) if keep else {}

    def _seed_dropout(self, micro: int) -> None:
        """Begin the dropout stream of a micro-batch, in the layers that it passes next."""
        stream = (self._micro + micro) * self._drawing.size + self._drawing.rank
        deeper = [self._stage.depth] if self._stage.depth else []
        _seed_generators(derive(self._seed, "dropout", self._step, stream, *deeper), self._device)

    def _differentiate(self, total: Tensor) -> None:
        """Add the gradient of a micro-batch, whose backward pass begins at `total`."""
        total.backward()  # type: ignore[no-untyped-call]

    def _agreed(self, ranks: Sequence[Done]) -> Metrics:
        """The metrics of all ranks. Raises TrainingDiverged if their losses add up to no finite number."""
        self._say_once([size for done in ranks for size in done.oversized])
        total = sum(done.total for done in ranks)
        if not math.isfinite(total):
            raise TrainingDiverged(
                f"step {self._step + 1}: the loss is {total}; nothing was updated with it. "
                "Lower optimizer.lr, or look at the data of this step"
            )
        metrics = Metrics()
        for done in ranks:
            metrics.merge(done.metrics)
        return metrics

    def _forward(self, micro: Batch, loss: LossFn, own: bool) -> tuple[Tensor, Loss, Outputs]:
        """What the backward pass of a micro-batch, which is on the CPU, begins at, its loss and its outputs; of a
        filler, whose gradient is zero, and where the model does not end, no loss."""
        batch, learns = micro.to(self._device), own and self._stage.ends
        if isinstance(loss, LinearLossFn):
            total, outputs = self._linear(micro, batch, loss, float(own))
            return total, loss(batch, outputs) if learns else Loss(total, Metrics()), outputs
        outputs = self.model.outputs(batch, loss.needs)
        nothing = sum((0 * values.sum() for values in outputs.values()), torch.zeros((), device=self._device))
        value = loss(batch, outputs) if learns else Loss(nothing, Metrics())
        return value.total, value, outputs

    def _linear(
        self, micro: Batch, batch: Batch, loss: LinearLossFn, factor: float = 1.0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`TrainableModel.linear` of `factor` times the loss of a micro-batch, on the CPU, and, as `batch`, there."""
        terms = None
        if isinstance(loss, LogitsLossFn):
            terms, batch = loss.terms, replace(batch, tokens={**batch.tokens, **loss.beside(batch)})
        return self.model.linear(batch, factor * loss.coefficients(micro), terms)

    @torch.no_grad()
    def measure(self, batch: Batch, loss: LossFn) -> Outputs:
        """What `loss` reads of the model on a batch of any size, [T] or [N] on the learner's device, without dropout:
        the outputs that it needs, or its own terms."""
        if not isinstance(loss, LogitsLossFn):
            return self.forward(batch, loss.needs)
        self.model.eval()

        def run(micro: Batch) -> Outputs:
            return self._linear(micro, micro.to(self._device), loss)[1]

        return spread(batch, run, self._budget, self._peers, padded=self.model.padded, stage=self._stage)

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

    def _say_few(self, micros: int) -> None:
        if micros >= self._stage.stages or self._said_few:
            return
        self._said_few = True
        log.info(
            "step %d: fewer micro-batches (%d) than stages (parallelism.pp=%d), which mostly wait for one another: "
            "lower algorithm.micro_batch_tokens=%d, or raise algorithm.batch_size, to have more; this is said once",
            self._step + 1,
            micros,
            self._stage.stages,
            self._budget,
        )

    def optim_step(self) -> Metrics:
        """Sum over ranks, clip, step, clear. Raises TrainingDiverged, with the weights untouched, if a gradient is not
        finite."""
        norm = self._update()
        metrics = Metrics()
        metrics.add(f"{self._prefix}/grad_norm", norm)
        metrics.add(f"{self._prefix}/lr", self.optimizer.param_groups[0]["lr"])
        return metrics

    def _update(self) -> Tensor:
        """What `optim_step` does; the norm of the gradient before it was clipped, [], equal on all ranks."""
        parameters = list(self._parameters.values())
        self._gradients.add(parameters)
        norm = self._gradients.norm(parameters)
        self._refuse_infinite(norm)
        if self._clip is not None:
            scale_to(self._clip, [p.grad for p in parameters if p.grad is not None], norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _refuse_infinite(self, norm: Tensor) -> None:
        """Raise TrainingDiverged for the norm of a gradient that is not finite."""
        if not torch.isfinite(norm):
            raise TrainingDiverged(
                f"step {self._step + 1}: the gradient norm is {float(norm)}; nothing was updated with it. "
                "Lower optimizer.lr, or look at the data of this step"
            )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """What learns, under the names it has in the model's module."""
        yield from ((name, whole(parameter)) for name, parameter in self._parameters.items())

    def state_dict(self) -> State:
        """Trained parameters and the optimizer's state; see `learner_state.state_of`."""
        return state_of(self._parameters, self.optimizer)

    def load_state_dict(self, state: State) -> None:
        """Restore `state_dict`. Raises CheckpointError unless names and shapes are exactly this model's."""
        restore(self._parameters, self.optimizer, state)


def _seed_generators(seed: int, device: torch.device) -> None:
    """As torch.manual_seed, but only where this process computes: that looks for backends which are not there, at 200
    times the cost."""
    torch.default_generator.manual_seed(seed)
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).manual_seed(seed)


def score(
    model: ScoringModel,
    batch: Batch,
    needs: frozenset[str],
    *,
    budget: int,
    device: torch.device,
    peers: Peers,
    stage: Stage = UNDIVIDED,
) -> dict[str, Tensor]:
    """The outputs named in `needs` on a batch of any size, [T] or [N] on `device`, in micro-batches of `budget`."""

    def run(micro: Batch) -> dict[str, Tensor]:
        return model.outputs(micro.to(device), needs)

    return spread(batch, run, budget, peers, padded=model.padded, stage=stage)
