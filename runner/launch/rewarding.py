"""A process of a job that only scores: reads the job from its run folder, starts its reward's workers, and serves them.

python -m runner.launch.rewarding FOLDER ATTEMPT PIPE INDEX        PIPE: descriptor of the pipe to the launcher

It ends when it is told to (SIGTERM), and with its launcher. It does not import torch.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import NoReturn

from runner.decisions import Decisions
from runner.folder import RunFolder
from runner.launch.rank import leave, read_spec
from runner.launch.screen import on_screen
from runner.launch.service import HOST, LOOPBACK, serve_until_told
from runner.registry import resolve
from runner.reward.calls import VERB, answered
from runner.reward.output import Output
from runner.reward.pool import Pool, Target
from runner.sampler.remote import secret
from runner.sampler.remote.notes import path_of
from runner.sampler.remote.window import Window, offered
from runner.sampler.remote.wire import Json, Wrong
from runner.spec.job import JobSpec

log = logging.getLogger("runner")


def main(root: str, attempt: str, pipe: str, index: str) -> int:
    """Returns the exit code; the launcher hears the reason."""
    folder = RunFolder(Path(root)).of_rewarder(int(index))
    return serve_until_told(folder, pipe, lambda: _serve(folder, int(attempt), int(index)))


def _serve(folder: RunFolder, attempt: int, index: int) -> None:
    """Answer ranks for ever."""
    spec = read_spec(folder)
    with on_screen(folder.log, silent=True) as console:
        console.message(f"rewarder {index}, attempt {attempt}, process {os.getpid()}")
        with own_pools(spec, Decisions(spec.strict), folder) as pools:
            serve(pools, path_of(folder.rewarders, index))


@contextmanager
def own_pools(spec: JobSpec, decide: Decisions, folder: RunFolder) -> Iterator[list[Pool]]:
    """The pools of the reward, each with its first process, closed in the end. Raises SpecError, EnvironmentProblem
    where one cannot start."""
    folder.printed.mkdir(parents=True, exist_ok=True)
    pools: list[Pool] = []
    with ExitStack() as closing:

        def make(target: Target, workers: int, timeout_s: float, output: Output) -> Pool:
            pools.append(Pool(target, workers, timeout_s, output))
            closing.callback(pools[-1].close)
            return pools[-1]

        for part in spec.reward.pooled():
            factory = resolve(type(part).factory)
            factory(part, seed=spec.seed, decide=decide, folder=folder.printed, make=make)
        yield pools


def serve(pools: Sequence[Pool], note: Path) -> NoReturn:
    """Answer calls, as many at a time as there are workers, until something is raised in this thread; note: the file
    that says where."""
    session = secrets.token_hex(8)
    held = {"version": -1, "digest": "", "session": session}  # no weights
    threads = ThreadPoolExecutor(sum(pool.workers for pool in pools), "score")

    def answer(body: Json) -> Json:
        try:
            return {"held": held, "result": answered(pools, body)}
        except Exception as error:
            log.warning("%s failed", VERB, exc_info=True)
            return {"held": held, "error": Wrong.of(error).said()}

    def ask(_: str, body: Json, key: str) -> Future[Json]:
        return threads.submit(answer, body)

    window = Window(session, (VERB,), lambda: {"held": held}, ask)
    try:
        with offered(window, note, token=secret.token(), host=os.environ.get(HOST, LOOPBACK)):
            while True:
                Event().wait()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    leave(main(*sys.argv[1:]))
