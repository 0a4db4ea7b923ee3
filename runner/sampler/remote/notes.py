"""Where the samplers of a job are found: a file for each, written by the sampler itself once it can be asked.

samplers/0.json   {"url": "http://127.0.0.1:40123", "host": …, "boot_id": …, "pid": …, "session": …}
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from runner.core import fsync_io
from runner.core.rank_info import Machine


@dataclass(frozen=True, slots=True)
class Note:
    """Where a sampler listens, on which machine, and which process it is."""

    url: str
    machine: Machine
    pid: int
    session: str

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0

    def write(self, path: Path) -> None:
        """Put it where a client looks for it, whole or not at all. Raises OSError."""
        content = {"url": self.url, **asdict(self.machine), "pid": self.pid, "session": self.session}
        fsync_io.replace_whole(path, json.dumps(content).encode())

    @classmethod
    def read(cls, path: Path) -> Note:
        """The note of a sampler. Raises OSError where there is none, ValueError for what is none."""
        try:
            found = json.loads(path.read_bytes())
            machine = Machine(str(found["host"]), str(found["boot_id"]))
            return cls(str(found["url"]), machine, int(found["pid"]), str(found["session"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} does not say where a sampler is: {error}") from error


def path_of(folder: Path, index: int) -> Path:
    """The file of sampler `index`."""
    return folder / f"{index}.json"


def url(host: str, port: int) -> str:
    """The address as it is typed."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
