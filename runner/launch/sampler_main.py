"""A process that only samples: reads the job from its run folder, builds its sampler, and serves it.

python -m runner.launch.sampler_main FOLDER ATTEMPT PIPE INDEX        PIPE: descriptor of the pipe to the launcher

It ends when it is told to (SIGTERM), and with its launcher.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from runner.core.auto_choices import Decisions
from runner.core.errors import Interrupted
from runner.core.signals import StopSignal
from runner.launch.exit_cause import HeartbeatWriter
from runner.launch.multi_node import LOOPBACK, SAMPLER_HOST
from runner.launch.rank_main import exit_process, read_spec, run_and_report
from runner.launch.run_messages import console_logging
from runner.launch.session import load_torch, set_environment, translate_memory_errors
from runner.run_dir.folder import RunFolder
from runner.sampler.remote.wire import job_token, take_token


def main(root: str, attempt: str, pipe: str, index: str) -> int:
    """Serve until SIGTERM; returns the exit code. The supervisor receives the reason over `pipe`."""
    folder = RunFolder(Path(root)).for_sampler(int(index))
    stop = StopSignal()
    stop.install()
    take_token()
    link = HeartbeatWriter(int(pipe))

    def work() -> None:
        if stop.number is None:
            with suppress(Interrupted), stop.interrupt_immediately():
                _serve(folder, int(attempt), int(index))

    return run_and_report(link, folder, work)


def _serve(folder: RunFolder, attempt: int, index: int) -> None:
    """Answer requests for ever."""
    spec = read_spec(folder)
    with console_logging(folder.log, silent=True) as console:
        console.message(f"sampler {index}, attempt {attempt}, process {os.getpid()}")
        decide = Decisions(spec.strict)
        set_environment(spec, decide)
        load_torch(spec.device.name)
        from runner.build.samplers import build_worker_sampler
        from runner.sampler.remote.server import serve

        with translate_memory_errors(spec):
            sampler, by, activity = build_worker_sampler(spec, decide, folder)
            activity.on_start(0)
            token, host = job_token(), os.environ.get(SAMPLER_HOST, LOOPBACK)
            serve(sampler, index, folder.samplers, token=token, host=host, collectives=by, device=activity.pop_readings)


if __name__ == "__main__":
    exit_process(main(*sys.argv[1:]))
