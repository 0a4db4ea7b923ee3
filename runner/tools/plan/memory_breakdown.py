"""What one rank holds in each phase of a step, term by term, in bytes.

phases of a step        always there                              and in it
update                  weights, optimizer state, frozen models   activations, logits, gradients, what is exchanged
optimizer               the same                                  all gradients, and temporaries
sampling                the same                                  keys and values, logits, weights, or an engine
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from runner.model.flops import key_value_size
from runner.model.initial_weights import DTYPES
from runner.spec.job import JobSpec
from runner.tools.plan.measure import Passes, full_micro_batch_tokens
from runner.tools.plan.model import published_config
from runner.tools.plan.rank_layout import (
    MemoryTerm,
    ModelWeights,
    ParameterCount,
    RankLayout,
    StageLayout,
    StepPhase,
    model_weights,
)
from runner.tools.plan.rollout_memory import EngineMemory, engine_sleep_level, torch_sampler_terms
from runner.tools.plan.traffic import compute_dtype, local_heads


@dataclass(frozen=True)
class MemoryBreakdown:
    """A job's memory on one rank of a stage.

    shape: the transformers config of the whole model; whole, own: by role, its weights, and what slices have of them;
    passes: those of a micro-batch; frozen: bytes of models that only score; cuts: micro-batches of a step; engine: the
    one that samples beside the rank, if one does
    """

    spec: JobSpec
    shape: Any
    spread: RankLayout
    stage: StageLayout
    whole: Mapping[str, ModelWeights]
    own: Mapping[str, ModelWeights]
    passes: Mapping[str, Passes]
    frozen: Sequence[MemoryTerm]
    cuts: int
    engine: EngineMemory | None

    def phases(self) -> list[StepPhase]:
        """All phases that the job has, without terms of no bytes."""
        held = [*self._held_terms(), *self.frozen]
        engine = self.engine.terms() if self.engine else []
        always = [] if engine_sleep_level(self.spec) else engine
        found = [
            StepPhase("update", [*held, *self._pass_terms(), *always]),
            StepPhase("optimizer", [*held, *self._optimizer_terms(), *always]),
        ]
        if self.engine:
            found.append(StepPhase("sampling", [*held, *engine]))
        elif self.spec.sampler.shares_model and not self.spec.launch.samplers:
            found.append(StepPhase("sampling", [*held, *self._sampling_terms()]))
        return [StepPhase(phase.name, [term for term in phase.terms if term.bytes]) for phase in found]

    def host(self) -> list[MemoryTerm]:
        """What a rank keeps in its host's memory meanwhile, as far as it follows from the job's options."""
        trainable, size = self._trained_bytes(), compute_dtype(self.spec).itemsize
        states = trainable + self._state_bytes()
        pieces = sum(part.bytes for part in self._parts().values()) + states
        inputs = len(self.stage.layers) * self._tokens() * self.shape.get_text_config().hidden_size * size
        asleep = self.engine.weights if self.engine and engine_sleep_level(self.spec) == 1 else 0
        copied = self.spec.checkpoint.every > 0 and self.spec.checkpoint.asynchronous is not False
        found = [
            MemoryTerm("shards, their gradients and optimizer state", pieces if self.spread.offloaded else 0),
            MemoryTerm("layers' inputs", inputs if self.spec.model.activation_offloading else 0),
            MemoryTerm("a copy of the state for a checkpoint", states if copied else 0),
            MemoryTerm("the weights of a sleeping engine", asleep),
        ]
        return [term for term in found if term.bytes]

    def _parts(self) -> dict[str, ParameterCount]:
        return {role: self.spread.rank_share(one, self.stage) for role, one in self.own.items()}

    def _trained_bytes(self) -> int:
        return sum(part.trained_bytes for part in self._parts().values())

    def _state_bytes(self) -> int:
        """Bytes that the optimizer keeps of what learns."""
        optimizer, found = self.spec.optimizer, 0.0
        for role, part in self._parts().items():
            size = part.trained_bytes // max(part.trained, 1)
            ends = (self.spread.stage_parts(self.own[role], self.stage).ends / self.spread.pieces).trained
            inside = max(0, part.trained - ends)
            found += inside * optimizer.state_bytes(size) + ends * optimizer.state_bytes(size, end=True)
        return round(found)

    def _held_terms(self) -> list[MemoryTerm]:
        """What a rank holds from the first step to the last."""
        ahead = self.spec.algorithm.steps_ahead()
        here = ahead and self.spec.sampler.shares_model and not self.spec.launch.samplers
        copies = (ahead + 1) * next(iter(self.own.values())).all.trained_bytes if here else 0
        versions = MemoryTerm("weight versions for algorithm.lag", copies)
        if self.spread.offloaded:
            return [versions]
        trainable = self._trained_bytes()
        return [
            MemoryTerm("trainable weights", trainable),
            MemoryTerm("frozen weights", sum(part.frozen_bytes for part in self._parts().values())),
            MemoryTerm("optimizer state", self._state_bytes()),
            versions,
        ]

    def _tokens(self) -> int:
        """Tokens of a micro-batch that the rank computes."""
        return ceil(full_micro_batch_tokens(self.spec, self.shape) / self.spread.mesh.cp)

    def _pass_terms(self) -> list[MemoryTerm]:
        """What forward and backward passes take, of the model whose passes take most."""
        depth = max(end - start for start, end in self.stage.runs)
        before = {role: part.trained_bytes if self.cuts > 1 else 0 for role, part in self._parts().items()}  # gradients
        whole = {role: passes.at_depth(depth, headed=self.stage.last) for role, passes in self.passes.items()}
        fullest = {role: one.fullest(before[role]) for role, one in whole.items()}
        role = max(fullest, key=lambda one: sum(fullest[one].values()))
        taken = fullest[role]
        more = self.stage.runs_in_flight(self.spread.mesh.pp, self.cuts) - 1
        waiting = more * self.passes[role].at_depth(depth, headed=False).kept if more else 0
        gathered = self.spread.gathered_part(self.own[role], self.stage)
        accumulated = self.spread.accumulated_bytes(self.own[role], self.stage)
        return [
            MemoryTerm("activations", taken["activations"]),
            MemoryTerm("activations of micro-batches in flight", waiting),
            MemoryTerm("logits", taken["logits"]),
            MemoryTerm("gradients", 0 if self.spread.offloaded else taken["gradients"]),
            MemoryTerm("layers gathered by FSDP", gathered.gathered_bytes(compute_dtype(self.spec).itemsize)),
            MemoryTerm("gradients before their sum", accumulated if self.cuts > 1 else 0),
            MemoryTerm("gradients in communication", gathered.trained_bytes),
            *self._exchange_terms(),
        ]

    def _exchange_terms(self) -> list[MemoryTerm]:
        """Buffers of messages in a pass: context parallel, between stages, and to evenly chosen experts."""
        mesh, inner = self.spread.mesh, self.shape.get_text_config()
        numbers = self._tokens() * compute_dtype(self.spec).itemsize
        heads, kv = local_heads(inner, self.spread)
        travelling = 2 * kv if self.spread.ring else heads + 2 * kv
        taken = getattr(inner, "num_experts_per_tok", 0) or 0
        kept = 0 if self.spec.model.gradient_checkpointing else len(self.stage.layers)  # what came back, for routers
        return [
            MemoryTerm("rows exchanged", numbers * travelling * key_value_size(inner) if mesh.cp > 1 else 0),
            MemoryTerm(
                "tokens sent to experts", numbers * taken * inner.hidden_size * (2 + kept) if mesh.ep > 1 else 0
            ),
            MemoryTerm("hidden states of other stages", 2 * numbers * inner.hidden_size if mesh.pp > 1 else 0),
        ]

    def _optimizer_terms(self) -> list[MemoryTerm]:
        """What an optimizer step takes: of the model that learns most, because each steps alone."""
        if self.spread.offloaded:
            return []
        largest = max(part.trained_bytes for part in self._parts().values())
        beside = largest if self.spec.optimizer.updates_all_at_once else 0
        return [MemoryTerm("gradients", largest), MemoryTerm("temporaries of the optimizer", beside)]

    def _sampling_terms(self) -> list[MemoryTerm]:
        """Memory of sampling with the model itself, gathered for it; each rank samples a part."""
        role, whole = next(iter(self.whole.items()))
        here = 0 if self.spread.offloaded else self._parts()[role].bytes
        gathered = MemoryTerm("weights gathered from other ranks", max(0, whole.all.bytes - here))
        return [*torch_sampler_terms(self.spec, self.shape, self.spec.launch.world), gathered]


def frozen_model_terms(
    spec: JobSpec, shape: Any, spread: RankLayout, number: int
) -> tuple[list[MemoryTerm], list[str]]:
    """Frozen models on a rank of stage `number`, and what is not counted. shape: of tensor shards."""
    terms, left_out = [], []
    for role, one in spec.algorithm.frozen_models().items():
        way = one.mode or ("copy" if spec.adapter.trains_base else "adapter")
        if one.path is not None and one.path.startswith("recipe:"):
            left_out.append(f"the {role} of {one.path}, which does not exist yet")
        elif one.path is not None:
            other = model_weights(spec, "lm", published_config(one.path, one.revision)[0], trains=False)
            size = DTYPES[one.dtype or spec.model.compute_dtype].itemsize
            terms.append(MemoryTerm(role, _scoring_share(other, spread, number).frozen * size // spread.mesh.tp))
        elif way == "copy":
            same = model_weights(spec, "lm", shape, trains=False)
            terms.append(MemoryTerm(role, _scoring_share(same, spread, number).frozen_bytes))
    if spec.reward.runs_model:
        left_out.append("the reward model")
    if spec.environment.most_turns() > 1 and spec.environment.episode_token_limit() is None:
        left_out.append("the environment's messages, which may lengthen an episode up to the model's limit")
    if spec.sampler.served:
        left_out.append("the server of sampler=server")
    return terms, left_out


def _scoring_share(model: ModelWeights, spread: RankLayout, number: int) -> ParameterCount:
    return spread.rank_share(model, spread.stages(len(model.layers))[number])
