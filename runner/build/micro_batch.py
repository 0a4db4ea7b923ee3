"""The tokens of a micro-batch where algorithm.micro_batch_tokens is null: what fits the device."""

from __future__ import annotations

from runner.core.device_kinds import CPU
from runner.core.errors import EnvironmentProblem, SpecError
from runner.device.cards import CARDS, DEFAULT_CARDS, Card, find_card
from runner.distributed.work_partition import run_on_rank0
from runner.interfaces import Decide, Device, RankCollectives
from runner.parallelism.apply import device_memory
from runner.spec.job import JobSpec
from runner.spec.registry import resolve


def resolve_micro_batch(spec: JobSpec, device: Device, everyone: RankCollectives, decide: Decide) -> JobSpec:
    """The spec with a number of tokens, which rank 0 estimates for the smallest device."""
    if spec.algorithm.micro_batch_tokens is not None:
        return spec
    memory = min(everyone.all_gather(device_memory(device.torch_device)))
    tokens, reason = run_on_rank0(everyone, lambda: _micro_batch(spec, device, memory))
    decide.record_fact("algorithm.micro_batch_tokens", str(tokens), reason)
    algorithm = spec.algorithm.model_copy(update={"micro_batch_tokens": tokens})
    return spec.model_copy(update={"algorithm": algorithm})


def _micro_batch(spec: JobSpec, device: Device, memory: int) -> tuple[int, str]:
    if device.torch_device.type == CPU.name:
        return spec.algorithm.micro_batch_budget, "on a CPU, whose memory other programs use too"
    card = card_of(device)._replace(memory=memory)
    try:
        return resolve("runner.tools.plan.budget:largest_micro_batch")(spec, card)  # type: ignore[no-any-return]
    except (EnvironmentProblem, SpecError) as error:
        reason = error.problems[0].message if isinstance(error, SpecError) else str(error).splitlines()[0]
        return spec.algorithm.micro_batch_budget, f"without an estimate: {reason}"


def card_of(device: Device) -> Card:
    """The device's card, or the usual one of its kind."""
    name = device.describe()["card"]
    return (find_card(name) or CARDS[DEFAULT_CARDS[device.torch_device.type]])._replace(name=name)
