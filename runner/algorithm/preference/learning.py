"""Preference learning: DPO and its variants on pairs, KTO on labeled completions, and reward models.

A reward model is a backbone with a scalar head that learns which of two answers is preferred.

    Pair   ──pack_pairs──▶ one tree: prompt, chosen (branch 0), rejected (branch 1); one unit, so it is never cut
    pairs  ──collect──▶ trees ──prepare──▶ + reference's logprobs ──▶ mini-batches ──▶ a loss of four log-probabilities
    judged ──collect──▶ rows and their mismatches ──prepare──▶ + reference's logprobs, z ──▶ mini-batches ──▶ kto
    pairs  ──collect──▶ trees ──prepare──▶ mini-batches ──▶ scores [N] ──▶ −log sigmoid(chosen − rejected)    rm

Legend: N rows, T tokens, P pairs. The mathematics and its papers are in `losses`. The loss is the mean over
the pairs (kto: answers) of the whole optimizer step, so it does not depend on micro-batches, sharing or ranks.

Of a policy every token of an answer counts, its end token included, and none of the prompt. The reference scores
without dropout, and the policy learns without it, as in TRL: it would be noise in their ratio (`algorithm.dropout`).

KTO (2402.01306): z, the estimate of KL(policy ‖ reference), is the mean log-ratio of mismatched answers. The prompt of
an answer is put before the next answer of the same mini-batch, as TRL does, and z holds for the whole mini-batch over
all ranks. It is made just before the update, without gradient or dropout and with the weights that the update starts
from: those that the loss is computed with. Departures: the paper and TRL take the micro-batch of one device, here z
does not depend on how the batch is cut; where two neighbors have the same prompt, their mismatch is none, as in TRL. A
mismatched row above the data's longest row loses the end of its completion (TRL: above max_length).

A reward model's score is read at the last token of an answer, its end token. Sources: 2203.02155 (InstructGPT), the
margin 2307.09288 (Llama 2), center_rewards_coef 2312.09244. Departure: InstructGPT weighs all pairs of one prompt
together, here every pair counts alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.algorithm.loss_registry import compute_selected
from runner.algorithm.preference import losses as formulas
from runner.algorithm.preference.config import DpoConfig, KtoConfig, RmConfig
from runner.algorithm.preference.losses import bradley_terry
from runner.algorithm.sft import PackedAlgorithm
from runner.core.batch import Batch, flatten_rows, row_sum, unread_batch, with_totals
from runner.core.metrics import Metrics
from runner.interfaces import LOGPROBS, LabeledCompletion, Loss, Model, Outputs, PreferencePair, Role, TokenizedAnswers
from runner.interfaces.examples import Numbers
from runner.interfaces.learning import AlgorithmInputs
from runner.interfaces.losses import PreferenceLosses

CHOSEN, REJECTED = 0, 1  # the `branch` of each side


def pack_pairs(pairs: Sequence[PreferencePair], *, share: bool, margins: bool = False) -> Batch:
    """One tree per pair, read when it is needed; weight 1 on every token of the answers, 0 on prompts.

    share: the prompt is a row of its own, computed once. margins: with a row channel `margin`, 0 where a pair has none.
    Raises ValueError for no pairs, an empty prompt or an empty answer.
    """
    known = pairs if isinstance(pairs, TokenizedAnswers) else TokenizedAnswers.of(pairs)
    batch = pack_answers(known, np.broadcast_to(np.arange(len(known))[:, None], known.sizes.shape), share=share)
    if margins:
        given = torch.tensor([known.label(at) or 0.0 for at in range(len(known))])
        margin = torch.where(batch.rows["branch"] < 0, 0.0, given[batch.rows["unit"]])
        batch = replace(batch, rows={**batch.rows, "margin": margin})
    return batch


def pack_answers(rows: TokenizedAnswers, picks: NDArray[np.int64], *, share: bool) -> Batch:
    """Prompts with their answers as trees, read when they are needed; weight 1 on answers, 0 on prompts.

    picks: of which row each unit's prompt and answers are, int64 [units, 1 + answers]; share: see `pack_trees`
    Raises ValueError for no unit, an empty prompt or an empty answer.
    """
    num_units, num_parts = picks.shape
    sizes = rows.sizes[picks, np.arange(num_parts)]
    if not sizes.size or sizes.min() <= 0:
        raise ValueError("a batch needs at least one prompt, and every prompt and answer at least one token")
    # the parts of each unit end to end, and of each of its rows: branch, start and tokens
    order = np.array(range(num_parts) if share else [part for at in range(1, num_parts) for part in (0, at)])
    branch = np.arange(num_parts - (not share)) - share
    start = sizes[:, :1] * (branch >= 0) * share
    lengths = sizes if share else sizes[:, :1] + sizes[:, 1:]
    unit = np.arange(num_units)[:, None]
    found = {"lengths": lengths, "unit": unit, "start": start, "branch": branch, "tree": unit}
    found["trained"] = sizes[:, branch + 1] * (branch >= 0)
    layout = {name: torch.from_numpy(np.broadcast_to(one, lengths.shape).flatten()) for name, one in found.items()}
    media = rows.media[picks[:, 0]]
    is_whole = share or (num_parts == 2 and bool((picks == picks[:, :1]).all()))  # each row of data once in its unit
    if is_whole or not media.any():  # else images are counted in the ids
        layout["media"] = torch.from_numpy((media[:, None] * (branch == branch[0])).flatten())

    def read(units: NDArray[np.int64]) -> Mapping[str, Tensor]:
        places = np.stack([picks[units][:, order], np.broadcast_to(order, (len(units), len(order)))], -1).reshape(-1, 2)
        weight = np.repeat((places[:, 1] > 0).astype(np.float32), rows.sizes[tuple(places.T)])
        return {"ids": flatten_rows(rows.read(places)), "weight": torch.from_numpy(weight)}

    return unread_batch(layout, read)


def chosen_rejected(batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The values of rows [N] for the chosen and the rejected answers, [P] each, in the order of the pairs."""
    branch = batch.structure.rows["branch"]
    chosen, rejected = ((branch == side).nonzero()[:, 0] for side in (CHOSEN, REJECTED))
    return rows[chosen.to(rows.device, non_blocking=True)], rows[rejected.to(rows.device, non_blocking=True)]


def pair_metrics(found: PreferenceLosses) -> Metrics:
    """train/loss, train/accuracy, reward/chosen, reward/rejected, reward/margin: means over pairs.

    A pair is right where the chosen answer's reward is the higher one; equal rewards are not.
    """
    losses, chosen, rejected = found
    metrics = Metrics()
    for name, values in (
        ("train/loss", losses.detach()),
        ("train/accuracy", chosen > rejected),
        ("reward/chosen", chosen),
        ("reward/rejected", rejected),
        ("reward/margin", chosen - rejected),
    ):
        metrics.add(name, values.sum(), len(values))
    return metrics


@dataclass(frozen=True, slots=True)
class PairwiseLoss:
    """The mean over pairs of a preference loss, plus the chosen answers' cross-entropy (`sft_coef`).

    The cross-entropy is a mean over the tokens of each answer (RPO 2404.19733; pref_ftx of LLaMA-Factory). Departure:
    TRL's loss_type sft takes the mean over all chosen tokens of a device's batch.

    Reads the token channel `reference` [T], where there is one: the reference's logprobs.
    """

    config: DpoConfig
    needs: frozenset[str] = LOGPROBS

    def __call__(self, batch: Batch, outputs: Outputs) -> Loss:
        quantities = _pair_inputs(batch, outputs["logprobs"])
        offered = {name: partial(quantities.__getitem__, name) for name in quantities}
        found: PreferenceLosses = compute_selected(self.config, "loss", offered)
        if self.config.sft_coef:
            nll = -quantities["chosen_logprobs"] / quantities["chosen_lengths"]
            found = found._replace(losses=found.losses + self.config.sft_coef * nll)
        metrics = pair_metrics(found)
        for side in ("chosen", "rejected"):
            logprobs, lengths = quantities[f"{side}_logprobs"], quantities[f"{side}_lengths"]
            metrics.add(f"policy/{side}_logprob", logprobs.detach().sum(), lengths.sum())
        return Loss(found.losses.sum() / max(batch.totals["units"], 1), metrics)


def _pair_inputs(batch: Batch, logprobs: Tensor) -> dict[str, Tensor]:
    """The inputs of preference losses, [P] each; log-ratios where the batch knows the reference."""
    weight = batch.tokens["weight"]
    found = {"logprobs": row_sum(batch, weight * logprobs), "lengths": row_sum(batch, (weight != 0).long())}
    if "reference" in batch.tokens:
        found["log_ratios"] = log_ratios(batch, logprobs)
    return {
        f"{side}_{name}": values
        for name, rows in found.items()
        for side, values in zip(("chosen", "rejected"), chosen_rejected(batch, rows), strict=True)
    }


def log_ratios(batch: Batch, logprobs: Tensor) -> Tensor:
    """log policy − log reference over each row's trained tokens, [N]; summed per token, for accuracy."""
    return row_sum(batch, batch.tokens["weight"] * (logprobs - batch.tokens["reference"]))


def with_reference(batch: Batch, reference: Model) -> Batch:
    """The same batch, on the CPU, with the reference's logprobs in the token channel `reference`."""
    logprobs = reference.forward(batch, LOGPROBS)["logprobs"].cpu()
    return replace(batch, tokens=batch.tokens | {"reference": logprobs})


class Dpo(PackedAlgorithm):
    """Learns which of two answers is preferred."""

    config: DpoConfig

    def experience(self, items: Sequence[PreferencePair]) -> Batch:
        return pack_pairs(items, share=self.config.share_prompts)

    def reference_batches(self, experience: Batch) -> Iterator[Batch]:
        """What of an experience the reference scores."""
        yield experience

    def prepare(self, experience: Batch, models: Mapping[Role, Model]) -> Iterator[Batch]:
        """Mini-batches of whole pairs, with the reference's logprobs where the loss has a reference."""
        known = with_reference(experience, models["reference"]) if self.config.frozen_models() else experience
        yield from super().prepare(known, models)


@dataclass(frozen=True, slots=True)
class KtoLoss:
    """The mean over judged answers of `losses.kto`.

    Reads the token channel `reference` [T] and the row channels `good` (1 or 0) and `z` [N].
    """

    config: KtoConfig
    needs: frozenset[str] = LOGPROBS

    def __call__(self, batch: Batch, outputs: Outputs) -> Loss:
        good, z, config = batch.rows["good"] > 0, batch.rows["z"], self.config
        log_ratio = log_ratios(batch, outputs["logprobs"])
        weights = {"desirable_weight": config.desirable_weight, "undesirable_weight": config.undesirable_weight}
        losses, rewards = formulas.kto(log_ratio, good, z, beta=config.beta, **weights)
        metrics = Metrics()
        metrics.add("train/loss", losses.detach().sum(), len(losses))
        metrics.add("train/accuracy", ((log_ratio > z) == good).sum(), len(losses))
        metrics.add("train/kl_baseline", z.sum(), len(losses))
        self._add_sides(metrics, batch, outputs["logprobs"].detach(), rewards)
        return Loss(losses.sum() / max(batch.totals["units"], 1), metrics)

    def _add_sides(self, metrics: Metrics, batch: Batch, logprobs: Tensor, rewards: Tensor) -> None:
        """Means over the good (chosen) and over the bad (rejected) answers."""
        weight, good = batch.tokens["weight"], batch.rows["good"] > 0
        sums, sizes = row_sum(batch, weight * logprobs), row_sum(batch, (weight != 0).long())
        for name, rows in (("chosen", good), ("rejected", ~good)):
            metrics.add(f"reward/{name}", torch.where(rows, rewards, 0).sum(), rows.sum())
            metrics.add(f"policy/{name}_logprob", torch.where(rows, sums, 0).sum(), torch.where(rows, sizes, 0).sum())


@dataclass(frozen=True, slots=True)
class KtoMiniBatch:
    """A mini-batch of labeled completions; mismatched: the same completions behind other prompts, or None."""

    batch: Batch
    mismatched: Batch | None


class Kto(PackedAlgorithm):
    """Learns from answers that were judged good or bad."""

    def experience(self, items: Sequence[LabeledCompletion]) -> list[KtoMiniBatch]:
        """Judged answers as what `prepare` takes: a part per mini-batch."""
        rows = items if isinstance(items, TokenizedAnswers) else TokenizedAnswers.of(items)
        most = self.config.mini_batches
        parts = np.split(np.arange(len(rows)), [len(rows) * i // most for i in range(1, most)])
        return [
            KtoMiniBatch(
                pack_labeled(rows, part), pack_mismatched(rows, part, self.data.longest) if part[1:].size else None
            )
            for part in parts
            if part.size
        ]

    def mini_batches(self, experience: list[KtoMiniBatch]) -> list[Batch]:
        return [part.batch for part in experience]

    def reference_batches(self, experience: list[KtoMiniBatch]) -> Iterator[Batch]:
        """What of an experience the reference scores: the answers, and the same behind other prompts."""
        for part in experience:
            yield from (part.batch,) if part.mismatched is None else (part.batch, part.mismatched)

    def prepare(self, experience: list[KtoMiniBatch], models: Mapping[Role, Model]) -> Iterator[Batch]:
        """Each mini-batch with the reference's logprobs, and with its z under the policy as it now is."""
        for part in experience:
            z = self._kl_baseline(part.mismatched, models)
            known = with_reference(part.batch, models["reference"])
            rows = {**known.rows, "z": torch.full((known.num_rows,), z)}
            yield with_totals(replace(known, rows=rows), known.count())

    def _kl_baseline(self, batch: Batch | None, models: Mapping[Role, Model]) -> float:
        """The baseline; 0 where no answer has another prompt to stand behind."""
        if batch is None:
            return 0.0
        known = with_reference(batch, models["reference"])
        ratios = log_ratios(known, models["policy"].forward(known, LOGPROBS)["logprobs"].cpu())
        return float(formulas.kto_baseline(ratios.sum(), known.num_rows))


def pack_labeled(rows: TokenizedAnswers, units: NDArray[np.int64]) -> Batch:
    """Some completions, each behind its prompt and a unit; weight 1 on it; row channel `good`."""
    batch = pack_answers(rows, np.stack([units, units], 1), share=False)
    good = torch.tensor([float(rows.label(unit) or 0) for unit in units.tolist()])
    return replace(batch, rows={**batch.rows, "good": good})


def pack_mismatched(rows: TokenizedAnswers, units: NDArray[np.int64], most: int) -> Batch:
    """The prompt of each unit with the next one's completion, of the last one with the first one's.

    The end of a completion is cut where both have more than `most` tokens.
    """
    others, sizes = np.roll(units, -1), rows.sizes.copy()
    sizes[others, 1] = np.minimum(sizes[others, 1], most - sizes[units, 0])

    def read(places: NDArray[np.int64]) -> Sequence[Numbers]:
        return [ids[:size] for ids, size in zip(rows.read(places), sizes[tuple(places.T)], strict=True)]

    return pack_answers(replace(rows, sizes=sizes, read=read), np.stack([units, others], 1), share=False)


def build_dpo(config: DpoConfig, parts: AlgorithmInputs) -> Dpo:
    """The algorithm over the job's data."""
    return Dpo(config, parts.data, {"policy": PairwiseLoss(config)})


def build_kto(config: KtoConfig, parts: AlgorithmInputs) -> Kto:
    """The algorithm over the job's data."""
    return Kto(config, parts.data, {"policy": KtoLoss(config)})


@dataclass(frozen=True, slots=True)
class RewardModelLoss:
    """The mean over pairs of `bradley_terry`; reads the row channel `margin` [N], where there is one."""

    center_rewards_coef: float
    needs: frozenset[str] = frozenset({"scores"})

    def __call__(self, batch: Batch, outputs: Outputs) -> Loss:
        chosen, rejected = chosen_rejected(batch, outputs["scores"])
        margin = chosen_rejected(batch, batch.rows["margin"])[0] if "margin" in batch.rows else 0.0
        found = bradley_terry(chosen, rejected, margin=margin, center_rewards_coef=self.center_rewards_coef)
        return Loss(found.losses.sum() / max(batch.totals["units"], 1), pair_metrics(found))


class RewardModeling(PackedAlgorithm):
    """Learns to score the preferred answer higher."""

    config: RmConfig

    def experience(self, items: Sequence[PreferencePair]) -> Batch:
        return pack_pairs(items, share=self.config.share_prompts, margins=self.config.use_margin)


def build(config: RmConfig, parts: AlgorithmInputs) -> RewardModeling:
    """The algorithm over the job's data."""
    return RewardModeling(config, parts.data, {"reward_model": RewardModelLoss(config.center_rewards_coef)})
