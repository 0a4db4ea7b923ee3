"""A process that would sample, without torch: TOY asks {"sampler 1": ["kill", "data"]} of its first lives."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from runner.core.errors import DataError, SamplerError
from runner.launch.heartbeat import ExitReport, HeartbeatWriter


def misbehave(asked: str, link: HeartbeatWriter) -> int:
    if asked == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if asked == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if asked == "quit":
        return 0
    error = {"data": DataError("line 7 is no JSON"), "fault": SamplerError("the engine is gone")}[asked]
    link.report(ExitReport.from_error(error))
    return error.exit_code


def main(role: str, root: str, attempt: str, pipe: str, index: str) -> int:
    link, told = HeartbeatWriter(int(pipe)), list[int]()
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    lives = Path(root) / f"{role}s" / f"{index}.lives"
    with lives.open("a") as file:
        seen = {
            name: os.environ.get(name)
            for name in ("RUN_SAMPLER_TOKEN", "RANK", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
        }
        file.write(json.dumps({"pid": os.getpid(), **seen}) + "\n")
    asked = json.loads(os.environ["TOY"]).get(f"{role} {index}", [])
    life = len(lives.read_text().splitlines())
    time.sleep(0.1)
    if life <= len(asked):
        return misbehave(asked[life - 1], link)
    while not told:
        time.sleep(0.01)
    lives.with_suffix(".told").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
