"""Sweeps of toy programs, which behave and misbehave in milliseconds; also a program, so that a sweep can be killed.

python -m tests.sweep.toy FOLDER start|resume|search NAME,NAME,… [OPTIONS AS JSON]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.core.device_kinds import ResourceRequest
from runner.core.errors import RunnerError
from runner.sweep import commands, plan, scheduler
from runner.sweep.commands import make_executor
from runner.sweep.config import SweepConfig
from runner.sweep.job import JobAttempt, StopReason
from runner.sweep.plan import JobPlan, JobState, Plan, Ranking, SweepFolder, SweepState
from runner.sweep.space import Dimension, SearchSpace

# Each gets its run folder as argv[1] and notes there that it was started: a sweep that runs a job twice is found out.
BEGIN = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
with open(folder / "starts", "a") as file:
    file.write(f"{os.getpid()}\\n")
starts = len((folder / "starts").read_text().split())
def note(step, **values):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step} | values) + "\\n")
"""
END = """
if not (folder / "status.json").exists():
    (folder / "status.json").write_text('{"state": "done"}')
"""
PROGRAMS = {
    "good": "note(1, **{'eval/loss': 1.0 + float(sys.argv[2])}); print('fine')",
    "raises": "raise ValueError('no such number')",
    "raises last": """
while not (folder.parent / "000" / "metrics.jsonl").exists():
    time.sleep(0.01)
raise ValueError("no such number")
""",
    "exits": "print('giving up'); sys.exit(3)",
    "dies": "os.kill(os.getpid(), signal.SIGKILL)",
    "hangs": "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)]; note(1); time.sleep(600)",
    "saves": """
signal.signal(signal.SIGTERM, lambda *_: (note(9), sys.exit(143)))
signal.signal(signal.SIGINT, lambda *_: (note(9), sys.exit(130)))
note(1)
while starts == 1 and not (folder / "go").exists():
    time.sleep(0.01)
note(2, **{'eval/loss': 0.5})
""",
    "memory": "sys.exit(75) if starts < 3 else note(1, **{'eval/loss': 0.1})",
    "half": "(folder / 'status.json').write_text('{\"state\": \"running\"}')",
    "silent": "note(1, **{'eval/loss': 1.0}); os._exit(0)",
    "parent": "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.exit(1)",
    "curve": """
import math
best = (math.log10(float(sys.argv[2])) + 3) ** 2
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
for step in range(1, 11):
    note(step, **{"eval/loss": best + 1 / step})
    time.sleep(0.08 if best > 1 else 0.01)
""",
    "cards": "note(1, cards=os.environ['ASCEND_RT_VISIBLE_DEVICES']); time.sleep(1)",
    "environment": "print(json.dumps(dict(os.environ)))",
    "place": "print(os.getcwd())",
    "sleeps": "time.sleep(600)",
    "where": "note(1, cores=len(os.sched_getaffinity(0))); time.sleep(0.2)",
}


def toy_plan(names: Sequence[str], options: Mapping[str, object], need: ResourceRequest | None = None) -> Plan:
    """A job per name; what varies is its number."""
    jobs = list(
        JobPlan(i, varied={"data.n": str(i)}, words=(f"data.n={i}",), sections={"n": i}, need=need or ResourceRequest())
        for i in range(len(names))
    )
    return Plan(
        "toy", ("data.n=…",), {"n": 0, "steps": 2}, jobs, options, (Ranking("eval/loss", "min", "last", "sent no"),)
    )


def command_of(folder: SweepFolder, names: Sequence[str]) -> commands.Command:
    """What runs each job."""

    def command(job: JobPlan, begun: bool) -> list[str]:
        program = BEGIN + PROGRAMS[names[job.index % len(names)]] + END
        given = job.varied.get("optimizer.lr", str(job.index))
        return [sys.executable, "-I", "-S", "-c", program, str(folder.run(job.index).root), given]

    return command


def start(
    where: Path, names: Sequence[str], need: ResourceRequest | None = None, **options: object
) -> tuple[SweepFolder, int]:
    """Run a sweep below `where`; its folder, and its exit code."""
    folder, made = plan.create_sweep_folder("toy", where), toy_plan(names, options, need)
    config = SweepConfig.model_validate(options)
    return folder, code_of(lambda: _start(folder, made, config, command_of(folder, names)))


def resume(
    folder: SweepFolder, names: Sequence[str], wanted: commands.ResumeSelection | None = None, **changes: object
) -> int:
    """Continue it; the exit code."""
    asked, config = wanted or commands.ResumeSelection(), SweepConfig.model_validate(changes)
    return code_of(lambda: resume_with(folder, asked, config, command_of(folder, names)))


LR = Dimension("optimizer.lr", "optimizer.lr", "float", 1e-6, 1.0, log=True)


def propose(index: int, words: Sequence[str], varied: Mapping[str, str]) -> JobPlan:
    return JobPlan(index, dict(varied), tuple(words), {"n": index})


def search(where: Path, names: Sequence[str], **options: object) -> tuple[SweepFolder, int]:
    """Search a learning rate, which is best at 1e-3."""
    folder, config = plan.create_sweep_folder("toy", where), SweepConfig.model_validate({"search": "optuna", **options})
    made = replace(toy_plan([], config.model_dump(exclude_unset=True)), search=SearchSpace((LR,), ()))
    return folder, code_of(lambda: _start(folder, made, config, command_of(folder, names), propose))


def go_on(folder: SweepFolder, names: Sequence[str], **changes: object) -> int:
    """Continue a search; the exit code."""
    _, made = plan.find_sweep(str(folder.root))
    config = SweepConfig.model_validate({**made.options, **changes})
    return code_of(lambda: resume_with(folder, commands.ResumeSelection(), config, command_of(folder, names), propose))


def _start(folder: SweepFolder, made: Plan, options: SweepConfig, *others: Any) -> int:
    with make_executor(options) as executor:
        return commands.start_sweep(folder, made, options, executor, *others)


def resume_with(folder: SweepFolder, wanted: commands.ResumeSelection, options: SweepConfig, *others: Any) -> int:
    """Continue a sweep where its options say."""
    with make_executor(options) as executor:
        return commands.resume_sweep(*plan.find_sweep(str(folder.root)), wanted, options, executor, *others)


def time_out_only(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the time limit end this job alone, after its first step: on a busy machine every job may take as long."""
    stop, attempt = scheduler.RunningJobs.stop, scheduler.JobAttempt

    def stop_one(jobs: scheduler.RunningJobs, at: int, reason: StopReason, *number: int) -> None:
        if reason.state != "timeout" or (at == index and jobs[at].metrics.step):
            stop(jobs, at, reason, *number)

    def with_its_limit(**given: Any) -> JobAttempt:
        return attempt(**given if given["index"] == index else given | {"timeout_s": None})

    monkeypatch.setattr(scheduler.RunningJobs, "stop", stop_one)
    monkeypatch.setattr(scheduler, "JobAttempt", with_its_limit)


def code_of(run: object) -> int:
    try:
        return run()  # type: ignore[operator,no-any-return]
    except RunnerError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def states(folder: SweepFolder) -> list[str]:
    """The state of each job, as the disk has it."""
    return [job.state for job in SweepState.read(folder)]


def jobs(folder: SweepFolder) -> list[JobState]:
    return list(SweepState.read(folder))


def starts(folder: SweepFolder, index: int) -> int:
    """How often a job's program was started."""
    path = folder.run(index).root / "starts"
    return len(path.read_text().split()) if path.exists() else 0


if __name__ == "__main__":
    place, action, listed = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")
    given = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    if npus := given.pop("npus", 0):
        given["need"] = ResourceRequest("npu", npus)
    if action != "resume":
        sys.exit((start if action == "start" else search)(place, listed, **given)[1])
    sys.exit(resume(SweepFolder(place), listed, **given))
