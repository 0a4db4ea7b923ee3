"""One process of a job on several devices: reads the job from its run folder, and takes part in it.

python -m runner.launch.rank FOLDER ATTEMPT PIPE LISTENER        its place is in torchrun's variables
    PIPE: descriptor of the pipe to the launcher; LISTENER: that of the socket of the job's store, or - but for rank 0
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from runner.core.errors import RunnerError
from runner.core.rank_info import Place
from runner.core.signals import StopSignal
from runner.launch.member import watch_stacks
from runner.launch.session import Session
from runner.launch.verdict import Link, Report
from runner.run_dir.folder import RunFolder, read_mapping
from runner.sampler.remote.wire import take_token
from runner.spec.decode import decode
from runner.spec.job import JobSpec


def main(root: str, attempt: str, pipe: str, listener: str) -> int:
    """Returns the rank's exit code; the launcher hears the reason."""
    stop = StopSignal()
    stop.install()
    take_token()
    link = Link(int(pipe))
    place = Place.of(os.environ)
    folder = RunFolder(Path(root)).of_rank(place.rank)

    def take_part() -> None:
        session = Session(read_spec(folder), folder, int(attempt), place, link.step, stop=stop)
        if listener != "-":
            session.meet = lambda: serve(int(listener))
        session.run()

    return reported(link, folder, take_part)


def reported(link: Link, folder: RunFolder, work: Callable[[], object]) -> int:
    """Do `work`; the exit code of a process of which the launcher hears why it ends."""
    with folder.log.open("a") as log:  # held open: the dumps go there, and a library that writes to the screen
        watch_stacks(log.fileno())
        try:
            work()
        except RunnerError as error:
            link.report(Report.of(error))
            return error.exit_code
        except Exception as error:
            traceback.print_exc(file=log)
            text = f"this is a bug of ours: {type(error).__name__}: {error}\n  the traceback is in {folder.log}"
            link.report(Report.of(RunnerError(text)))
            return RunnerError.exit_code
    return 0


def serve(listener: int) -> object:
    """Hold the job's store, at which all ranks meet, in this process; the launcher listens already on its port.

    It imports torch, so the environment is set before.
    """
    from runner.core import torch_compat

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return torch_compat.listening_store(host, port, listener, wait_for_workers=False)


def read_spec(folder: RunFolder) -> JobSpec:
    """The job in a run folder. Raises EnvironmentProblem where it cannot be read, SpecError."""
    return decode(read_mapping(folder.spec, must_exist=True), {})


def leave(code: int) -> NoReturn:
    """End the process without taking the libraries down: gloo's threads need seconds for it, or crash, where other
    ranks are gone by then."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody is left to read it
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(*sys.argv[1:]))
