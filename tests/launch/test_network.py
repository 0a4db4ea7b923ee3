"""Two machines with a network of their own each, and a wire between them, which is cut: namespaces of the kernel's.

Their common host name leads each of them to itself alone, as on many machines.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.several import DDP, DEADLINE_S, Job, gone, wait_until
from tests.launch.traces import Traces, traces

IP = shutil.which("ip") or "/usr/sbin/ip"
HEAD, WORKER, PORT = "10.77.0.1", "10.77.0.2", 6399
SOON = {  # Ray notices the loss of a node in seconds, and a node that of its head; as it comes: half a minute, a minute
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}
UP_S = 120.0
SFT = ("+recipe=sft_demo", *DDP, "tracker=none", "evaluation.every=0")


def may() -> bool:
    """Whether this process may make networks."""
    words = ["unshare", "--net", IP, "link", "add", "x0", "type", "veth", "peer", "name", "x1"]
    try:
        return subprocess.run(words, capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


pytestmark = [pytest.mark.soak, pytest.mark.timeout(600), pytest.mark.skipif(not may(), reason="no network namespaces")]


@dataclass(frozen=True, slots=True)
class Wired:
    """Two networks; `at` makes a command run in one of them."""

    names: tuple[str, str]

    def at(self, which: int) -> tuple[str, ...]:
        return (IP, "netns", "exec", self.names[which])

    def cut(self) -> None:
        _ip("-n", self.names[0], "link", "set", "wire0", "down")


@contextmanager
def wired() -> Iterator[Wired]:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, with a wire between them."""
    mark = secrets.token_hex(3)
    one, other = names = (f"run-{mark}-0", f"run-{mark}-1")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "wire0", "netns", one, "type", "veth", "peer", "name", "wire1", "netns", other)
        for at, (name, address) in enumerate(zip(names, (HEAD, WORKER), strict=True)):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", f"wire{at}")
            for device in ("lo", f"wire{at}"):
                _ip("-n", name, "link", "set", device, "up")
        yield Wired(names)
    finally:
        for name in names:
            subprocess.run([IP, "netns", "del", name], capture_output=True, timeout=30)


def _ip(*words: str) -> None:
    subprocess.run([IP, *words], check=True, capture_output=True, timeout=30)


@contextmanager
def nodes(networks: Wired, trail: Traces) -> Iterator[dict[str, str]]:
    """A node of Ray with three cores in each network; the environment in which the cluster is joined."""
    shared = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {**os.environ, **trail.environment, **shared, **SOON, "RAY_TMPDIR": str(trail.temporary)}
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=3", "--disable-usage-stats"]
    ray += ["--object-store-memory=100000000"]
    head = ["--head", f"--port={PORT}", f"--node-ip-address={HEAD}", "--include-dashboard=false"]
    worker = [f"--address={HEAD}:{PORT}", f"--node-ip-address={WORKER}"]
    processes = []
    try:
        for which, words in enumerate((head, worker)):
            log, command = trail.cache / f"{which}.log", [*networks.at(which), *ray, *words]
            with log.open("ab") as to:
                processes.append(subprocess.Popen(command, env=environment, stdin=-3, stdout=to, stderr=to))
            _until_up(log)
        yield shared
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


def _until_up(log: Path) -> None:
    end = time.monotonic() + UP_S
    while "Ray runtime started" not in log.read_text():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)


@pytest.fixture
def trail() -> Iterator[Traces]:
    with traces() as one:
        one.cache.mkdir()
        yield one


def test_machines_find_each_other_though_their_names_lead_nowhere(tmp_path: Path) -> None:
    jobs = [Job(tmp_path, f"{which}.txt") for which in range(2)]
    words = (*SFT, "launch.nodes=2", f"launch.rdzv_endpoint={HEAD}:{PORT}", "launch.devices=1", "steps=3")
    with wired() as networks:
        both = [job.start(*words, f"launch.node_rank={at}", before=networks.at(at)) for at, job in enumerate(jobs)]
        ends = [process.wait(DEADLINE_S) for process in both]
    assert ends == [0, 0], jobs[0].said() + jobs[1].said()
    assert jobs[0].steps() == 3


def test_a_wire_that_is_cut_between_two_nodes_ends_the_job_which_says_so(tmp_path: Path, trail: Traces) -> None:
    pytest.importorskip("ray")
    job = Job(tmp_path)
    words = (*SFT, "device.threads=2", "launch.devices=2", "steps=100000", "checkpoint.every=2")  # a rank on each
    with wired() as networks, nodes(networks, trail) as environment:
        where = ("launch=ray", f"launch.address={HEAD}:{PORT}", "launch.attempts=1")
        process = job.start(*words, *where, before=networks.at(0), **environment, TMPDIR="/tmp")
        wait_until(lambda: job.steps() >= 2, process)
        said = job.said()
        assert HEAD in said and WORKER in said, "a rank on each node"
        ranks = job.pids()
        networks.cut()
        assert process.wait(200) == 75, job.said()
        assert " was lost: " in job.said() and "continue: run resume latest" in job.said()
        assert gone(ranks, 120), "that on the other side too"
