"""Which jobs of a sweep wait in Slurm: also those that have run, and wait to be started again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from runner.sweep.record import JobState
from runner.sweep.slurm.batch import FOLDER, kept_id
from runner.sweep.slurm.queue import queue


def waiting(sweep: Path, jobs: Iterable[JobState]) -> Mapping[int, str]:
    """Job → why it waits, as Slurm says. Raises EnvironmentProblem where no Slurm answers."""
    known = [(index, job.identity or {}) for index, job in enumerate(jobs)]
    batches = {index: identity["batch"] for index, identity in known if "batch" in identity}
    entries, found = queue(sweep.name) if batches else {}, {}
    for index, batch in batches.items():
        entry = entries.get((kept_id(sweep / FOLDER, batch) or "", index))
        if entry is not None and entry.state == "PENDING":
            found[index] = entry.reason
    return found
