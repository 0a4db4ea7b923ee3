"""One rank of a job with several processes: reads the job from its run folder and runs it.

python -m runner.launch.rank_main FOLDER ATTEMPT PIPE LISTENER        the rank is in torchrun's variables
    PIPE: descriptor of the pipe to the launcher; LISTENER: descriptor of the store's socket for rank 0, - for others
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TextIO

from runner.core.errors import EnvironmentProblem, RunnerError
from runner.core.fsync_io import full_disk_error
from runner.core.package import plug_in_fault
from runner.core.rank_info import RankInfo
from runner.core.signals import StopSignal
from runner.launch.heartbeat import ExitReport, HeartbeatWriter
from runner.launch.session import Session
from runner.launch.worker_process import enable_stack_dumps
from runner.run_dir.folder import RunFolder, read_spec
from runner.run_dir.manifest import redact
from runner.sampler.server.job_token import take_token
from runner.spec.base import COMMAND_LINE, iter_leaves
from runner.spec.decode import TRUST_KEY, decode
from runner.spec.job import JobSpec


def main(root: str, attempt: str, pipe: str, listener: str) -> int:
    """Run the rank; returns its exit code. The launcher reads the reason from the pipe."""
    stop = StopSignal()
    stop.install()
    take_token()
    heartbeat = HeartbeatWriter(int(pipe))
    place = RankInfo.from_environment(os.environ)
    folder = RunFolder(Path(root)).for_rank(place.rank)

    def run() -> None:
        session = Session(load_spec(folder), folder, int(attempt), place, heartbeat.step, stop=stop)
        if listener != "-":
            session.open_store = lambda: serve_store(int(listener))
        session.run()

    return run_and_report(heartbeat, folder, run)


def run_and_report(heartbeat: HeartbeatWriter, folder: RunFolder, work: Callable[[], object]) -> int:
    """Do `work` and report to the launcher why the process ends; returns the exit code."""
    with folder.log.open("a") as log:  # stays open for stack dumps
        enable_stack_dumps(log.fileno())
        try:
            work()
        except RunnerError as error:
            heartbeat.report(ExitReport.from_error(error))
            return error.exit_code
        except Exception as error:
            reported = full_disk_error(error) or _report_traceback(error, log, folder)
            heartbeat.report(ExitReport.from_error(reported))
            return reported.exit_code
    return 0


def _report_traceback(error: Exception, log: TextIO, folder: RunFolder) -> RunnerError:
    """Write the traceback of an error that is not worded for the user; the error that names it."""
    log.write(redact(traceback.format_exc()))
    where = f"\n  the traceback is in {folder.log}"
    if (fault := plug_in_fault(error)) is not None:
        return EnvironmentProblem(fault + where)
    return RunnerError(f"this is a bug in this project: {type(error).__name__}: {error}{where}")


def serve_store(listener: int) -> object:
    """Serve the job's rendezvous store at the port that the supervisor has opened.

    Imports torch, so the environment must be set before.
    """
    from runner.core import torch_compat

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return torch_compat.serve_tcp_store(host, port, listener, wait_for_workers=False)


def load_spec(folder: RunFolder) -> JobSpec:
    """The job in a run folder, whose launcher has checked who set what.

    Raises EnvironmentProblem if it cannot be read, SpecError.
    """
    data = read_spec(folder).data
    trusted = [key for key, _ in iter_leaves(data) if key.endswith(TRUST_KEY)]
    return decode(data, dict.fromkeys(trusted, COMMAND_LINE))


def exit_process(code: int) -> NoReturn:
    """End the process without shutting libraries down.

    After other ranks have ended, gloo's threads take seconds to shut down, or crash.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader has ended
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_process(main(*sys.argv[1:]))
