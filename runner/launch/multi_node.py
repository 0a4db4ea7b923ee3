"""Multi-node rendezvous: the supervisors of all nodes start and stop together.

machine 0: listens at launch.rdzv_endpoint ◀── hello: number, host, the job as it was typed ── machine 1 …
           ── folder, attempt, the store's port ──▶      ◀── over · cause ──▶

Messages are JSON lines; a machine whose connection breaks is lost. torch's TCPStore is not used: importing torch costs
the launcher a second and 190 MB; calls exceed their timeout when the server is stopped or cut off; the store does not
report a lost client; and every client may write.

gloo uses the address of the host name unless an interface is set. On many machines that is a loopback address, so
`gloo_interface` selects the interface that leads to the other machines.
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
CAUSE_S = 30.0  # timeout for another machine's cause after the ranks of this machine have ended
TIMEOUT_S = 1800.0  # if parallelism has no timeout
LOOPBACK = "127.0.0.1"
SAMPLER_HOST = "RUN_SAMPLER_HOST"  # variable: the address at which other machines of the job reach a sampler
PER_NODE_OPTIONS = ("launch.node_rank",)  # options that differ between machines


class NodeConnection:
    """The connection to another machine's launcher. received: the newest message of each kind."""

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
        """Receive messages; returns whether the connection is broken: closed, or an invalid message."""
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
        """Send the other machines, once, that the job is over."""
        if not self.announced:
            self.announced = True
            for peer in self.connections:
                peer.send({"over": True})

    def is_over(self) -> bool:
        """Whether another machine has sent that the job is over, or is lost."""
        # A list: receives from all.
        over = any([peer.receive() or "over" in peer.received for peer in self.connections])
        if over and self.is_node0:
            self.announce_end()
        return over

    def agree_on_cause(self, own: ExitCause | None) -> ExitCause | None:
        """The common cause of all machines: the one that explains the end best."""
        if not self.is_node0:
            [peer] = self.connections
            peer.send({"cause": own})
            return self._receive_cause(peer, own)
        causes = [own, *(self._receive_cause(peer, own) for peer in self.connections)]
        best = min((cause for cause in causes if cause), key=lambda v: v.strength, default=None)
        for peer in self.connections:
            peer.send({"cause": best})
        return best

    def _receive_cause(self, peer: NodeConnection, own: ExitCause | None) -> ExitCause | None:
        """A machine's cause. If it sends none, the cause is `own`, or the loss of the machine.

        If the ranks of this machine succeeded or were interrupted, there is no timeout: the others may be saving.
        """
        patient = own is None or own.strength == INTERRUPTED
        deadline = time.monotonic() + (float("inf") if patient else CAUSE_S)
        while "cause" not in peer.received and not peer.receive() and time.monotonic() < deadline:
            select.select([peer.socket], [], [], RETRY_S)
        if "cause" in peer.received:
            cause = peer.received["cause"]
            return None if cause is None else ExitCause(*cause)
        gone = ExitCause(KILLED, f"{peer.name} was lost: its launcher does not respond", LOST)
        return gone if own is None or own.strength == WAITED else own


@contextmanager
def gather_nodes(spec: JobSpec, folder: RunFolder, attempt: int, typed: Mapping[str, Any]) -> Iterator[PeerNodes]:
    """On machine 0: wait for the other machines and send them the run folder.

    Raises EnvironmentProblem if this machine does not have the address, SpecError if a machine has another job,
    DeadlineExceeded if one does not connect, Interrupted.
    """
    host, port = spec.launch.rdzv_address
    stop = StopSignal()
    with stop.handle_signals(), ExitStack() as closing, stop.interrupt_immediately():
        server = closing.enter_context(_listen(host, port, _address_text(spec)))
        listener = closing.enter_context(_listen(host, 0, _address_text(spec)))
        count = spec.launch.machines
        print_text(f"waiting for {count - 1} more of {count} machines at {_address_text(spec)}")
        store = (host, listener.getsockname()[1])
        peers = _accept_nodes(server, spec, typed, closing)
        for peer in peers:
            peer.send({"welcome": [str(folder.root), attempt, *store]})
        found = PeerNodes(peers, True, store, listener)
        closing = closing.pop_all()
    with closing:
        yield found


@contextmanager
def join_node0(spec: JobSpec, typed: Mapping[str, Any]) -> Iterator[tuple[PeerNodes, RunFolder, int]]:
    """On another machine: machine 0, the run's folder, and the number of the attempt.

    Raises DeadlineExceeded if machine 0 does not respond, EnvironmentProblem if it has another job or its folder is
    not visible here, RankLost if it exits before the job starts, Interrupted.
    """
    stop = StopSignal()
    with stop.handle_signals(), ExitStack() as closing, stop.interrupt_immediately():
        here = f"machine {spec.launch.machine} of {spec.launch.machines}"
        print_text(f"{here}: connecting to machine 0 at {_address_text(spec)}")
        peer = NodeConnection(closing.enter_context(_connect(spec)), "machine 0")
        peer.send({"hello": [spec.launch.machine, socket.gethostname(), typed]})
        while not peer.receive() and not {"welcome", "refused"} & peer.received.keys():
            select.select([peer.socket], [], [], RETRY_S)
        if "refused" in peer.received:
            raise EnvironmentProblem(peer.received["refused"])
        if "welcome" not in peer.received:
            raise RankLost("machine 0 exited before the job started; see its output for the cause")
        root, attempt, host, port = peer.received["welcome"]
        folder = RunFolder(Path(root))
        if not folder.spec.is_file():
            text = f"cannot see the run's folder {root}, which machine 0 created"
            raise EnvironmentProblem(f"{text}; use storage that all machines share")
        closing = closing.pop_all()
    with closing:
        yield PeerNodes([peer], False, (host, port)), folder, attempt


def _accept_nodes(
    server: socket.socket, spec: JobSpec, typed: Mapping[str, Any], closing: ExitStack
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
        if server in select.select([server, *(peer.socket for peer in unnamed)], [], [], RETRY_S)[0]:
            unnamed.append(NodeConnection(closing.enter_context(server.accept()[0]), "a machine"))
        # The command may be typed again on a lost machine.
        found = {node: peer for node, peer in found.items() if _is_alive(peer)}
        unnamed = [peer for peer in unnamed if _is_alive(peer)]
        for peer in [peer for peer in unnamed if "hello" in peer.received]:
            unnamed.remove(peer)
            match peer.received["hello"]:
                case [int(node), str(host), dict(other)]:
                    peer.name = f"machine {node} ({host})"
                    _refuse_other_job(peer, typed, other)
                    if node in found:
                        text = f"launch.node_rank={node} is used by {found[node].name}; set another number on each"
                        peer.send({"refused": text})
                    else:
                        found[node] = peer
                case _:
                    peer.socket.close()
    for peer in unnamed:
        peer.socket.close()  # not a machine of this job
    return [found[node] for node in sorted(found)]


def _is_alive(peer: NodeConnection) -> bool:
    """Whether the connection is open; a broken one is closed."""
    broken = peer.receive()
    if broken:
        peer.socket.close()
    return not broken


def _refuse_other_job(peer: NodeConnection, typed: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    here, there = dict(iter_leaves(typed)), dict(iter_leaves(other))
    names = [k for k in {**here, **there} if k not in PER_NODE_OPTIONS and here.get(k) != there.get(k)]
    # Machine 0 has replaced a recipe by its weights.
    names = [k for k in names if not str(here.get(k)).startswith(RECIPE)]
    if not names:
        return
    peer.send({"refused": f"machine 0 has a different job: {', '.join(names)}; type the same command on all machines"})
    text = "{} here, {} on {}; type the same command on all machines"
    raise SpecError([Problem(k, text.format(here.get(k), there.get(k), peer.name)) for k in names])


def _listen(host: str, port: int, address: str) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=512)
    except OSError as error:
        text = f"launch.rdzv_endpoint={address}: cannot listen there ({error.strerror}); set an address of machine 0"
        raise EnvironmentProblem(f"{text}, and a free port") from error


def _connect(spec: JobSpec) -> socket.socket:
    """A connection to machine 0, as soon as it listens."""
    limit = peer_timeout_s(spec)
    deadline = time.monotonic() + limit
    while True:
        try:
            return socket.create_connection(spec.launch.rdzv_address, timeout=5)
        except OSError as error:
            if time.monotonic() > deadline:
                text = f"machine 0 does not respond at {_address_text(spec)} within {limit:g} s ({error_reason(error)})"
                raise DeadlineExceeded(f"{text}; start the same command there, with launch.node_rank=0") from error
            time.sleep(RETRY_S)


def peer_timeout_s(spec: JobSpec) -> float:
    """Seconds to wait for a rank or a machine."""
    return TIMEOUT_S if spec.parallelism.deadline_s is None else spec.parallelism.deadline_s


def _address_text(spec: JobSpec) -> str:
    """The address of machine 0 as text."""
    host, port = spec.launch.rdzv_address
    return f"{host}:{port}"


def interface_of(address: str) -> str | None:
    """The name of the interface with this IPv4 address; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == address for one in addresses):
            return name
    return None


def address_towards(host: str) -> str:
    """This machine's IPv4 address on the route to `host`; empty if there is no route. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((host, 9))
        except OSError:
            return ""
        return str(asked.getsockname()[0])


def gloo_interface(address: str) -> dict[str, str]:
    """The variable that lets gloo use the interface with this address; empty if no interface has it."""
    name = interface_of(address)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name}
