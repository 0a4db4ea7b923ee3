"""A run's standing as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from runner.folder import RunFolder, is_latest, shown
from runner.report.standing import Member, Standing
from runner.tracker.text import counted, duration, number, size, visible

# Lines of numbers: what each is about, and how the names begin that stand in it, in their order.
LINES = {
    "learns": ("reward/mean", "train/loss", "train/grad_norm", "eval/"),
    "times": ("perf/step_s", "perf/tokens_per_s", "perf/mfu", "time/"),
    "samples": (
        "rollout/length",
        "rollout/cut_off",
        "rollout/staleness",
        "perf/publish_s",
        "perf/load_s",
        "sync/",
        "sampler/",
    ),
    "device": ("device/", "perf/peak_memory_bytes"),
}
COUNTS = ("sampler/restarts", "sampler/resyncs", "sampler/rejected")  # of what went wrong: worth a word if it did
GO_ON = ("interrupted", "failed", "killed")


def lines(run: Standing) -> Iterator[str]:
    """What `run status` prints."""
    folder = RunFolder(Path(run.folder))
    yield f"{shown(folder.root)}: {_headline(run)}"
    if run.error:
        yield f"error    {visible(run.error.splitlines()[0])}"
    if (job := run.slurm) is not None:
        yield f"slurm    job {job['job']}: {job['state']} ({job['reason']}); log {_path(job['log'])}"
    yield from _table(run.members)
    for about, names in LINES.items():
        if found := [key for name in names for key in run.numbers if _is_of(key, name) and _tells(run, key)]:
            yield f"{about.ljust(8)} " + " · ".join(_number(run, key) for key in found)
    if run.checkpoint is not None and run.checkpoint_age_s is not None:
        yield f"saved    step {run.checkpoint}, {duration(run.checkpoint_age_s)} ago"
    elif run.step:
        yield "saved    nothing yet"
    if run.logs:
        yield f"logs     {', '.join(map(_path, run.logs))}"
    if run.state in GO_ON:
        yield f"go on    run resume {'latest' if is_latest(folder) else shown(folder.root)}"


def _headline(run: Standing) -> str:
    said = [run.state, f"step {run.step} of {run.steps}"]
    if run.attempt is not None and run.attempt > 1:
        said.insert(1, f"attempt {run.attempt}")
    if run.exit_code:
        said.insert(1, f"exit code {run.exit_code}")
    if run.step_s is not None:
        said.append(f"{number(run.step_s)} s a step")
    if run.left_s is not None:
        said.append(f"{duration(run.left_s)} left")
    return " · ".join(said)


def _table(members: list[Member]) -> Iterator[str]:
    """The processes, a line each."""
    width = max((len(member.name) for member in members), default=0)
    where = [f"{member.host or '?'}:{member.pid or '?'}" for member in members]
    wide = max(map(len, where), default=0)
    for member, place in zip(members, where, strict=True):
        said = [member.state]
        if member.step is not None:
            said.append(f"step {member.step}")
        if member.heard_s is not None:
            said.append(f"heard {number(round(member.heard_s, 1))} s ago")
        if member.replaced:
            said.append(f"started anew {counted(member.replaced, 'time')}")
        yield f"process  {member.name.ljust(width)}  {place.ljust(wide)}  {', '.join(said)}"


def _is_of(key: str, name: str) -> bool:
    """Whether a metric is the one of this name, or one below it where it ends in a slash."""
    return key.startswith(name) if name.endswith("/") else key == name


def _tells(run: Standing, key: str) -> bool:
    return key not in COUNTS or run.numbers[key][1] != 0


def _number(run: Standing, key: str) -> str:
    """Its name and value, with the step where that is not the newest."""
    step, value = run.numbers[key]
    text = "not finite" if value is None else size(value) if key.endswith("bytes") else number(value)
    return f"{key} {text}" + (f" (step {step})" if step != run.step else "")


def _path(path: str) -> str:
    return shown(Path(path))
