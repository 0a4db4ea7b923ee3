"""A model built by all ranks of a job: by the first with its weights, as by a single process, by the others without.

    first rank   config, weights, seed ──▶ model on the CPU ──what it found out by computing──┐
    others       config ────────────────▶ model on `meta` ◀───────────────────────────────────┘

`meta` is torch's device that knows shapes and data types and holds nothing. The numbers follow when the model is
spread (`weights`). So weights are read, converted and drawn once, and cannot differ between ranks; what the models are
made of can, where machines have other folders or versions, and is compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from runner.core.errors import EnvironmentProblem
from runner.distributed.work_partition import together
from runner.interfaces import Peers
from runner.parallelism.weights import META, slots

LIBRARIES = ("torch", "transformers", "peft")


class Loadable(Protocol):
    """What is needed of a model: what is saved of it, the module around all, the transformers model in it."""

    whole: Any
    inner: Any

    # what was found out by computing, in plain values; and the same, told to a model that has no weights
    def found(self) -> dict[str, Any]: ...

    def adopt(self, found: dict[str, Any]) -> None: ...


M = TypeVar("M", bound=Loadable)


def loaded(make: Callable[[torch.device], M], everyone: Peers) -> M:
    """The model that `make` builds on a device: the CPU of the first rank, and `meta` on the others.

    Collective. What `make` raises on one rank is raised on all; raises EnvironmentProblem, on all ranks, where they
    have not built the same.
    """
    made: list[M] = []
    first = everyone.rank == 0

    def own(_: list[int]) -> list[tuple[dict[str, str], dict[str, Any]]]:
        with nullcontext() if first else META:
            model = make(torch.device("cpu") if first else META)
        made.append(model)
        _refuse_loose(model.whole)
        return [(described(model), model.found() if first else {})]

    ranks = together(everyone, range(everyone.size), own)
    refuse_different([parts for parts, _ in ranks])
    if not first:
        made[0].adopt(ranks[0][1])
    return made[0]


def described(model: Loadable) -> dict[str, str]:
    """What a model is made of but for its numbers: classes, tensors, options, and the libraries that compute it."""
    own = {f"module {name or 'all'}": type(part).__qualname__ for name, part in model.whole.named_modules()}
    own |= {name: f"{slot.tensor.dtype} {list(slot.tensor.shape)}" for name, slot in slots(model.whole)}
    options = model.inner.config.to_dict()
    for name, value in options.items():
        if not name.startswith("_"):
            own[f"config.json: {name}"] = json.dumps(value, sort_keys=True, default=str)
    return own | {library: version(library) for library in LIBRARIES}


def refuse_different(ranks: list[dict[str, str]]) -> None:
    """Raise EnvironmentProblem where a rank's model is not made of what the first one's is."""
    for rank, found in enumerate(ranks):
        if differing := [name for name in {**ranks[0], **found} if ranks[0].get(name) != found.get(name)]:
            name = differing[0]
            raise EnvironmentProblem(
                f"ranks 0 and {rank} build different models: {len(differing)} differences, e.g. {name} is "
                f"{ranks[0].get(name, 'not there')} on rank 0 and {found.get(name, 'not there')} on rank {rank}\n"
                "  give all machines the same model folder and the same versions"
            )


def _refuse_loose(module: nn.Module) -> None:
    """Raise EnvironmentProblem for a tensor that is neither parameter nor buffer: it does not travel."""
    for name, part in module.named_modules():
        if loose := [key for key, value in vars(part).items() if isinstance(value, Tensor)]:
            raise EnvironmentProblem(
                f"{name or 'the model'} ({type(part).__qualname__}) keeps a tensor, {loose[0]}, that is neither a "
                "parameter nor a buffer, and so cannot be handed to other ranks\n  type parallelism=single"
            )
