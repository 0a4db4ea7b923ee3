"""Build a model on all ranks, read its weights on rank 0, and scatter them into the ranks' shards.

    rank 0       config, weights, seed ──▶ model on the CPU ──probe results──┐
    other ranks  config ─────────────────▶ model on `meta` ◀─────────────────┘

    rank 0: a model with its weights ──Weights──▶ the model without, tensors aside ─┐ tensor by tensor
    others: the model without weights ──────────▶ cut, sharded, on no device        ┴──────────────────▶ own shards

`meta` is torch's device that knows shapes and data types and holds nothing. Between the two steps only the structure
changes: parameters on `meta` may become shards (DTensor). No device ever holds more than what its rank keeps and one
tensor; the whole model is in the host memory of rank 0 alone, until it is scattered. So weights are read, converted and
drawn once and cannot differ between ranks. What they are read from can, where machines have other folders or versions,
and is compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.core.errors import EnvironmentProblem
from runner.distributed.dtensor_utils import local_slice
from runner.distributed.work_partition import run_partitioned
from runner.interfaces import RankCollectives, TrainableModel
from runner.run_dir.manifest import LIBRARIES

META = torch.device("meta")


class TensorSlot(NamedTuple):
    """A place in a module that has a parameter or a buffer."""

    holder: dict[str, Any]  # of a module's parameters, or of its buffers
    key: str

    @property
    def tensor(self) -> Tensor:
        """What is there."""
        found: Tensor = self.holder[self.key]
        return found

    def assign(self, tensor: Tensor) -> None:
        """Put something else there."""
        self.holder[self.key] = tensor


class WeightScatter:
    """The parameters and buffers of a module, which afterwards has its own on `meta` on each rank.

    everyone: the ranks, the first of which has the values; those of the others are dropped, if there are any.
    Tied tensors stay tied.
    """

    def __init__(self, module: nn.Module, world_peers: RankCollectives, device: torch.device) -> None:
        """device: over which the numbers go to the others."""
        self._everyone, self._device = world_peers, device
        self._names: dict[str, str] = {}  # of each place → the first name of what is there
        self._like: dict[str, Tensor] = {}  # by first name, on `meta`
        self._numbers: dict[str, Tensor] = {}
        known: dict[int, str] = {}
        for name, slot in tensor_slots(module):
            first = known.setdefault(id(slot.tensor), name)
            self._names[name] = first
            if first == name:
                self._numbers[name] = slot.tensor.detach()
                self._like[name] = _as_kind_of(slot.tensor, slot.tensor.detach().to(META))
        for name, slot in tensor_slots(module):
            slot.assign(self._like[self._names[name]])
        if world_peers.rank:
            self._numbers.clear()

    @contextmanager
    def materialize(self, module: nn.Module, parts: Sequence[nn.Module]) -> Iterator[None]:
        """Let `parts` of the module have their full values, on every rank's device, inside the block.

        Collective on entering.
        """
        inside = {id(holder) for part in parts for one in part.modules() for holder in (one._parameters, one._buffers)}
        borrowed = [(slot, self._names[name]) for name, slot in tensor_slots(module) if id(slot.holder) in inside]
        names = dict.fromkeys(name for _, name in borrowed)
        made = {name: _as_kind_of(self._like[name], self._broadcast_full(name)) for name in names}
        for slot, name in borrowed:
            slot.assign(made[name])
        try:
            yield
        finally:
            for slot, name in borrowed:
                slot.assign(self._like[name])

    def scatter(self, module: nn.Module, target_device: torch.device, absent: Collection[str] = ()) -> None:
        """Give `module` this rank's part of every tensor: its shard of a DTensor, else all of it.

        target_device: where parameters are placed; buffers are on the device. absent: names of tensors that only other
        ranks have. Tensors that are no longer in the module need no name. The parameters are other objects afterwards.
        Collective; can be called once.
        """
        places: dict[str, list[TensorSlot]] = {}
        for name, slot in tensor_slots(module):
            if name not in absent:
                places.setdefault(self._names[name], []).append(slot)
        kept = {name for name, found in places.items() if not isinstance(found[0].tensor, DTensor)}
        most = max((like.nbytes for name, like in self._like.items() if name not in kept), default=0)
        room = torch.empty(most, dtype=torch.int8, device=self._device)  # one, or what is kept would lie between many
        for name in self._like:
            full = self._broadcast_full(name, None if name in kept else room)
            self._numbers.pop(name, None)
            if found := places.get(name):
                like = found[0].tensor
                device = target_device if isinstance(like, nn.Parameter) else self._device
                made = _as_kind_of(like, _shard_of(like, full, device))
                for slot in found:
                    slot.assign(made)

    def _broadcast_full(self, name: str, room: Tensor | None = None) -> Tensor:
        """All of a tensor, on the device, on every rank; in bytes of `room` where there is one."""
        like = self._like[name]
        if room is None:
            full = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        else:
            full = room[: like.nbytes].view(like.dtype).view(like.shape)
        if self._everyone.rank == 0:
            own = self._numbers[name].contiguous()
            full = own if own.device == self._device else full.copy_(own)
        self._everyone.broadcast_(full)
        return full


def tensor_slots(module: nn.Module) -> Iterator[tuple[str, TensorSlot]]:
    """Every place that has a parameter or a buffer, by its name; what is tied has several."""
    for prefix, part in module.named_modules():
        holders: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for holder in holders:
            for key, tensor in holder.items():
                if tensor is not None:
                    yield f"{prefix}.{key}" if prefix else key, TensorSlot(holder, key)


def _as_kind_of(tensor: Tensor, numbers: Tensor) -> Tensor:
    """`numbers` as a parameter that learns or not, or as a buffer, like `tensor`."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(numbers, requires_grad=tensor.requires_grad)
    return numbers


def _shard_of(like: Tensor, full: Tensor, target_device: torch.device) -> Tensor:
    """What a rank has of `full` that holds `like`."""
    if not isinstance(like, DTensor):
        return full.to(target_device)
    part = full[local_slice(like)].clone(memory_format=torch.contiguous_format)
    options: dict[str, Any] = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    made: Tensor = DTensor.from_local(part, like.device_mesh, like.placements, **options)  # on the mesh's device
    return made.to(target_device)


M = TypeVar("M", bound=TrainableModel)


def load_on_rank0(make: Callable[[torch.device], M], world_peers: RankCollectives) -> M:
    """The model that `make` builds on a device: the CPU of the first rank, and `meta` on the others.

    Collective. What `make` raises on one rank is raised on all; raises EnvironmentProblem, on all ranks, where they
    have not built the same.
    """
    made: list[M] = []
    first = world_peers.rank == 0

    def own(_: list[int]) -> list[tuple[dict[str, str], dict[str, Any]]]:
        with nullcontext() if first else META:
            model = make(torch.device("cpu") if first else META)
        made.append(model)
        _refuse_unregistered_tensors(model.whole)
        return [(model_facts(model), model.export_probe() if first else {})]

    ranks = run_partitioned(world_peers, range(world_peers.size), own)
    refuse_different([parts for parts, _ in ranks])
    if not first:
        made[0].import_probe(ranks[0][1])
    return made[0]


def model_facts(model: TrainableModel) -> dict[str, str]:
    """What a model is made of except its values: classes, tensors, options, and library versions."""
    own = {f"module {name or 'all'}": type(part).__qualname__ for name, part in model.whole.named_modules()}
    own |= {name: f"{slot.tensor.dtype} {list(slot.tensor.shape)}" for name, slot in tensor_slots(model.whole)}
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
                "  use the same model folder and the same versions on all machines"
            )


def _refuse_unregistered_tensors(module: nn.Module) -> None:
    """Raise EnvironmentProblem for a tensor that is neither parameter nor buffer: it cannot be sent."""
    for name, part in module.named_modules():
        if loose := [key for key, value in vars(part).items() if isinstance(value, Tensor)]:
            raise EnvironmentProblem(
                f"{name or 'the model'} ({type(part).__qualname__}) has a tensor, {loose[0]}, that is neither a "
                "parameter nor a buffer, so it cannot be sent to other ranks\n"
                "  type parallelism=single"
            )
