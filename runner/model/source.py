"""Where a model's first weights come from, and what has to be equal for them to be the same again.

folder   sha256 of config.json; of the weights too where some of them never learn, which no checkpoint holds
hub      the commit
drawn    the seed, and what it was drawn for
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Source:
    """A local folder, a commit of the hub, or random numbers (which a folder or commit may give the shape of).

    drawn: what random weights are a function of, in words; None where weights are read.
    """

    folder: Path | None = None
    commit: str | None = None
    drawn: str | None = None

    def identity(self, *, weights: bool) -> dict[str, str]:
        """What makes it the same source; `weights` asks for the sha256 of a folder's weights, 1 to 2 GB a second."""
        found = {}
        if self.commit is not None:
            found["commit"] = self.commit
        if self.folder is not None:
            found["config"] = sha256(self.folder.glob("config.json"))
        if self.drawn is not None:
            found["drawn"] = self.drawn
        elif self.folder is not None and weights:
            found["weights"] = sha256(sorted(self.folder.glob("*.safetensors")))
        return found


def sha256(files: Iterable[Path]) -> str:
    """One digest of the names and contents of files."""
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            whole.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()
