"""Ray's driver for a sweep, in its own process, because Ray handles signals, prints, and may exit.

    stdin   {"do": "start", "token", "name", "resources", "wrapper", "attempt"} | {"do": "find", "token", "name"}
            {"do": "signal", "token", "number"}                              end of file: the sweep has ended
    stdout  {"is": "found", "token"}
            {"is": "gone", "token", "why"}    its actor has ended or does not exist; the status file has the job's end

Each job is a detached actor with the job's resources, which starts the wrapper (runner.sweep.job_wrapper) and exits
when the wrapper ends. On an existing cluster actors continue without the driver; a local cluster ends with the driver,
after all jobs have had time to save. Ray decides the placement.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import ray
from ray.exceptions import RayError

from runner.core.rank_info import LAUNCHER_VARIABLES
from runner.core.subprocess import JsonLines
from runner.launch.ray.cluster import NAMESPACE, connect_cluster

PING_S = 1.0
TICK_S = 0.1
NOT_PASSED = {"OMP_NUM_THREADS", *LAUNCHER_VARIABLES}  # of the program that started Ray, e.g. srun


class JobActor:
    """The actor of one job, pickled by value: nodes need no installation of this package."""

    def __init__(self, wrapper: list[str], attempt: dict[str, Any]) -> None:
        import subprocess
        import threading

        kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_") and k not in NOT_PASSED}
        self._wrapper = subprocess.Popen(
            [*wrapper, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**kept, **attempt["environment"]},
            start_new_session=True,
        )
        assert self._wrapper.stdin is not None
        self._wrapper.stdin.write(json.dumps(attempt).encode())
        self._wrapper.stdin.close()
        self._said = ""
        self._me = ray.get_runtime_context().current_actor
        threading.Thread(target=self._wait, daemon=True).start()

    def look(self) -> str:
        """The wrapper's error message, if it failed."""
        return self._said

    def signal(self, number: int) -> None:
        """Forward a signal to the wrapper."""
        self._wrapper.send_signal(signal.SIGUSR1 if number == signal.SIGKILL else number)

    def leave(self) -> None:
        """End this actor."""
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]

    def _wait(self) -> None:
        assert self._wrapper.stderr is not None
        self._said = self._wrapper.stderr.read().decode(errors="replace").strip()
        if self._wrapper.wait() != 0:
            time.sleep(5 * PING_S)  # so that `look` can return the error
        self._me.leave.remote()


class RaySweepDriver:
    """The actors that this driver has started or found."""

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines
        self._actors: dict[str, Any] = {}
        self._looks: dict[Any, str] = {}  # outstanding calls → token
        self._due: dict[str, float] = {}
        self._said: dict[str, str] = {}

    def handle_request(self, what: dict[str, Any]) -> None:
        """Handle a request of the sweep."""
        token = what["token"]
        if what["do"] == "start":
            options = {"name": what["name"], "lifetime": "detached", "namespace": NAMESPACE, **what["resources"]}
            self._add(token, ray.remote(JobActor).options(**options).remote(what["wrapper"], what["attempt"]))
        elif what["do"] == "find":
            try:
                self._add(token, ray.get_actor(what["name"], NAMESPACE))
                self._lines.send({"is": "found", "token": token})
            except ValueError:
                self._lines.send({"is": "gone", "token": token, "why": ""})
        elif (actor := self._actors.get(token)) is not None:
            if token in self._said:  # it has begun
                actor.signal.remote(what["number"])
            else:
                ray.kill(actor)

    def _add(self, token: str, actor: Any) -> None:
        self._actors[token] = actor
        self._looks[actor.look.remote()] = token

    def poll_actors(self) -> None:
        """Find out which actors have started and which have ended."""
        ready = ray.wait(list(self._looks), num_returns=len(self._looks), timeout=0)[0] if self._looks else []
        for answer in ready:
            token = self._looks.pop(answer)
            try:
                self._said[token] = ray.get(answer)
                self._due[token] = time.monotonic() + PING_S
            except RayError as error:
                why = self._said.get(token) or (str(error) if token not in self._said else "")
                self._lines.send({"is": "gone", "token": token, "why": why})
                del self._actors[token]
        for token, due in list(self._due.items()):
            if time.monotonic() > due and token in self._actors:
                del self._due[token]
                self._looks[self._actors[token].look.remote()] = token

    def stop_jobs(self, grace_s: float) -> None:
        """Let all jobs save and end, because the cluster ends with the sweep."""
        for token, actor in self._actors.items():
            actor.signal.remote(int(signal.SIGTERM)) if token in self._said else ray.kill(actor)
        deadline = time.monotonic() + grace_s
        while self._actors and time.monotonic() < deadline:
            self.poll_actors()
            time.sleep(TICK_S)


def main(asked: dict[str, Any]) -> None:
    """Serve one sweep. `asked`: the request to runner.launch.ray.cluster, and grace_s."""
    lines = JsonLines.to_parent()
    driver = RaySweepDriver(lines)
    with connect_cluster(asked, lines):
        while (requests := lines.receive(TICK_S)) is not None:
            for request in requests:
                driver.handle_request(request)
            driver.poll_actors()
        if asked["address"] is None:
            driver.stop_jobs(asked["grace_s"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
