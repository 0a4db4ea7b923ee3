"""algorithm.micro_batch_tokens=null: the largest micro-batch that fits by the estimate, the same on every rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.build import micro_batch
from runner.build.micro_batch import resolve_micro_batch
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import Problem, SpecError
from runner.device.cards import CARDS, GIB, Card
from runner.device.config import CpuConfig
from runner.device.cpu import Cpu
from runner.distributed.work_partition import SINGLE_PROCESS
from runner.spec.job import JobSpec
from runner.tools.plan.budget import largest_micro_batch, with_micro_batch
from runner.tools.plan.estimate import estimate

CARD, WANTED = CARDS["H100"], "algorithm.micro_batch_tokens=null"


def job(*words: str) -> JobSpec:
    words = words or (WANTED,)
    longest = () if any(word.startswith("data.max_length") for word in words) else ("data.max_length=600",)
    given = ("+recipe=sft_demo", "device=cuda", *longest, *words)
    return compose_job(given).spec


def fits(spec: JobSpec, tokens: int, card: Card) -> bool:
    given = with_micro_batch(spec, tokens)
    return estimate(given, card).fits(card)


def test_it_is_the_largest_power_of_two_that_fits() -> None:
    spec, card = job(), CARD._replace(memory=2 * GIB)
    tokens, reason = largest_micro_batch(spec, card)
    assert 600 <= tokens < 2**17 and tokens.bit_count() == 1
    assert fits(spec, tokens, card) and not fits(spec, 2 * tokens, card)
    assert "of 2.0 GiB of the H100, by the estimate of run plan" in reason


def test_more_memory_allows_more_up_to_the_tokens_of_a_step() -> None:
    tokens, reason = largest_micro_batch(job(), CARD)
    step = 600 * job().algorithm.batch_size
    assert tokens // 2 < step <= tokens and f"more than {step} would not be faster" in reason
    assert largest_micro_batch(job(WANTED, "algorithm.batch_size=4096"), CARD)[0] == 2**17


def test_the_longest_row_is_the_least() -> None:
    tokens, reason = largest_micro_batch(job(), CARD._replace(memory=GIB // 2))
    assert tokens == 600 and "may not fit" in reason
    longer = job(WANTED, "data.max_length=9000", "model.max_positions=20000")
    tokens, reason = largest_micro_batch(longer, CARD._replace(memory=GIB // 2))
    assert tokens == 4096 and "tokens, may not fit" in reason  # the long one is a micro-batch of its own
    assert (
        largest_micro_batch(
            job(WANTED, "data.max_length=200000", "model.max_positions=200000"), CARD._replace(memory=10**15)
        )[0]
        == 200_000
    )


def test_a_pair_is_the_least_where_it_is_longer() -> None:
    spec = compose_job(("+recipe=dpo_demo", "device=cuda", "init_from=null", "data.max_length=600", WANTED)).spec
    assert largest_micro_batch(spec, CARD._replace(memory=GIB // 2))[0] == 1200


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("+recipe=tinker_demo",), "run tinker does not know its clients' rows; type a number"),
        (
            ("+recipe=sft_demo", "parallelism=ddp", "parallelism.pp=2", "launch.devices=2"),
            "the stages of parallelism.pp",
        ),
    ],
    ids=["tinker", "pp"],
)
def test_null_is_refused_where_a_number_is_needed(words: tuple[str, ...], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        compose_job((*words, WANTED))


def resolved(spec: JobSpec, device: Any) -> tuple[int | None, str]:
    found = resolve_micro_batch(spec, device, SINGLE_PROCESS, decisions := Decisions(strict=True))
    [fact] = decisions.records()["facts"]
    assert fact["feature"] == "algorithm.micro_batch_tokens"
    assert fact["value"] == str(found.algorithm.micro_batch_tokens)
    return found.algorithm.micro_batch_tokens, fact["reason"]


def test_a_cpu_takes_a_fixed_number() -> None:
    assert resolved(job(), Cpu(CpuConfig(), decide=Decisions()))[0] == 4096


@pytest.mark.parametrize("refused", [False, True])
def test_a_card_takes_what_the_plan_gives_or_says_why_not(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    card = CARD._replace(memory=2 * GIB)
    monkeypatch.setattr(micro_batch, "card_of", lambda _: CARD)
    monkeypatch.setattr(micro_batch, "device_memory", lambda _: card.memory)
    spec, device = job(), SimpleNamespace(torch_device=torch.device("cuda"))
    wanted = largest_micro_batch(spec, card)
    if refused:
        monkeypatch.setattr("runner.tools.plan.budget.estimate", raise_spec_error)
        wanted = (4096, "without an estimate: no plan of it")
    assert resolved(spec, device) == wanted


def raise_spec_error(*_: Any) -> None:
    raise SpecError([Problem("model", "no plan of it")])


def test_a_number_stays_and_is_not_said() -> None:
    spec = job("algorithm.micro_batch_tokens=64")
    found = resolve_micro_batch(spec, SimpleNamespace(), SINGLE_PROCESS, decisions := Decisions())  # type: ignore[arg-type]
    assert found is spec and not decisions.records()["facts"]
