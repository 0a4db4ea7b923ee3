"""The connection to Ray's driver, a process of its own, and the process that cleans up after it.

Ray takes over signals, prints, and may end its process; its agents outlive a driver that was killed.

RayConnection ──pipes──▶ this module as a program ──the same pipes──▶ MODULE (Ray's driver) ──▶ a cluster of its own:
                           │                                             raylet, agents, actors, their children
                           └─ the driver has ended: SIGKILL to all below, the folder removed, its exit code

    each driver sends {"is": "ready", "nodes": [{"CPU": 2.0, "NPU": 4.0}, …]} first, or
    {"is": "refused", "why", "passes"}      passes: another attempt may end otherwise

Whichever of these is killed, the others end: the driver at the end of its stdin, the program after the driver. The
connection first checks that the cluster can be reached: Ray would try for minutes. Ray is not imported here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from runner.core.errors import EnvironmentProblem, RankLost
from runner.core.subprocess import ChildProcess, JsonLines, descendants, is_cleaner, kill

READY_S = 180.0  # for Ray to start or be reached: seconds on a free machine, a minute on a busy one
END_S = 30.0  # for Ray to shut down
KILLED_S = 10.0  # for the guard to end what is left of a driver that it had to kill
TAIL = 5  # lines of what Ray printed that an error shows
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # what makes Ray take 127.0.0.1 for this machine's address
QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}  # Ray sends usage statistics, unless this is set
# On this machine a job's processes are what they are under launch=local. Ray would let everything else go before its
# workers (niceness 15), have the kernel end them first, and end them itself where memory becomes scarce.
AS_LOCAL = {
    "RAY_worker_niceness": "0",
    "RAY_worker_oom_score_adjustment": "0",
    "RAY_memory_monitor_refresh_ms": "0",
}


def require_ray(option: str) -> None:
    """Raise EnvironmentProblem where the package is not installed that `option` needs."""
    if importlib.util.find_spec("ray") is None:
        raise EnvironmentProblem(f"{option} needs the package ray\n  pip install 'posttrain-run[ray]'")


def actor_options(resource: str, count: int) -> dict[str, Any]:
    """Resources of an actor. A process on cards requests no cores: cards are the scarce resource."""
    if resource == "CPU":
        return {"num_cpus": count}
    return {"num_cpus": 0, **({"num_gpus": count} if resource == "GPU" else {"resources": {resource: count}})}


class RayConnection:
    """Ray's driver, from start to end. `nodes`: what each node has.

    module: the driver's program; asked: the request at its start, with the `address` (None: a cluster of its own);
    grace_s: seconds that it may take at its end, beside Ray's own
    """

    def __init__(self, module: str, asked: Mapping[str, Any], grace_s: float = 0.0) -> None:
        self.nodes: list[Mapping[str, float]] = []
        self._module, self._asked, self._grace_s = module, {**asked, "folder": None}, grace_s
        self._refused, self._passes = "", False

    def __enter__(self) -> Self:
        """Start the driver. Raises EnvironmentProblem where Ray fails, RankLost where its driver is killed."""
        if not self._is_own:
            check_reachable(self._asked["address"])
        if self._is_own:
            self._asked["folder"] = tempfile.mkdtemp(prefix="run-ray-", dir="/tmp")  # short: sockets are in it
        self._output = tempfile.TemporaryFile()  # what Ray prints; it has no name to be left behind
        self._process = ChildProcess(
            [sys.executable, "-P", "-m", "runner.launch.ray.driver_connection", self._module, json.dumps(self._asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            env=self._environment(),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._lines = JsonLines(self._process.stdout.fileno(), self._process.stdin.fileno())
        try:
            self.wait_for(lambda: bool(self.nodes), READY_S)
        except BaseException:
            self._close(0.0)  # it may never come to read that it is to end
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close(self._grace_s + END_S)

    def _environment(self) -> dict[str, str]:
        """A cluster of our own is reachable on this machine only, and has its own password."""
        own = {**LOOPBACK, **AS_LOCAL, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        return {**os.environ, **QUIET, **(own if self._is_own else {})}

    def send(self, **request: Any) -> None:
        """Send a request to the driver. `receive_events` reports one that died."""
        self._lines.send(request)

    def receive_events(self, wait_s: float = 0.0) -> None:
        """Read what the driver has sent. Raises EnvironmentProblem where it has ended, RankLost by a signal.

        Also RankLost where it was too slow.
        """
        if (events := self._lines.receive(wait_s)) is None:
            why = self._refused or f"Ray's driver exited ({self._tail() or 'it printed nothing'})"
            lost = self._passes if self._refused else self._was_killed()
            raise (RankLost if lost else EnvironmentProblem)(f"{self.where}: {why}")
        for event in events:
            self._dispatch_event(event)

    def wait_for(self, is_so: Callable[[], bool], seconds: float) -> None:
        """Read what the driver sends until `is_so()`. Raises EnvironmentProblem after `seconds`, RankLost."""
        end = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > end:
                port = "`ray start --head` prints the port (usually 6379), which is not the dashboard's"
                advice = "" if self._is_own or self.nodes else f"; {port}"
                raise EnvironmentProblem(f"{self.where}: no response within {seconds:g} s{advice} ({self._tail()})")
            self.receive_events(0.2)

    def _dispatch_event(self, event: Mapping[str, Any]) -> None:
        if event["is"] == "ready":
            self.nodes = event["nodes"]
        elif event["is"] == "refused":
            self._refused, self._passes = event["why"], event["passes"]
        else:
            self._handle_event(event)

    def _handle_event(self, event: Mapping[str, Any]) -> None:
        """What this driver says beside those."""
        raise NotImplementedError

    def _close(self, within_s: float) -> None:
        """End the driver, and with a cluster of our own all of it, also where the guard was killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        if not self._process.ends_within(within_s):
            self._process.stop(KILLED_S, signal.SIGUSR1)
        if self._asked["folder"] is not None:
            shutil.rmtree(self._asked["folder"], ignore_errors=True)  # the guard's work, unless it was killed
        self._process.stdout.close()
        self._output.close()

    def _was_killed(self) -> bool:
        """Whether a signal has ended the driver, or the guard, which says so by its exit code."""
        return self._process.ends_within(KILLED_S) and not 0 <= self._process.returncode <= 128

    @property
    def _is_own(self) -> bool:
        return self._asked["address"] is None

    @property
    def where(self) -> str:
        """The cluster, in words."""
        address = self._asked["address"]
        return f"Ray at {address}" if address else "Ray on this machine"

    def _tail(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines[-TAIL:])


CONNECT_TIMEOUT_S = 10.0
ADDRESS = "RAY_ADDRESS"
FOLDERS = ("RAY_TMPDIR", "TMPDIR")  # the first that is set has Ray's files


def check_reachable(address: str) -> None:
    """Raise EnvironmentProblem where no server listens.

    address: HOST:PORT or auto; what it does not say, and where no cluster of this machine is on record, is left to Ray
    """
    named, what = address, f"Ray at {address}"
    if address == "auto":
        named, source = _recorded_address()
        what = f"Ray at auto ({named}, from {source})"
    host, _, port = named.rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        advice = "`ray start --head` prints the address of a cluster; without launch.address the job starts its own"
        raise EnvironmentProblem(f"{what}: no server listens there ({error.strerror or error}); {advice}") from error


def _recorded_address() -> tuple[str, str]:
    """What Ray takes `auto` for, empty where it looks around; and who says so."""
    if named := os.environ.get(ADDRESS):
        return named, ADDRESS
    folder = next((os.environ[name] for name in FOLDERS if name in os.environ), "/tmp")
    file = Path(folder) / "ray" / "ray_current_cluster"  # of the last `ray start`; one that was killed leaves it
    try:
        return file.read_text(encoding="utf-8").strip(), str(file)
    except FileNotFoundError:
        return "", ""


RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set in a command that `ray job submit` has started
# `_` at the end: all that begin so. Those that may hold a secret are passed in memory only.
FORWARDED = (
    "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "SWANLAB_", "VLLM_", "TORCH_", "PYTORCH_", "GLOO_",
    "NCCL_", "HCCL_", "RUNNER_CACHE", "RUNNER_FAILPOINT", "PYTHONPATH", "NO_COLOR", "OMP_NUM_THREADS", "http_proxy",
    "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE",
)  # fmt: skip


def forwarded_env(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment goes with a job to where it runs."""
    prefixes = tuple(name for name in FORWARDED if name.endswith("_"))
    found = {name: value for name, value in environment.items() if name in FORWARDED or name.startswith(prefixes)}
    given = json.loads(environment.get(RAY_JOB, "{}")).get("runtime_env", {}).get("env_vars", {})
    if RAY_JOB in environment and "OMP_NUM_THREADS" not in given:
        found.pop("OMP_NUM_THREADS", None)  # Ray's own, for the one process that it has started: 1
    return found


PR_SET_CHILD_SUBREAPER = 36
TICK_S = 0.1
SETTLE_S = 5.0  # for what clears away after dead processes


def main(module: str, asked: str) -> int:
    """Return the driver's exit code, 128 + n for signal n. SIGUSR1: the driver is killed."""
    ctypes.CDLL(None).prctl(
        PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
    )  # what the driver leaves behind stays below this process
    folder = json.loads(asked)["folder"]
    forwarded: list[int] = []
    try:
        command = [sys.executable, "-P", "-m", module, asked]
        driver = ChildProcess(command, end_signal=signal.SIGKILL, own_session=False, stdin=None)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # it ends with the driver; not ignored, which children inherit
        signal.signal(signal.SIGUSR1, lambda *_: forwarded.append(signal.SIGKILL))
        code = driver.wait_and_forward(forwarded)
    finally:
        _end_all_below()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _end_all_below() -> None:
    end = time.monotonic() + SETTLE_S
    while left := descendants(os.getpid()):
        kill([one for one in left if time.monotonic() > end or not is_cleaner(one)])
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(TICK_S)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
