"""Build a model on all ranks, read its weights on rank 0, and scatter them into the ranks' shards.

    rank 0       config, weights, seed ──▶ model on the CPU ──probe results──┐
    other ranks  config ─────────────────▶ model on `meta` ◀─────────────────┘

    rank 0: model with weights ──WeightScatter──▶ model on `meta`, weights aside ─┐ tensor by tensor
    others: model on `meta` ────────────────────▶ split, sharded, on `meta`       ┴──────────────────▶ own shards

torch's device `meta` has shapes and dtypes, but no values. Between the two steps only the structure changes: parameters
on `meta` may become shards (DTensor). A device never has more than its rank's shards and one full tensor; only the host
memory of rank 0 has the full model until it is scattered. So weights are read, converted and initialized once, and
cannot differ between ranks. Their sources may differ between machines (folders, versions) and are compared.
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
from runner.core.quantized_weight import QuantizedWeight
from runner.distributed.dtensor_utils import local_slice
from runner.distributed.work_partition import run_partitioned
from runner.interfaces import RankCollectives, TrainableModel
from runner.run_dir.manifest import LIBRARIES

META = torch.device("meta")


class TensorSlot(NamedTuple):
    """A parameter or buffer of a module, by its dict and key."""

    holder: dict[str, Any]  # the module's _parameters or _buffers
    key: str

    @property
    def tensor(self) -> Tensor:
        """The tensor in this slot."""
        return self.holder[self.key]

    def assign(self, tensor: Tensor) -> None:
        """Replace the tensor in this slot."""
        self.holder[self.key] = tensor


class WeightScatter:
    """Takes the parameters and buffers of a module, and leaves tensors on `meta` instead.

    world_peers: all ranks, of which rank 0 has the values; those of other ranks are dropped. Tied tensors stay tied.
    """

    def __init__(self, module: nn.Module, world_peers: RankCollectives, device: torch.device) -> None:
        """device: the device whose backend sends the values."""
        self._everyone, self._device = world_peers, device
        self._names: dict[str, str] = {}  # name of each slot → first name of its tensor
        self._like: dict[str, Tensor] = {}  # tensors on `meta`, by first name
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
        """Give `parts` of the module their full values, on every rank's device, inside the block.

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
        """Give `module` its values: this rank's shard of a DTensor, the full tensor otherwise.

        target_device: of parameters; buffers are on the sending device. absent: names of tensors that only other ranks
        have. The parameters are other objects afterwards. Collective; can be called once.
        """
        places: dict[str, list[TensorSlot]] = {}
        for name, slot in tensor_slots(module):
            if name not in absent:
                places.setdefault(self._names[name], []).append(slot)
        kept = {name for name, found in places.items() if not isinstance(found[0].tensor, DTensor)}
        most = max((like.nbytes for name, like in self._like.items() if name not in kept), default=0)
        room = torch.empty(most, dtype=torch.int8, device=self._device)  # one buffer, to avoid fragmentation
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
        """A full tensor on every rank's device; in the buffer `room`, if given."""
        like = self._like[name]
        if isinstance(like, QuantizedWeight):
            names, settings = like.__tensor_flatten__()
            parts = {part: torch.empty_like(getattr(like, part), device=self._device) for part in names}
            for part, empty in parts.items():
                if self._everyone.rank == 0:
                    empty.copy_(getattr(self._numbers[name], part))
                self._everyone.broadcast_(empty)
            return QuantizedWeight.__tensor_unflatten__(parts, settings, like.shape, None)
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
    """Every slot with a parameter or buffer, by name; a tied tensor has several slots."""
    for prefix, part in module.named_modules():
        holders: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for holder in holders:
            for key, tensor in holder.items():
                if tensor is not None:
                    yield f"{prefix}.{key}" if prefix else key, TensorSlot(holder, key)


def _as_kind_of(tensor: Tensor, numbers: Tensor) -> Tensor:
    """`numbers` as a parameter (trainable or not) or a buffer, like `tensor`."""
    return nn.Parameter(numbers, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else numbers


def _shard_of(like: Tensor, full: Tensor, target_device: torch.device) -> Tensor:
    """This rank's part of `full`, sharded like `like`."""
    if not isinstance(like, DTensor):
        return full.to(target_device)
    part = full[local_slice(like)].clone(memory_format=torch.contiguous_format)
    options: dict[str, Any] = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    made: Tensor = DTensor.from_local(part, like.device_mesh, like.placements, **options)  # on the mesh's device
    return made.to(target_device)


M = TypeVar("M", bound=TrainableModel)


def load_on_rank0(make: Callable[[torch.device], M], world_peers: RankCollectives) -> M:
    """The model that `make` builds on a device: the CPU on rank 0, and `meta` on the others.

    Collective. An error of `make` on one rank is raised on all. Raises EnvironmentProblem, on all ranks, if they have
    built different models.
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
    """A model's classes, tensor shapes, options and library versions, without values."""
    own = {f"module {name or 'all'}": type(part).__qualname__ for name, part in model.whole.named_modules()}
    own |= {name: f"{slot.tensor.dtype} {list(slot.tensor.shape)}" for name, slot in tensor_slots(model.whole)}
    options = model.inner.config.to_dict()
    for name, value in options.items():
        if not name.startswith("_"):
            own[f"config.json: {name}"] = json.dumps(value, sort_keys=True, default=str)
    return own | {library: version(library) for library in LIBRARIES}


def refuse_different(ranks: list[dict[str, str]]) -> None:
    """Raise EnvironmentProblem if a rank's model differs from that of rank 0."""
    for rank, found in enumerate(ranks):
        if differing := [name for name in {**ranks[0], **found} if ranks[0].get(name) != found.get(name)]:
            name = differing[0]
            raise EnvironmentProblem(
                f"ranks 0 and {rank} build different models: {len(differing)} differences, e.g. {name} is "
                f"{ranks[0].get(name, 'not there')} on rank 0 and {found.get(name, 'not there')} on rank {rank}\n"
                "  use the same model folder and the same versions on all machines"
            )


def _refuse_unregistered_tensors(module: nn.Module) -> None:
    """Raise EnvironmentProblem for a tensor that is neither parameter nor buffer, which cannot be sent."""
    for name, part in module.named_modules():
        if loose := [key for key, value in vars(part).items() if isinstance(value, Tensor)]:
            raise EnvironmentProblem(
                f"{name or 'the model'} ({type(part).__qualname__}) has a tensor, {loose[0]}, that is neither a "
                "parameter nor a buffer, so it cannot be sent to other ranks\n"
                "  type parallelism=single"
            )
