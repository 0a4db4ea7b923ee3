"""Decide whether a job's policy replays the experts that its sampler used, and hook its routers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from runner.core.errors import Problem, SpecError
from runner.interfaces import Decide, TrainableModel
from runner.model.router_replay import find_routers, replay_objection
from runner.spec.job import JobSpec

OPTION = "model.router_replay"


def hook_routers(spec: JobSpec, model: TrainableModel, decide: Decide) -> None:
    """Count the experts of the policy, or of its copy that samples, and replay them where that helps.

    Raises SpecError where experts are to be replayed, and the model has none or routers that do not support it.
    """
    asked = spec.model.router_replay
    needed = asked in ("sampler", "old")
    if not find_routers(model.inner) and not needed:
        return
    unhooked = spec.model.router_objection(spec) or replay_objection(model.inner)
    reason = spec.model.replay_objection(spec) or unhooked
    if reason and needed:
        raise SpecError([Problem(OPTION, f"{reason}; type {OPTION}=off")])
    if unhooked:
        if spec.algorithm.needs_sampler and asked == "auto":
            decide.record_fact(OPTION, "off", str(reason))
        return
    model.hook_routers()
    assert model.routing is not None
    differs = ", ".join(_differences(spec, model))
    replayed = asked == "auto" and not reason and bool(differs)
    model.routing.replays = "old" if asked == "old" else "sampler" if asked == "sampler" or replayed else None
    if asked == "auto" and spec.algorithm.needs_sampler:
        value = "sampler" if model.routing.replays else "off"
        decide.record_fact(OPTION, value, reason or differs or "sampler and trainer are one model in float32")


def _differences(spec: JobSpec, model: TrainableModel) -> Iterator[str]:
    """Why sampler and trainer may send a token to different experts."""
    if lag := spec.algorithm.steps_ahead():
        yield f"algorithm.lag={lag}: the sampler has older weights"
    if spec.launch.samplers:
        yield "the sampler is another process"
    if model.compute_dtype != torch.float32:
        yield f"{str(model.compute_dtype).removeprefix('torch.')} rounds differently in both"
