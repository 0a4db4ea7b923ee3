"""Held-out evaluation by the algorithm's own loss: the same numbers, whatever the batches, and no trace in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.algorithm.preference.config import DpoConfig, KtoConfig, RmConfig
from runner.algorithm.preference.learning import build as build_rm
from runner.algorithm.preference.learning import build_dpo, build_kto, pack_pairs
from runner.core.batch import Batch
from runner.interfaces import Outputs
from runner.interfaces.learning import AlgorithmInputs
from runner.trainer.evaluator import HeldOutLoss, LearnsFromItems, MemoizedModel, even_batches
from runner.trainer.reference_model import FrozenModel
from tests.algorithm.preferences import (
    CPU,
    TOKENIZER,
    Given,
    frozen,
    judged,
    learner,
    model,
    pairs,
    refuse,
)

PAIRS = pairs(7, seed=2)
JUDGED = judged(8, seed=2)
TRAINING = pairs(4, seed=9)


def parts(items: Any) -> AlgorithmInputs:
    return AlgorithmInputs(Given(items), TOKENIZER, 0, refuse)


def dpo(**options: Any) -> tuple[Any, dict[str, Any]]:
    models = {"policy": learner(model(5)), "reference": frozen(model(6))}
    return build_dpo(DpoConfig(batch_size=4, **options), parts(TRAINING)), models


def measured(algorithm: Any, items: Any, models: Any, size: int, samples: int = 0) -> Any:
    return HeldOutLoss(algorithm, items, size, samples, TOKENIZER).evaluate(models)


def test_the_numbers_are_those_of_the_loss_on_all_items() -> None:
    algorithm, models = dpo()
    [batch] = algorithm.prepare(algorithm.experience(PAIRS), models)
    loss = algorithm.losses["policy"]
    direct = loss(batch, models["policy"].forward(batch, loss.needs)).metrics.result()
    values = measured(algorithm, PAIRS, models, 100).values
    assert values["eval/loss"] == pytest.approx(direct["train/loss"])
    assert values["eval/accuracy"] == pytest.approx(direct["train/accuracy"])
    assert values["eval/margin"] == pytest.approx(direct["reward/margin"])
    assert values["eval/chosen_logprob"] == pytest.approx(direct["policy/chosen_logprob"])
    assert values.keys() == {f"eval/{n.partition('/')[2]}" for n in direct} | {"time/eval_s"}
    assert values["time/eval_s"] > 0


@pytest.mark.parametrize("loss", ["sigmoid", "simpo"])
def test_they_do_not_depend_on_how_many_items_go_at_once(loss: str) -> None:
    algorithm, models = dpo(loss=loss, mini_batches=2)
    found = [dict(measured(algorithm, PAIRS, models, size).values) for size in (1, 3, 100)]
    for values in found:
        del values["time/eval_s"]
        assert values == pytest.approx(found[0], rel=1e-5)


def test_a_sample_is_an_item_in_words_with_its_own_numbers() -> None:
    algorithm, models = dpo(mini_batches=2)
    report = measured(algorithm, PAIRS, models, 3, samples=5)
    assert len(report.samples) == 5
    for sample, pair in zip(report.samples, PAIRS, strict=False):
        words = {name: TOKENIZER.decode(getattr(pair, name)) for name in ("prompt", "chosen", "rejected")}
        assert {name: sample[name] for name in words} == words and sample["margin"] == pair.margin
        alone = measured(algorithm, [pair], models, 1).values
        for name in ("eval/loss", "eval/accuracy", "eval/chosen", "eval/rejected", "eval/margin"):
            assert sample[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6)


def test_a_reward_model() -> None:
    algorithm = build_rm(RmConfig(batch_size=4), parts(TRAINING))
    subject = learner(model(5, head="scalar"))
    report = measured(algorithm, PAIRS, {"reward_model": subject}, 3, samples=100)
    assert len(report.samples) == 7
    for number in ("accuracy", "chosen", "margin"):
        mean = sum(s[f"eval/{number}"] for s in report.samples) / 7
        assert report.values[f"eval/{number}"] == pytest.approx(mean, rel=1e-5)


def test_judged_answers_have_numbers_of_their_side_only() -> None:
    models = {"policy": learner(model(5)), "reference": frozen(model(6))}
    algorithm = build_kto(KtoConfig(batch_size=4), parts(judged(4)))
    report = measured(algorithm, JUDGED, models, 4, samples=8)
    assert {"eval/loss", "eval/accuracy", "eval/kl_baseline", "eval/chosen", "eval/rejected"} <= report.values.keys()
    for sample, item in zip(report.samples, JUDGED, strict=True):
        assert sample["completion"] == TOKENIZER.decode(item.completion) and sample["good"] == item.good
        assert ("eval/chosen" in sample) == item.good and ("eval/rejected" in sample) != item.good
    losses = sum(s["eval/loss"] for s in report.samples) / 8
    assert report.values["eval/loss"] == pytest.approx(losses, rel=1e-5)


class Counting(FrozenModel):
    """A frozen model that counts the tokens that it scores."""

    tokens = 0

    def forward(self, batch: Batch, needs: frozenset[str]) -> Outputs:
        self.tokens += batch.num_tokens
        return super().forward(batch, needs)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_the_reference_scores_held_out_items_once(kind: str) -> None:
    reference = Counting(model(6), budget=50, device=CPU)
    algorithm: Any = build_kto(KtoConfig(batch_size=4), parts(judged(4))) if kind == "kto" else dpo()[0]
    items, subject = (JUDGED if kind == "kto" else PAIRS), learner(model(5))
    known = {"policy": subject, "reference": MemoizedModel(reference)}
    first = dict(measured(algorithm, items, known, 4).values)
    scored = reference.tokens
    torch.nn.init.normal_(subject.model.inner.lm_head.weight)
    again = dict(measured(algorithm, items, known, 4).values)
    assert reference.tokens == scored > 0
    afresh = measured(algorithm, items, {"policy": subject, "reference": reference}, 4).values
    for values in (again, first):
        del values["time/eval_s"]
    assert again == {name: afresh[name] for name in again} != first


def test_what_is_remembered_is_of_one_batch_and_one_output() -> None:
    known, plain = MemoizedModel(frozen(model(6))), frozen(model(6))
    for items in (PAIRS[:3], PAIRS[3:], PAIRS[:3]):
        batch = pack_pairs(items, share=True)
        for output in ("logprobs", "entropy"):
            needs = frozenset({output})
            assert torch.equal(known.forward(batch, needs)[output], plain.forward(batch, needs)[output])


def test_it_leaves_no_trace() -> None:
    algorithm, models = dpo()
    subject = models["policy"]
    before = {name: p.detach().clone() for name, p in subject.model.trainable().items()}
    random = torch.get_rng_state()
    measured(algorithm, PAIRS, models, 3, samples=2)
    assert torch.equal(random, torch.get_rng_state())
    for name, parameter in subject.model.trainable().items():
        assert torch.equal(parameter, before[name]) and parameter.grad is None


def test_what_it_needs_of_an_algorithm_can_be_asked() -> None:
    assert isinstance(dpo()[0], LearnsFromItems)
    assert not isinstance(PAIRS, LearnsFromItems)


@given(st.integers(1, 40), st.integers(1, 12))
def test_no_run_of_items_is_left_with_very_few(count: int, most: int) -> None:
    found = list(even_batches(range(count), most))
    assert [i for run in found for i in run] == list(range(count))
    assert max(map(len, found)) <= most
    assert max(map(len, found)) - min(map(len, found)) <= 1
