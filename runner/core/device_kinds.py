"""The kinds of device, and what drivers, torch, Slurm, Ray and vLLM call them, without torch.

A device from elsewhere adds its own: `XPU = register(Kind(name="xpu", …))` in the module of its config.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml


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

    @property
    def backend(self) -> str:
        """Backends of process groups for its tensors and the host's, as `init_process_group` takes them."""
        return self.collectives if self.name == "cpu" else f"cpu:gloo,{self.name}:{self.collectives}"


KINDS: dict[str, Kind] = {}


def register(kind: Kind) -> Kind:
    """Make a kind known by its name, so that all who are handed its cards can ask for it."""
    return KINDS.setdefault(kind.name, kind)


def find_kind(name: str) -> Kind:
    """The kind that torch calls so; one that nobody registered can nothing special."""
    return KINDS.get(name) or Kind(name=name, collectives=name, resource=name.upper(), word=name)


def card_kinds() -> dict[str, Kind]:
    """Those with cards, by name, in the order in which device=auto takes them."""
    return {name: kind for name, kind in KINDS.items() if kind.visible is not None}


for _name, _one in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items():
    register(Kind(name=_name, **_one | {"names": tuple(_one.get("names", ()))}))
