"""The jobs that are submitted to Slurm together, as one job array: the file that each of them reads on its node.

slurm/<token>.json   the orders by array index, which is the job's number; what holds for all of them
slurm/<token>.id     the array's number in Slurm, once it has one
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.folder import write_atomic, write_json
from runner.sweep.order import Order

FOLDER = "slurm"  # of a sweep's folder


@dataclass(frozen=True, slots=True)
class Batch:
    """One job array. `kind` of device, and `gres`, what Slurm calls it.

    timeout_s: after which each job is told to save and end
    all_signalled: whether Slurm's SIGTERM reaches every process of a job by itself, or only the first
    """

    token: str
    kind: str
    gres: str
    timeout_s: float | None
    all_signalled: bool
    orders: dict[int, Order] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Put it where its jobs find it. Raises StorageError."""
        path = folder / f"{self.token}.json"
        with suppress(FileExistsError):
            folder.mkdir()
        write_json(path, asdict(self))
        return path

    @classmethod
    def read(cls, path: Path) -> Batch:
        """As it was written. Raises OSError, ValueError."""
        data = json.loads(path.read_text(encoding="utf-8"))
        orders = {int(index): _order(order) for index, order in data.pop("orders").items()}
        return cls(**data, orders=orders)


def _order(data: Mapping[str, Any]) -> Order:
    return Order(**{**data, "command": tuple(data["command"]), "again": tuple(data["again"])})


def keep_id(folder: Path, token: str, array: str) -> None:
    """Write down the array's number. Raises StorageError."""
    write_atomic(folder / f"{token}.id", array)


def kept_id(folder: Path, token: str) -> str | None:
    """The array's number; None where its sweep died before it had one, or could write it down."""
    try:
        return (folder / f"{token}.id").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
