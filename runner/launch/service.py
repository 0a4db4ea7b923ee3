"""What a process of a job that serves its ranks does around its work: it is told to end, and says why it ended."""

from __future__ import annotations

from collections.abc import Callable

from runner.errors import Interrupted
from runner.folder import RunFolder
from runner.launch.link import Link
from runner.launch.rank import reported
from runner.sampler.remote import secret
from runner.signals import StopSignal

HOST = "RUN_SAMPLER_HOST"  # the address at which the job's other machines find this one; on one machine not set
LOOPBACK = "127.0.0.1"


def serve_until_told(folder: RunFolder, pipe: str, serve: Callable[[], None]) -> int:
    """Serve until SIGTERM. Returns the exit code; the launcher, at the other end of `pipe`, hears the reason."""
    stop = StopSignal()
    stop.install()
    secret.take()
    link = Link(int(pipe))

    def work() -> None:
        if stop.number is not None:
            return
        try:
            with stop.at_once():
                serve()
        except Interrupted:
            return

    return reported(link, folder, work)
