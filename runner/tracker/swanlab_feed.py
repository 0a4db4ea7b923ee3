"""What the upload process does with the `swanlab` package: open the run, log, finish.

    7, {"train/loss": 0.5}                ─▶ run.log({"train/loss": 0.5}, step=7)
    7, [{"prompt": ..., "answer": ...}]   ─▶ run.log({"samples": [Text, …]}, step=7)

SwanLab's system collectors are disabled: they would describe this process and record the git remote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import swanlab

COLLECTORS = ("hardware", "runtime", "requirements", "conda", "git", "swanlab", "monitor")


class SwanlabFeed:
    """The SwanLab run `settings["run_id"]`, started or continued; its files go to <folder>/swanlab/.

    Raises whatever swanlab raises.
    """

    files: ClassVar[str] = "run-*"

    def __init__(self, settings: Mapping[str, Any], folder: Path, mode: str, watched_pid: int) -> None:
        self._run = swanlab.init(
            id=settings["run_id"],
            resume="allow",
            mode=mode,
            log_dir=str(folder / "swanlab"),
            name=settings["name"],
            project=settings["project"],
            workspace=settings["workspace"],
            group=settings["run_group"],
            tags=list(settings["tags"]),
            config=settings["config"],
            settings=swanlab.Settings(
                interactive=False,
                probe=swanlab.Settings.Probe(**dict.fromkeys(COLLECTORS, False)),
                terminal=swanlab.Settings.Terminal(proxy_type="none"),
            ),
        )
        self.folder, self.url = Path(self._run.dir), self._run.url if mode == "online" else ""
        self.after = -1  # SwanLab itself drops steps that the server has

    @staticmethod
    def server() -> str:
        """The address of the configured server."""
        return str(swanlab.Settings().api_host)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One point of each metric."""
        self._run.log(dict(values), step=step)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """The rows as texts, each a block of JSON."""
        blocks = [json.dumps(row, indent=2, ensure_ascii=False, default=str) for row in rows]
        self._run.log({"samples": [swanlab.Text(block) for block in blocks]}, step=step)

    def finish(self, exit_code: int) -> bool:
        """End the run, in a state that says whether it failed.

        SwanLab prints what it could not upload to stderr, and reports it nowhere else.
        """
        self._run.finish("crashed" if exit_code else "success", error="the run failed" if exit_code else None)
        return True
