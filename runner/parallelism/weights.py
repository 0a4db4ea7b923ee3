"""Weights on their way from the rank that built a model to what each rank holds of it.

    rank 0: a model with its weights ──Weights──▶ the model without, tensors aside ─┐ one after the other
    others: the model without weights ──────────▶ cut, sharded, on no device        ┴─────────────────────▶ own pieces

What is in between changes structure only: parameters lie on torch's `meta` device, which knows shapes and data types
and holds nothing, and may become pieces (DTensor) of what they were. On no device there is ever more than what a rank
keeps and one tensor; whole models are in the host's memory of the first rank alone, until they are handed out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.distributed.dtensor_utils import span
from runner.interfaces import Peers

META = torch.device("meta")


class Slot(NamedTuple):
    """A place in a module that has a parameter or a buffer."""

    holder: dict[str, Any]  # of a module's parameters, or of its buffers
    key: str

    @property
    def tensor(self) -> Tensor:
        """What is there."""
        found: Tensor = self.holder[self.key]
        return found

    def put(self, tensor: Tensor) -> None:
        """Put something else there."""
        self.holder[self.key] = tensor


class Weights:
    """The parameters and buffers of a module, which has them no more: on each rank its own are on `meta` from here on.

    everyone: the ranks, the first of which has the numbers; those of the others are dropped, if there are any.
    Tied tensors are one, and stay so.
    """

    def __init__(self, module: nn.Module, everyone: Peers, device: torch.device) -> None:
        """device: over which the numbers go to the others."""
        self._everyone, self._device = everyone, device
        self._names: dict[str, str] = {}  # of each place → the first name of what is there
        self._like: dict[str, Tensor] = {}  # by first name, on `meta`
        self._numbers: dict[str, Tensor] = {}
        known: dict[int, str] = {}
        for name, slot in slots(module):
            first = known.setdefault(id(slot.tensor), name)
            self._names[name] = first
            if first == name:
                self._numbers[name] = slot.tensor.detach()
                self._like[name] = _like(slot.tensor, slot.tensor.detach().to(META))
        for name, slot in slots(module):
            slot.put(self._like[self._names[name]])
        if everyone.rank:
            self._numbers.clear()

    @contextmanager
    def lent(self, module: nn.Module, parts: Sequence[nn.Module]) -> Iterator[None]:
        """Let `parts` of the module have all their numbers, on the device of every rank, while the block lasts.
        Collective on entering."""
        inside = {id(holder) for part in parts for one in part.modules() for holder in (one._parameters, one._buffers)}
        borrowed = [(slot, self._names[name]) for name, slot in slots(module) if id(slot.holder) in inside]
        made = {name: _like(self._like[name], self._whole(name)) for name in dict.fromkeys(n for _, n in borrowed)}
        for slot, name in borrowed:
            slot.put(made[name])
        try:
            yield
        finally:
            for slot, name in borrowed:
                slot.put(self._like[name])

    def hand_out(self, module: nn.Module, home: torch.device, elsewhere: Collection[str] = ()) -> None:
        """Give `module` what this rank holds of every tensor, once and for all: its piece of a DTensor, else all of it.

        home: where parameters come to lie; buffers lie on the device. elsewhere: the names of what other ranks have,
        and this one does not. What no longer is in the module needs no name. The parameters are other objects
        afterwards. Collective; nothing is left here.
        """
        places: dict[str, list[Slot]] = {}
        for name, slot in slots(module):
            if name not in elsewhere:
                places.setdefault(self._names[name], []).append(slot)
        kept = {name for name, found in places.items() if not isinstance(found[0].tensor, DTensor)}
        most = max((like.nbytes for name, like in self._like.items() if name not in kept), default=0)
        room = torch.empty(most, dtype=torch.int8, device=self._device)  # one, or what is kept would lie between many
        for name in self._like:
            full = self._whole(name, None if name in kept else room)
            self._numbers.pop(name, None)
            if found := places.get(name):
                like = found[0].tensor
                made = _like(like, _part(like, full, home if isinstance(like, nn.Parameter) else self._device))
                for slot in found:
                    slot.put(made)

    def _whole(self, name: str, room: Tensor | None = None) -> Tensor:
        """All of a tensor, on the device, on every rank; in bytes of `room` where there is one."""
        like = self._like[name]
        if room is None:
            full = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        else:
            full = room[: like.nbytes].view(like.dtype).view(like.shape)
        if self._everyone.rank == 0:
            own = self._numbers[name].contiguous()
            full = own if own.device == self._device else full.copy_(own)
        self._everyone.from_first_(full)
        return full


def slots(module: nn.Module) -> Iterator[tuple[str, Slot]]:
    """Every place that has a parameter or a buffer, by its name; what is tied has several."""
    for prefix, part in module.named_modules():
        holders: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for holder in holders:
            for key, tensor in holder.items():
                if tensor is not None:
                    yield f"{prefix}.{key}" if prefix else key, Slot(holder, key)


def _like(tensor: Tensor, numbers: Tensor) -> Tensor:
    """`numbers` as a parameter that learns or not, or as a buffer, like `tensor`."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(numbers, requires_grad=tensor.requires_grad)
    return numbers


def _part(like: Tensor, full: Tensor, home: torch.device) -> Tensor:
    """What a rank has of `full` that holds `like`."""
    if not isinstance(like, DTensor):
        return full.to(home)
    part = full[span(like)].clone(memory_format=torch.contiguous_format)
    options: dict[str, Any] = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    made: Tensor = DTensor.from_local(part, like.device_mesh, like.placements, **options)  # on the mesh's device
    return made.to(home)
