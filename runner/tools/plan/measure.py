"""Memory of one micro-batch's passes, measured by running the job's model on the meta device.

    shape ──cut to a depth──▶ model ──forward──▶ kept until the backward pass ──backward──▶ the most there ever was

Of a deeper model or stage it is the straight line through two depths, for each of the moments in which a pass may be at
its fullest: forward and loss, the backward pass of the first layers that have their turn and of the last ones, and what
is behind it. Of the layers between, each adds or frees as much as the next, so that none of them is the fullest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from runner.core.auto_choices import Decisions
from runner.core.batch import Batch, pack
from runner.core.errors import Problem, RunnerError, SpecError
from runner.model.batch_layout import max_row_length
from runner.model.flops import is_expert
from runner.spec.base import Head
from runner.spec.job import JobSpec
from runner.tools.plan.meta_memory_tracker import META, Kind, MetaMemoryTracker, fused_attention, keep_gradients
from runner.tools.plan.model import (
    allow_meta_autocast,
    build_meta_model,
    decoder_layers,
    layer_period,
    sample_depths,
    with_depth,
)
from runner.tools.plan.rank_layout import RankLayout

BETWEEN = "layers between"
ASSUMED_LENGTH = 1024  # tokens of an item where data.max_length is null: a plan reads no data


@dataclass(frozen=True, slots=True)
class Pass:
    """Bytes of a forward and backward pass: by moment and kind; and kept between the two."""

    peaks: Mapping[str, Mapping[Kind, int]]
    kept: int

    def fullest(self, gradients: int = 0) -> Mapping[Kind, int]:
        """Its fullest moment, if so many bytes of gradients are there from passes before."""
        moments = [{**peak, "gradients": max(gradients, peak["gradients"])} for peak in self.peaks.values()]
        return max(moments, key=lambda peak: sum(peak.values()))


class Passes:
    """The passes of one learner's micro-batch on one rank, by how many layers it runs."""

    def __init__(self, spec: JobSpec, head: Head, shape: Any, spread: RankLayout) -> None:
        """shape: the transformers config of what the rank has of each layer."""
        self._spec, self._head, self._shape, self._spread = spec, head, shape, spread
        self._period = layer_period(shape, spec.model.gradient_checkpointing)
        self._known: dict[tuple[int, bool], Pass] = {}

    def at_depth(self, depth: int, *, headed: bool = True) -> Pass:
        """A pass through so many layers; without `headed`, of a stage whose hidden states go to the next one."""
        low, high = sample_depths(depth, self._period)
        if depth <= high:
            return self._run(depth, headed)
        first, second = self._run(low, headed), self._run(high, headed)
        more = (depth - high) / (high - low)

        def extrapolate(one: int, two: int) -> int:
            return two + round((two - one) * more)

        peaks = {
            moment: {kind: extrapolate(first.peaks[moment][kind], taken) for kind, taken in peak.items()}
            for moment, peak in second.peaks.items()
            if moment != BETWEEN
        }
        return Pass(peaks, extrapolate(first.kept, second.kept))

    def _run(self, depth: int, headed: bool) -> Pass:
        if (depth, headed) not in self._known:
            shape = with_depth(self._shape, depth)
            try:
                self._known[depth, headed] = _run(self._spec, self._head, shape, self._spread, headed)
            except RunnerError:
                raise
            except Exception as error:  # a model's code may fail in any way on meta tensors
                said = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
                raise unsupported_model(shape, said) from error
        return self._known[depth, headed]


def unsupported_model(shape: Any, why: str) -> SpecError:
    """The error for a family that cannot be planned. shape: its transformers config."""
    text = f"run plan does not support model_type={shape.model_type} ({why}); plan another model of this size"
    return SpecError([Problem("model", text)])


def _run(spec: JobSpec, head: Head, shape: Any, spread: RankLayout, headed: bool) -> Pass:
    model = build_meta_model(spec, head, shape)
    model.set_varlen_kernel(partial(fused_attention, dtype=model.compute_dtype), decide=Decisions())
    batch = micro_batch(spec, shape, spread.mesh.cp)
    learning = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
    stored = {name: p.element_size() for name, p in learning.items()}
    if spread.is_sharded:  # layers come from other ranks in what they compute in
        for parameter in model.module.parameters():
            parameter.data = parameter.data.to(model.compute_dtype)
    held, vocabulary = [*model.module.parameters(), *model.module.buffers()], shape.get_text_config().vocab_size
    tracker, period = MetaMemoryTracker(held, vocabulary), layer_period(shape, spec.model.gradient_checkpointing)
    with ExitStack() as during:
        for name, parameter in learning.items():
            parts = spread.experts if is_expert(name) else spread.pieces
            during.callback(keep_gradients([parameter], tracker, parts, stored[name])[0].remove)
        for handle in _moment_hooks(decoder_layers(model), tracker, period):
            during.callback(handle.remove)
        during.enter_context(allow_meta_autocast())
        during.enter_context(tracker)
        total = _total(spec, head, model, batch) if headed else _through_layers(model, batch)
        kept = tracker.now
        total.backward()
    return Pass(tracker.peaks, kept)


def _moment_hooks(blocks: Sequence[nn.Module], tracker: MetaMemoryTracker, repeats: int) -> list[RemovableHandle]:
    """Tell the tracker when a layer's backward pass begins, and when there is none any more."""

    def moment_name(at: int) -> str:
        return "first layers" if at >= len(blocks) - repeats else "last layers" if at < repeats else BETWEEN

    def register_moment(at: int, layer: nn.Module, given: Any, named_inputs: Any, out: Any) -> None:
        for value, moment in ((out, moment_name(at)), (next(iter(given), None), "end" if at == 0 else None)):
            tensor = value[0] if isinstance(value, tuple) else value
            if moment and isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda grad, moment=moment: tracker.enter(moment))

    return [
        layer.register_forward_hook(partial(register_moment, at), with_kwargs=True) for at, layer in enumerate(blocks)
    ]


def _through_layers(model: Any, batch: Batch) -> Tensor:
    """What a stage that is not the last makes of a batch: hidden states, and nothing of them."""
    return model._run_pass(lambda: model._backbone(model.shard_tokens(batch.to(META)))).sum()


def _total(spec: JobSpec, head: Head, model: Any, batch: Batch) -> Tensor:
    """What a loss of the algorithm's kind makes of the model's outputs."""
    if head == "lm" and spec.algorithm.item_kind == "sft" and not spec.algorithm.needs_sampler:
        return model.linear_loss(batch.to(META), torch.ones(batch.num_tokens))[0]
    outputs = model.outputs(batch.to(META), needed_outputs(spec, head))
    return torch.stack([value.sum() for value in outputs.values()]).sum()


def needed_outputs(spec: JobSpec, head: Head) -> frozenset[str]:
    """The outputs that the loss of a model with this head reads."""
    if head == "scalar":
        return frozenset({"values"} if spec.algorithm.needs_sampler else {"scores"})
    own = {"logprobs", "entropy"} if spec.algorithm.needs_sampler else {"logprobs"}
    return frozenset(own | ({"values"} if head == "lm+value" else set()))


def longest_row_tokens(spec: JobSpec, shape: Any) -> int:
    """Tokens of the longest row, its answer or episode included.

    shape: the transformers config of the model. An episode ends where model or sampler have no room for another turn.
    """
    longest = (spec.data.max_length or ASSUMED_LENGTH) + spec.episode_tokens()
    if spec.environment.most_turns() == 1:
        return longest
    return min(longest, spec.sampler.length_limit or longest, (max_row_length(shape) or (longest, ""))[0])


def longest_unit_tokens(spec: JobSpec, shape: Any) -> int:
    """Tokens of the longest unit, which no micro-batch divides: a row, or both rows of a pair."""
    return longest_row_tokens(spec, shape) * (2 if spec.algorithm.item_kind == "pairs" else 1)


def full_micro_batch_tokens(spec: JobSpec, shape: Any) -> int:
    """Tokens of the largest micro-batch: a unit above algorithm.micro_batch_tokens is one of its own."""
    return max(spec.algorithm.micro_batch_budget, longest_unit_tokens(spec, shape))


def micro_batch(spec: JobSpec, shape: Any, ranks: int = 1) -> Batch:
    """A full micro-batch of the longest rows, or the tokens that one of `ranks` has of it."""
    budget = -(-full_micro_batch_tokens(spec, shape) // ranks)
    row = min(longest_row_tokens(spec, shape), budget)
    lengths = [row] * (budget // row)
    if rest := budget - sum(lengths):
        lengths.append(rest)
    return pack([[0] * n for n in lengths], [[1.0] * n for n in lengths])
