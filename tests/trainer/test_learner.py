"""The learner: the update does not depend on the cut, guards fire before weights change, state round-trips."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.algorithm.sft import CrossEntropy
from runner.core.batch import Batch, pack, with_totals
from runner.core.errors import CheckpointError, RunnerError, TrainingDiverged
from runner.core.metrics import Metrics
from runner.interfaces import Loss, Outputs, State
from runner.interfaces.learning import OptimSettings
from runner.trainer.learner import LocalLearner
from tests.toys import Bigram


class Rounding(torch.optim.SGD):
    """Has a seed, as an optimizer that draws random bits."""

    seed = 0


class Counting(torch.optim.Optimizer):
    """Keeps plain values, as schedule-free and distance-adaptive optimizers do: in its group and of each parameter."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0, "span": (1, 2)})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += group["span"][0]
            for p in group["params"]:
                seen = self.state[p]
                seen["times"] = seen.get("times", 0) + 1
                p.sub_(p.grad, alpha=group["lr"] / (group["k"] + seen["times"]))


def learner(
    model: Bigram | None = None,
    *,
    budget: int = 1000,
    kind: str = "adamw",
    clip: float | None = 1.0,
    seed: int = 3,
    prefix: str = "train",
) -> LocalLearner:
    model = model or Bigram()
    kinds: dict[str, Any] = {
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
        "counting": Counting,
        "rounding": Rounding,
    }
    optimizer = kinds[kind](list(model.trainable().values()), lr=0.1)
    return LocalLearner(
        model,
        optimizer,
        lr=0.1,
        clip_norm=clip,
        factor=lambda step: 1.0 / (step + 1),
        budget=budget,
        seed=seed,
        device=torch.device("cpu"),
        prefix=prefix,
    )


def batch(rows: list[list[int]] | None = None) -> Batch:
    rows = rows or [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [2, 3]]
    packed = pack(rows, [[1.0] * len(row) for row in rows])
    return with_totals(packed, packed.count())


@dataclass(frozen=True)
class SquaredLogprobs:
    """A loss that is not linear in the logprobs, so that the general path runs."""

    needs: frozenset[str] = frozenset({"logprobs"})

    def __call__(self, batch: Batch, outputs: Outputs) -> Loss:
        return Loss((outputs["logprobs"] ** 2).sum() / batch.totals["tokens"], Metrics())


def trained(budget: int, kind: str, loss: object, data: Batch, steps: int = 3) -> torch.Tensor:
    subject = learner(budget=budget, kind=kind)
    for step in range(steps):
        subject.begin_step(step)
        subject.forward_backward(data, loss)  # type: ignore[arg-type]
        subject.optim_step()
    return subject.model.trainable()["table"].detach()


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.lists(st.integers(0, 11), min_size=2, max_size=9), min_size=1, max_size=8),
    st.integers(1, 20),
    st.sampled_from(["adamw", "sgd"]),
    st.sampled_from([CrossEntropy(), SquaredLogprobs()]),
)
def test_the_update_does_not_depend_on_the_micro_batches(
    rows: list[list[int]], budget: int, kind: str, loss: object
) -> None:
    data = batch(rows)
    torch.testing.assert_close(
        trained(budget, kind, loss, data), trained(10_000, kind, loss, data), rtol=1e-9, atol=1e-12
    )


def test_the_gradient_is_that_of_the_whole_batchs_mean() -> None:
    model, data = Bigram(), batch()
    subject = learner(model, budget=4, clip=None)
    metrics, _ = subject.forward_backward(data, CrossEntropy())
    table = model.table.detach().clone().requires_grad_()
    ids, parent = data.tokens["ids"], data.tokens["parent"]
    keep = parent >= 0
    direct = torch.nn.functional.cross_entropy(table[ids[parent[keep]]], ids[keep])
    direct.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(model.table.grad, table.grad)
    assert metrics.result()["train/loss"] == pytest.approx(direct.item())


def test_clipping_is_by_the_global_norm() -> None:
    subject = learner(kind="sgd", clip=0.01)
    before = subject.model.trainable()["table"].detach().clone()
    subject.begin_step(0)
    subject.forward_backward(batch(), CrossEntropy())
    norm = subject.optim_step().result()["train/grad_norm"]
    change = (subject.model.trainable()["table"].detach() - before).norm()
    assert norm > 0.01 and float(change) == pytest.approx(0.1 * 0.01, rel=1e-4)


def test_the_learning_rate_is_a_function_of_the_step() -> None:
    subject = learner()
    subject.begin_step(4)
    subject.forward_backward(batch(), CrossEntropy())
    assert subject.optim_step().result()["train/lr"] == pytest.approx(0.1 / 5)


def test_an_optimizer_that_draws_has_a_seed_of_its_job_and_role() -> None:
    options = [{"seed": 3}, {"seed": 4}, {"seed": 3, "prefix": "critic"}]
    optimizers: list[Any] = [learner(kind="rounding", **one).optimizer for one in options]  # type: ignore[arg-type]
    assert len({one.seed for one in optimizers} | {0}) == 4


def test_kept_outputs_cover_the_mini_batch_in_order() -> None:
    subject, data = learner(budget=4), batch()
    _, kept = subject.forward_backward(data, CrossEntropy(), keep=frozenset({"logprobs"}))
    torch.testing.assert_close(kept["logprobs"], subject.forward(data, frozenset({"logprobs"}))["logprobs"])


def test_a_non_finite_loss_or_gradient_changes_no_weight() -> None:
    subject = learner()
    with torch.no_grad():
        subject.model.trainable()["table"][2, 3] = float("inf")
    before = subject.model.trainable()["table"].detach().clone()
    with pytest.raises(TrainingDiverged, match="step 1: the loss is"):
        subject.forward_backward(batch(), CrossEntropy())
    subject = learner()
    subject.forward_backward(batch(), CrossEntropy())
    subject.model.trainable()["table"].grad[0, 0] = float("nan")  # type: ignore[index]
    before = subject.model.trainable()["table"].detach().clone()
    with pytest.raises(TrainingDiverged, match="gradient norm"):
        subject.optim_step()
    assert torch.equal(before, subject.model.trainable()["table"].detach())


def test_an_oversized_unit_runs_alone_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="runner"):
        subject = learner(budget=3)
        for _ in range(2):
            subject.forward_backward(batch(), CrossEntropy())
    assert caplog.text.count("are longer than algorithm.micro_batch_tokens=3 (the longest: 5 tokens)") == 1


@pytest.mark.parametrize("verb", ["forward", "forward_backward"])
def test_padding_counts_for_a_model_that_runs_padded(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shapes = Bigram(), []
    outputs = model.outputs
    monkeypatch.setattr(model, "is_padded", True, raising=False)
    monkeypatch.setattr(model, "outputs", lambda b, n: shapes.append(b.rows["lengths"].tolist()) or outputs(b, n))
    subject, data = learner(model, budget=8), batch([[1, 2], [3], [4, 5, 6, 7, 8], [9], [1, 2], [3, 4, 5]])
    if verb == "forward":
        subject.forward(data, frozenset({"logprobs"}))
    else:
        subject.forward_backward(data, SquaredLogprobs())
    assert shapes == [[2, 3], [1, 1, 2], [5]]
    assert all(len(lengths) * max(lengths) <= 8 for lengths in shapes)


def as_saved(subject: LocalLearner) -> State:
    """The learner's state as a checkpoint brings it back: tensors copied, everything else through JSON."""
    state = subject.state_dict()
    plain = {key: value for key, value in state.items() if key != "tensors"}
    return {**json.loads(json.dumps(plain)), "tensors": {k: v.clone() for k, v in state["tensors"].items()}}


@pytest.mark.parametrize("kind", ["adamw", "sgd", "counting"])
@pytest.mark.parametrize("cut", [1, 2])
def test_state_round_trips_to_the_same_bits(kind: str, cut: int) -> None:
    straight, first = (learner(Bigram(dropout=0.3), kind=kind) for _ in range(2))
    second = learner(Bigram(dropout=0.3), kind=kind)

    def advance(subject: LocalLearner, steps: range) -> None:
        for step in steps:
            subject.begin_step(step)
            subject.forward_backward(batch(), CrossEntropy())
            subject.optim_step()

    advance(straight, range(4))
    advance(first, range(cut))
    saved = as_saved(first)
    torch.manual_seed(99)
    second.load_state_dict(saved)
    advance(second, range(cut, 4))
    assert torch.equal(straight.model.trainable()["table"], second.model.trainable()["table"])
    assert straight.optimizer.state_dict()["param_groups"] == second.optimizer.state_dict()["param_groups"]


def test_state_of_no_parameter_is_refused_and_not_lost() -> None:
    subject = learner(kind="counting")
    subject.optimizer.state["all"] = {"times": 3}
    with pytest.raises(RunnerError, match="Counting keeps state under 'all' that cannot be saved"):
        subject.state_dict()


def test_an_optimizer_of_other_groups_is_refused() -> None:
    subject = learner()
    state = subject.state_dict()
    state["optimizer"]["groups"] *= 2
    with pytest.raises(CheckpointError, match="has other parameter groups"):
        subject.load_state_dict(state)


def test_a_checkpoint_of_another_model_is_refused() -> None:
    state = learner().state_dict()
    with pytest.raises(CheckpointError, match="differ in 1 parameters"):
        learner().load_state_dict({**state, "tensors": {**state["tensors"], "param/extra": torch.ones(1)}})
    with pytest.raises(CheckpointError, match="other parameter groups"):
        learner().load_state_dict({**state, "tensors": {**state["tensors"], "optim/step/extra": torch.ones(1)}})
    with pytest.raises(CheckpointError, match=r"table: torch.float64\[12, 12\] in the checkpoint"):
        learner(Bigram(vocab=13)).load_state_dict(state)


class Raises:
    """A loss whose second micro-batch raises, after the first one has left its gradient."""

    needs = frozenset({"logprobs"})
    calls = 0

    def __call__(self, batch: Batch, outputs: Outputs) -> Loss:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("the second one")
        return Loss(outputs["logprobs"].sum(), Metrics())


def test_a_pass_that_raises_leaves_the_gradient_as_it_was() -> None:
    one = learner(budget=5)
    for before in (None, "some"):
        if before:
            one.forward_backward(batch(), CrossEntropy())
        kept = None if one.model.table.grad is None else one.model.table.grad.clone()
        with pytest.raises(RuntimeError, match="the second one"):
            one.forward_backward(batch(), Raises())
        assert one.model.table.grad is None if kept is None else torch.equal(one.model.table.grad, kept)
        with pytest.raises(TrainingDiverged):
            one.forward_backward(with_totals(replace_weight(batch(), float("inf")), batch().totals), CrossEntropy())
        assert one.model.table.grad is None if kept is None else torch.equal(one.model.table.grad, kept)


def replace_weight(given: Batch, weight: float) -> Batch:
    return Batch({**given.tokens, "weight": given.tokens["weight"] * weight}, given.rows)


def test_passes_add_their_gradients_up() -> None:
    one, other = learner(), learner()
    for _ in range(3):
        one.forward_backward(batch(), CrossEntropy())
    other.forward_backward(batch(), CrossEntropy())
    torch.testing.assert_close(one.model.table.grad, 3 * other.model.table.grad)


def test_a_step_takes_settings() -> None:
    settings = OptimSettings(lr=0.3, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.2, clip_norm=1e-2)
    one, model = learner(), Bigram()
    reference = torch.optim.AdamW([model.table], lr=0.3, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.2)
    for _ in range(2):
        one.forward_backward(batch(), CrossEntropy())
        model.table.grad = one.model.table.grad.clone()
        torch.nn.utils.clip_grad_norm_([model.table], 1e-2)
        reference.step()
        assert one.optim_step(settings).result()["train/lr"] == 0.3
    torch.testing.assert_close(one.model.table, model.table)
