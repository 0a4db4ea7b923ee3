"""What the sink process does with the `wandb` package: test the server, open the run, log lines.

    {"step": 7, "train/loss": 0.5}              ─▶ run.log({"train/step": 7, "train/loss": 0.5})
    {"step": 7, "prompt": ..., "answer": ...}…  ─▶ run.log({"train/step": 7, "samples": Table})

W&B's own step counts calls of `log` and restarts at 0 when an offline run continues, so every metric is
drawn over AXIS instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from runner.tracker.jsonl_tail import JsonlTail
from runner.tracker.text import with_health_panel

AXIS = "train/step"
CONNECT_S = 3.0
INIT_S = 10.0


def why_unreachable() -> str:
    """Why the configured server cannot be used, or "" if it answers anything within CONNECT_S seconds."""
    import wandb
    from aiohttp import ClientError  # here, because an offline run needs no network

    from runner.core.http_client import failure_reason, request, run_coroutine

    base_url = str(wandb.setup().settings.base_url)
    try:
        run_coroutine(request("HEAD", base_url, timeout_s=CONNECT_S, largest_bytes=0, proxies=True))
    except TimeoutError:
        return f"{base_url} does not respond within {CONNECT_S:.0f} s"
    except (OSError, ClientError) as error:
        return f"{base_url} cannot be reached ({failure_reason(error)})"
    return ""


def open_run(settings: Mapping[str, Any], folder: Path, mode: str, watched_pid: int) -> Any:
    """Start or continue the run `settings["run_id"]`; W&B's files go to <folder>/wandb/.

    Raises whatever wandb raises, within about INIT_S seconds.
    """
    import wandb

    if mode == "offline":
        move_superseded(folder / "wandb", settings["run_id"])
    run = wandb.init(
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
    run.define_metric("*", step_metric=AXIS)
    return run


def finish(run: Any, exit_code: int) -> bool:
    """End the run and wandb-core; False if not everything was uploaded in time (it is on disk then)."""
    import wandb

    whole = True
    try:
        run.finish(exit_code=exit_code)
    except TimeoutError:
        whole = False
    # Only when wandb-core has ended is its file whole: `finish` returns before the last block is written.
    wandb.teardown(exit_code)
    return whole


def move_superseded(folder: Path, run_id: str) -> None:
    """Move earlier offline copies of this run to superseded/: the new copy is complete."""
    for old in folder.glob(f"offline-run-*-{run_id}"):
        (folder / "superseded").mkdir(exist_ok=True)
        os.replace(old, folder / "superseded" / old.name)


class WandbFeed:
    """Sends the lines of a run folder to a W&B run; `after` is the last step the server already has."""

    def __init__(self, run: Any, folder: Path) -> None:
        self._run = run
        self._metrics, self._samples = JsonlTail(folder / "metrics.jsonl"), JsonlTail(folder / "samples.jsonl")
        self._after = int(run.summary.get(AXIS, -1)) if run.resumed else -1
        self.written = 0

    def feed_new_lines(self) -> int:
        """Feed what has come; returns the number of lines read."""
        metrics, samples = self._metrics.lines(), self._samples.lines()
        for line in metrics:
            values = {k: v for k, v in line.items() if k != "step" and v is not None}
            self._log(line["step"], with_health_panel(values))
            self.written += 1
        for step, rows in groupby(samples, key=lambda line: int(line["step"])):
            self._log(step, {"samples": _table([{k: v for k, v in row.items() if k != "step"} for row in rows])})
        return len(metrics) + len(samples)

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        if step > self._after:
            self._run.log({AXIS: step, **values})


def _table(rows: list[dict[str, Any]]) -> Any:
    import wandb

    columns: list[str | int] = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(str(name))) for name in columns] for row in rows]
    return wandb.Table(columns=columns, data=cells, allow_mixed_types=True)


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
