"""Several machines: their launchers meet at machine 0, start together, and end together for one reason.

machine 0: listens at launch.address ◀── hello: number, host, the job as it was typed ── machine 1 …
           ── folder, attempt, the store's port ──▶      ◀── over · verdict ──▶

Plain JSON, a line each; a machine whose line breaks is gone. Not torch's TCPStore: it costs a launcher, which imports
no torch, a second and 190 MB; its calls outlast their timeout where the server is stopped or cut off; it tells nobody
that a client is gone; and whoever connects may write.

gloo takes the address of the host's own name, unless it is told an interface, and on many machines that is a loopback
one: `met_at` tells it the one on the way to the others.
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
from runner.core.signals import StopSignal
from runner.core.subprocess import JsonLines
from runner.launch.verdict import INTERRUPTED, KILLED, LOST, WAITED, Verdict
from runner.run_dir.folder import RunFolder
from runner.spec.base import leaves
from runner.spec.job import RECIPE, JobSpec

RETRY_S = 0.5
SEND_S = 5.0
LONGEST_BYTES = 2**24  # of a message
# seconds until a machine that is cut off is noticed: 10 + 3 × 5
ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
VERDICT_S = 30.0  # for a machine's last word, once the ranks of this one have ended
TIMEOUT_S = 1800.0  # where the parallelism says nothing
LOOPBACK = "127.0.0.1"
SAMPLER_HOST = "RUN_SAMPLER_HOST"  # variable: the address at which the job's other machines find a sampler's
OWN_WORDS = ("launch.node",)  # what each machine says for itself


class Line:
    """The connection to another machine's launcher. `said`: the newest of each kind of message that came."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.socket, self.name = connection, name
        self.said: dict[str, Any] = {}
        self._lines = JsonLines(connection.fileno(), connection.fileno(), LONGEST_BYTES)
        self._broken = False
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: dict[str, Any]) -> None:
        """Say something; `listen` finds out where nobody is left to hear it."""
        with suppress(OSError):
            self._lines.send(message, SEND_S)

    def listen(self) -> bool:
        """Take in what has come; whether the line is broken: it ended, or what came is no message, an object."""
        if not self._broken:
            try:
                messages = self._lines.receive()
                self._broken = messages is None
                for message in messages or ():
                    self.said.update(message)
            except (ValueError, TypeError):
                self._broken = True
        return self._broken


@dataclass(slots=True)
class Machines:
    """The other machines of a job: all of them for machine 0, machine 0 for the others. `store`: where ranks meet."""

    lines: list[Line]
    leads: bool
    store: tuple[str, int]
    listener: socket.socket | None = None  # of the store, on machine 0
    told: bool = False

    def tell(self) -> None:
        """Say to the others, once, that the job is over."""
        if not self.told:
            self.told = True
            for line in self.lines:
                line.send({"over": True})

    def is_over(self) -> bool:
        """Whether another machine says so, or is gone."""
        over = any([line.listen() or "over" in line.said for line in self.lines])  # all are listened to
        if over and self.leads:
            self.tell()
        return over

    def agree(self, own: Verdict | None) -> Verdict | None:
        """The one verdict of all machines: what explains the end best."""
        if not self.leads:
            [line] = self.lines
            line.send({"verdict": own})
            return self._heard(line, own)
        verdicts = [own, *(self._heard(line, own) for line in self.lines)]
        best = min((verdict for verdict in verdicts if verdict), key=lambda v: v.strength, default=None)
        for line in self.lines:
            line.send({"verdict": best})
        return best

    def _heard(self, line: Line, own: Verdict | None) -> Verdict | None:
        """A machine's verdict; that it is gone, where it gives none and `own` says nothing better.

        Where this machine's ranks ended well, or were interrupted, those of the other one may take their time to save.
        """
        patient = own is None or own.strength == INTERRUPTED
        deadline = time.monotonic() + (float("inf") if patient else VERDICT_S)
        while "verdict" not in line.said and not line.listen() and time.monotonic() < deadline:
            select.select([line.socket], [], [], RETRY_S)
        if "verdict" in line.said:
            said = line.said["verdict"]
            return None if said is None else Verdict(*said)
        gone = Verdict(KILLED, f"{line.name} is gone: its launcher does not answer", LOST)
        return gone if own is None or own.strength == WAITED else own


@contextmanager
def gathered(spec: JobSpec, folder: RunFolder, attempt: int, typed: Mapping[str, Any]) -> Iterator[Machines]:
    """On machine 0: the others, once all have come, and know the folder.

    Raises EnvironmentProblem if this is not where they look, SpecError if one has another job, DeadlineExceeded if one
    does not come, Interrupted.
    """
    host, port = spec.launch.meeting
    stop = StopSignal()
    with stop.installed(), ExitStack() as closing, stop.at_once():
        door = closing.enter_context(_listening(host, port, _address(spec)))
        listener = closing.enter_context(_listening(host, 0, _address(spec)))
        print(f"waiting for {spec.launch.machines - 1} more of {spec.launch.machines} machines at {_address(spec)}")
        store = (host, listener.getsockname()[1])
        lines = _all(door, spec, typed, closing)
        for line in lines:
            line.send({"welcome": [str(folder.root), attempt, *store]})
        found = Machines(lines, True, store, listener)
        closing = closing.pop_all()
    with closing:
        yield found


@contextmanager
def joined(spec: JobSpec, typed: Mapping[str, Any]) -> Iterator[tuple[Machines, RunFolder, int]]:
    """On another machine: machine 0, the run's folder, and the number of the attempt.

    Raises DeadlineExceeded if machine 0 is not there, EnvironmentProblem if it has another job or its folder is not
    to be seen here, RankLost if it ends before it starts, Interrupted.
    """
    stop = StopSignal()
    with stop.installed(), ExitStack() as closing, stop.at_once():
        print(f"machine {spec.launch.machine} of {spec.launch.machines}: looking for machine 0 at {_address(spec)}")
        line = Line(closing.enter_context(_connected(spec)), "machine 0")
        line.send({"hello": [spec.launch.machine, socket.gethostname(), typed]})
        while not line.listen() and not {"welcome", "refused"} & line.said.keys():
            select.select([line.socket], [], [], RETRY_S)
        if "refused" in line.said:
            raise EnvironmentProblem(line.said["refused"])
        if "welcome" not in line.said:
            raise RankLost("machine 0 ended before the job began; what it says is the cause")
        root, attempt, host, port = line.said["welcome"]
        folder = RunFolder(Path(root))
        if not folder.spec.is_file():
            text = f"the run's folder {root}, which machine 0 made, is not to be seen here"
            raise EnvironmentProblem(f"{text}; start on a disk that all share")
        closing = closing.pop_all()
    with closing:
        yield Machines([line], False, (host, port)), folder, attempt


def _all(door: socket.socket, spec: JobSpec, typed: Mapping[str, Any], closing: ExitStack) -> list[Line]:
    """A line to each of the other machines; whoever else connects (a scan, a health check) holds none of them up."""
    found: dict[int, Line] = {}
    unnamed: list[Line] = []
    limit = deadline_s(spec)
    deadline = time.monotonic() + limit
    while missing := [node for node in range(1, spec.launch.machines) if node not in found]:
        if time.monotonic() > deadline:
            who = ", ".join(map(str, missing))
            raise DeadlineExceeded(f"no word from machine {who} within {limit:g} s at {_address(spec)}")
        if door in select.select([door, *(line.socket for line in unnamed)], [], [], RETRY_S)[0]:
            unnamed.append(Line(closing.enter_context(door.accept()[0]), "a machine"))
        found = {node: line for node, line in found.items() if _lives(line)}  # one that is gone may be typed again
        unnamed = [line for line in unnamed if _lives(line)]
        for line in [line for line in unnamed if "hello" in line.said]:
            unnamed.remove(line)
            match line.said["hello"]:
                case [int(node), str(host), dict(other)]:
                    line.name = f"machine {node} ({host})"
                    _refuse_other_job(line, typed, other)
                    if node in found:
                        text = f"launch.node={node} is taken by {found[node].name}; give each its own number"
                        line.send({"refused": text})
                    else:
                        found[node] = line
                case _:
                    line.socket.close()
    for line in unnamed:
        line.socket.close()  # nobody listens to it any more
    return [found[node] for node in sorted(found)]


def _lives(line: Line) -> bool:
    """Whether it is not broken; one that is, is closed."""
    broken = line.listen()
    if broken:
        line.socket.close()
    return not broken


def _refuse_other_job(line: Line, typed: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    here, there = dict(leaves(typed)), dict(leaves(other))
    names = [k for k in {**here, **there} if k not in OWN_WORDS and here.get(k) != there.get(k)]
    names = [k for k in names if not str(here.get(k)).startswith(RECIPE)]  # machine 0 has put its weights there by now
    if not names:
        return
    line.send({"refused": f"machine 0 was given another job: {', '.join(names)}; type the same command on all"})
    text = "{} here, {} on {}; type the same command on all"
    raise SpecError([Problem(k, text.format(here.get(k), there.get(k), line.name)) for k in names])


def _listening(host: str, port: int, address: str) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=512)
    except OSError as error:
        text = f"launch.address={address}: cannot listen there ({error.strerror}); an address of machine 0 is expected"
        raise EnvironmentProblem(f"{text}, and a free port") from error


def _connected(spec: JobSpec) -> socket.socket:
    """Machine 0's door, once it is open."""
    limit = deadline_s(spec)
    deadline = time.monotonic() + limit
    while True:
        try:
            return socket.create_connection(spec.launch.meeting, timeout=5)
        except OSError as error:
            if time.monotonic() > deadline:
                text = f"machine 0 does not answer at {_address(spec)} within {limit:g} s ({error})"
                raise DeadlineExceeded(f"{text}; start the same command there, with launch.node=0") from error
            time.sleep(RETRY_S)


def deadline_s(spec: JobSpec) -> float:
    """Seconds that a rank or a machine is waited for."""
    return TIMEOUT_S if spec.parallelism.deadline_s is None else spec.parallelism.deadline_s


def _address(spec: JobSpec) -> str:
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


def met_at(address: str) -> dict[str, str]:
    """The environment in which gloo is found at this machine's address; empty where no interface has it."""
    name = interface_of(address)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name}
