"""Several machines: their supervisors meet at machine 0, start together, and end together.

machine 0: listens at launch.rdzv_endpoint ◀── hello: number, host, the job as it was typed ── machine 1 …
           ── folder, attempt, the store's port ──▶      ◀── over · verdict ──▶

Plain JSON, a line each; a machine whose line breaks is gone. Not torch's TCPStore: it costs a launcher, which imports
no torch, a second and 190 MB; its calls outlast their timeout where the server is stopped or cut off; it tells nobody
that a client is gone; and whoever connects may write.

gloo takes the address of the host's own name, unless an interface is set, and on many machines that is a loopback
one: `gloo_interface` tells it the one on the way to the others.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from runner.core.errors import DeadlineExceeded, EnvironmentProblem, Problem, RankLost, SpecError
from runner.core.fsync_io import error_reason
from runner.core.signals import StopSignal
from runner.core.subprocess import JsonLines
from runner.launch.exit_cause import INTERRUPTED, KILLED, LOST, WAITED, ExitCause
from runner.run_dir.folder import RunFolder
from runner.spec.base import iter_leaves
from runner.spec.job import RECIPE, JobSpec
from runner.tracker.text import print_text

RETRY_S = 0.5
SEND_S = 5.0
LONGEST_BYTES = 2**24  # of a message
# seconds until a machine that is cut off is noticed: 10 + 3 × 5
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
VERDICT_S = 30.0  # for a machine's last word, once the ranks of this one have ended
TIMEOUT_S = 1800.0  # where the parallelism says nothing
LOOPBACK = "127.0.0.1"
SAMPLER_HOST = "RUN_SAMPLER_HOST"  # variable: the address at which the job's other machines find a sampler's
PER_NODE_OPTIONS = ("launch.node_rank",)  # what each machine says for itself


class NodeConnection:
    """The connection to another machine's launcher. `said`: the newest of each kind of message that came."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.socket, self.name = connection, name
        self.received: dict[str, Any] = {}
        self._lines = JsonLines(connection.fileno(), connection.fileno(), LONGEST_BYTES)
        self._broken = False
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; `receive` detects a closed connection."""
        with suppress(OSError):
            self._lines.send(message, SEND_S)

    def receive(self) -> bool:
        """Take in what has come; whether the line is broken: it ended, or what came is no message, an object."""
        if not self._broken:
            try:
                messages = self._lines.receive()
                self._broken = messages is None
                for message in messages or ():
                    self.received.update(message)
            except (ValueError, TypeError):
                self._broken = True
        return self._broken


@dataclass(slots=True)
class PeerNodes:
    """The other machines of a job: all of them for machine 0, machine 0 for others. `store`: rendezvous."""

    connections: list[NodeConnection]
    is_node0: bool
    store: tuple[str, int]
    listener: socket.socket | None = None  # of the store, on machine 0
    announced: bool = False

    def announce_end(self) -> None:
        """Say to the others, once, that the job is over."""
        if not self.announced:
            self.announced = True
            for line in self.connections:
                line.send({"over": True})

    def is_over(self) -> bool:
        """Whether another machine says so, or is gone."""
        over = any([line.receive() or "over" in line.received for line in self.connections])  # all are listened to
        if over and self.is_node0:
            self.announce_end()
        return over

    def agree_on_cause(self, own: ExitCause | None) -> ExitCause | None:
        """The one verdict of all machines: what explains the end best."""
        if not self.is_node0:
            [line] = self.connections
            line.send({"verdict": own})
            return self._receive_cause(line, own)
        verdicts = [own, *(self._receive_cause(line, own) for line in self.connections)]
        best = min((verdict for verdict in verdicts if verdict), key=lambda v: v.strength, default=None)
        for line in self.connections:
            line.send({"verdict": best})
        return best

    def _receive_cause(self, line: NodeConnection, own: ExitCause | None) -> ExitCause | None:
        """A machine's verdict; that it is gone, where it gives none and `own` says nothing better.

        Where this machine's ranks ended well, or were interrupted, those of the other one may take their time to save.
        """
        patient = own is None or own.strength == INTERRUPTED
        deadline = time.monotonic() + (float("inf") if patient else VERDICT_S)
        while "verdict" not in line.received and not line.receive() and time.monotonic() < deadline:
            select.select([line.socket], [], [], RETRY_S)
        if "verdict" in line.received:
            said = line.received["verdict"]
            return None if said is None else ExitCause(*said)
        gone = ExitCause(KILLED, f"{line.name} was lost: its launcher does not respond", LOST)
        return gone if own is None or own.strength == WAITED else own


@contextmanager
def gather_nodes(spec: JobSpec, folder: RunFolder, attempt: int, typed: Mapping[str, Any]) -> Iterator[PeerNodes]:
    """On machine 0: the others, once all have come, and know the folder.

    Raises EnvironmentProblem if this is not where they look, SpecError if one has another job, DeadlineExceeded if one
    does not come, Interrupted.
    """
    host, port = spec.launch.meeting
    stop = StopSignal()
    with stop.handle_signals(), ExitStack() as closing, stop.interrupt_immediately():
        door = closing.enter_context(_listen(host, port, _address_text(spec)))
        listener = closing.enter_context(_listen(host, 0, _address_text(spec)))
        print_text(
            f"waiting for {spec.launch.machines - 1} more of {spec.launch.machines} machines at {_address_text(spec)}"
        )
        store = (host, listener.getsockname()[1])
        lines = _accept_nodes(door, spec, typed, closing)
        for line in lines:
            line.send({"welcome": [str(folder.root), attempt, *store]})
        found = PeerNodes(lines, True, store, listener)
        closing = closing.pop_all()
    with closing:
        yield found


@contextmanager
def join_node0(spec: JobSpec, typed: Mapping[str, Any]) -> Iterator[tuple[PeerNodes, RunFolder, int]]:
    """On another machine: machine 0, the run's folder, and the number of the attempt.

    Raises DeadlineExceeded if machine 0 is not there, EnvironmentProblem if it has another job or its folder is not
    to be seen here, RankLost if it ends before it starts, Interrupted.
    """
    stop = StopSignal()
    with stop.handle_signals(), ExitStack() as closing, stop.interrupt_immediately():
        print_text(
            f"machine {spec.launch.machine} of {spec.launch.machines}: connecting to machine 0 at {_address_text(spec)}"
        )
        line = NodeConnection(closing.enter_context(_connect(spec)), "machine 0")
        line.send({"hello": [spec.launch.machine, socket.gethostname(), typed]})
        while not line.receive() and not {"welcome", "refused"} & line.received.keys():
            select.select([line.socket], [], [], RETRY_S)
        if "refused" in line.received:
            raise EnvironmentProblem(line.received["refused"])
        if "welcome" not in line.received:
            raise RankLost("machine 0 exited before the job started; see its output for the cause")
        root, attempt, host, port = line.received["welcome"]
        folder = RunFolder(Path(root))
        if not folder.spec.is_file():
            text = f"cannot see the run's folder {root}, which machine 0 created"
            raise EnvironmentProblem(f"{text}; use storage that all machines share")
        closing = closing.pop_all()
    with closing:
        yield PeerNodes([line], False, (host, port)), folder, attempt


def _accept_nodes(
    door: socket.socket, spec: JobSpec, typed: Mapping[str, Any], closing: ExitStack
) -> list[NodeConnection]:
    """A connection to each other machine; other clients (a scan, a health check) do not delay them."""
    found: dict[int, NodeConnection] = {}
    unnamed: list[NodeConnection] = []
    limit = peer_timeout_s(spec)
    deadline = time.monotonic() + limit
    while missing := [node for node in range(1, spec.launch.machines) if node not in found]:
        if time.monotonic() > deadline:
            who = ", ".join(map(str, missing))
            raise DeadlineExceeded(f"machine {who} did not connect to {_address_text(spec)} within {limit:g} s")
        if door in select.select([door, *(line.socket for line in unnamed)], [], [], RETRY_S)[0]:
            unnamed.append(NodeConnection(closing.enter_context(door.accept()[0]), "a machine"))
        found = {node: line for node, line in found.items() if _is_alive(line)}  # one that is gone may be typed again
        unnamed = [line for line in unnamed if _is_alive(line)]
        for line in [line for line in unnamed if "hello" in line.received]:
            unnamed.remove(line)
            match line.received["hello"]:
                case [int(node), str(host), dict(other)]:
                    line.name = f"machine {node} ({host})"
                    _refuse_other_job(line, typed, other)
                    if node in found:
                        text = f"launch.node_rank={node} is used by {found[node].name}; set another number on each"
                        line.send({"refused": text})
                    else:
                        found[node] = line
                case _:
                    line.socket.close()
    for line in unnamed:
        line.socket.close()  # no launcher listens to it any more
    return [found[node] for node in sorted(found)]


def _is_alive(line: NodeConnection) -> bool:
    """Whether it is not broken; one that is, is closed."""
    broken = line.receive()
    if broken:
        line.socket.close()
    return not broken


def _refuse_other_job(line: NodeConnection, typed: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    here, there = dict(iter_leaves(typed)), dict(iter_leaves(other))
    names = [k for k in {**here, **there} if k not in PER_NODE_OPTIONS and here.get(k) != there.get(k)]
    names = [k for k in names if not str(here.get(k)).startswith(RECIPE)]  # machine 0 has put its weights there by now
    if not names:
        return
    line.send({"refused": f"machine 0 has a different job: {', '.join(names)}; type the same command on all machines"})
    text = "{} here, {} on {}; type the same command on all machines"
    raise SpecError([Problem(k, text.format(here.get(k), there.get(k), line.name)) for k in names])


def _listen(host: str, port: int, address: str) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=512)
    except OSError as error:
        text = f"launch.rdzv_endpoint={address}: cannot listen there ({error.strerror}); set an address of machine 0"
        raise EnvironmentProblem(f"{text}, and a free port") from error


def _connect(spec: JobSpec) -> socket.socket:
    """Machine 0's door, once it is open."""
    limit = peer_timeout_s(spec)
    deadline = time.monotonic() + limit
    while True:
        try:
            return socket.create_connection(spec.launch.meeting, timeout=5)
        except OSError as error:
            if time.monotonic() > deadline:
                text = f"machine 0 does not respond at {_address_text(spec)} within {limit:g} s ({error_reason(error)})"
                raise DeadlineExceeded(f"{text}; start the same command there, with launch.node_rank=0") from error
            time.sleep(RETRY_S)


def peer_timeout_s(spec: JobSpec) -> float:
    """Seconds that a rank or a machine is waited for."""
    return TIMEOUT_S if spec.parallelism.deadline_s is None else spec.parallelism.deadline_s


def _address_text(spec: JobSpec) -> str:
    """Machine 0's, as it is said."""
    host, port = spec.launch.meeting
    return f"{host}:{port}"


def interface_of(address: str) -> str | None:
    """The name of the interface with this IPv4 address, None where there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == address for one in addresses):
            return name
    return None


def address_towards(host: str) -> str:
    """This machine's IPv4 address on the way to `host`; empty where there is no way. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((host, 9))
        except OSError:
            return ""
        return str(asked.getsockname()[0])


def gloo_interface(address: str) -> dict[str, str]:
    """The environment in which gloo is found at this machine's address; empty where no interface has it."""
    name = interface_of(address)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name}
