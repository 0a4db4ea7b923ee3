"""A process of a job that only samples: reads the job from its run folder, builds its sampler, and serves it.

python -m runner.launch.sampling FOLDER ATTEMPT PIPE INDEX        PIPE: descriptor of the pipe to the launcher

It ends when it is told to (SIGTERM), and with its launcher.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from runner.decisions import Decisions
from runner.errors import Interrupted
from runner.folder import RunFolder
from runner.launch.link import Link
from runner.launch.rank import leave, read_spec, reported
from runner.launch.screen import on_screen
from runner.launch.session import memory_errors
from runner.launch.surroundings import load_torch, set_environment
from runner.sampler.remote import secret
from runner.signals import StopSignal

HOST = "RUN_SAMPLER_HOST"  # the address at which the job's other machines find this one; on one machine not set
LOOPBACK = "127.0.0.1"


def main(root: str, attempt: str, pipe: str, index: str) -> int:
    """Returns the exit code; the launcher hears the reason."""
    stop = StopSignal()
    stop.install()
    secret.take()
    link = Link(int(pipe))
    folder = RunFolder(Path(root)).of_sampler(int(index))

    def serve_until_told() -> None:
        if stop.number is not None:
            return
        try:
            with stop.at_once():
                _serve(folder, int(attempt), int(index))
        except Interrupted:
            return

    return reported(link, folder, serve_until_told)


def _serve(folder: RunFolder, attempt: int, index: int) -> None:
    """Answer requests for ever."""
    spec = read_spec(folder)
    with on_screen(folder.log, silent=True) as console:
        console.message(f"sampler {index}, attempt {attempt}, process {os.getpid()}")
        decide = Decisions(spec.strict)
        set_environment(spec, decide)
        load_torch(spec.device.name)
        from runner.build.sampling import build_own_sampler
        from runner.sampler.remote.server import serve

        with memory_errors(spec):
            sampler = build_own_sampler(spec, decide, folder)
            serve(sampler, index, folder.samplers, token=secret.token(), host=os.environ.get(HOST, LOOPBACK))


if __name__ == "__main__":
    leave(main(*sys.argv[1:]))
