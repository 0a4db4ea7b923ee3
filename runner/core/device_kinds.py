"""The kinds of device, and what drivers, torch, Slurm, Ray and vLLM call them, without torch.

A device from elsewhere adds its own: `XPU = register(Kind(name="xpu", …))` in the module of its config.

Drivers hide mistakes in lists of visible devices (ASCEND_RT_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES), which are found
here.

Sweeps and Slurm assign cores and cards of these kinds (`ResourceRequest`).
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from runner.core.errors import EnvironmentProblem, Problem, SpecError
from runner.core.package import read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of device, by the name that torch has for it.

    collectives: torch's name of what sums its tensors over processes
    resource: what Ray counts it as; word: what people count; gres: what Slurm usually calls its cards
    shown_by_slurm: whether Slurm itself says how many of its cards a job has, and sets `visible`
    visible: the variable that lists the cards a process may use; names: how an entry may begin that is no number
    unread: a variable of another project's that looks as if it did, which no driver reads
    nodes: the device files of its cards; allocator: the variable that sets its memory up
    dtype: the data type that a model computes in where `model.dtype` is left out
    fused_optimizer: whether torch has fused AdamW for it; compiles_optimizer: whether torchao's update is compiled
    there; elsewhere its operators run one by one
    pins_offload: whether what FSDP keeps on the host for it is in pinned memory
    binds_groups: whether groups share its communicator; torch then binds the next group to it, too
    communicator_bytes: of its memory that each communicator takes
    engine_graphs: whether a vLLM engine captures graphs there; engine_options: "module:attribute", the function that
    says what an engine is built with there beside what all are: (environment, sleeps, experts) → keywords of vllm.LLM
    engine_keeps_experts: whether an engine that sleeps has its experts again as it wakes
    engine_batch_invariant: whether vLLM has batch-invariant kernels for it
    The processor has none of gres, visible, names, unread, nodes and allocator.
    """

    name: str
    collectives: str
    resource: str
    word: str
    gres: str | None = None
    shown_by_slurm: bool = False
    visible: str | None = None
    names: tuple[str, ...] = ()
    unread: str | None = None
    nodes: str | None = None
    allocator: str | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    fused_optimizer: bool = False
    compiles_optimizer: bool = False
    pins_offload: bool = False
    binds_groups: bool = False
    communicator_bytes: int = 0
    engine_graphs: bool = False
    engine_options: str | None = None
    engine_keeps_experts: bool = True
    engine_batch_invariant: bool = False

    @property
    def backend(self) -> str:
        """Backends of process groups for its tensors and the host's, as `init_process_group` takes them."""
        return self.collectives if self.name == "cpu" else f"cpu:gloo,{self.name}:{self.collectives}"


KINDS: dict[str, Kind] = {}


def register(kind: Kind) -> Kind:
    """Make a kind known by its name, so that every user of its cards can look it up."""
    return KINDS.setdefault(kind.name, kind)


def find_kind(name: str) -> Kind:
    """The kind that torch calls so; an unregistered one has no special features."""
    return KINDS.get(name) or Kind(name=name, collectives=name, resource=name.upper(), word=name)


def card_kinds() -> dict[str, Kind]:
    """Those with cards, by name, in the order in which device=auto takes them."""
    return {name: kind for name, kind in KINDS.items() if kind.visible is not None}


for _name, _one in read_table(__file__, "device_kinds.yaml").items():
    register(Kind(name=_name, **_one | {"names": tuple(_one.get("names", ()))}))


CPU, CUDA, NPU = KINDS["cpu"], KINDS["cuda"], KINDS["npu"]
VARIABLES = {name: kind.visible for name, kind in KINDS.items() if kind.visible is not None}


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    """The devices of a list, in its order (numbers, or names such as GPU-1a2b and MIG-…), and its faults."""

    ids: tuple[int | str, ...]
    faults: tuple[str, ...]

    def out_of_range(self, count: int) -> list[int]:
        """The numbers that `count` devices do not have."""
        return [number for number in self.ids if isinstance(number, int) and number >= count]


def parse_visible(text: str, names: Sequence[str] = ()) -> VisibleDevices:
    """Parse a comma-separated list; entries that begin with one of `names` are names, others numbers.

    An empty text selects no device.
    """
    ids: list[int | str] = []
    faults = []
    for piece in [part.strip() for part in text.split(",")] if text.strip() else []:
        if piece.isdecimal():
            ids.append(int(piece))
        elif names and piece.startswith(tuple(names)):
            ids.append(piece)
        else:
            faults.append(f"'{piece}' is not a device number" if piece else "an empty entry")
    repeated = sorted({str(number) for number in ids if ids.count(number) > 1})
    return VisibleDevices(tuple(ids), (*faults, *(f"{number} is listed twice" for number in repeated)))


def unread_variable_problem(kind: Kind, environment: Mapping[str, str]) -> tuple[str, str] | None:
    """What is wrong, and what to type, where only a variable that no driver reads lists the cards."""
    if kind.unread is None or kind.unread not in environment or kind.visible in environment:
        return None
    value = environment[kind.unread]
    text = f"{kind.unread}={value} hides no card: the driver reads {kind.visible}, which is not set"
    return text, f"export {kind.visible}={value}; unset {kind.unread}"


def listed_cards(kind: Kind) -> tuple[str, ...] | None:
    """The cards that this process's environment lists; None where it has no list.

    Raises EnvironmentProblem for an invalid list, and for one in a variable that no driver reads.
    """
    value = os.environ.get(kind.visible) if kind.visible else None
    if value is None:
        if fault := unread_variable_problem(kind, os.environ):
            raise EnvironmentProblem("\n  ".join(fault))
        return None
    found = parse_visible(value, kind.names)
    if found.faults:
        advice = f"correct the list, or type: unset {kind.visible}"
        raise EnvironmentProblem(f"{kind.visible}={value}: {'; '.join(found.faults)}\n  {advice}")
    return tuple(map(str, found.ids))


def present_cards(kind: Kind) -> tuple[str, ...]:
    """The cards that this process may use, as in `visible`: those its environment lists, else all.

    Drivers count from 0, also in a container whose only device files are nvidia4 and nvidia5. Whether a driver stands
    behind them is known when torch has been imported. Raises EnvironmentProblem like `listed_cards`.
    """
    if (own := listed_cards(kind)) is not None:
        return own
    assert kind.nodes is not None, f"{kind.name} has no cards"
    before = kind.nodes.partition("[")[0]
    count = sum(path.removeprefix(before).isdecimal() for path in glob.glob(kind.nodes))
    return tuple(map(str, range(count)))


CORE = "core"


def kind_of(name: str) -> Kind:
    """The kind of device that is meant by a need's `kind`."""
    return CPU if name == CORE else find_kind(name)


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """Cores of a machine, or cards of a kind by its name, and how many of them."""

    kind: str = CORE
    count: int = 1

    def __str__(self) -> str:
        return f"{self.count} {kind_of(self.kind).word}{'s' if self.count > 1 else ''}"

    @classmethod
    def of_spec(cls, spec: Any, cards: Sequence[str] | None = None) -> ResourceRequest:
        """What a job uses on each of its machines, which have these kinds of card (None: unknown).

        Raises SpecError for device=auto if none is known.
        """
        kind = spec.device.occupies
        if spec.device.is_auto:
            if cards is None:
                text = "device=auto is resolved only where the job runs; type device=cpu, device=cuda or device=npu"
                raise SpecError([Problem("device", text)])
            kind = next((kind for name, kind in card_kinds().items() if name in cards), CPU)
        processes = spec.launch.devices + spec.launch.samplers
        return cls(CORE, spec.device.host_threads * processes) if kind is CPU else cls(kind.name, processes)
