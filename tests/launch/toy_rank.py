"""A rank without torch, which does what TOY asks of its rank: {"1": "kill"}; the others go through the steps.

"until 5": it ends well when samplers were started five times.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from runner.core.errors import DataError, DeadlineExceeded
from runner.core.rank_info import RankInfo
from runner.launch.heartbeat import ExitReport, HeartbeatWriter
from runner.launch.worker_process import enable_stack_dumps

STEPS, STEP_S = 10, 0.05


def stuck_here(folder: Path) -> None:
    (folder / "stuck").touch()
    threading.Event().wait()


def misbehave(asked: str, link: HeartbeatWriter, place: RankInfo, folder: Path) -> int:
    if asked == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if asked == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if asked == "hang":
        stuck_here(folder)
    if asked == "wordless":
        os._exit(9)
    error = {
        "data": DataError(f"{place}: line 7 is no JSON"),
        "same": DataError("line 7 is no JSON"),
        "waited": DeadlineExceeded(f"{place}, summing: another rank did not arrive"),
    }[asked]
    if asked == "waited":  # for ranks that have done what they are asked, which a busy machine may start later
        toys = json.loads(os.environ["TOY"])
        ending, stuck = [rank for rank, what in toys.items() if what in ("kill", "data")], "hang" in toys.values()
        while len(list(folder.glob("*.said"))) < place.size or any(runs(folder / f"{rank}.said") for rank in ending):
            time.sleep(STEP_S)
        while stuck and not (folder / "stuck").exists():
            time.sleep(STEP_S)
        time.sleep(0.3)
    link.report(ExitReport.from_error(error))
    return error.exit_code


def runs(said: Path) -> bool:
    """Whether the rank that wrote this still runs; a zombie does not."""
    try:
        pid = json.loads(said.read_text())["pid"]
    except ValueError:
        return True  # it is writing
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def lives(root: Path) -> int:
    """How many samplers were started."""
    return sum(len(path.read_text().splitlines()) for path in root.glob("samplers/*.lives"))


def main(root: str, attempt: str, pipe: str, listener: str) -> int:
    place, link = RankInfo.from_environment(os.environ), HeartbeatWriter(int(pipe))
    asked = json.loads(os.environ["TOY"]).get(str(place.rank))
    with (Path(root) / "ranks" / f"{place.rank}.said").open("w") as said:
        wanted = ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "RUN_SAMPLER_TOKEN")
        json.dump({name: os.environ.get(name) for name in wanted} | {"pid": os.getpid(), "listener": listener}, said)
    log = (Path(root) / ("run.log" if place.is_rank0 else f"ranks/{place.rank}.log")).open("a")
    enable_stack_dumps(log.fileno())
    served = asked is not None and asked.startswith("until ")
    for step in range(1, STEPS if asked != "long" and not served else 10**6):
        time.sleep(STEP_S)
        link.step(step)
        if served and step > 2 and lives(Path(root)) >= int(asked.removeprefix("until ")):
            return 0
        if asked not in (None, "long") and not served and step == 2:
            return misbehave(asked, link, place, Path(root) / "ranks")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
