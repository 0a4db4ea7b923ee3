"""dpo, its variants and kto: against plain Hugging Face passes and formulas in floats, and however a batch is cut."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.algorithm.loss_registry import functions
from runner.algorithm.preference.config import DpoConfig, KtoConfig
from runner.algorithm.preference.learning import build_dpo, build_kto, pack_mismatched, pack_pairs
from runner.core.media import MEDIA_ID
from runner.core.micro_batches import footprints
from runner.core.prefix_tree import Branch, Tree, pack_trees
from runner.interfaces import LabeledCompletion, PreferencePair, TokenizedAnswers
from runner.interfaces.learning import AlgorithmInputs
from runner.trainer.reference_model import FrozenModel
from tests.algorithm.preference.test_losses import ALPHA, BETA, CASES, GAMMA, LAM, SMOOTHING, sig
from tests.algorithm.preferences import (
    CPU,
    TOKENIZER,
    WHOLE,
    Given,
    assert_close,
    backward,
    copied,
    frozen,
    gradients,
    judged,
    learner,
    model,
    pairs,
    plain,
    plain_gradients,
    plain_logprob,
    refuse,
    train,
)

LOSSES = functions("preference_loss")
WITHOUT_REFERENCE = ("simpo", "orpo", "cpo", "cpo_averaged")
GIVEN = {"beta": BETA, "label_smoothing": SMOOTHING, "gamma": GAMMA, "lam": LAM, "alpha": ALPHA}
PAIRS = pairs(5)
JUDGED = judged(6)


def dpo(items: list[PreferencePair], **options: Any) -> Any:
    config = DpoConfig(**{"batch_size": len(items), **options})
    return build_dpo(config, AlgorithmInputs(Given(items), TOKENIZER, 0, refuse))


def kto(items: list[LabeledCompletion], **options: Any) -> Any:
    config = KtoConfig(**{"batch_size": len(items), **options})
    return build_kto(config, AlgorithmInputs(Given(items), TOKENIZER, 0, refuse))


def options_of(loss: str) -> dict[str, float]:
    return {name: GIVEN[name] for name in LOSSES[loss].options}


@cache
def policy_and_reference() -> tuple[Any, Any]:
    return model(5, double=True), model(6, double=True)


@cache
def plain_policy_and_reference() -> tuple[Any, Any]:
    policy, reference = policy_and_reference()
    return plain(policy), plain(reference)


@cache
def plain_sums() -> list[tuple[float, float, float, float]]:
    """(chosen, rejected) log-probabilities of each pair under the policy, then under the reference."""
    with torch.no_grad():
        return [
            tuple(
                float(plain_logprob(m, p.prompt, a))
                for m in plain_policy_and_reference()
                for a in (p.chosen, p.rejected)
            )  # type: ignore[misc]
            for p in PAIRS
        ]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_is_that_of_plain_passes_over_one_answer_at_a_time(loss: str, share: bool) -> None:
    policy, reference = policy_and_reference()
    algorithm = dpo(PAIRS, loss=loss, share_prompts=share, **options_of(loss))
    subject = learner(policy)
    batch, metrics = backward(subject, algorithm, {"policy": subject, "reference": frozen(reference)})
    prompts, answers = sum(len(p.prompt) for p in PAIRS), sum(len(p.chosen) + len(p.rejected) for p in PAIRS)
    assert batch.num_tokens == prompts * (1 if share else 2) + answers
    _, formula, reward = CASES[loss]
    losses, chosen, rejected = [], [], []
    for pair, (pc, pr, rc, rr) in zip(PAIRS, plain_sums(), strict=True):
        c, r = (pc, pr) if loss in WITHOUT_REFERENCE else (pc - rc, pr - rr)
        n, m = len(pair.chosen), len(pair.rejected)
        losses.append(formula(c, r, n, m))
        chosen.append(reward(c, n))
        rejected.append(reward(r, m))
    expected = {
        "train/loss": sum(losses) / len(PAIRS),
        "train/accuracy": sum(c > r for c, r in zip(chosen, rejected, strict=True)) / len(PAIRS),
        "reward/chosen": sum(chosen) / len(PAIRS),
        "reward/rejected": sum(rejected) / len(PAIRS),
        "reward/margin": (sum(chosen) - sum(rejected)) / len(PAIRS),
        "policy/chosen_logprob": sum(s[0] for s in plain_sums()) / sum(len(p.chosen) for p in PAIRS),
        "policy/rejected_logprob": sum(s[1] for s in plain_sums()) / sum(len(p.rejected) for p in PAIRS),
    }
    assert metrics.result() == pytest.approx(expected, rel=1e-6)
    assert 0 < expected["train/accuracy"] < 1
    policy.module.zero_grad()


def dpo_total(module: Any, reference: Any) -> torch.Tensor:
    """DPO's loss from plain passes, differentiable."""
    losses = []
    for pair in PAIRS:
        with torch.no_grad():
            rc, rr = (plain_logprob(reference, pair.prompt, a) for a in (pair.chosen, pair.rejected))
        pc, pr = (plain_logprob(module, pair.prompt, a) for a in (pair.chosen, pair.rejected))
        losses.append(torch.log1p(torch.exp(-BETA * ((pc - rc) - (pr - rr)))))
    return torch.stack(losses).mean()


def test_the_gradient_is_that_of_plain_passes() -> None:
    policy, reference = policy_and_reference()
    twin, other = plain_policy_and_reference()
    expected = plain_gradients(dpo_total(twin, other), twin)
    for budget, share in product((1, WHOLE), (True, False)):
        subject = learner(policy, budget=budget)
        backward(
            subject,
            dpo(PAIRS, beta=BETA, share_prompts=share),
            {"policy": subject, "reference": frozen(reference)},
        )
        assert_close(gradients(subject), expected, 1e-6)  # transformers computes norms in float32
        policy.module.zero_grad()


@pytest.mark.parametrize("share", [True, False])
def test_the_cross_entropy_of_the_chosen_answer_may_stand_beside_the_loss(share: bool) -> None:
    policy, reference = policy_and_reference()
    twin, other = plain_policy_and_reference()
    nll = [-plain_logprob(twin, pair.prompt, pair.chosen) / len(pair.chosen) for pair in PAIRS]
    total = dpo_total(twin, other) + 0.4 * torch.stack(nll).mean()
    expected = plain_gradients(total, twin)
    subject = learner(policy, budget=1)
    algorithm = dpo(PAIRS, beta=BETA, sft_coef=0.4, share_prompts=share)
    _, metrics = backward(subject, algorithm, {"policy": subject, "reference": frozen(reference)})
    assert_close(gradients(subject), expected, 1e-6)
    assert metrics.result()["train/loss"] == pytest.approx(float(total.detach()), rel=1e-6)
    policy.module.zero_grad()


@pytest.mark.parametrize("loss", ["sigmoid", "orpo"])
def test_gradients_do_not_depend_on_cuts_sharing_layout_or_order(loss: str) -> None:
    found = []
    for budget, share, layout, turn in [
        (WHOLE, True, "packed", 0),
        (1, True, "packed", 2),
        (45, False, "packed", 3),
        (45, True, "padded", 1),
        (1, False, "padded", 0),
    ]:
        items = PAIRS[turn:] + PAIRS[:turn]
        subject = learner(model(5, layout=layout), budget=budget)
        models = {"policy": subject, "reference": frozen(model(6, layout=layout))}
        _, metrics = backward(subject, dpo(items, loss=loss, share_prompts=share, **options_of(loss)), models)
        found.append((gradients(subject), metrics.result()))
    for gradient, values in found[1:]:
        assert_close(gradient, found[0][0], 1e-6)
        assert values == pytest.approx(found[0][1], rel=1e-5)


def test_the_adapter_switched_off_is_a_reference_like_a_copy_also_after_updates() -> None:
    base = model(5)
    copy = copied(base)
    adapted = model(5, adapter=True)
    off = FrozenModel(adapted, budget=50, device=CPU, during=adapted.module.disable_adapter)
    subject, algorithm = learner(adapted, lr=0.5), dpo(PAIRS)
    first, _ = backward(subject, algorithm, {"policy": subject, "reference": off})
    subject.optim_step()
    for reference in (copy, off):
        [batch] = algorithm.prepare(algorithm.collect(0), {"policy": subject, "reference": reference})
        assert torch.equal(batch.tokens["reference"], first.tokens["reference"])
    own = subject.forward(first, frozenset({"logprobs"}))["logprobs"]
    assert float((own - first.tokens["reference"]).abs().max()) > 0.1


def test_equal_models_start_at_log_2_and_no_margin() -> None:
    policy, _ = policy_and_reference()
    subject = learner(policy)
    _, metrics = backward(subject, dpo(PAIRS), {"policy": subject, "reference": copied(policy)})
    values = metrics.result()
    assert values["train/loss"] == pytest.approx(0.6931471805599453, rel=1e-6)
    assert values["reward/margin"] == pytest.approx(0, abs=1e-6)
    policy.module.zero_grad()


def test_a_loss_without_reference_asks_for_none() -> None:
    assert [loss for loss in LOSSES if not DpoConfig(loss=loss).frozen_models()] == list(WITHOUT_REFERENCE)
    subject = learner(model(5))
    backward(subject, dpo(PAIRS, loss="simpo"), {"policy": subject})


def test_mini_batches_hold_whole_pairs_and_know_their_own_totals() -> None:
    algorithm = dpo(PAIRS[:4], loss="cpo", mini_batches=2)
    parts = list(algorithm.prepare(algorithm.collect(0), {}))
    answers = [sum(len(p.chosen) + len(p.rejected) for p in part) for part in (PAIRS[:2], PAIRS[2:4])]
    assert [p.totals for p in parts] == [{"tokens": n, "rows": 4, "units": 2} for n in answers]


@pytest.mark.parametrize("loss", ["sigmoid", "ipo_averaged"])
def test_a_few_steps_teach_the_preference(loss: str) -> None:
    items = pairs(16, seed=3)
    made = model(5)
    subject = learner(made, lr=0.3)
    values = train(subject, dpo(items, loss=loss), {"policy": subject, "reference": copied(made)}, 12)
    assert values[0]["reward/margin"] == pytest.approx(0, abs=1e-5)
    assert values[-1]["train/accuracy"] == 1
    assert values[-1]["train/loss"] < values[0]["train/loss"]
    assert values[-1]["reward/margin"] > 0.01


@pytest.mark.parametrize("algorithm", [dpo(PAIRS), kto(JUDGED)], ids=["dpo", "kto"])
def test_an_empty_batch_has_the_same_metrics_and_no_loss(algorithm: Any) -> None:
    policy, reference = policy_and_reference()
    models = {"policy": learner(policy), "reference": frozen(reference)}
    [batch] = algorithm.prepare(algorithm.collect(0), models)
    loss = algorithm.losses["policy"]
    full = loss(batch, models["policy"].forward(batch, loss.needs))
    empty = loss(batch.to(torch.device("cpu")).slice_rows(0, 0), {"logprobs": torch.zeros(0, requires_grad=True)})
    assert empty.metrics.sums.keys() == full.metrics.sums.keys()
    empty.total.backward()
    assert float(empty.total.detach()) == 0


@pytest.mark.parametrize("algorithm", [dpo(PAIRS), dpo(PAIRS, loss="orpo"), kto(JUDGED)], ids=["dpo", "orpo", "kto"])
def test_no_loss_reads_a_value_back_from_the_device(algorithm: Any) -> None:
    policy, reference = policy_and_reference()
    models = {"policy": learner(policy), "reference": frozen(reference)}
    [batch] = algorithm.prepare(algorithm.collect(0), models)
    away = batch.to(torch.device("meta"))  # where there are no values to be read
    loss = algorithm.losses["policy"](away, {"logprobs": torch.empty(batch.num_tokens, device="meta")})
    assert loss.total.shape == () and loss.total.is_meta


# --- kto --------------------------------------------------------------------------------------------------------------


def kto_z(policy: Any, reference: Any, items: list[LabeledCompletion]) -> float:
    """z from plain passes: the prompt of each answer before the next one's completion."""
    policy, reference, total = plain(policy), plain(reference), 0.0
    for at, item in enumerate(items):
        other = items[(at + 1) % len(items)].completion
        with torch.no_grad():
            total += float(plain_logprob(policy, item.prompt, other) - plain_logprob(reference, item.prompt, other))
    return max(0.0, total / len(items))


def swapped(better: bool) -> tuple[Any, Any]:
    """Policy and reference in the order in which z is above 0, or not."""
    first, second = policy_and_reference()
    above = kto_z(first, second, JUDGED) > 0
    return (first, second) if above == better else (second, first)


def test_z_is_the_mean_log_ratio_of_swapped_prompts_and_never_negative() -> None:
    for above in (True, False):
        policy, reference = swapped(above)
        models = {"policy": learner(policy), "reference": frozen(reference)}
        algorithm = kto(JUDGED)
        [batch] = algorithm.prepare(algorithm.collect(0), models)
        expected = kto_z(policy, reference, JUDGED)
        assert (expected > 0) == above
        assert batch.rows["z"].tolist() == pytest.approx([expected] * 6, rel=1e-6)


def test_kto_is_that_of_plain_passes_however_it_is_cut() -> None:
    policy, reference = swapped(True)
    z = kto_z(policy, reference, JUDGED)
    twin, other, losses = plain(policy), plain(reference), []
    for item in JUDGED:
        with torch.no_grad():
            base = plain_logprob(other, item.prompt, item.completion)
        ratio = plain_logprob(twin, item.prompt, item.completion) - base
        side = 1 if item.good else -1
        weight = 1.5 if item.good else 0.7
        losses.append(weight * (1 - torch.sigmoid(side * BETA * (ratio - z))))
    total = torch.stack(losses).mean()
    expected = plain_gradients(total, twin)
    for budget in (1, 30, WHOLE):
        subject = learner(policy, budget=budget)
        algorithm = kto(JUDGED, beta=BETA, desirable_weight=1.5, undesirable_weight=0.7)
        _, metrics = backward(subject, algorithm, {"policy": subject, "reference": frozen(reference)})
        assert_close(gradients(subject), expected, 1e-6)
        assert metrics.result()["train/loss"] == pytest.approx(total.item(), rel=1e-6)
        policy.module.zero_grad()


def test_the_metrics_of_kto() -> None:
    policy, reference = swapped(True)
    subject = learner(policy)
    _, metrics = backward(subject, kto(JUDGED, beta=BETA), {"policy": subject, "reference": frozen(reference)})
    policy.module.zero_grad()
    z = kto_z(policy, reference, JUDGED)
    twins = plain(policy), plain(reference)
    sides: dict[bool, list[tuple[float, float, int]]] = {True: [], False: []}
    with torch.no_grad():
        for i in JUDGED:
            own, base = (float(plain_logprob(m, i.prompt, i.completion)) for m in twins)
            sides[i.good].append((own, own - base, len(i.completion)))
    expected = {
        "train/loss": sum(1 - sig((1 if g else -1) * BETA * (d - z)) for g in sides for _, d, _ in sides[g]) / 6,
        "train/accuracy": sum((d > z) == g for g in sides for _, d, _ in sides[g]) / 6,
        "train/kl_baseline": z,
    }
    for good, name in ((True, "chosen"), (False, "rejected")):
        own, ratios, sizes = (sum(column) for column in zip(*sides[good], strict=True))
        expected |= {f"reward/{name}": BETA * ratios / len(sides[good]), f"policy/{name}_logprob": own / sizes}
    assert metrics.result() == pytest.approx(expected, rel=1e-6)


def test_each_mini_batch_has_the_z_of_the_policy_as_it_then_is() -> None:
    policy, reference = model(5, double=True), policy_and_reference()[1]
    subject = learner(policy, lr=0.5)
    algorithm = kto(JUDGED, mini_batches=2, beta=1.0)
    for number, batch in enumerate(
        algorithm.prepare(algorithm.collect(0), {"policy": subject, "reference": frozen(reference)})
    ):
        expected = kto_z(policy, reference, JUDGED[3 * number : 3 * number + 3])
        assert batch.rows["z"].tolist() == pytest.approx([expected] * 3, rel=1e-6)
        assert batch.totals["units"] == 3
        subject.forward_backward(batch, algorithm.losses["policy"])
        subject.optim_step()


def test_a_single_answer_has_nothing_to_be_swapped_with() -> None:
    policy, reference = swapped(True)
    algorithm = kto(JUDGED)
    models = {"policy": learner(policy), "reference": frozen(reference)}
    [batch] = algorithm.prepare(algorithm.experience(JUDGED[:1]), models)
    assert batch.rows["z"].tolist() == [0.0]


IDS = st.lists(st.integers(0, 99) | st.just(MEDIA_ID), min_size=1, max_size=5).map(tuple)
ANY_PAIRS = st.lists(st.builds(PreferencePair, IDS, IDS, IDS, st.none() | st.floats(0, 2, width=32)), min_size=1)


@given(ANY_PAIRS, st.booleans())
def test_pairs_that_are_read_later_are_the_trees_of_pairs(pairs: list[PreferencePair], share: bool) -> None:
    def branch(pair: PreferencePair, ids: tuple[int, ...]) -> Branch:
        return Branch(ids, {"weight": [1.0] * len(ids)}, {"margin": pair.margin or 0.0})

    trees = [Tree(pair.prompt, [branch(pair, pair.chosen), branch(pair, pair.rejected)]) for pair in pairs]
    found, wanted = pack_pairs(pairs, share=share, margins=True), pack_trees(trees, share=share)
    assert found.count() == wanted.count()
    for padded in (True, False):
        assert footprints(found, padded).slots().tolist() == footprints(wanted, padded).slots().tolist()
    assert all(torch.equal(found.tokens[name], wanted.tokens[name]) for name in wanted.tokens)
    assert all(torch.equal(found.rows[name], wanted.rows[name]) for name in wanted.rows)


def test_mismatched_answers() -> None:
    items = [LabeledCompletion((n,), (10 + n,), True) for n in range(3)]
    batch = pack_mismatched(TokenizedAnswers.of(items), np.arange(3), most=2)
    assert batch.tokens["ids"].tolist() == [0, 11, 1, 12, 2, 10]
    assert batch.tokens["weight"].tolist() == [0, 1] * 3


def test_a_mismatched_row_is_no_longer_than_the_longest_row() -> None:
    algorithm = kto([LabeledCompletion((1, 2, 3), (4,), True), LabeledCompletion((5,), (6, 7, 8), False)])
    algorithm.data.longest = 4
    [part] = algorithm.collect(0)
    assert part.batch.tokens["ids"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert part.mismatched.tokens["ids"].tolist() == [1, 2, 3, 6, 5, 4]
    assert part.mismatched.tokens["weight"].tolist() == [0, 0, 0, 1, 0, 1]
    assert part.mismatched.rows["lengths"].tolist() == [4, 2]


def test_a_few_steps_of_kto_tell_good_from_bad() -> None:
    made = model(5)
    subject = learner(made, lr=1.0)
    values = train(subject, kto(judged(12, seed=4)), {"policy": subject, "reference": copied(made)}, 12)
    assert values[-1]["train/accuracy"] > 0.9 > values[0]["train/accuracy"]
    assert values[-1]["reward/chosen"] > 0.01 > -0.01 > values[-1]["reward/rejected"]
