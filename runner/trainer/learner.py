"""The learner: one trained model behind three methods that hide how it is sharded from algorithms.

    mini-batch ──partitioned──▶ a rank's micro-batches ──forward·backward──▶ gradients, summed over ranks in the last
               gradients ──optim_step──▶ weights, the same on every rank

Legend: N rows, T tokens. Gradients are summed. The loss has been divided by the total it means;
nothing divides here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runner.core.batch import Batch
from runner.core.errors import TrainingDiverged
from runner.core.metrics import Metrics
from runner.core.micro_batches import footprints
from runner.core.rng import derive_seed
from runner.core.torch_compat import seed_generators
from runner.distributed.dtensor_utils import clip_grads_with_norm_, full_tensor
from runner.distributed.gradient_sums import MeshGradientReducer
from runner.distributed.work_partition import (
    SINGLE_PROCESS,
    SINGLE_STAGE,
    concat_outputs,
    drop_filler_outputs,
    map_sharded,
    shard_batch,
)
from runner.interfaces import (
    GradientReducer,
    LinearLossFn,
    LogitsLossFn,
    Loss,
    LossFn,
    Outputs,
    PipelineStage,
    RankCollectives,
    State,
    TrainableModel,
)
from runner.interfaces.learning import OptimSettings
from runner.interfaces.routing import ExpertCounts
from runner.optimizer.fused_step import can_skip, step_if_finite
from runner.trainer.optimizer_state import learner_state, restore_learner_state

log = logging.getLogger("runner")
DEAD_AFTER = 20  # mini-batches in a row


@dataclass(frozen=True, slots=True)
class RankResult:
    """Result of a rank's part of a mini-batch; oversized: sizes of units above the token budget."""

    total: float
    metrics: Metrics
    oversized: list[int]
    experts: ExpertCounts | None = None


class LocalLearner:
    """One model, or an adapter of a shared one, and its optimizer; does its share of each mini-batch.

    factor:  the schedule, step (0-based) → factor on the learning rate
    budget:  tokens of one micro-batch on the device
    seed:    every dropout stream is derived from (seed, step, micro-batch, rank, layers before those of this rank), and
             the `seed` of an optimizer that has one from (seed, prefix)
    prefix:  of the names of its metrics
    peers:   who the work is shared with; all ranks call every verb, with the same arguments
    gradients: how those of all ranks become one; None = each of the peers has all parameters, or a piece of each
    stage:   which of the model's layers are here, and so the order of passes
    drawing: who draws dropout each for itself: the peers, and those who do a part of the same work; None = the peers
    during:  the context in which the model is this learner's: where others train it, too, with its adapter active
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
        peers: RankCollectives = SINGLE_PROCESS,
        gradients: GradientReducer | None = None,
        stage: PipelineStage = SINGLE_STAGE,
        drawing: RankCollectives | None = None,
        during: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._lr, self._clip, self._factor = lr, clip_norm, factor
        self._budget, self._seed, self._device, self._prefix = budget, seed, device, prefix
        self._peers, self._gradients, self._stage = peers, gradients or MeshGradientReducer(peers, device), stage
        self._drawing, self._during = drawing or peers, during
        with during():
            self._parameters = model.trainable()
        if hasattr(optimizer, "seed"):  # it draws random bits
            optimizer.seed = derive_seed(seed, "optimizer", prefix)
        self.reads_late = can_skip(optimizer)
        self._step = self._micro = 0
        self._logged = set[str]()  # what messages that appear once were about
        self._idle_for: Tensor | None = None  # mini-batches in a row without a token for each expert, int64 [M, E]

    def begin_step(self, step: int) -> None:
        """Set what is a pure function of the step: the learning rate and the dropout streams."""
        self._step, self._micro = step, 0
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr * self._factor(step)

    def read_ahead(self, batch: Batch) -> None:
        """Read this rank's part of a mini-batch before `forward_backward`, in any thread."""
        for micro in shard_batch(batch, self._budget, self._peers, padded=self.model.is_padded).micro_batches:
            micro.read_ahead()

    @torch.no_grad()
    def forward(self, batch: Batch, needs: frozenset[str]) -> Outputs:
        """Score a batch of any size without gradient and without dropout; [T] outputs on the learner's device.

        Where the update replays its experts, `experts` [T, M, k] is one of the outputs.
        """
        self.model.eval()
        routing = self.model.routing
        replayed = routing if routing is not None and routing.replays == "old" else None

        def run(micro: Batch) -> Outputs:
            found = self.model.outputs(micro.to(self._device), needs)
            if replayed is None:
                return found
            return {**found, "experts": replayed.token_experts}

        with self._during():
            return map_sharded(batch, run, self._budget, self._peers, padded=self.model.is_padded, stage=self._stage)

    def forward_backward(
        self, batch: Batch, loss: LossFn, keep: frozenset[str] = frozenset()
    ) -> tuple[Metrics, Outputs]:
        """Add the gradient of a mini-batch, summed over ranks; returns metrics and the outputs in `keep`.

        Outputs are detached and cover the whole mini-batch. Raises TrainingDiverged, on all ranks, if the loss is not
        finite. Where it raises, gradients are as they were before.
        """
        earlier = [(p, p.grad) for p in self._parameters.values() if p.grad is not None]
        for parameter, _ in earlier:
            parameter.grad = None
        try:
            with self._during():
                found = self._accumulate(batch, loss, keep)()
        except BaseException:
            self.optimizer.zero_grad(set_to_none=True)
            self._gradients.discard()
            for parameter, gradient in earlier:
                parameter.grad = gradient
            raise
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        return found

    def _accumulate(self, batch: Batch, loss: LossFn, keep: frozenset[str]) -> Callable[[], tuple[Metrics, Outputs]]:
        """The passes of `forward_backward`; returns what reads their metrics."""
        self.model.train()
        share = shard_batch(batch, self._budget, self._peers, padded=self.model.is_padded)
        micros, waiting = list(share), dict[tuple[int, int], Tensor]()
        for micro, _ in micros if self.model.media else ():
            self.model.media.start_reading(micro)
        metrics, total = Metrics(), torch.zeros((), device=self._device)
        kept: list[Outputs] = []
        if len(micros) < (stages := self._stage.num_stages):
            self._log_once(
                f"fewer micro-batches ({len(micros)}) than stages (parallelism.pp={stages}), so stages are mostly "
                f"idle: lower algorithm.micro_batch_tokens={self._budget}, or raise algorithm.batch_size",
                "stages",
            )
        turns = self._stage.schedule(len(micros))
        for left, turn in zip(reversed(range(len(turns))), turns, strict=True):
            if turn.backward:
                self._backward(waiting.pop(turn[:2]), is_last=left == 0)
                continue
            self._stage.begin_op(turn)
            self._seed_dropout(turn.micro)
            micro, own = micros[turn.micro]
            micro = micro.read()
            with self._counting_experts(own):
                waiting[turn[:2]], value, outputs = self._forward(micro, loss, own)
            if self._stage.is_last:
                total += value.total.detach()
                metrics.merge(value.metrics)
                kept.append(drop_filler_outputs({name: outputs[name].detach() for name in keep}, own))
        self._micro += len(micros)
        routing = self.model.routing
        counts = None if routing is None else routing.pop_counts()

        def read() -> tuple[Metrics, Outputs]:
            oversized = [size for micro in share.micro_batches for size in self._oversized_tokens(micro)]
            experts = None if counts is None else counts.to_cpu()
            done = self._peers.all_gather(RankResult(float(total), metrics.plain(), oversized, experts))
            found = concat_outputs(kept) if kept else {}
            return self._merge_rank_results(done), share.gather_outputs(self._peers, found) if keep else {}

        return read

    def _seed_dropout(self, micro: int) -> None:
        """Begin the dropout stream of a micro-batch, in the layers that it passes next."""
        stream = (self._micro + micro) * self._drawing.size + self._drawing.rank
        deeper = [self._stage.index] if self._stage.index else []
        seed_generators(derive_seed(self._seed, "dropout", self._step, stream, *deeper), self._device)

    @contextmanager
    def _counting_experts(self, own: bool) -> Iterator[None]:
        """Count the experts of a forward pass's tokens, not those of a filler, nor of what is computed again."""
        if self.model.routing is not None:
            self.model.routing.counts_tokens = own
        yield
        if self.model.routing is not None:
            self.model.routing.counts_tokens = False

    def _backward(self, total: Tensor, is_last: bool) -> None:
        """Add the gradient of a micro-batch, whose backward pass begins at `total`."""
        with self._gradients.backward(list(self._parameters.values()), is_last):
            total.backward()  # type: ignore[no-untyped-call]

    def _merge_rank_results(self, ranks: Sequence[RankResult]) -> Metrics:
        """The metrics of all ranks. Raises TrainingDiverged if their losses add up to no finite number."""
        if sizes := [size for done in ranks for size in done.oversized]:
            padding = ", padding included" if self.model.is_padded else ""
            patches = ", patches of images included" if self.model.media else ""
            self._log_once(
                f"{len(sizes)} items are longer than algorithm.micro_batch_tokens={self._budget} (the longest: "
                f"{max(sizes)} tokens{padding}{patches}); each of them is a separate micro-batch",
                "sizes",
            )
        total = sum(done.total for done in ranks)
        if not math.isfinite(total):
            raise TrainingDiverged(
                f"step {self._step + 1}: the loss is {total}; this update is not saved. Lower optimizer.lr, or check "
                "the data of this step"
            )
        metrics = Metrics()
        for done in ranks:
            metrics.merge(done.metrics)
        if counts := [done.experts for done in ranks if done.experts is not None]:
            self._report_experts(sum(counts[1:], counts[0]), metrics)
        return metrics

    def _report_experts(self, counts: ExpertCounts, metrics: Metrics) -> None:
        """Add the metrics of a mini-batch's routing, and warn of experts that are not used any more."""
        for name, value in counts.metrics().items():
            metrics.add(name, value)
        before = torch.zeros_like(counts.chosen) if self._idle_for is None else self._idle_for
        self._idle_for = torch.where(counts.idle, before + 1, 0)
        dead = self._idle_for >= DEAD_AFTER
        if bool(dead.any()):
            layer, expert = dead.nonzero()[0].tolist()
            self._log_once(
                f"{int(dead.sum())} experts of {dead.numel()} got no token in {DEAD_AFTER} mini-batches, the first is "
                f"expert {expert} of layer {layer} with experts; they are not trained (router/idle_experts)",
                "experts",
                logging.WARNING,
            )

    def _log_once(self, text: str, about: str, level: int = logging.INFO) -> None:
        """Log the first of the messages about something that may recur in every step."""
        if about not in self._logged:
            self._logged.add(about)
            log.log(level, "step %d: %s; this warning appears once", self._step + 1, text)

    def _forward(self, micro: Batch, loss: LossFn, own: bool) -> tuple[Tensor, Loss, Outputs]:
        """The tensor that a micro-batch's backward pass starts at, its loss and its outputs.

        No loss for a filler, whose gradient is zero, and on a stage that is not the last. `micro` is on the CPU.
        """
        batch, learns = micro.to(self._device), own and self._stage.is_last
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
        """`TrainableModel.linear` of `factor` times the loss; `micro` is on the CPU, `batch` on the device."""
        terms = None
        if isinstance(loss, LogitsLossFn):
            terms, batch = loss.logit_terms, replace(batch, tokens={**batch.tokens, **loss.extra_channels(batch)})
        return self.model.linear_loss(batch, factor * loss.grad_weights(micro), terms)

    @torch.no_grad()
    def measure(self, batch: Batch, loss: LossFn) -> Outputs:
        """Outputs or terms that `loss` needs of a batch of any size, [T] or [N], without dropout."""
        if not isinstance(loss, LogitsLossFn):
            return self.forward(batch, loss.needs)
        self.model.eval()

        def run(micro: Batch) -> Outputs:
            return self._linear(micro, micro.to(self._device), loss)[1]

        with self._during():
            return map_sharded(batch, run, self._budget, self._peers, padded=self.model.is_padded, stage=self._stage)

    def _oversized_tokens(self, micro: Batch) -> list[int]:
        """The slots that a micro-batch takes, if they are above the budget."""
        taken = int(footprints(micro, self.model.is_padded).slots()[-1])
        return [taken] if taken > self._budget else []

    def optim_step(self, settings: OptimSettings | None = None) -> Metrics:
        """Clip, step, clear. settings: of this step and those after it, of AdamW.

        Raises TrainingDiverged, with the weights untouched, if a gradient is not finite.
        """
        if settings is not None:
            self._apply_settings(settings)
        return self._step_metrics(self._step_optimizer())

    def update(self, batch: Batch, loss: LossFn) -> Callable[[], Metrics]:
        """`forward_backward` and `optim_step`, whose metrics the host reads by calling what it returns.

        Raises TrainingDiverged as they do. Where the optimizer's kernel can skip an update that is not finite, the host
        waits for the device, and raises, only when it reads.
        """
        if not self.reads_late:
            metrics, _ = self.forward_backward(batch, loss)
            metrics.merge(self.optim_step())
            return lambda: metrics
        try:
            with self._during():
                read = self._accumulate(batch, loss, frozenset())
        except BaseException:
            self.optimizer.zero_grad(set_to_none=True)
            self._gradients.discard()
            raise
        norm = self._gradients.total_norm(list(self._parameters.values()))
        step_if_finite(self.optimizer, norm, self._clip)
        self.optimizer.zero_grad(set_to_none=True)

        def finish() -> Metrics:
            found, _ = read()
            self._check_grad_norm(norm)
            found.merge(self._step_metrics(norm))
            return found

        return finish

    def _step_metrics(self, norm: Tensor) -> Metrics:
        metrics = Metrics()
        metrics.add(f"{self._prefix}/grad_norm", norm)
        metrics.add(f"{self._prefix}/lr", self.optimizer.param_groups[0]["lr"])
        return metrics

    def _apply_settings(self, settings: OptimSettings) -> None:
        self._clip = settings.clip_norm
        for group in self.optimizer.param_groups:
            decay = settings.weight_decay if all(p.ndim >= 2 for p in group["params"]) else 0.0
            group.update(lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=decay)

    def _step_optimizer(self) -> Tensor:
        """What `optim_step` does; the norm of the gradient before it was clipped, [], equal on all ranks."""
        parameters = list(self._parameters.values())
        norm = self._gradients.total_norm(parameters)
        self._check_grad_norm(norm)
        if self._clip is not None:
            clip_grads_with_norm_(self._clip, [p.grad for p in parameters if p.grad is not None], norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _check_grad_norm(self, norm: Tensor) -> None:
        """Raise TrainingDiverged for the norm of a gradient that is not finite."""
        if not torch.isfinite(norm):
            raise TrainingDiverged(
                f"step {self._step + 1}: the gradient norm is {float(norm)}; the update was skipped. Lower "
                "optimizer.lr, or check the data of this step"
            )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """What learns, under the names it has in the model's module."""
        yield from ((name, full_tensor(parameter)) for name, parameter in self._parameters.items())

    def state_dict(self) -> State:
        """Trained parameters and the optimizer's state; see `learner_state`."""
        return learner_state(self._parameters, self.optimizer)

    def load_state_dict(self, state: State) -> None:
        """Restore `state_dict`. Raises CheckpointError unless names and shapes are exactly this model's."""
        restore_learner_state(self._parameters, self.optimizer, state)
