"""Offline distillation: a student learns a teacher's distributions on given answers.

    items ──collect──▶ one packed batch ──prepare──▶ mini-batches with their totals
          ──losses──▶ Σ weight·(temperature²·divergence + sft_coef·cross-entropy) / (learnt tokens of the whole step)

Of each micro-batch the teacher gives hidden states [T, H], in its own data type and on the device, and its head; the
student's learner applies both heads chunk by chunk. Of neither model are [T, V] logits ever held, and hidden states of
one micro-batch only. The mathematics and its papers are in `losses`.

The factor temperature² is Hinton's (1503.02531, section 2): it keeps the size of the gradient, and with it what
`sft_coef` and the learning rate mean. TRL's GKD trainer has none. Where one model's head has more rows than the other's
(padding of the embedding), the divergence is over the ids that both have; the tokenizer's are among them.

Legend: T tokens, S of them learnt, H the teacher's hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from runner.algorithm.distillation import losses as formulas
from runner.algorithm.distillation.config import DistillConfig
from runner.algorithm.given import LearnsFromData
from runner.algorithm.parts import HeadedModel, Parts
from runner.batch import Batch, pack, split_rows, with_totals
from runner.errors import Problem, SpecError, UnfitModel
from runner.metrics import Metrics
from runner.protocols import Data, Item, Loss, LossFn, Model, Outputs, Role

HIDDEN = frozenset({"hidden"})


@dataclass(frozen=True, slots=True)
class DistillationLoss:
    """The mean over learnt tokens of temperature²·divergence + sft_coef·cross-entropy.

    teacher: gives the output `hidden` [T, H], what it predicts each token from; head: makes its logits [S, V] of
    those, without gradient.
    """

    config: DistillConfig
    teacher: HeadedModel
    head: Callable[[Tensor], Tensor]
    needs: frozenset[str] = frozenset({"loss", "divergence"})

    def coefficients(self, batch: Batch) -> Tensor:
        """∂total/∂loss, float32 [T]."""
        return batch.tokens["weight"] / max(batch.totals["tokens"], 1)

    def beside(self, micro: Batch) -> Mapping[str, Tensor]:
        """The channel `teacher` [T, H]: the teacher's hidden states."""
        return {"teacher": self.teacher.alone(micro, HIDDEN)["hidden"]}

    def terms(self, logits: Tensor, tokens: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """loss, divergence (in nats, without its factor) and, where it is part of the loss, nll, [S] each; of the
        student's logits [S, V] and the tokens' channels [S, …]."""
        temperature = self.config.temperature
        divergence = self._divergence(*common(self.head(tokens["teacher"]), logits))
        found = {"loss": temperature**2 * divergence, "divergence": divergence}
        if self.config.sft_coef:
            found["nll"] = -formulas.tempered(logits, 1).gather(1, tokens["ids"][:, None])[:, 0]
            found["loss"] = found["loss"] + self.config.sft_coef * found["nll"]
        return found

    def _divergence(self, teacher: Tensor, student: Tensor) -> Tensor:
        config = self.config
        pair = formulas.tempered(teacher, config.temperature), formulas.tempered(student, config.temperature)
        if config.top_k is not None:
            pair = formulas.coarse(*pair, config.top_k)
        if config.divergence == "jsd":
            return formulas.jsd(*pair, beta=config.mixture)
        return {"forward_kl": formulas.forward_kl, "reverse_kl": formulas.reverse_kl}[config.divergence](*pair)

    def __call__(self, batch: Batch, outputs: Outputs) -> Loss:
        weight, metrics = batch.tokens["weight"], Metrics()
        count = (weight != 0).sum()
        for term, name in (("loss", "train/loss"), ("divergence", "distill/divergence"), ("nll", "distill/nll")):
            if term in outputs:
                metrics.add(name, (weight * outputs[term]).sum(), count)
        return Loss((self.coefficients(batch) * outputs["loss"]).sum(), metrics)


def common(teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [S, ≥ V] of both for the V ids that both have."""
    size = min(teacher.shape[-1], student.shape[-1])
    return teacher[:, :size], student[:, :size]


class Distill(LearnsFromData):
    """Learns a teacher's distributions on given answers."""

    def __init__(self, config: DistillConfig, data: Data, loss: DistillationLoss) -> None:
        self.config, self.data = config, data
        self.losses: Mapping[Role, LossFn] = {"policy": loss}

    def collect(self, step: int) -> Batch:
        """The step's items as one packed batch on the CPU."""
        return self.experience(self.data.take(step, self.config.batch_size))

    def experience(self, items: Sequence[Item]) -> Batch:
        """Any items as what `prepare` takes."""
        return pack([i.ids for i in items], [i.weights for i in items])

    def prepare(self, experience: Batch, models: Mapping[Role, Model]) -> Iterator[Batch]:
        """The batch in `mini_batches` parts, each with its totals."""
        for part in split_rows(experience, self.config.mini_batches):
            yield with_totals(part, part.count())


def build(config: DistillConfig, parts: Parts) -> Distill:
    """The algorithm over the job's data and its teacher. Raises SpecError for a teacher without a head of its own, and
    for a top_k that leaves no token out."""
    if config.top_k is not None and config.top_k >= len(parts.tokenizer):
        text = f"the tokenizer has {len(parts.tokenizer)} tokens, so {config.top_k} of them are all; leave it out"
        raise SpecError([Problem("algorithm.top_k", text)])
    teacher = parts.frozen["teacher"]
    try:
        loss = DistillationLoss(config, teacher, teacher.lm_head())
    except UnfitModel as error:
        text = f"{error}; take another, or algorithm=opd"
        raise SpecError([Problem("algorithm.teacher", text)]) from error
    return Distill(config, parts.data, loss)
