"""Offline distillation: a student learns a teacher's distributions on given answers.

    items ──collect──▶ one packed batch ──prepare──▶ mini-batches with the teacher's hidden states and totals
          ──losses──▶ Σ weight·(temperature²·divergence + sft_coef·cross-entropy) / (learnt tokens of the whole step)

The teacher gives hidden states [T, H] and its head, the student's learner applies both heads chunk by chunk: of neither
model are [T, V] logits ever held. The mathematics and its papers are in `distillation_losses`.

The factor temperature² is Hinton's (1503.02531, section 2): it keeps the size of the gradient, and with it what
`sft_coef` and the learning rate mean. TRL's GKD trainer has none. Where one model's head has more rows than the other's
(padding of the embedding), the divergence is over the ids that both have; the tokenizer's are among them.

Legend: T tokens, S of them learnt, H the teacher's hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from runner.algorithm.distillation import losses as formulas
from runner.algorithm.distillation.config import DistillConfig
from runner.algorithm.given import LearnsFromData
from runner.algorithm.parts import Parts
from runner.batch import Batch, pack, split_rows, with_tokens, with_totals
from runner.metrics import Metrics
from runner.protocols import Data, Loss, LossFn, Model, Outputs, Ranks, Role

HIDDEN = frozenset({"hidden"})


@dataclass(frozen=True, slots=True)
class DistillationLoss:
    """The mean over learnt tokens of temperature²·divergence + sft_coef·cross-entropy.

    Reads the token channel `teacher` [T, H]: the hidden states that the teacher predicts each token from; `head` makes
    the teacher's logits [S, V] of them, without gradient.
    """

    config: DistillConfig
    head: Callable[[Tensor], Tensor]
    needs: frozenset[str] = frozenset({"loss", "divergence"})

    def coefficients(self, batch: Batch) -> Tensor:
        """∂total/∂loss, float32 [T]."""
        return batch.tokens["weight"] / max(batch.totals["tokens"], 1)

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

    def __init__(self, config: DistillConfig, data: Data, head: Callable[[Tensor], Tensor]) -> None:
        self.config, self.data = config, data
        self.losses: Mapping[Role, LossFn] = {"policy": DistillationLoss(config, head)}

    def collect(self, step: int) -> Batch:
        """The step's items as one packed batch on the CPU."""
        items = self.data.take(step, self.config.batch_size)
        return pack([i.ids for i in items], [i.weights for i in items])

    def prepare(self, experience: Batch, models: Mapping[Role, Model], ranks: Ranks) -> Iterator[Batch]:
        """The batch in `mini_batches` parts, each with its totals over all ranks and the teacher's hidden states."""
        for part in split_rows(experience, self.config.mini_batches):
            known = with_tokens(part, teacher=models["teacher"].forward(part, HIDDEN)["hidden"])
            yield with_totals(known, ranks.sum(part.count()))


def build(config: DistillConfig, parts: Parts) -> Distill:
    """The algorithm over the job's data and its teacher's head."""
    return Distill(config, parts.data, parts.lm_head("teacher"))
