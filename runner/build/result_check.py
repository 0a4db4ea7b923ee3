"""Checks what a plug-in's component returns: type, shape, data type and whether it is finite.

    factory ──▶ the adapter's model, data, environments, optimizer, sampler ──first items, turns, step, answers──▶ fault

Observations are checked at each turn, all else once per run. Components of this project are not checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from runner.core.errors import Problem, SpecError
from runner.core.media import MEDIA_ID
from runner.distributed.dtensor_utils import local_tensor
from runner.interfaces import (
    Environment,
    EnvironmentFactory,
    LabeledCompletion,
    Observation,
    PreferencePair,
    Prompt,
    Request,
    Rollout,
    SamplerWrapper,
    TokenizedExample,
)
from runner.spec.base import ComponentConfig, ItemKind
from runner.spec.registry import default_registry, resolve, source_location

ITEMS: Mapping[ItemKind, tuple[type, tuple[str, ...]]] = {  # and its sequences of ids
    "sft": (TokenizedExample, ("ids",)),
    "pairs": (PreferencePair, ("prompt", "chosen", "rejected")),
    "judged": (LabeledCompletion, ("prompt", "completion")),
    "prompts": (Prompt, ("ids",)),
}
FIRST_ITEMS = 8


def build_component(config: ComponentConfig, *given: Any, **options: Any) -> Any:
    """What the factory of a component returns for these arguments; see `check_result`."""
    made = default_registry().factory(config)(config, *given, **options)
    return made if type(config).factory.startswith("runner.") else check_result(config, made, *given, **options)


def check_result(config: ComponentConfig, made: Any, *given: Any, **options: Any) -> Any:
    """What a factory returned for these arguments, with the checks that come with its first use.

    Raises SpecError, which names file and function, for something else than the component has to return.
    """
    return CHECKS[config.group](_Check(config), made, *given, **options)


@dataclass(frozen=True, slots=True)
class _Check:
    """Requirements on a component's results."""

    config: Any

    def require(self, condition: bool, fault: str, function: Any = None) -> None:
        """Raise SpecError with the fault of a function, by default the factory, unless the condition holds."""
        if condition:
            return
        kind, where = self.config.group, source_location(function or resolve(type(self.config).factory))
        text = f"{kind}={self.config.component_name()} of a plug-in ({where}): {fault}"
        raise SpecError([Problem(kind, f"{text}; runner.testing.check_{kind} tests the component")])


def _check_adapter(check: _Check, made: Any, model: Any, **_: Any) -> Any:
    wanted = "expected the model with its adapter, as model.with_peft_module returns it"
    check.require(isinstance(made, type(model)), f"{wanted}, got {type(made).__name__}")
    check.require(bool(made.trainable()), "nothing is trainable in the model that it returned")
    check.require(_are_finite(made.trainable()), "trainable parameters are not finite (NaN or infinity)")
    return made


def _are_finite(parameters: Mapping[str, torch.Tensor]) -> bool:
    return all(bool(local_tensor(p).isfinite().all()) for p in parameters.values() if not p.is_meta)


def _check_optimizer(check: _Check, made: Any, *, parameters: Mapping[str, nn.Parameter], **_: Any) -> Any:
    check.require(isinstance(made, torch.optim.Optimizer), f"expected a torch optimizer, got {type(made).__name__}")
    held = [id(p) for group in made.param_groups for p in group["params"]]
    wanted = f"each of {len(parameters)} parameters is in one group, and in no other; got {len(held)}"
    check.require(sorted(held) == sorted(map(id, parameters.values())), wanted)
    kinds = [(p.shape, p.dtype) for p in parameters.values()]

    def check_step(*_: object) -> None:
        hook.remove()
        same = [(p.shape, p.dtype) for p in parameters.values()] == kinds
        check.require(same, "its first step changed the shape or data type of parameters", made.step)
        check.require(_are_finite(parameters), "its first step made parameters that are not finite", made.step)

    hook = made.register_step_post_hook(check_step)
    return made


def _check_data(check: _Check, made: Any, *, tokenizer: Any, kind: ItemKind, **_: Any) -> Any:
    types: Mapping[str, Any] = {"fingerprint": str, "prompt_style": str, "longest": int, "columns": Collection}
    for name, wanted in {**types, **dict.fromkeys(("__len__", "take", "held_out_questions"), Callable)}.items():
        value = getattr(made, name, None)
        check.require(isinstance(value, wanted), f"{name} of the data: expected {wanted.__name__}, got {value!r:.80}")
    count, (cls, sequences) = min(len(made), FIRST_ITEMS), ITEMS[kind]
    items = made.take(0, count)
    fits = len(items) == count > 0 and all(isinstance(item, cls) for item in items)
    check.require(fits, f"expected {max(count, 1)} items {cls.__name__} from take(0, {count}), got {items!r:.200}")
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    for item in items:
        fits = all(_are_ids(getattr(item, name), vocab_size) for name in sequences)
        check.require(fits, f"expected ids from 0 to {vocab_size - 1}, got {item!r:.200}", made.take)
        fits = kind != "sft" or _are_numbers(item.weights, len(item.ids))
        check.require(fits, f"expected one finite weight for each id, got {item!r:.200}", made.take)
    return made


def _are_ids(ids: Any, vocab_size: int) -> bool:
    """Whether these are token ids; places of images are none of the vocabulary's."""
    sequence = isinstance(ids, Sequence) and all(isinstance(one, int) for one in ids)
    return sequence and all(0 <= one < vocab_size or one >= MEDIA_ID for one in ids)


def _are_numbers(numbers: Any, size: int) -> bool:
    return len(numbers) == size and all(map(math.isfinite, numbers))


class _CheckedEnvironment:
    """An environment whose answers are checked."""

    def __init__(self, environment: Environment, check: _Check) -> None:
        self._environment, self._check = environment, check
        self.reset = environment.reset

    def step(self, answer: str) -> Observation | None:
        """See `Environment`."""
        said: Any = self._environment.step(answer)
        texts = [said.role, said.text] if isinstance(said, Observation) else [said]
        fits = said is None or (all(isinstance(text, str) for text in texts) and len(texts) == 2)
        wanted = f"step() returns Observation(role, text), or None at the end of the episode; got {said!r:.200}"
        self._check.require(fits, wanted, self._environment.step)
        return said  # type: ignore[no-any-return]


def _check_environment(check: _Check, made: Any, **_: Any) -> Any:
    text = f"expected EnvironmentFactory(make, max_turns), got {made!r:.200}"
    check.require(isinstance(made, EnvironmentFactory), text)
    most = check.config.most_turns()
    text = f"most_turns() is {most}, and the factory has max_turns={made.max_turns}; they are equal, and above 1"
    check.require(made.max_turns == most > 1, text)
    return replace(made, make=lambda: _CheckedEnvironment(made.make(), check))


class _CheckedSampler(SamplerWrapper):
    """A sampler whose first answers are checked."""

    def __init__(self, sampler: Any, check: _Check, vocab_size: int) -> None:
        super().__init__(sampler)
        self._check, self._vocab_size, self._is_checked = check, vocab_size, False

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        """See `Sampler`."""
        rollouts = super().sample(requests)
        if requests and not self._is_checked:
            self._check_rollouts(requests, rollouts)
            self._is_checked = True
        return rollouts

    def _check_rollouts(self, requests: Sequence[Request], rollouts: Any) -> None:
        count = len(rollouts)
        fits = count == len(requests) and all(isinstance(one, Rollout) for one in rollouts)
        wanted = f"expected a Rollout for each of {len(requests)} requests, not {count}: {rollouts!r:.200}"
        self._check.require(fits, wanted, self._sampler.sample)
        for request, one in zip(requests, rollouts, strict=True):
            size, raw = len(one.ids), one.logprobs if one.raw_logprobs is None else one.raw_logprobs
            fits = _are_ids(one.ids, self._vocab_size) and 1 <= size <= request.max_new_tokens
            wanted = f"expected 1 to {request.max_new_tokens} ids from 0 to {self._vocab_size - 1}"
            self._check.require(fits, f"{wanted}, got {one!r:.200}", self._sampler.sample)
            fits = _are_numbers(one.logprobs, size) and _are_numbers(raw, size)
            wanted = "expected finite logprobs and raw_logprobs, one for each id"
            self._check.require(fits, f"{wanted}, got {one!r:.200}", self._sampler.sample)
            wanted = f"expected finish stop or length, got {one.finish!r}"
            self._check.require(one.finish in ("stop", "length"), wanted, self._sampler.sample)


def _check_sampler(check: _Check, made: Any, *, model: Any, **_: Any) -> Any:
    names = [name for name in vars(SamplerWrapper) if not name.startswith("_") and name != "set_weight_source"]
    missing = [name for name in names if not hasattr(made, name)]
    check.require(not missing, f"expected a sampler, got {type(made).__name__} without {', '.join(missing)}")
    return _CheckedSampler(made, check, model.limits().vocab_size)


CHECKS: Mapping[str, Callable[..., Any]] = {
    "adapter": _check_adapter,
    "data": _check_data,
    "environment": _check_environment,
    "optimizer": _check_optimizer,
    "sampler": _check_sampler,
}
