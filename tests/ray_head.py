"""The head of a Ray cluster as `ray start --head` makes it, with Ray's dashboard: `with head() as one: one.address`.

launch.ray.guard ▷ python -m tests.ray_head ASKED ─▶ ray start --head --block      ends with its stdin; nothing is left
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
START_S = 180.0
STORE_BYTES = 10**8
# A machine that is busy takes longer than Ray waits for its agents, and for a node to say that it is there.
PATIENT = {"RAY_agent_register_timeout_ms": "300000", "RAY_health_check_timeout_ms": "100000"}
PORTS = (
    "port", "dashboard-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port", "runtime-env-agent-port",
    "metrics-export-port", "ray-client-server-port",
)  # fmt: skip
STARTED, TRIES = "Ray runtime started", 4  # Ray gives up after 30 s, which are few where others work, too
COMMAND = "import sys; from ray.scripts.scripts import main; sys.exit(main())"


@dataclass
class Head:
    """`address`: of the dashboard; `token`: that it wants; `folder`: Ray's own, with its logs."""

    address: str
    token: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """What a user of it has exported."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}


@contextmanager
def head(cores: int = 4) -> Iterator[Head]:
    """A cluster of one node, heard on this machine only, whose `python` is this one."""
    folder, token = tempfile.mkdtemp(prefix="ray-", dir="/tmp"), secrets.token_hex(32)
    ports = {name: free_port() for name in PORTS}
    asked = {"folder": folder, "cores": cores, "ports": ports}
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "WANDB_", "HF_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    one = Head(f"http://127.0.0.1:{ports['dashboard-port']}", token, Path(folder))
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "runner.launch.ray.driver_connection", "tests.ray_head", json.dumps(asked)],
        cwd=folder,
        env={**kept, **own, **PATIENT, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "PATH": path, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        until_it_answers(one, process)
        yield one
        process.communicate(timeout=START_S)


def until_it_answers(one: Head, process: subprocess.Popen[bytes]) -> None:
    """Wait for the dashboard, and for the agent by which it starts jobs."""
    end = time.monotonic() + START_S
    request = Request(f"{one.address}/api/jobs/", headers={"Authorization": f"Bearer {one.token}"})
    while True:
        try:
            urlopen(request, timeout=10).close()
            return
        except (URLError, OSError):
            assert process.poll() is None and time.monotonic() < end, "Ray's dashboard does not answer"
            time.sleep(0.5)


def main(asked: dict[str, Any]) -> None:
    options = {
        "node-ip-address": "127.0.0.1",
        "include-dashboard": "true",
        "dashboard-host": "127.0.0.1",
        "num-cpus": asked["cores"],
        "object-store-memory": STORE_BYTES,
        "temp-dir": asked["folder"],
        **asked["ports"],
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-P", "-c", COMMAND, "start", "--head", "--block", *words]
    for _ in range(TRIES):
        # All that it leaves behind is the guard's.
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            if any(STARTED in line for line in process.stdout):
                threading.Thread(target=process.stdout.read, daemon=True).start()
                print("up", flush=True)
                sys.stdin.read()
                process.kill()
                return


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
