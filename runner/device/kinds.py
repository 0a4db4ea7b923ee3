"""The kinds of device, and what drivers, torch and Ray call what belongs to each. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from runner.spec.base import Dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of device, by the name that torch has for it.

    collectives: torch's name of what sums its tensors over processes
    resource: what Ray counts it as
    visible: the variable that lists the cards a process may use; names: how an entry may begin that is no number
    unread: a variable of another project's that looks as if it did, which no driver reads
    nodes: the device files of its cards; allocator: the variable that sets its memory up
    dtype: the data type that a model computes in where `model.dtype` is left out
    The processor has none of visible, names, unread, nodes and allocator.
    """

    name: str
    collectives: str
    resource: str
    visible: str | None = None
    names: tuple[str, ...] = ()
    unread: str | None = None
    nodes: str | None = None
    allocator: str | None = None
    dtype: Dtype = "bfloat16"

    @property
    def backend(self) -> str:
        """Process groups for its tensors, and for those of the host beside them, as `init_process_group` takes it."""
        return self.collectives if self.name == "cpu" else f"cpu:gloo,{self.name}:{self.collectives}"


_TABLE = yaml.safe_load(Path(__file__).with_name("kinds.yaml").read_text(encoding="utf-8"))
KINDS = {name: Kind(name=name, **one | {"names": tuple(one.get("names", ()))}) for name, one in _TABLE.items()}
CPU, CUDA, NPU = KINDS["cpu"], KINDS["cuda"], KINDS["npu"]
