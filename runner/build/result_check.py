"""What a plug-in's component returns, checked before it is used: type, shape, data type and whether it is finite.

    factory ──▶ the adapter's model, data, environments, optimizer, sampler ──first items, turns, step, answers──▶ fault

Observations are checked at each turn, all else once per run. Components of this project are not checked.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

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
from runner.spec.registry import default_registry

Refuse = Callable[[Any, str], NoReturn]  # raises SpecError; with the function that returned it, and what is wrong
ITEMS: Mapping[ItemKind, tuple[type, tuple[str, ...]]] = {  # and its sequences of ids
    "sft": (TokenizedExample, ("ids",)),
    "pairs": (PreferencePair, ("prompt", "chosen", "rejected")),
    "judged": (LabeledCompletion, ("prompt", "completion")),
    "prompts": (Prompt, ("ids",)),
}
FIRST_ITEMS = 8


def build_component(config: ComponentConfig, *given: Any, **options: Any) -> Any:
    """What the factory of a component returns for these arguments; see the module.

    Raises SpecError, which names file and function, where that of a plug-in returns something else than it has to.
    """
    factory = default_registry().factory(config)
    made = factory(config, *given, **options)
    if type(config).factory.startswith("runner."):
        return made

    def refuse(function: Any, fault: str) -> NoReturn:
        name = f"{config.group}={config.component_name()} of a plug-in ({_source(function)})"
        text = f"{name}: {fault}; runner.testing.check_{config.group} tests the component"
        raise SpecError([Problem(config.group, text)])

    return CHECKS[config.group](config, factory, made, refuse, *given, **options)


def _source(function: Any) -> str:
    """`file:line, name` of a function or a class."""
    plain: Any = inspect.unwrap(function)
    try:
        return f"{inspect.getsourcefile(plain)}:{inspect.getsourcelines(plain)[1]}, {plain.__qualname__}"
    except (TypeError, OSError):  # a callable object, or code without a file
        return repr(plain)


def _adapter(config: Any, factory: Any, made: Any, refuse: Refuse, model: Any, **_: Any) -> Any:
    if not isinstance(made, type(model)):
        text = f"expected the model with its adapter, as model.with_peft_module returns it, got {type(made).__name__}"
        refuse(factory, text)
    trainable = made.trainable()
    if not trainable:
        refuse(factory, "no parameter of the model that it returned is trainable")
    if wrong := _not_finite(trainable):
        refuse(factory, f"the trainable parameter {wrong} has numbers that are not finite (NaN or infinity)")
    return made


def _not_finite(parameters: Mapping[str, torch.Tensor]) -> str | None:
    """The first parameter with a number that is not finite in this rank's part."""
    real = {name: local_tensor(p) for name, p in parameters.items() if not p.is_meta}
    return next((name for name, tensor in real.items() if not bool(tensor.isfinite().all())), None)


def _optimizer(
    config: Any, factory: Any, made: Any, refuse: Refuse, *, parameters: Mapping[str, nn.Parameter], **_: Any
) -> Any:
    if not isinstance(made, torch.optim.Optimizer):
        refuse(factory, f"expected a torch optimizer, got {type(made).__name__}")
    held = [id(p) for group in made.param_groups for p in group["params"]]
    if sorted(held) != sorted(map(id, parameters.values())):
        text = f"expected each of {len(parameters)} parameters in one group, got {len(held)}, {len({*held})} different"
        refuse(factory, text)
    kinds = {name: (p.shape, p.dtype) for name, p in parameters.items()}

    def check(*_: object) -> None:
        hook.remove()
        for name, p in parameters.items():
            if (p.shape, p.dtype) != kinds[name]:
                refuse(made.step, f"its first step made {name} from {kinds[name]} to {(p.shape, p.dtype)}")
        if wrong := _not_finite(parameters):
            refuse(made.step, f"after its first step {wrong} has numbers that are not finite (NaN or infinity)")

    hook = made.register_step_post_hook(check)
    return made


def _data(config: Any, factory: Any, made: Any, refuse: Refuse, *, tokenizer: Any, kind: ItemKind, **_: Any) -> Any:
    types: Mapping[str, Any] = {"fingerprint": str, "prompt_style": str, "longest": int, "columns": Collection}
    for name, wanted in {**types, **dict.fromkeys(("__len__", "take", "held_out_questions"), Callable)}.items():
        if not isinstance(value := getattr(made, name, None), wanted):
            refuse(factory, f"expected data whose {name} is of type {wanted.__name__}, got {value!r:.80}")
    count, (cls, sequences) = min(len(made), FIRST_ITEMS), ITEMS[kind]
    items = made.take(0, count)
    if not count or len(items) != count or not all(isinstance(item, cls) for item in items):
        text = f"expected {max(count, 1)} items of type {cls.__name__} from take(0, {count}), got {items!r:.200}"
        refuse(made.take, text)
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    for at, item in enumerate(items):
        found = {name: getattr(item, name) for name in sequences}
        faults = [f"{name}: {fault}" for name, ids in found.items() if (fault := _id_fault(ids, vocab_size))]
        faults += _number_faults(weights=item.weights, size=len(item.ids)) if kind == "sft" and not faults else []
        if faults:
            refuse(made.take, f"item {at}: {faults[0]}")
    return made


def _id_fault(ids: Any, vocab_size: int) -> str | None:
    """What is wrong with token ids; places of images are none of the vocabulary's."""
    if not isinstance(ids, Sequence) or not all(isinstance(one, int) for one in ids):
        return f"expected a tuple of int, got {ids!r:.100}"
    wrong = [one for one in ids if not (0 <= one < vocab_size or one >= MEDIA_ID)]
    return f"the id {wrong[0]} is not one of the {vocab_size} of the vocabulary" if wrong else None


def _number_faults(size: int, **numbers: Any) -> list[str]:
    """What is wrong with numbers of which each token has one."""
    return [
        f"{name}: expected {size} finite numbers, one for each token, got {found!r:.100}"
        for name, found in numbers.items()
        if len(found) != size or not all(map(math.isfinite, found))
    ]


class _CheckedEnvironment:
    """An environment whose answers are checked."""

    def __init__(self, environment: Environment, refuse: Refuse) -> None:
        self._environment, self._refuse = environment, refuse
        self.reset = environment.reset

    def step(self, answer: str) -> Observation | None:
        """See `Environment`."""
        said: Any = self._environment.step(answer)
        if said is not None and not (
            isinstance(said, Observation) and isinstance(said.role, str) and isinstance(said.text, str)
        ):
            self._refuse(self._environment.step, f"expected Observation(role, text) or None, got {said!r:.200}")
        return said


def _environment(config: Any, factory: Any, made: Any, refuse: Refuse, **_: Any) -> Any:
    if not isinstance(made, EnvironmentFactory):
        refuse(factory, f"expected EnvironmentFactory(make, max_turns), got {made!r:.200}")
    if made.max_turns != config.most_turns():
        refuse(factory, f"max_turns is {made.max_turns}, and most_turns() of the config is {config.most_turns()}")
    return replace(made, make=lambda: _CheckedEnvironment(made.make(), refuse))


class _CheckedSampler(SamplerWrapper):
    """A sampler whose first answers are checked."""

    def __init__(self, sampler: Any, refuse: Refuse, vocab_size: int) -> None:
        super().__init__(sampler)
        self._refuse, self._vocab_size, self._is_checked = refuse, vocab_size, False

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        """See `Sampler`."""
        rollouts = super().sample(requests)
        if not self._is_checked and (fault := next(self._faults(requests, rollouts), None)):
            self._refuse(self._sampler.sample, fault)
        self._is_checked |= bool(requests)
        return rollouts

    def _faults(self, requests: Sequence[Request], rollouts: Any) -> Iterator[str]:
        if len(rollouts) != len(requests) or not all(isinstance(one, Rollout) for one in rollouts):
            yield f"expected a Rollout for each of {len(requests)} requests, got {rollouts!r:.200}"
            return
        for request, one in zip(requests, rollouts, strict=True):
            if fault := _id_fault(one.ids, self._vocab_size):
                yield f"ids: {fault}"
            elif not 1 <= len(one.ids) <= request.max_new_tokens:
                yield f"ids: expected 1 to {request.max_new_tokens} of them, got {len(one.ids)}"
            elif one.finish not in ("stop", "length"):
                yield f"finish: expected stop or length, got {one.finish!r}"
            else:
                raw = one.logprobs if one.raw_logprobs is None else one.raw_logprobs
                yield from _number_faults(len(one.ids), logprobs=one.logprobs, raw_logprobs=raw)


def _sampler(config: Any, factory: Any, made: Any, refuse: Refuse, *, model: Any, **_: Any) -> Any:
    names = [name for name in vars(SamplerWrapper) if not name.startswith("_") and name != "set_weight_source"]
    if missing := [name for name in names if not hasattr(made, name)]:
        refuse(factory, f"expected a sampler, got {type(made).__name__} without {', '.join(missing)}")
    return _CheckedSampler(made, refuse, model.limits().vocab_size)


CHECKS: Mapping[str, Callable[..., Any]] = {
    "adapter": _adapter,
    "data": _data,
    "environment": _environment,
    "optimizer": _optimizer,
    "sampler": _sampler,
}
