"""Ranks that torchrun, or another program that sets its variables, has started.

rank 0: composes the job, creates the folder ──store: folder, attempt──▶ the other ranks join

The store is torch's, but a rank must set its environment before it imports torch. So rank 0 publishes the job after
that, and each other rank receives it in a separate process: this module as a program.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from runner.core.errors import EnvironmentProblem, RankLost, RunnerError
from runner.core.rank_info import RENDEZVOUS_VARIABLES, RankInfo, is_launched_rank
from runner.device.process_setup import AUTOLOAD
from runner.run_dir.folder import RunFolder
from runner.spec.job import JobSpec

KEY = "job"
PORT = 29500  # torchrun's own
LAYOUT = tuple(f"launch.{name}=" for name in ("devices", "nodes", "node_rank", "rdzv_endpoint"))  # set by torchrun
LOOK = timedelta(seconds=1)  # between checks for a signal while waiting for rank 0


def run_under_torchrun(words: Sequence[str], begin: Callable[[Sequence[str]], int]) -> int:
    """Begin a job with these words; inside torchrun as rank 0 with its layout, or as another rank.

    Raises EnvironmentProblem where the words contradict torchrun, and whatever `begin` does.
    """
    if not is_launched_rank(os.environ):
        return begin(words)
    from runner.launch.rank_main import exit_process

    place = RankInfo.from_environment(os.environ)
    if not place.is_rank0:
        exit_process(_run_other_rank(place))
    code = RunnerError.exit_code
    try:
        code = begin([*words, *torchrun_layout(place, words)])
    except RunnerError as error:
        code = error.exit_code
        raise
    finally:
        os.environ[AUTOLOAD] = "0"  # torch may not be imported yet, and nothing is computed any more
        _publish_job({"ended": code})
    exit_process(code)


def torchrun_layout(place: RankInfo, words: Sequence[str]) -> list[str]:
    """The layout of torchrun as overrides. Raises EnvironmentProblem for `words` that contradict it."""
    if place.size % place.local_size:
        text = f"{place.local_size} processes here and {place.size} in total"
        raise EnvironmentProblem(f"{text}; start the same number on each machine")
    nodes = place.size // place.local_size
    found: dict[str, Any] = {"devices": place.local_size, "nodes": nodes}
    if nodes > 1:
        address = ":".join(os.environ[name] for name in RENDEZVOUS_VARIABLES)
        found |= {"node_rank": place.node_rank, "rdzv_endpoint": address}
    layout = {f"launch.{name}": str(value) for name, value in found.items()}
    for word in words:
        name, _, value = word.lstrip("+").partition("=")
        if value != layout.pop(name, value):
            raise EnvironmentProblem(f"{word}: torchrun started {found['devices']} × {nodes} processes; leave it out")
    return [f"{name}={value}" for name, value in layout.items()]


def torchrun_command(devices: int, machines: int) -> str:
    """The command that runs this command's job under torchrun."""
    words = [word for word in sys.argv[1:] if not word.lstrip("+").startswith(LAYOUT)]
    where = ["--standalone"]
    if machines > 1:
        where = [f"--nnodes={machines}", "--node_rank=0", "--master_addr=HOST", f"--master_port={PORT}"]
    started = ["torchrun", *where, f"--nproc_per_node={devices}", "-m", "runner", *words]
    each = f"     (on each machine, with its --node_rank, 0 to {machines - 1}; HOST: machine 0's name)"
    return shlex.join(started) + (each if machines > 1 else "")


def run_rank0(spec: JobSpec, folder: RunFolder, attempt: int) -> None:
    """Run rank 0. Raises RunnerError."""
    from runner.launch.cleanup_process import remove_scratch_at_end
    from runner.launch.session import Session

    folder.ranks.mkdir(exist_ok=True)
    stores: list[Any] = []  # empty until the job is published

    def publish() -> None:
        stores.append(_publish_job({"folder": str(folder.root), "attempt": attempt, "argv": sys.argv[1:]}))

    place = RankInfo.from_environment(os.environ)
    try:
        with remove_scratch_at_end(spec, folder, place):
            Session(spec, folder, attempt, place, open_store=publish).run()
    except RunnerError as error:
        for store in stores:
            _is_first(store, str(error))
        raise


def _run_other_rank(place: RankInfo) -> int:
    """Run another rank; returns its exit code. Only one rank prints an error that several ranks have."""
    from runner.launch.cleanup_process import remove_scratch_at_end
    from runner.launch.rank_main import load_spec
    from runner.launch.session import Session

    job = _receive_job()
    if "ended" in job:
        return int(job["ended"])
    if job["argv"] != sys.argv[1:]:
        raise EnvironmentProblem(f"{place}: rank 0 has a different command line: {' '.join(job['argv'])}")
    folder = RunFolder(Path(job["folder"])).for_rank(place.rank)
    if not folder.spec.is_file():
        raise EnvironmentProblem(f"{place}: cannot see rank 0's folder {folder.root} here; use shared storage")
    spec, stores = load_spec(folder), list[Any]()
    try:
        with remove_scratch_at_end(spec, folder, place):
            Session(spec, folder, job["attempt"], place, open_store=lambda: stores.append(_store())).run()
    except RunnerError as error:
        time.sleep(LOOK.total_seconds())
        if all(_is_first(store, str(error)) for store in stores):
            raise
        return error.exit_code
    return 0


def _receive_job() -> dict[str, Any]:
    """The job that rank 0 publishes, received by a separate process. Raises RankLost if rank 0 is lost."""
    from runner.core.subprocess import with_pdeathsig

    command = with_pdeathsig([sys.executable, "-P", "-m", "runner.launch.torchrun"])
    own = {**os.environ, AUTOLOAD: "0"}  # a torch_npu that does not load would break it
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=own, check=False)
    if done.returncode or not done.stdout:
        raise RankLost(f"rank 0 exited before the job started (its listening process returned {done.returncode})")
    job: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "lost" in job:
        raise RankLost(job["lost"])
    return job


def print_job() -> None:
    """Print the job that rank 0 publishes, or that rank 0 is lost."""
    try:
        job = _wait_for_job(_store())
    except RankLost as error:
        job = {"lost": str(error)}
    print(json.dumps(job))


def _publish_job(job: Mapping[str, Any]) -> Any:
    """Publish the job, or its end if no job was published; returns the store."""
    store = _store()
    store.compare_set(KEY, "", json.dumps(job))
    return store


def _wait_for_job(store: Any) -> dict[str, Any]:
    """The job that rank 0 publishes. Raises RankLost if it is lost; torchrun then ends this process, too."""
    from torch.distributed import DistNetworkError, DistStoreError

    while True:
        try:
            store.wait([KEY], LOOK)
            return dict(json.loads(store.get(KEY)))
        except DistNetworkError as error:
            raise RankLost(f"rank 0 exited before the job started ({error})") from error
        except DistStoreError:  # not yet
            continue


def _is_first(store: Any, message: str) -> bool:
    """Whether no other rank has ended with this message."""
    try:
        return bool(store.add(hashlib.sha256(message.encode()).hexdigest(), 1) == 1)
    except RuntimeError:  # the store has ended
        return True


def _store() -> Any:
    """The ranks' rendezvous store, served by torchrun or else by rank 0."""
    from torch import distributed

    store, _, _ = next(distributed.rendezvous("env://"))  # type: ignore[attr-defined]
    return distributed.PrefixStore("runner", store)  # type: ignore[attr-defined]


if __name__ == "__main__":
    print_job()
