"""The models of a job: those that learn, and those that only score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.build.parts import build_frozen, build_learner, build_model
from runner.decisions import Decisions
from runner.frozen import FrozenModel
from runner.learner import LocalLearner
from runner.model.flops import ModelFlops
from runner.parallelism.world import World
from runner.protocols import Device, Model, Role
from runner.spec.job import JobSpec


@dataclass(frozen=True, slots=True)
class Models:
    """What a job computes with. model: what the first learner, `main`, trains: the policy, where there is one; flops:
    of what learns."""

    learners: Mapping[Role, LocalLearner]
    frozen: Mapping[Role, FrozenModel]
    model: Any
    flops: Mapping[Role, ModelFlops]

    @property
    def main(self) -> LocalLearner:
        """The first one that learns."""
        return next(iter(self.learners.values()))

    @property
    def all(self) -> dict[Role, Model]:
        """By role."""
        return {**self.learners, **self.frozen}


def build_models(spec: JobSpec, tokenizer: Any, device: Device, world: World, decide: Decisions) -> Models:
    """Build them: all that learn before the first learner, which may shard its own."""
    made = {
        role: build_model(spec, tokenizer, device, decide, head, world)
        for role, head in spec.algorithm.learners().items()
    }
    learners = {role: build_learner(spec, role, model, device, world, decide) for role, model in made.items()}
    model = next(iter(made.values()))
    frozen = {
        role: build_frozen(spec, role, one, model, tokenizer, device, world, decide)
        for role, one in spec.algorithm.frozen().items()
    }
    return Models(learners, frozen, model, {role: one.flops for role, one in made.items()})
