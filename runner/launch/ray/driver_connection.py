"""The connection to Ray's driver process, and the guard process that cleans up after it.

Ray handles signals, prints, and may exit; its agents survive a killed driver.

RayConnection ──pipes──▶ this module as a program ──the same pipes──▶ MODULE (Ray's driver) ──▶ a local cluster:
                           │                                             raylet, agents, actors, their children
                           └─ the driver has ended: SIGKILL to all below, the folder removed, its exit code

    each driver sends {"is": "ready", "nodes": [{"CPU": 2.0, "NPU": 4.0}, …]} first, or
    {"is": "refused", "why", "passes"}      passes: another attempt may succeed

If one of these processes is killed, the others end: the driver at the end of its stdin, the guard after the driver. The
connection first checks that the cluster can be reached, because Ray would try for minutes. Ray is not imported here.
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

READY_S = 180.0  # for Ray to start or to connect: seconds on an idle machine, a minute on a busy one
END_S = 30.0  # for Ray to shut down
KILLED_S = 10.0  # for the guard to clean up after a driver that it killed
TAIL = 5  # lines of what Ray printed that an error shows
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # lets Ray use 127.0.0.1 as this machine's address
QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}  # Ray sends usage statistics, unless this is set
# On this machine processes have the same priority as under launch=local. By default Ray gives its workers niceness 15,
# lets the kernel kill them first, and kills them itself when memory is low.
AS_LOCAL = {"RAY_worker_niceness": "0", "RAY_worker_oom_score_adjustment": "0", "RAY_memory_monitor_refresh_ms": "0"}


def require_ray(option: str) -> None:
    """Raise EnvironmentProblem if ray, which `option` needs, is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise EnvironmentProblem(f"{option} needs the package ray\n  pip install 'posttrain-run[ray]'")


def actor_options(resource: str, count: int) -> dict[str, Any]:
    """Resources of an actor. A process on cards requests no cores: cards are the scarce resource."""
    if resource == "CPU":
        return {"num_cpus": count}
    return {"num_cpus": 0, **({"num_gpus": count} if resource == "GPU" else {"resources": {resource: count}})}


class RayConnection:
    """Ray's driver, from start to end. nodes: the resources of each node.

    module: the driver's program; asked: its first request, with the `address` (None: a local cluster); grace_s: seconds
    that it needs at its end in addition to Ray's own
    """

    def __init__(self, module: str, asked: Mapping[str, Any], grace_s: float = 0.0) -> None:
        self.nodes: list[Mapping[str, float]] = []
        self._module, self._asked, self._grace_s = module, {**asked, "folder": None}, grace_s
        self._refused, self._passes = "", False

    def __enter__(self) -> Self:
        """Start the driver. Raises EnvironmentProblem if Ray fails, RankLost if the driver is killed."""
        if self._is_own:
            self._asked["folder"] = tempfile.mkdtemp(prefix="run-ray-", dir="/tmp")  # short: sockets are in it
        else:
            check_reachable(self._asked["address"])
        self._output = tempfile.TemporaryFile()  # output of Ray; unnamed, so that it cannot remain
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
            self._close(0.0)  # it may not read its stdin yet
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close(self._grace_s + END_S)

    def _environment(self) -> dict[str, str]:
        """A local cluster can be reached only from this machine, and has its own token."""
        own = {**LOOPBACK, **AS_LOCAL, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        return {**os.environ, **QUIET, **(own if self._is_own else {})}

    def send(self, **request: Any) -> None:
        """Send a request to the driver. `receive_events` raises if it has ended."""
        self._lines.send(request)

    def receive_events(self, wait_s: float = 0.0) -> None:
        """Handle what the driver has sent. Raises EnvironmentProblem if it has ended.

        Raises RankLost if it was killed by a signal or was too slow.
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
        """Handle an event of this driver."""
        raise NotImplementedError

    def _close(self, within_s: float) -> None:
        """End the driver, and a local cluster with it, even if the guard was killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        if not self._process.ends_within(within_s):
            self._process.stop(KILLED_S, signal.SIGUSR1)
        if self._asked["folder"] is not None:
            shutil.rmtree(self._asked["folder"], ignore_errors=True)  # if the guard was killed
        self._process.stdout.close()
        self._output.close()

    def _was_killed(self) -> bool:
        """Whether a signal has ended the driver or the guard, by the guard's exit code."""
        return self._process.ends_within(KILLED_S) and not 0 <= self._process.returncode <= 128

    @property
    def _is_own(self) -> bool:
        return self._asked["address"] is None

    @property
    def where(self) -> str:
        """The cluster as text."""
        address = self._asked["address"]
        return f"Ray at {address}" if address else "Ray on this machine"

    def _tail(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines[-TAIL:])


CONNECT_TIMEOUT_S = 10.0
ADDRESS = "RAY_ADDRESS"
FOLDERS = ("RAY_TMPDIR", "TMPDIR")  # the first that is set is the folder of Ray's files


def check_reachable(address: str) -> None:
    """Raise EnvironmentProblem if no server listens at an address.

    address: HOST:PORT or auto; if no address is known, the check is left to Ray
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
    """The address that Ray uses for `auto`, empty if unknown; and its source."""
    if named := os.environ.get(ADDRESS):
        return named, ADDRESS
    folder = next((os.environ[name] for name in FOLDERS if name in os.environ), "/tmp")
    file = Path(folder) / "ray" / "ray_current_cluster"  # of the last `ray start`; a killed cluster leaves it
    try:
        return file.read_text(encoding="utf-8").strip(), str(file)
    except FileNotFoundError:
        return "", ""


RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set in a command that `ray job submit` has started
# A name that ends in `_` is a prefix. Values are passed in memory only, as they may be secrets.
FORWARDED = (
    "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "SWANLAB_", "VLLM_", "TORCH_", "PYTORCH_", "GLOO_",
    "NCCL_", "HCCL_", "RUNNER_CACHE", "RUNNER_FAILPOINT", "PYTHONPATH", "NO_COLOR", "OMP_NUM_THREADS", "http_proxy",
    "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE",
)  # fmt: skip


def forwarded_env(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that are forwarded to where the job runs."""
    prefixes = tuple(name for name in FORWARDED if name.endswith("_"))
    found = {name: value for name, value in environment.items() if name in FORWARDED or name.startswith(prefixes)}
    given = json.loads(environment.get(RAY_JOB, "{}")).get("runtime_env", {}).get("env_vars", {})
    if RAY_JOB in environment and "OMP_NUM_THREADS" not in given:
        found.pop("OMP_NUM_THREADS", None)  # Ray sets it to 1 for the command
    return found


PR_SET_CHILD_SUBREAPER = 36
TICK_S = 0.1
SETTLE_S = 60.0  # for processes that clean up after others


def main(module: str, asked: str) -> int:
    """Run the driver; returns its exit code, 128 + n for signal n. SIGUSR1 kills the driver."""
    # orphans of the driver become children of this process
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = json.loads(asked)["folder"]
    forwarded: list[int] = []
    try:
        command = [sys.executable, "-P", "-m", module, asked]
        driver = ChildProcess(command, end_signal=signal.SIGKILL, own_session=False, stdin=None)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # it ends with the driver; SIG_IGN would be inherited
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
