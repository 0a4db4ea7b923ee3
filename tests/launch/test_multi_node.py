"""Launchers of several machines: they meet, refuse what does not fit, and end with one verdict."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from runner.cli.job_builder import compose_job
from runner.core.errors import DeadlineExceeded, EnvironmentProblem, RunnerError, SpecError
from runner.core.signals import StopSignal
from runner.launch import multi_node as module
from runner.launch.exit_cause import KILLED, OWN, WAITED, ExitCause
from runner.launch.local import write_spec
from runner.launch.multi_node import NodeConnection, PeerNodes, gather_nodes, join_node0
from runner.run_dir.folder import RunFolder
from runner.spec.job import JobSpec
from tests.ports import free_port

KILL = ExitCause(KILLED, "rank 3 of 4 was killed (SIGKILL)", 75)
DATA = ExitCause(OWN, "rank 0 of 4: line 7", 3)
LOSS = ExitCause(WAITED, "rank 2 of 4 lost another rank", 75)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter waits; and no signal handlers, which only a main thread may install."""
    monkeypatch.setattr(module, "RETRY_S", 0.02)
    monkeypatch.setattr(module, "CAUSE_S", 100.0)
    monkeypatch.setattr(StopSignal, "handle_signals", lambda self: nullcontext())


@pytest.fixture
def port() -> int:
    return free_port()


def spec_of(node: int, port: int, *words: str, nodes: int = 2) -> JobSpec:
    layout = ["parallelism=ddp", "launch.devices=2", f"launch.nodes={nodes}", f"launch.node_rank={node}"]
    return compose_job(["+recipe=sft_demo", *layout, f"launch.rdzv_endpoint=127.0.0.1:{port}", *words]).spec


class Machine(threading.Thread):
    """A machine's launcher: `work` is what it does with the others once they met; `found` what came of it."""

    def __init__(self, spec: JobSpec, root: Path, work: Callable[[PeerNodes], Any] = lambda machines: machines.store):
        super().__init__()
        self.spec, self.root, self.work = spec, root, work
        self.found: Any = None
        self.start()

    def run(self) -> None:
        typed = self.spec.model_dump(mode="json")
        try:
            if self.spec.launch.node_rank == 0:
                folder = RunFolder(self.root)
                write_spec(folder, self.spec)
                with gather_nodes(self.spec, folder, 3, typed) as machines:
                    self.found = self.work(machines)
            else:
                with join_node0(self.spec, typed) as (machines, folder, attempt):
                    assert (folder.root, attempt) == (self.root, 3)
                    self.found = self.work(machines)
        except RunnerError as error:
            self.found = error


def ended(*machines: Machine) -> list[Any]:
    for machine in machines:
        machine.join(200)
        assert not machine.is_alive()
    return [machine.found for machine in machines]


def test_they_meet_whoever_comes_first_and_know_one_store(tmp_path: Path, port: int) -> None:
    third, second = (Machine(spec_of(node, port, nodes=3), tmp_path) for node in (2, 1))
    first = Machine(spec_of(0, port, nodes=3), tmp_path)
    stores = ended(first, second, third)
    assert stores[0][0] == "127.0.0.1" and stores[0][1] != port and len({tuple(store) for store in stores}) == 1


def test_another_command_is_refused_on_both_with_the_option(tmp_path: Path, port: int) -> None:
    second = Machine(spec_of(1, port, "optimizer.lr=0.5"), tmp_path)
    first, second_found = ended(Machine(spec_of(0, port, "optimizer.lr=0.25"), tmp_path), second)
    assert isinstance(first, SpecError) and "optimizer.lr: 0.25 here, 0.5 on machine 1" in str(first)
    assert isinstance(second_found, EnvironmentProblem) and "machine 0 has a different job: optimizer.lr" in str(
        second_found
    )


def test_a_number_that_is_taken_is_refused(tmp_path: Path, port: int) -> None:
    first = Machine(spec_of(0, port, nodes=3), tmp_path)
    twins = [Machine(spec_of(1, port, nodes=3), tmp_path) for _ in range(2)]
    while all(twin.is_alive() for twin in twins):
        pass
    ended(Machine(spec_of(2, port, nodes=3), tmp_path), first, *twins)
    [refused] = [twin.found for twin in twins if isinstance(twin.found, RunnerError)]
    assert "launch.node_rank=1 is used by machine 1" in str(refused)


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\n", b"[1]\n", b"[" * 10**5 + b"\n", b"", b'{"hello": 1}\n'],
)
def test_who_connects_and_is_no_machine_is_left_aside(tmp_path: Path, port: int, said: bytes) -> None:
    spec = spec_of(0, port, "parallelism.timeout_s=200")
    first = Machine(spec, tmp_path)
    with module._connect(spec) as stray, module._connect(spec) as scan:
        scan.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        scan.close()  # with a reset
        stray.sendall(said)
        second = Machine(spec_of(1, port, "parallelism.timeout_s=200"), tmp_path)
        assert ended(first, second)[0][0] == "127.0.0.1" and second.found == first.found


def test_what_never_ends_is_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_BYTES", 1000)
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as other:
        line = NodeConnection(door.accept()[0], "a machine")
        other.sendall(b'{"over": true}\n')
        until = time.monotonic() + 5
        while not line.received and time.monotonic() < until:
            assert not line.receive()
        other.sendall(b"x" * 1001)
        until = time.monotonic() + 5
        while not line.receive() and time.monotonic() < until:
            time.sleep(0.01)
        assert line.receive() and line.received == {"over": True}
        line.socket.close()


def test_a_machine_that_is_typed_again_has_its_number_back(tmp_path: Path, port: int) -> None:
    spec = spec_of(1, port, "parallelism.timeout_s=200", nodes=3)
    first = Machine(spec_of(0, port, "parallelism.timeout_s=200", nodes=3), tmp_path)
    interrupted, twin = (NodeConnection(module._connect(spec), "machine 0") for _ in range(2))
    for line in (interrupted, twin):
        line.send({"hello": [1, "host", spec.model_dump(mode="json")]})
        time.sleep(0.1)
    while "refused" not in twin.received:
        assert not twin.receive()
    interrupted.socket.close()
    twin.socket.close()
    again = Machine(spec, tmp_path)
    third = Machine(spec_of(2, port, "parallelism.timeout_s=200", nodes=3), tmp_path)
    stores = ended(first, again, third)
    assert all(tuple(store) == stores[0] for store in stores), stores


def test_a_folder_that_is_not_shared_is_said(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.RunFolder, "spec", tmp_path / "nowhere", raising=False)
    monkeypatch.setattr("tests.launch.test_multi_node.write_spec", lambda folder, spec: None)
    _, second = ended(Machine(spec_of(0, port), tmp_path), Machine(spec_of(1, port), tmp_path))
    assert "which machine 0 created; use storage that all machines share" in str(second)


@pytest.mark.parametrize("node", [0, 1])
def test_a_machine_that_does_not_come_is_named(tmp_path: Path, port: int, node: int) -> None:
    [found] = ended(Machine(spec_of(node, port, "parallelism.timeout_s=0.3"), tmp_path))
    assert isinstance(found, DeadlineExceeded)
    assert ("machine 1" if node == 0 else "machine 0 does not respond") in str(found)


def test_an_address_that_is_not_of_this_machine(tmp_path: Path) -> None:
    spec = spec_of(0, 29400)
    spec = spec.model_copy(update={"launch": spec.launch.model_copy(update={"rdzv_endpoint": "192.0.2.1:29400"})})
    [found] = ended(Machine(spec, tmp_path))
    assert isinstance(found, EnvironmentProblem) and "cannot listen there" in str(found)


@pytest.mark.parametrize(
    ("own", "other", "common"),
    [(None, None, None), (LOSS, KILL, KILL), (KILL, LOSS, KILL), (DATA, LOSS, DATA), (None, DATA, DATA)],
)
def test_they_agree_on_the_verdict_that_explains_most(
    tmp_path: Path, port: int, own: ExitCause | None, other: ExitCause | None, common: ExitCause | None
) -> None:
    first = Machine(spec_of(0, port), tmp_path, lambda machines: machines.agree_on_cause(own))
    second = Machine(spec_of(1, port), tmp_path, lambda machines: machines.agree_on_cause(other))
    assert ended(first, second) == [common, common]


def test_a_machine_that_is_gone_is_the_cause(tmp_path: Path, port: int) -> None:
    def watch(machines: PeerNodes) -> ExitCause | None:
        while not machines.is_over():
            pass
        return machines.agree_on_cause(LOSS)

    first = Machine(spec_of(0, port), tmp_path, watch)
    second = Machine(spec_of(1, port), tmp_path)  # ends at once
    verdict = ended(first, second)[0]
    assert verdict.exit_code == 75 and verdict.message.startswith("machine 1 (") and "was lost" in verdict.message


def test_a_machine_that_is_done_waits_for_one_that_still_writes(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CAUSE_S", 0.1)

    def write(machines: PeerNodes) -> ExitCause | None:
        until = time.monotonic() + 0.6
        while time.monotonic() < until:
            assert not machines.is_over()
        return machines.agree_on_cause(None)

    first = Machine(spec_of(0, port), tmp_path, write)
    second = Machine(spec_of(1, port), tmp_path, lambda machines: machines.agree_on_cause(None))
    assert ended(first, second) == [None, None]


def test_what_ends_one_machine_ends_all(tmp_path: Path, port: int) -> None:
    def end(machines: PeerNodes) -> bool:
        machines.announce_end()
        return machines.agree_on_cause(KILL) == KILL

    def watch(machines: PeerNodes) -> bool:
        while not machines.is_over():
            pass
        return machines.agree_on_cause(LOSS) == KILL

    found = ended(
        Machine(spec_of(0, port, nodes=3), tmp_path, watch),
        Machine(spec_of(1, port, nodes=3), tmp_path, end),
        Machine(spec_of(2, port, nodes=3), tmp_path, watch),
    )
    assert found == [True, True, True]
