"""TensorBoard event files in the run folder, under tensorboard/."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core.errors import EnvironmentProblem
from runner.run_dir.folder import RunFolder, display_path
from runner.run_dir.manifest import redact_values
from runner.tracker.text import labeled_line, with_health_panel

if TYPE_CHECKING:
    from runner.tracker.config import TensorboardConfig
    from runner.tracker.console import Console

INSTALL = 'pip install tensorboard, or: pip install "posttrain-run[tensorboard]"'


class TensorboardTracker:
    """Writes scalars and samples; the first error ends the tracker with a message, not the run."""

    def __init__(self, folder: Path, writer: Any, console: Console) -> None:
        self._folder, self._writer, self._console = folder, writer, console
        self._lost = ""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar per metric, and the health panel."""
        values = with_health_panel(metrics)
        self._try(lambda: [self._writer.add_scalar(name, value, step) for name, value in values.items()])

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """The rows as one text, each a block of JSON."""
        blocks = [json.dumps(redact_values(row), indent=2, ensure_ascii=False, default=str) for row in rows]
        text = "\n\n".join("    " + block.replace("\n", "\n    ") for block in blocks)  # four spaces: shown as it is
        self._try(lambda: self._writer.add_text("samples", text, step))

    def finish(self, status: str) -> list[str]:
        """Close the file; returns how to look at it."""
        self._try(self._writer.close)
        if self._lost:
            return [labeled_line("view", f"tensorboard is incomplete: {self._lost}")]
        return [labeled_line("view", f"tensorboard --logdir {display_path(self._folder)}")]

    def _try(self, write: Any) -> None:
        if self._lost:
            return
        try:
            write()
        except Exception as error:  # any error of its writer thread (a full disk) must not end the run
            self._lost = f"{type(error).__name__}: {error}"
            self._console.message(f"tensorboard stops: {self._lost}; metrics.jsonl continues", "warning")


def build(
    config: TensorboardConfig, *, folder: RunFolder, first_step: int, console: Console, **_: Any
) -> TensorboardTracker:
    """A writer that hides what an earlier attempt wrote after `first_step`.

    Raises EnvironmentProblem if the package is missing.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        text = f"tracker=tensorboard needs a package that is not installed ({error}); {INSTALL}"
        raise EnvironmentProblem(text) from error
    where = folder.root / "tensorboard"
    # Steps of an earlier attempt after `first_step` must not be shown: TensorBoard drops steps from purge_step on.
    writer = SummaryWriter(str(where), purge_step=first_step + 1 if first_step else 0, flush_secs=10)
    return TensorboardTracker(where, writer, console)
