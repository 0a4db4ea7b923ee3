"""Distillation as a whole: real models, the gradient of the formula written out, and what must not change it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.algorithm.config import DistillConfig
from runner.algorithm.distillation import build, common_vocab_logits
from runner.algorithm.sft import PackedAlgorithm
from runner.build.components import Models, build_tokenizer
from runner.build.data import build_data
from runner.build.evaluation import build_evaluation
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.batch import Batch
from runner.core.errors import SpecError
from runner.interfaces import EvalQuestion, Outputs, TokenizedExample
from runner.interfaces.learning import AlgorithmInputs
from runner.model.causal_lm import CausalLM
from runner.model.config import TinyConfig
from runner.model.tiny import byte_tokenizer
from runner.trainer.learner import LocalLearner
from runner.trainer.reference_model import FrozenModel
from tests.algorithm.harness import silent
from tests.model.test_chunked_lm_head import Largest
from tests.model.zoo import CPU, module
from tests.parallelism.worlds import alone

WHOLE = 10**6
TEACHER = "a/teacher"  # the tests hand over a model; nothing is loaded by this name
WORD = (3, 9, 27, 81, 243, 5, 25, 125)


def row(length: int, shift: int, learnt: float = 1.0) -> TokenizedExample:
    """Tokens of which the last two thirds are trained on."""
    ids = tuple(WORD[(t + shift) % len(WORD)] + shift for t in range(length))
    return TokenizedExample(ids, tuple(learnt * (t > length // 3) for t in range(length)))


ITEMS = [row(7, 0), row(12, 3), row(2, 5), row(9, 1, 0.5), row(17, 2), row(4, 4)]


class Rows:
    """The items above, in their order."""

    fingerprint = "rows"

    def __len__(self) -> int:
        return len(ITEMS)

    def take(self, step: int, count: int, round: int = 0) -> Sequence[TokenizedExample]:
        return [ITEMS[(step * count + i) % len(ITEMS)] for i in range(count)]

    def held_out_questions(self) -> Sequence[EvalQuestion]:
        return ()

    def held_out_items(self) -> Sequence[TokenizedExample]:
        return ()


class Counted(FrozenModel):
    """A teacher that notes how many rows of logits, and how many tokens' hidden states, it was asked for at once."""

    most = states = 0
    types: frozenset[torch.dtype] = frozenset()

    def forward_local(self, batch: Batch, needs: frozenset[str]) -> Outputs:
        found = super().forward_local(batch, needs)
        self.states, self.types = max(self.states, batch.num_tokens), self.types | {found["hidden"].dtype}
        return found

    def lm_head(self) -> Any:
        inner = super().lm_head()

        def logits(hidden: Tensor) -> Tensor:
            self.most = max(self.most, len(hidden))
            return inner(hidden)

        return logits


def model_of(kind: str, seed: int, chunk: int, **architecture: Any) -> CausalLM:
    made = module(kind, seed, **architecture)
    config = TinyConfig(lm_head_chunk_tokens=chunk)
    return CausalLM(made, byte_tokenizer(512), config, seed=seed, decide=Decisions())


def student_of(kind: str = "qwen2", chunk: int = 4, **architecture: Any) -> CausalLM:
    return model_of(kind, 1, chunk, **architecture)


def teacher_of(kind: str = "qwen3", **architecture: Any) -> Counted:
    """Another architecture than the student's, wider and with more rows in its head."""
    wider = {"hidden_size": 48, "vocab_size": 320} | architecture
    return Counted(model_of(kind, 2, 2048, **wider), budget=WHOLE, device=CPU)


def learner_of(model: CausalLM, budget: int = WHOLE) -> LocalLearner:
    optimizer = torch.optim.SGD(model.trainable().values(), lr=0.1)
    options: dict[str, Any] = {"lr": 0.1, "clip_norm": None, "factor": lambda _: 1.0, "seed": 0, "device": CPU}
    return LocalLearner(model, optimizer, budget=budget, **options)


def algorithm_of(config: DistillConfig, teacher: FrozenModel) -> PackedAlgorithm:
    return build(config, AlgorithmInputs(Rows(), byte_tokenizer(512), 0, silent, frozen_models={"teacher": teacher}))


def gradients(
    config: DistillConfig, student: CausalLM, teacher: FrozenModel, budget: int = WHOLE
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Summed over the mini-batches of the first step, and the metrics."""
    algorithm, learner = algorithm_of(config, teacher), learner_of(student, budget)
    learner.begin_step(0)
    for batch in algorithm.prepare(algorithm.collect(0), {"teacher": teacher}):
        metrics, _ = learner.forward_backward(batch, algorithm.losses["policy"])
    return {n: p.grad.clone() for n, p in student.trainable().items() if p.grad is not None}, metrics.result()


def all_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """float64 [T, V] of one row by itself, through the model's own forward."""
    with model._own_attention():
        logits: Tensor = model.causal.double()(input_ids=torch.tensor([ids])).logits[0]
    return logits


def written_out(config: DistillConfig, student: CausalLM, teacher: CausalLM) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and its gradient in float64, from all logits, with the formulas in another form."""
    total, tokens, heat = torch.zeros((), dtype=torch.float64), 0, config.temperature
    for item in ITEMS:
        ours, theirs = all_logits(student, item.ids), all_logits(teacher, item.ids).detach()
        size = min(ours.shape[1], theirs.shape[1])
        for t, weight in enumerate(item.weights):
            if not weight:
                continue
            p = torch.softmax(theirs[t - 1, :size] / heat, -1)
            q = torch.softmax(ours[t - 1, :size] / heat, -1)
            if config.top_k is not None:
                top = p.argsort(descending=True)[: config.top_k]
                p, q = (torch.cat([one[top], 1 - one[top].sum()[None]]) for one in (p, q))
            beta = 0.5 if config.beta is None else config.beta
            m = beta * p + (1 - beta) * q
            divergence = {
                "forward_kl": (p * (p / q).log()).sum(),
                "reverse_kl": (q * (q / p).log()).sum(),
                "jsd": beta * (p * (p / m).log()).sum() + (1 - beta) * (q * (q / m).log()).sum(),
            }[config.divergence]
            nll = -torch.log_softmax(ours[t - 1], -1)[item.ids[t]]
            total, tokens = total + weight * (heat**2 * divergence + config.sft_coef * nll), tokens + 1
    total = total / tokens
    parameters = {n: p for n, p in student.trainable().items() if p.requires_grad}
    found = torch.autograd.grad(total, list(parameters.values()))
    return total, dict(zip(parameters, found, strict=True))


OPTIONS: dict[str, dict[str, Any]] = {
    "forward": {},
    "reverse, hot": {"divergence": "reverse_kl", "temperature": 2.0},
    "jsd, beside cross-entropy": {"divergence": "jsd", "beta": 0.3, "sft_coef": 0.7, "temperature": 1.5},
    "top 5": {"top_k": 5, "temperature": 0.8},
    "jsd of top 3": {"divergence": "jsd", "top_k": 3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_gradient_is_that_of_the_formula_written_out(name: str) -> None:
    config = DistillConfig(teacher=TEACHER, batch_size=len(ITEMS), **OPTIONS[name])
    student, teacher = student_of(), teacher_of()
    got, metrics = gradients(config, student, teacher)
    total, wanted = written_out(config, student, teacher.model)
    assert metrics["train/loss"] == pytest.approx(float(total.detach()), rel=1e-5)
    assert got.keys() == wanted.keys()
    for parameter, gradient in wanted.items():
        error = float((got[parameter].double() - gradient).norm())
        assert error <= 1e-4 * float(gradient.norm()) + 1e-7, parameter


def test_cutting_changes_no_gradient() -> None:
    config = DistillConfig(teacher=TEACHER, batch_size=len(ITEMS), divergence="jsd", sft_coef=0.5)
    wanted, metrics = gradients(config, student_of(chunk=WHOLE), teacher_of())
    for budget, chunk in ((1, 4), (20, 1), (WHOLE, 7)):
        got, same = gradients(config, student_of(chunk=chunk), teacher_of(), budget)
        assert same == pytest.approx(metrics, rel=1e-5)
        for name in wanted:
            assert float((got[name] - wanted[name]).norm()) <= 1e-5 * float(wanted[name].norm()) + 1e-8, name


def test_mini_batches_each_divide_by_their_own_tokens() -> None:
    config = DistillConfig(teacher=TEACHER, batch_size=6, mini_batches=2)
    teacher = teacher_of()
    algorithm = algorithm_of(config, teacher)
    batches = list(algorithm.prepare(algorithm.collect(0), {"teacher": teacher}))
    learnt = [sum(w > 0 for item in part for w in item.weights[1:]) for part in (ITEMS[:3], ITEMS[3:])]
    assert [batch.totals["tokens"] for batch in batches] == learnt
    assert teacher.states == 0, "the teacher is asked when a micro-batch is trained on"


def test_hidden_states_of_one_micro_batch_exist_at_once_in_the_teachers_data_type() -> None:
    config = DistillConfig(teacher=TEACHER, batch_size=len(ITEMS))
    teacher = teacher_of()
    teacher.model.module.to(torch.bfloat16)
    gradients(config, student_of(), teacher, budget=20)
    assert 0 < teacher.states <= 20 < sum(len(item.ids) for item in ITEMS)
    assert teacher.types == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_without_gradient_the_terms_are_those_that_are_learnt(kind: str) -> None:
    config = DistillConfig(teacher=TEACHER, batch_size=len(ITEMS), sft_coef=0.5, divergence="jsd")
    student, teacher = student_of(kind), teacher_of()
    algorithm, subject = algorithm_of(config, teacher), learner_of(student, budget=20)
    [batch] = algorithm.prepare(algorithm.experience(ITEMS), {})
    loss = algorithm.losses["policy"]
    found = subject.measure(batch, loss)
    assert all(p.grad is None for p in student.trainable().values())
    wanted, _ = subject.forward_backward(batch, loss)
    assert loss(batch, found).metrics.result() == pytest.approx(wanted.result(), rel=1e-5)


def test_of_neither_model_are_all_logits_ever_held() -> None:
    config = DistillConfig(teacher=TEACHER, batch_size=len(ITEMS), sft_coef=0.5, top_k=3)
    shape = {"vocab_size": 5000, "hidden_size": 8, "intermediate_size": 16}
    student, teacher = student_of(chunk=4, **shape), teacher_of("llama", **shape)
    learnt = sum(w > 0 for item in ITEMS for w in item.weights[1:])
    with Largest() as watched:
        gradients(config, student, teacher)
    assert teacher.most == 4, "rows of the teacher's logits"
    assert watched.elements == 8 * 5000 < learnt * 5000, "the weights' gradients are the largest tensors"


@pytest.mark.parametrize("kind", ["gemma2", "granite"])
def test_a_student_that_changes_its_logits_learns_from_what_they_are(kind: str) -> None:
    config = DistillConfig(teacher=TEACHER, batch_size=len(ITEMS))
    student, teacher = student_of(kind), teacher_of()
    got, _ = gradients(config, student, teacher)
    _, wanted = written_out(config, student, teacher.model)
    for name, gradient in wanted.items():
        assert float((got[name].double() - gradient).norm()) <= 1e-4 * float(gradient.norm()) + 1e-7, name


def test_a_teacher_that_changes_its_logits_is_refused_and_not_misread() -> None:
    with pytest.raises(SpecError, match=r"algorithm\.teacher: the logits of Gemma2ForCausalLM .* algorithm=opd"):
        algorithm_of(DistillConfig(teacher=TEACHER), teacher_of("gemma2"))


def test_a_top_k_that_leaves_nothing_out_is_refused() -> None:
    teacher = teacher_of()
    algorithm_of(DistillConfig(teacher="x", top_k=258), teacher)
    with pytest.raises(SpecError, match=r"algorithm\.top_k: the tokenizer has only 259 tokens, so 259 selects all"):
        algorithm_of(DistillConfig(teacher="x", top_k=259), teacher)


def test_ids_that_only_one_of_the_two_has_do_not_count() -> None:
    wide, narrow = torch.randn(3, 9), torch.randn(3, 7)
    for one, other in ((wide, narrow), (narrow, wide)):
        left, right = common_vocab_logits(one, other)
        assert torch.equal(left, one[:, :7]) and torch.equal(right, other[:, :7])


def test_a_student_that_is_its_teacher_has_nothing_to_learn() -> None:
    config = DistillConfig(teacher=TEACHER, batch_size=len(ITEMS))
    student = student_of()
    found, metrics = gradients(config, student, FrozenModel(student_of(), budget=9, device=CPU))
    assert metrics["distill/divergence"] == pytest.approx(0, abs=1e-6)
    assert all(float(gradient.abs().max()) < 1e-5 for gradient in found.values())
    assert "distill/nll" not in metrics


def test_a_step_without_a_learnt_token_has_a_gradient_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.algorithm.distillation.test_offline.ITEMS", [TokenizedExample((1, 2, 3), (0.0, 0.0, 0.0))]
    )
    found, _ = gradients(DistillConfig(teacher=TEACHER, batch_size=1), student_of(), teacher_of())
    assert found and all(not gradient.any() for gradient in found.values())


def test_held_out_answers_have_a_divergence_beside_the_numbers_of_every_policy(workdir: Path) -> None:
    words = ["model=tiny", "data=demo", "data.items=16", "data.held_out=6", "evaluation.max_new_tokens=8"]
    spec = compose_job([*words, "algorithm=distill", f"algorithm.teacher={TEACHER}", "algorithm.sft_coef=0.5"]).spec
    data = build_data(spec, build_tokenizer(spec, Decisions()), Decisions())
    student, teacher = student_of(), teacher_of()
    subject = learner_of(student, budget=100)
    config: Any = spec.algorithm
    algorithm: Any = build(
        config, AlgorithmInputs(data, student.tokenizer, 0, silent, frozen_models={"teacher": teacher})
    )
    models = Models({"policy": subject}, {"teacher": teacher}, student, {})
    evaluate = build_evaluation(spec, data, models, algorithm, alone(), None, Decisions())
    assert evaluate is not None
    report = evaluate()
    [batch] = algorithm.prepare(algorithm.experience([q.item for q in data.held_out_questions()]), models.by_role)
    wanted, _ = subject.forward_backward(batch, algorithm.losses["policy"])
    for name in ("divergence", "nll"):
        assert report.values[f"eval/{name}"] == pytest.approx(wanted.result()[f"distill/{name}"], rel=1e-5)
    assert report.values["eval/loss"] == pytest.approx(report.values["eval/nll"], rel=1e-5), "as of every policy"
    assert "eval/exact_match" in report.values and len(report.samples) == 6
