"""Reward models: scores and losses against plain Hugging Face passes over one answer, however a batch is cut."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.algorithm.preference.config import RmConfig
from runner.algorithm.preference.learning import build
from runner.data.chat import Renderer
from runner.interfaces import Completion, PreferencePair, Prompt
from runner.interfaces.learning import AlgorithmInputs
from runner.reward.config import ModelRewardConfig
from tests.algorithm.preferences import (
    TOKENIZER,
    WHOLE,
    Given,
    assert_close,
    backward,
    gradients,
    learner,
    model,
    pairs,
    plain,
    plain_gradients,
    plain_score,
    refuse,
    train,
)
from tests.reward.samples import made

PAIRS = pairs(5)


def rm(items: list[PreferencePair], **options: Any) -> Any:
    config = RmConfig(**{"batch_size": len(items), **options})
    return build(config, AlgorithmInputs(Given(items), TOKENIZER, 0, refuse))


def plain_scores(twin: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(plain_score(twin, p.prompt, p.chosen), plain_score(twin, p.prompt, p.rejected)) for p in PAIRS]


@pytest.mark.parametrize("use_margin", [True, False])
@pytest.mark.parametrize("center_rewards_coef", [0.0, 0.01])
def test_the_loss_is_that_of_plain_passes(use_margin: bool, center_rewards_coef: float) -> None:
    made = model(5, head="scalar", double=True)
    scores = [(c.item(), r.item()) for c, r in plain_scores(plain(made))]
    margins = [(p.margin or 0.0) if use_margin else 0.0 for p in PAIRS]
    losses = [
        math.log1p(math.exp(-(c - r - m))) + center_rewards_coef * (c + r) ** 2
        for (c, r), m in zip(scores, margins, strict=True)
    ]
    expected = {
        "train/loss": sum(losses) / 5,
        "train/accuracy": sum(c > r for c, r in scores) / 5,
        "reward/chosen": sum(c for c, _ in scores) / 5,
        "reward/rejected": sum(r for _, r in scores) / 5,
        "reward/margin": sum(c - r for c, r in scores) / 5,
    }
    for share in (True, False):
        subject = learner(made, budget=1)
        algorithm = rm(PAIRS, use_margin=use_margin, center_rewards_coef=center_rewards_coef, share_prompts=share)
        batch, metrics = backward(subject, algorithm, {"reward_model": subject})
        assert metrics.result() == pytest.approx(expected, rel=1e-5)
        assert batch.num_rows == (3 if share else 2) * len(PAIRS)
    assert 0 < expected["train/accuracy"] < 1 and any(p.margin for p in PAIRS)


def test_the_gradient_is_that_of_plain_passes() -> None:
    made = model(5, head="scalar", double=True)
    twin = plain(made)
    total = torch.stack([-torch.nn.functional.logsigmoid(c - r) for c, r in plain_scores(twin)]).mean()
    expected = plain_gradients(total, twin)
    subject = learner(made, budget=20)
    backward(subject, rm(PAIRS, use_margin=False), {"reward_model": subject})
    assert_close(gradients(subject), expected, 1e-6)


def test_gradients_do_not_depend_on_cuts_sharing_layout_or_order() -> None:
    found = []
    for budget, share, layout, turn in [
        (WHOLE, True, "packed", 0),
        (1, True, "packed", 2),
        (45, False, "packed", 3),
        (45, True, "padded", 1),
        (1, False, "padded", 0),
    ]:
        subject = learner(model(5, head="scalar", layout=layout), budget=budget)
        algorithm = rm(PAIRS[turn:] + PAIRS[:turn], share_prompts=share, center_rewards_coef=0.01)
        _, metrics = backward(subject, algorithm, {"reward_model": subject})
        found.append((gradients(subject), metrics.result()))
    for gradient, values in found[1:]:
        assert_close(gradient, found[0][0], 1e-6)
        assert values == pytest.approx(found[0][1], rel=1e-5)


def test_a_margin_of_none_is_one_of_zero() -> None:
    subject = learner(model(5, head="scalar"))
    values = []
    for margin in (None, 0.0):
        items = [replace(pair, margin=margin) for pair in PAIRS]
        values.append(backward(subject, rm(items), {"reward_model": subject})[1].result())
    assert values[0] == values[1]


def test_an_empty_batch_has_the_same_metrics_and_no_loss() -> None:
    algorithm = rm(PAIRS)
    [batch] = algorithm.prepare(algorithm.collect(0), {})
    loss = algorithm.losses["reward_model"]
    full = loss(batch, {"scores": torch.zeros(batch.num_rows)})
    empty = loss(batch.to(torch.device("cpu")).slice_rows(0, 0), {"scores": torch.zeros(0, requires_grad=True)})
    empty.total.backward()
    assert empty.metrics.sums.keys() == full.metrics.sums.keys()
    assert float(empty.total.detach()) == 0


def test_the_loss_reads_no_value_back_from_the_device() -> None:
    algorithm = rm(PAIRS)
    [batch] = algorithm.prepare(algorithm.collect(0), {})
    away = batch.to(torch.device("meta"))  # where there are no values to be read
    loss = algorithm.losses["reward_model"](away, {"scores": torch.empty(batch.num_rows, device="meta")})
    assert loss.total.shape == () and loss.total.is_meta


def test_a_few_steps_teach_which_answer_is_better() -> None:
    subject = learner(model(5, head="scalar"), lr=0.1)
    values = train(subject, rm(pairs(16, seed=3), use_margin=False), {"reward_model": subject}, 12)
    assert values[0]["train/accuracy"] < 0.8
    assert values[-1]["train/accuracy"] == 1


def test_an_exported_model_is_read_at_the_token_that_it_was_trained_at(tmp_path: Path) -> None:
    """reward=model on a conversation against the score that the loss sees: at the end token, not at the line break."""
    trained = model(5, head="scalar")
    trained.save(tmp_path)
    question = ({"role": "user", "content": "2+2?"},)
    ids = Renderer(TOKENIZER).conversation_ids([*question, {"role": "assistant", "content": "4"}])
    assert ids[-2:] == [TOKENIZER.eos_token_id, *TOKENIZER("\n")["input_ids"]]
    reward = made(ModelRewardConfig(path=str(tmp_path)), tokenizer=TOKENIZER)
    [[found]] = reward.score([[Completion(Prompt((1,), "", question), (2,), "4", "stop")]])
    with torch.no_grad():
        assert found == pytest.approx(plain_score(plain(trained), ids[:-3], ids[-3:-1]).item(), abs=1e-5)
