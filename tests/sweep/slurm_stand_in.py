"""A stand-in for Slurm, where there is none: sbatch, squeue, scancel and scontrol, by the name it is called with.

It runs batch scripts as real processes: arrays, their limit, dependencies, signals, requeueing, kills. A keeper of each
array starts and watches its tasks, and finds what they are told in files. A signal reaches the process that the script
has become, and only a kill everything below it, as with Slurm's `proctrack/cgroup`.

    $STAND_IN/17.json           the tasks of array 17: state, reason, pid
    $STAND_IN/17/3-scancel-…    told to task 3 of it, and not done yet
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from runner.core import subprocess as processes
from runner.run_dir.folder import write_json

ROOT = Path(os.environ.get("STAND_IN", os.devnull))
NODE = {"gpu": 2, "npu": 4, "cpu": 8}
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
KILL_WAIT_S = 60.0
POLL_S = 0.02


def sbatch(arguments: list[str]) -> int:
    parser = ArgumentParser()
    parser.add_argument("--test-only", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("script", nargs="?")
    given = parser.parse_args(arguments)
    if given.version:
        return 0
    text = Path(given.script).read_text() if given.script else sys.stdin.read()
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if "#SBATCH" in line
    )
    options = {name: "".join(shlex.split(value)) for name, value in options.items()}
    if refusal := refused(options):
        print(f"sbatch: error: Batch job submission failed: {refusal}", file=sys.stderr)
        return 1
    if given.test_only:
        return 0
    array = submitted(text, options)
    print(f"Submitted batch job {array}")
    return 0


def refused(options: dict[str, str]) -> str:
    if options.get("partition", "main") != "main":
        return "Invalid partition name specified"
    kind, _, count = options.get("gres", "cpu:1").rpartition(":")
    too_many = int(count) > NODE[kind.partition(":")[0]] or int(options.get("cpus-per-task", "1")) > NODE["cpu"]
    return "Requested node configuration is not available" if too_many else ""


def submitted(text: str, options: dict[str, str]) -> int:
    array = 1 + max((int(path.stem) for path in ROOT.glob("*.json")), default=16)
    folder = ROOT / str(array)
    folder.mkdir()
    (folder / "script").write_text(text)
    listed, _, limit = options["array"].partition("%")
    bounds = [piece.partition("-") for piece in listed.split(",")]
    tasks = [index for low, _, high in bounds for index in range(int(low), int(high or low) + 1)]
    waits = options.get("dependency", "").removeprefix("afterany:").split(":")
    kept = {
        "name": options["job-name"],
        "comment": options["comment"],
        "output": options["output"],
        "limit": int(limit or len(tasks)),
        "after": [one for one in waits if one],
        "tasks": {
            str(index): {"state": "PENDING", "reason": "JobArrayTaskLimit", "pid": 0, "starts": 0} for index in tasks
        },
    }
    write_json(ROOT / f"{array}.json", kept)
    keeper = [sys.executable, "-m", "tests.sweep.slurm_stand_in", "keeper", str(array)]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": (folder / "errors").open("w")}
    subprocess.Popen(keeper, cwd=Path(__file__).parents[2], start_new_session=True, **quiet)  # type: ignore[call-overload]
    return array


class Keeper:
    """One array, to its end."""

    def __init__(self, array: str) -> None:
        self.array, self.path = array, ROOT / f"{array}.json"
        self.kept: dict[str, Any] = json.loads(self.path.read_text())
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.deadlines: dict[str, float] = {}
        self.again: set[str] = set()

    def run(self) -> None:
        while any(task["state"] not in OVER for task in self.kept["tasks"].values()):
            for told in sorted((ROOT / self.array).glob("*-told-*")):
                words = told.read_text().split()
                told.unlink()
                self.obey(told.name.partition("-")[0], words)
            for index, process in list(self.running.items()):
                if process.poll() is not None:
                    del self.running[index]
                    self.ended(index, process.returncode)
                elif time.monotonic() > self.deadlines.get(index, float("inf")):
                    self.kill(index)
            self.start_what_fits()
            time.sleep(POLL_S)

    def start_what_fits(self) -> None:
        before = [json.loads((ROOT / f"{one}.json").read_text())["tasks"].values() for one in self.kept["after"]]
        if any(task["state"] not in OVER for tasks in before for task in tasks):
            return
        for index, task in self.kept["tasks"].items():
            if task["state"] == "PENDING" and len(self.running) < self.kept["limit"]:
                self.start(index, task)

    def start(self, index: str, task: dict[str, Any]) -> None:
        variables = {
            "SLURM_ARRAY_TASK_ID": index,
            "SLURM_JOB_ID": f"{self.array}_{index}",
            "SLURM_RESTART_COUNT": str(task["starts"]),
        }
        output = self.kept["output"].replace("%3a", f"{int(index):03}")
        with open(output, "ab") as file:
            process = subprocess.Popen(
                ["bash", str(ROOT / self.array / "script")],
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.running[index] = process
        self.change(index, state="RUNNING", pid=process.pid, starts=task["starts"] + 1)

    def obey(self, index: str, words: list[str]) -> None:
        task = self.kept["tasks"][index]
        if words[0] == "requeue":
            self.again.add(index)
        if task["state"] == "PENDING" and words[0] in ("cancel", "withdraw"):
            self.change(index, state="CANCELLED")
        elif index in self.running and words[0] == "signal":
            self.running[index].send_signal(number_of(words[1]))
        elif index in self.running and words[0] == "kill":
            self.kill(index)
        elif index in self.running and words[0] in ("cancel", "requeue"):
            self.change(index, state="COMPLETING", reason=words[0])
            self.running[index].send_signal(signal.SIGTERM)
            self.deadlines[index] = time.monotonic() + KILL_WAIT_S

    def ended(self, index: str, code: int) -> None:
        self.deadlines.pop(index, None)
        if index in self.again:
            self.again.discard(index)
            self.change(index, state="PENDING", reason="BeginTime")
        elif self.kept["tasks"][index]["reason"] == "cancel":
            self.change(index, state="CANCELLED")
        else:
            self.change(
                index, state="COMPLETED" if code == 0 else "FAILED", reason="None" if code == 0 else "NonZeroExitCode"
            )

    def kill(self, index: str) -> None:
        process = self.running[index]
        below = processes.descendants(process.pid)
        process.kill()
        processes.kill(below)

    def change(self, index: str, **changes: Any) -> None:
        self.kept["tasks"][index] |= changes
        write_json(self.path, self.kept)


def number_of(word: str) -> int:
    return int(word) if word.isdecimal() else signal.Signals[f"SIG{word}"]


def tell(job: str, words: str) -> None:
    array, _, index = job.partition("_")
    if (ROOT / array).is_dir():
        path = ROOT / array / f"{index}-told-{time.monotonic_ns()}"
        path.with_name("new").write_text(words)
        path.with_name("new").rename(path)


def scancel(arguments: list[str]) -> int:
    jobs = [word for word in arguments if not word.startswith("--")]
    number = next((word.partition("=")[2] for word in arguments if word.startswith("--signal=")), "")
    for job in jobs:
        if "--state=PENDING" in arguments:
            tell(job, "withdraw")
        elif number == "KILL":
            tell(job, "kill")
        else:
            tell(job, f"signal {number}" if number else "cancel")
    return 0


def scontrol(arguments: list[str]) -> int:
    if arguments[:2] == ["show", "config"]:
        print("ProctrackType           = proctrack/cgroup")
    elif arguments[0] == "requeue":
        tell(arguments[1], "requeue")
    else:
        print("   JOB_GRES=npu:2\n     Nodes=here CPU_IDs=0 Mem=0 GRES=npu:2(IDX:1-2)")
    return 0


def squeue(arguments: list[str]) -> int:
    name = next(word.partition("=")[2] for word in arguments if word.startswith("--name="))
    for path in ROOT.glob("*.json"):
        kept = json.loads(path.read_text())
        if kept["name"] == name:
            for index, task in kept["tasks"].items():
                print(path.stem, index, task["state"], kept["comment"], task["reason"], sep="|")
    return 0


def main() -> int:
    name, arguments = sys.argv[1], sys.argv[2:]
    if name == "keeper":
        Keeper(arguments[0]).run()
        return 0
    return {"sbatch": sbatch, "squeue": squeue, "scancel": scancel, "scontrol": scontrol}[name](arguments)


def install(where: Path) -> Path:
    """Put its commands into a folder that is to be on the PATH."""
    where.mkdir()
    for name in ("sbatch", "squeue", "scancel", "scontrol", "srun"):
        path = where / name
        program = shlex.join([sys.executable, "-m", "tests.sweep.slurm_stand_in", name])
        path.write_text(f'#!/bin/sh\ncd {shlex.quote(str(Path(__file__).parents[2]))} && exec {program} "$@"\n')
        path.chmod(0o755)
    return where


def end_all(state: Path) -> None:
    """Kill whatever runs still: the keepers, who have nothing to wait for then, end by themselves."""
    for path in state.glob("*.json"):
        for task in json.loads(path.read_text())["tasks"].values():
            if task["state"] in ("RUNNING", "COMPLETING"):
                below = processes.descendants(task["pid"])
                with suppress(psutil.NoSuchProcess):
                    below.append(psutil.Process(task["pid"]))
                processes.kill(below)


if __name__ == "__main__":
    sys.exit(main())
