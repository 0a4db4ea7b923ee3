"""Offline distillation: a student learns a teacher's distributions on given answers.

    items ──collect──▶ one packed batch ──prepare──▶ mini-batches with their totals
          ──losses──▶ Σ weight·(temperature²·divergence + sft_coef·cross-entropy) / (trained tokens of the mini-batch)

    logits ──log_softmax(logits / temperature)──▶ log-probabilities [S, V] ──(top-k)──▶ [S, k + 1] ──divergence──▶ [S]

Of each micro-batch the teacher gives hidden states [T, H], in its own data type and on the device, and its head; the
student's learner applies both heads chunk by chunk. Of neither model are [T, V] logits ever held, and hidden states of
one micro-batch only.

The factor temperature² is Hinton's (1503.02531, section 2): it keeps the size of the gradient, and with it what
`sft_coef` and the learning rate mean. TRL's GKD trainer has none. Where one model's head has more rows than the other's
(padding of the embedding), the divergence is over the ids that both have; the tokenizer's are among them.

Legend: T tokens, S of them trained on, H the teacher's hidden size, V vocabulary. Log-probabilities are finite, in
float32 or better; the teacher's are without gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.algorithm.config import DistillConfig
from runner.algorithm.loss_registry import compute_selected
from runner.algorithm.sft import PackedAlgorithm
from runner.core.batch import Batch
from runner.core.errors import Problem, SpecError, UnsupportedModelError
from runner.core.metrics import Metrics
from runner.interfaces import Loss, Outputs
from runner.interfaces.learning import AlgorithmInputs, HeadedModel

HIDDEN = frozenset({"hidden"})


@dataclass(frozen=True, slots=True)
class DistillationLoss:
    """The mean over trained tokens of temperature²·divergence + sft_coef·cross-entropy.

    teacher: gives the output `hidden` [T, H], what it predicts each token from; head: makes its logits [S, V] of
    those, without gradient.
    """

    config: DistillConfig
    teacher: HeadedModel
    head: Callable[[Tensor], Tensor]
    needs: frozenset[str] = frozenset({"loss", "divergence"})

    def grad_weights(self, batch: Batch) -> Tensor:
        """∂total/∂loss, float32 [T]."""
        return batch.tokens["weight"] / max(batch.totals["tokens"], 1)

    def extra_channels(self, micro: Batch) -> Mapping[str, Tensor]:
        """The channel `teacher` [T, H]: the teacher's hidden states."""
        return {"teacher": self.teacher.forward_local(micro, HIDDEN)["hidden"]}

    def logit_terms(self, logits: Tensor, tokens: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """loss, divergence (nats, without factor) and, where it is part of the loss, nll, [S] each.

        logits: the student's, [S, V]; tokens: their channels [S, …]
        """
        temperature = self.config.temperature
        divergence = self._divergence(*common_vocab_logits(self.head(tokens["teacher"]), logits))
        found = {"loss": temperature**2 * divergence, "divergence": divergence}
        if self.config.sft_coef:
            found["nll"] = -scaled_log_softmax(logits, 1).gather(1, tokens["ids"][:, None])[:, 0]
            found["loss"] = found["loss"] + self.config.sft_coef * found["nll"]
        return found

    def _divergence(self, teacher: Tensor, student: Tensor) -> Tensor:
        config = self.config
        pair = scaled_log_softmax(teacher, config.temperature), scaled_log_softmax(student, config.temperature)
        if config.top_k is not None:
            pair = top_k_with_rest(*pair, config.top_k)
        return compute_selected(config, "divergence", {"teacher": lambda: pair[0], "student": lambda: pair[1]})

    def __call__(self, batch: Batch, outputs: Outputs) -> Loss:
        weight, metrics = batch.tokens["weight"], Metrics()
        count = (weight != 0).sum()
        for term, name in (("loss", "train/loss"), ("divergence", "distill/divergence"), ("nll", "distill/nll")):
            if term in outputs:
                metrics.add(name, (weight * outputs[term]).sum(), count)
        return Loss((self.grad_weights(batch) * outputs["loss"]).sum(), metrics)


def common_vocab_logits(teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [S, ≥ V] of both for the V ids that both have."""
    size = min(teacher.shape[-1], student.shape[-1])
    return teacher[:, :size], student[:, :size]


def build(config: DistillConfig, parts: AlgorithmInputs) -> PackedAlgorithm:
    """The algorithm over the job's data and its teacher.

    Raises SpecError for a teacher without a head of its own, and for a top_k that leaves no token out.
    """
    if config.top_k is not None and config.top_k >= len(parts.tokenizer):
        text = f"the tokenizer has only {len(parts.tokenizer)} tokens, so {config.top_k} selects all; leave it out"
        raise SpecError([Problem("algorithm.top_k", text)])
    teacher = parts.frozen_models["teacher"]
    try:
        loss = DistillationLoss(config, teacher, teacher.lm_head())
    except UnsupportedModelError as error:
        text = f"{error}; choose another teacher, or type algorithm=opd"
        raise SpecError([Problem("algorithm.teacher", text)]) from error
    return PackedAlgorithm(config, parts.data, {"policy": loss})


def scaled_log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """log-softmax of logits / temperature, [S, V], in float32 or better."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.log_softmax(wide / temperature, dim=-1)


def top_k_with_rest(teacher: Tensor, student: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Both distributions over the teacher's k likeliest tokens and the rest as one event, [S, k + 1] each.

    They stay distributions, so that a divergence of them is never negative, never above that of the whole vocabulary,
    and blind only to how the others share their probability. With k of at least V they come back as they are.
    """
    if k >= teacher.shape[-1]:
        return teacher, student
    top = teacher.topk(k, dim=-1).indices
    return _gather_with_rest(teacher, top), _gather_with_rest(student, top)


def _gather_with_rest(logprobs: Tensor, top: Tensor) -> Tensor:
    rest = logprobs.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, top), rest], dim=-1)
