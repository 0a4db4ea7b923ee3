"""Slurm's commands for one machine that passes for several: sbatch, srun, scontrol, squeue, scancel.

sbatch ─▶ keeper ─▶ the script, again if it was requeued        srun ─▶ a process for each "machine", all of them here

    $STAND_IN/17.json     job 17: state, reason, starts, pid of its script, pids of its tasks
    $STAND_IN/17.told     what it is told: requeue, cancel
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import zlib
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

ROOT = Path(os.environ.get("STAND_IN", os.devnull))
HERE = "127.0.0.1"
POLL_S = 0.05
CODE = Path(__file__).resolve().parents[2]


def first_job(state: Path) -> int:
    """The number of the first job: a port follows from it, and another run of these tests may be under way."""
    return 17 + zlib.crc32(bytes(state)) % 10_000


def job_of(number: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / f"{number}.json").read_text()))


def change(number: str, **changes: Any) -> None:
    path = ROOT / f"{number}.json"
    with (ROOT / "lock").open("w") as lock:  # the keeper and srun change a job
        fcntl.flock(lock, fcntl.LOCK_EX)
        path.with_suffix(".new").write_text(json.dumps({**(job_of(number) if path.exists() else {}), **changes}))
        path.with_suffix(".new").rename(path)


def sbatch(arguments: list[str]) -> int:
    files = [word for word in arguments if not word.startswith("--")]
    text = Path(files[0]).read_text() if files else sys.stdin.read()
    lines = [line.removeprefix("#SBATCH --").partition("=") for line in text.splitlines() if "#SBATCH" in line]
    options = {name: "".join(shlex.split(value)) for name, _, value in lines}
    if options.get("partition", "main") != "main":
        print("sbatch: error: Batch job submission failed: Invalid partition name specified", file=sys.stderr)
        return 1
    if "--test-only" in arguments:
        return 0
    number = str(first_job(ROOT) + len(list(ROOT.glob("*.json"))))
    change(number, state="PENDING", reason="Resources", options=options, script=files[0], starts=0, pid=0, tasks=[])
    keeper = [sys.executable, "-m", __spec__.name, "keeper", number]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": (ROOT / f"{number}.errors").open("w")}
    subprocess.Popen(keeper, env=at_home(), start_new_session=True, **quiet)  # type: ignore[call-overload]
    print(f"Submitted batch job {number}")
    return 0


def keeper(arguments: list[str]) -> int:
    [number] = arguments
    again = True
    while again:
        job, again = job_of(number), False
        machines = job["options"]["nodes"]
        variables = {
            "SLURM_JOB_ID": number,
            "SLURM_JOB_NUM_NODES": machines,
            "SLURM_RESTART_COUNT": str(job["starts"]),
            "SLURM_CPUS_PER_TASK": job["options"]["cpus-per-task"],
        }
        with open(job["options"]["output"].replace("%j", number), "ab") as log:
            process = subprocess.Popen(["bash", job["script"]], env=os.environ | variables, stdout=log, stderr=log)
        change(number, state="RUNNING", reason="None", starts=job["starts"] + 1, pid=process.pid)
        code = process.wait()
        told = ROOT / f"{number}.told"
        if told.exists():
            again = told.read_text() == "requeue"
            told.unlink()
            change(number, state="PENDING" if again else "CANCELLED", reason="BeginTime" if again else "None", tasks=[])
        else:
            change(number, state="FAILED" if code else "COMPLETED", tasks=[])
    return 0


def srun(arguments: list[str]) -> int:
    own = list(takewhile(lambda word: word.startswith("--"), arguments))  # options come first
    options = dict(word.removeprefix("--").partition("=")[::2] for word in own)
    command = arguments[len(own) :]
    number, machines = os.environ["SLURM_JOB_ID"], int(options["nodes"])
    assert options["ntasks"] == str(machines) and options["cpu-bind"] == "none"
    running = []
    for node in range(machines):
        step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": f"here[0-{machines - 1}]", "SLURM_NODEID": str(node)}
        step |= {"SLURM_STEP_NUM_NODES": str(machines), "SLURM_STEP_NUM_TASKS": str(machines)}
        running.append(subprocess.Popen(command, env=os.environ | step))
    for forwarded in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(forwarded, lambda number, frame: pass_on(running, number))
    if (ROOT / f"{number}.json").exists():
        change(number, tasks=[task.pid for task in running])
    while all(task.poll() is None for task in running):
        time.sleep(POLL_S)
    end = time.monotonic() + float(options["wait"])
    while any(task.poll() is None for task in running) and time.monotonic() < end:
        time.sleep(POLL_S)
    pass_on([task for task in running if task.poll() is None], signal.SIGKILL)
    return max(code if code >= 0 else 128 - code for code in (task.wait() for task in running))


def pass_on(tasks: list[subprocess.Popen[bytes]], number: int) -> None:
    for task in tasks:
        task.send_signal(number)


def scontrol(arguments: list[str]) -> int:
    if arguments[:2] == ["show", "hostnames"]:
        low, _, high = arguments[2].partition("[")[2].rstrip("]").partition("-")
        print("\n".join(f"here{number}" for number in range(int(low), int(high or low) + 1)))
    elif arguments[:2] == ["show", "node"]:
        print(f"NodeName={arguments[2]} Gres=(null)\n   NodeAddr={HERE} NodeHostName=here")
    elif arguments[0] == "requeue":
        (ROOT / f"{arguments[1]}.told").write_text("requeue")
    return 0


def squeue(arguments: list[str]) -> int:
    number = next(word.partition("=")[2] for word in arguments if word.startswith("--jobs="))
    if not (ROOT / f"{number}.json").exists():
        print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
        return 1
    job = job_of(number)
    print(f"{job['state']}|{job['reason']}")
    return 0


def scancel(arguments: list[str]) -> int:
    [number] = arguments
    (ROOT / f"{number}.told").write_text("cancel")
    for pid in (*job_of(number)["tasks"], job_of(number)["pid"]):
        os.kill(pid, signal.SIGTERM)
    return 0


def at_home() -> dict[str, str]:
    """An environment in which this module is found."""
    return {**os.environ, "PYTHONPATH": str(CODE)}


def install(where: Path) -> Path:
    """Put its commands into a folder that is to be on the PATH."""
    where.mkdir()
    for name in ("sbatch", "srun", "scontrol", "squeue", "scancel"):
        path = where / name
        program = shlex.join([sys.executable, "-m", "tests.launch.slurm_stand_in", name])
        path.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(CODE))} exec {program} "$@"\n')
        path.chmod(0o755)
    return where


def end_all(state: Path, within_s: float = 20.0) -> None:
    """End whatever runs still: first tasks, then the scripts, which their keepers outlive shortly."""
    end = time.monotonic() + within_s
    for path in state.glob("*.json"):
        while (job := json.loads(path.read_text()))["state"] in ("RUNNING", "PENDING") and time.monotonic() < end:
            for pid in (*job["tasks"], job["pid"]):
                with suppress(ProcessLookupError):
                    os.kill(pid or os.getpid(), signal.SIGKILL if pid else 0)
            time.sleep(POLL_S)


if __name__ == "__main__":
    commands = {"sbatch": sbatch, "srun": srun, "scontrol": scontrol, "squeue": squeue, "scancel": scancel}
    sys.exit({**commands, "keeper": keeper}[sys.argv[1]](sys.argv[2:]))
