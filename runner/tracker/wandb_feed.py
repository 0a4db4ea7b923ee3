"""What the upload process does with the `wandb` package: open the run, log, finish.

    7, {"train/loss": 0.5}                ─▶ run.log({"train/step": 7, "train/loss": 0.5})
    7, [{"prompt": ..., "answer": ...}]   ─▶ run.log({"train/step": 7, "samples": Table})

W&B's own step counts calls of `log` and restarts at 0 when an offline run continues, so every metric is
drawn over AXIS instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import wandb

AXIS = "train/step"
INIT_S = 10.0


class WandbFeed:
    """The W&B run `settings["run_id"]`, started or continued; its files go to <folder>/wandb/.

    Raises whatever wandb raises, within about INIT_S seconds.
    """

    files: ClassVar[str] = "offline-run-*"

    def __init__(self, settings: Mapping[str, Any], folder: Path, mode: str, watched_pid: int) -> None:
        self._run = wandb.init(
            id=settings["run_id"],
            resume="allow",
            mode=mode,  # type: ignore[arg-type]  # Literal["offline", "online"] since it was read from the config
            dir=str(folder),
            name=settings["name"],
            project=settings["project"],
            entity=settings["entity"],
            group=settings["run_group"],
            tags=settings["tags"],
            config=settings["config"],
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=INIT_S,
                finish_timeout=settings["deadline_s"] / 2,
                finish_timeout_raises=True,
                disable_git=True,  # the manifest has it, without the remote's URL
                disable_job_creation=True,
                save_code=False,
                x_stats_pid=watched_pid,
            ),
        )
        self._run.define_metric("*", step_metric=AXIS)
        self.folder, self.url = Path(self._run.settings.sync_dir), self._run.url or ""
        self.after = int(self._run.summary.get(AXIS, -1)) if self._run.resumed else -1

    @staticmethod
    def server() -> str:
        """The address of the configured server."""
        return str(wandb.setup().settings.base_url)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One line of W&B's history."""
        self._run.log({AXIS: step, **values})

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """The rows as a table."""
        columns: list[str | int] = list(dict.fromkeys(name for row in rows for name in row))
        cells = [[_cell(row.get(str(name))) for name in columns] for row in rows]
        self._run.log({AXIS: step, "samples": wandb.Table(columns=columns, data=cells, allow_mixed_types=True)})

    def finish(self, exit_code: int) -> bool:
        """End the run and wandb-core; False if not everything was uploaded in time (it is on disk then)."""
        whole = True
        try:
            self._run.finish(exit_code=exit_code)
        except TimeoutError:
            whole = False
        # Only when wandb-core has ended is its file whole: `finish` returns before the last block is written.
        wandb.teardown(exit_code)
        return whole


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
