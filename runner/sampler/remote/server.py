"""A sampler behind HTTP: what a process runs that only samples.

POST /load, /sample, /score, /release ─▶ the one thread that has the sampler, one after another (`window.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import NoReturn

from runner.interfaces import Sampler
from runner.sampler.remote.backends import Collectives
from runner.sampler.remote.collective import getting
from runner.sampler.remote.keeper import Keeper
from runner.sampler.remote.listening import Desk, path_of
from runner.sampler.remote.window import Window, offered
from runner.sampler.remote.wire import Json


def serve(
    sampler: Sampler,
    index: int,
    notes: Path,
    *,
    token: str,
    host: str = "127.0.0.1",
    port: int = 0,
    collectives: Collectives | None = None,
    device: Callable[[], Mapping[str, float]] = dict,
) -> NoReturn:
    """Serve `sampler` as number `index` of a job's, until something is raised in this thread, which alone uses it.

    notes: the folder in which clients look for samplers; token: what they have to name; host: the address of this
    machine to listen at, and at which clients reach it; port: 0 = any that is free; collectives: by which weights come
    from another machine, None = over HTTP; device: what that was found to be doing since this was last asked.
    Raises EnvironmentProblem where the address cannot be had, OSError where the note cannot be written.
    """
    with closing(sampler), getting(token, host, collectives) as get, closing(Keeper(sampler, get)) as keeper:
        desk = Desk()

        def health() -> Json:
            return keeper.health() | {"busy": desk.busy, "waiting": desk.waiting}

        def ask(verb: str, body: Json, key: str) -> Future[Json]:
            return desk.ask(lambda: {**keeper.answer(verb, body, key), "device": dict(device())})

        window = Window(keeper.held.session, keeper.verbs, health, ask)
        with offered(window, path_of(notes, index), token=token, host=host, port=port):
            desk.run()
