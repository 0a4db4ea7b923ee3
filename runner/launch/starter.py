"""Starts the processes of a job on this machine: each with its place, its devices, and its share of the cores."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from runner.device.visible import listed
from runner.errors import EnvironmentProblem
from runner.launch.interface import address_towards, met_at
from runner.launch.janitor import Janitor
from runner.launch.machines import Machines
from runner.launch.member import Member, Order
from runner.place import Place, alone
from runner.spec.job import JobSpec

LOOPBACK = "127.0.0.1"


class Local:
    """The `Starter` of launch=local; of several machines, that of this one."""

    def __init__(self, spec: JobSpec, machines: Machines | None = None) -> None:
        """Raises EnvironmentProblem where devices are missing."""
        self._spec, self._machines = spec, machines
        self._cards = _cards(spec)
        self._own = None if machines is not None else socket.create_server((LOOPBACK, 0), backlog=512)
        self._janitor = Janitor() if spec.algorithm.samples else None

    def places(self) -> list[Place]:
        """The ranks of this machine."""
        size = self._spec.launch.devices
        first = size * self._spec.launch.machine
        return [Place(first + local, self._spec.launch.world, local, size) for local in range(size)]

    def meeting(self) -> tuple[str, int]:
        """Where all ranks meet."""
        if self._machines is not None:
            return self._machines.store
        assert self._own is not None
        return LOOPBACK, self._own.getsockname()[1]

    def start(self, order: Order) -> Member:
        """Start a process. Raises StorageError, EnvironmentProblem."""
        listener = self._machines.listener if self._machines is not None else self._own
        handle = listener.fileno() if listener is not None and order.meets else None
        if self._janitor is not None:
            self._janitor.remove(*order.scratch)
        own = {**alone(os.environ), **self._surroundings(), **self._seen(order), **order.environment}
        member = Member.start(order, own, handle, self._janitor)
        if self._own is not None and order.meets:
            self._own.close()  # rank 0 has it: where that is gone, nobody is to wait for an answer
        return member

    def close(self) -> None:
        """Nothing of what was started is left."""
        if self._own is not None:
            self._own.close()
        if self._janitor is not None:
            self._janitor.close()

    def _surroundings(self) -> Mapping[str, str]:
        """What all processes of this machine have in their environment."""
        processes = self._spec.launch.devices + self._spec.launch.samplers
        found = {}
        if "OMP_NUM_THREADS" not in os.environ:
            found["OMP_NUM_THREADS"] = str(max(len(os.sched_getaffinity(0)) // processes, 1))
        if "GLOO_SOCKET_IFNAME" not in os.environ:  # a host's own name need not lead anywhere, as in many containers
            found |= met_at(LOOPBACK if self._machines is None else address_towards(self._machines.store[0]))
        return found

    def _seen(self, order: Order) -> Mapping[str, str]:
        """The cards that a process is to see: a rank sees all, and takes the one of its place."""
        variable = self._spec.device.kind.visible
        if order.role == "rank" or variable is None or self._cards is None:
            return {}
        return {variable: ",".join(self._cards[number] for number in order.cards)}


def _cards(spec: JobSpec) -> tuple[str, ...] | None:
    """The devices here, as a list of visible ones names them: where the user has no list, the driver counts from 0,
    whatever the device files are called (a container may have some of them). None on the processor, and where no
    sampler is to be given any. Raises EnvironmentProblem where ranks and samplers want more than there are.
    """
    there = spec.device.visible() if spec.launch.samplers else None
    if there is not None and listed(spec.device.kind) is None:
        there = tuple(map(str, range(len(there))))
    wanted = spec.launch.devices + spec.launch.samplers
    if there is not None and len(there) < wanted:
        asked = f"launch.devices={spec.launch.devices} and launch.samplers={spec.launch.samplers} want {wanted} devices"
        found = f"{len(there)} {'is' if len(there) == 1 else 'are'} here ({', '.join(there) or 'none'})"
        raise EnvironmentProblem(f"{asked}, and {found}; type fewer, or list more in {spec.device.kind.visible}")
    return there
