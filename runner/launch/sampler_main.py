"""Rollout server process of a job: reads the job from its run folder and serves its sampler.

python -m runner.launch.sampler_main FOLDER ATTEMPT PIPE INDEX        PIPE: descriptor of the pipe to the launcher

It ends at SIGTERM, and with its launcher.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from runner.core.auto_choices import Decisions
from runner.core.errors import Interrupted
from runner.core.signals import StopSignal
from runner.device.process_setup import load_torch, set_environment
from runner.launch.heartbeat import HeartbeatWriter
from runner.launch.multi_node import LOOPBACK, SAMPLER_HOST
from runner.launch.rank_main import exit_process, load_spec, run_and_report
from runner.launch.run_messages import console_logging
from runner.launch.session import translate_device_errors
from runner.run_dir.folder import RunFolder
from runner.run_dir.user_files import with_copied_files
from runner.sampler.server.job_token import job_token, take_token


def main(root: str, attempt: str, pipe: str, index: str) -> int:
    """Serve until SIGTERM. Returns the exit code; the launcher reads the reason from `pipe`."""
    folder = RunFolder(Path(root)).for_sampler(int(index))
    stop = StopSignal()
    stop.install()
    take_token()
    heartbeat = HeartbeatWriter(int(pipe))

    def work() -> None:
        with suppress(Interrupted), stop.interrupt_immediately():
            _serve(folder, int(attempt), int(index))

    return run_and_report(heartbeat, folder, work)


def _serve(folder: RunFolder, attempt: int, index: int) -> None:
    """Serve until a signal or an error."""
    spec = with_copied_files(load_spec(folder), folder)
    with console_logging(folder.log, silent=True) as console:
        console.message(f"sampler {index}, attempt {attempt}, process {os.getpid()}")
        decide = Decisions(spec.strict)
        set_environment(spec, decide)
        load_torch(spec.device.name)
        from runner.build.samplers import build_worker_sampler
        from runner.inference.rollout_server import serve

        with translate_device_errors(spec):
            sampler, stats, images = build_worker_sampler(spec, decide, folder)
            stats.on_start(0)
            token, host = job_token(), os.environ.get(SAMPLER_HOST, LOOPBACK)
            readings = stats.pop_readings
            serve(sampler, index, folder.samplers, token=token, host=host, device_stats=readings, images=images)


if __name__ == "__main__":
    exit_process(main(*sys.argv[1:]))
