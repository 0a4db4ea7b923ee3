"""What a job reserves of Ray: a seat for each of its processes; refused with the arithmetic where it cannot be had.

spec ─▶ seats ─▶ refuse_too_many(nodes) ─▶ one placement group ─▶ table

Ray itself would wait for ever for what no node has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from runner.device.kinds import CPU
from runner.errors import EnvironmentProblem
from runner.launch.member import Role
from runner.launch.samplers import count_of
from runner.spec.job import JobSpec

WORDS = {"CPU": "core", "GPU": "GPU", "NPU": "NPU"}  # of what Ray counts


@dataclass(frozen=True, slots=True)
class Seat:
    """One process of the job: what it asks of the node that it runs on, `count` of `resource`."""

    role: Role
    index: int
    resource: str
    count: int


class Taken(NamedTuple):
    """Where a seat is. `devices`: as the node's list of visible ones names them; none on the processor."""

    node: str  # its address
    host: str
    devices: tuple[str, ...]


def seats(spec: JobSpec) -> list[Seat]:
    """The ranks, then the samplers. A process on cards asks for no cores: cards are what is scarce."""
    kind = spec.device.kind
    each = getattr(spec.device, "threads", 1) if kind is CPU else 1
    ranks = [Seat("rank", rank, kind.resource, each) for rank in range(spec.launch.world)]
    cards = spec.sampler.cards()
    return ranks + [Seat("sampler", index, kind.resource, each * cards) for index in range(count_of(spec))]


def refuse_too_many(wanted: Sequence[Seat], nodes: Sequence[Mapping[str, float]], where: str) -> None:
    """Raise EnvironmentProblem where these nodes could not hold all seats at once if nobody else were there.

    A sampler's seat is as large as several ranks', so that counting is exact: the larger ones go first.
    """
    resource, unit = wanted[0].resource, min(seat.count for seat in wanted)
    there = [int(node.get(resource, 0)) for node in nodes]
    room, asked = sum(count // unit * unit for count in there), sum(seat.count for seat in wanted)
    has = f"{where} has {_total(there, resource)}"
    if asked > room:
        text = f"the job wants {described(wanted)}, and {has}: {asked - room} too few"
        raise EnvironmentProblem(f"{text}; {_advice(room)}")
    largest = max(seat.count for seat in wanted)
    alike = [seat for seat in wanted if seat.count == largest]
    if len(alike) > (fit := sum(count // largest for count in there)):
        each = f"{_counted(largest, resource)} of one node"
        who = (
            f"1 {alike[0].role} wants {each}" if len(alike) == 1 else f"{len(alike)} {alike[0].role}s want {each} each"
        )
        text = f"{who}, and {has}: room for {fit}"
        raise EnvironmentProblem(f"{text}; {_advice(room)}")


def described(wanted: Sequence[Seat]) -> str:
    """All that is wanted, in words: 8 NPUs (6 to train, 2 to sample)."""
    train, sample = (sum(seat.count for seat in wanted if seat.role == role) for role in ("rank", "sampler"))
    total = _counted(train + sample, wanted[0].resource)
    return f"{total} ({train} to train, {sample} to sample)" if sample else total


def table(wanted: Sequence[Seat], taken: Sequence[Taken]) -> Iterator[str]:
    """Who is where: role, node, devices; neighbours on one node share a line."""
    rows = [("role", "node", "devices")]
    pairs = zip(wanted, taken, strict=True)
    for (role, node, host), group in groupby(pairs, key=lambda pair: (pair[0].role, pair[1].node, pair[1].host)):
        own = list(group)
        first, last = own[0][0], own[-1][0]
        name = f"{role} {first.index}" if len(own) == 1 else f"{role}s {first.index} to {last.index}"
        devices = ", ".join(device for _, place in own for device in place.devices)
        count = _counted(sum(seat.count for seat, _ in own), first.resource)
        rows.append((name, f"{host} ({node})", f"{first.resource} {devices}" if devices else count))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, where, what in rows:
        yield f"  {name.ljust(widths[0])}  {where.ljust(widths[1])}  {what}"


def grouped(nodes: Sequence[str], roles: Iterable[Role]) -> list[int]:
    """The order in which bundles are taken as seats, so that ranks on one node are neighbours: the fullest node first.

    nodes, roles: of each bundle, ranks' before samplers'; returns bundles' numbers
    """
    found = list(enumerate(zip(nodes, roles, strict=True)))
    many = {node: sum(other == node for other in nodes) for node in nodes}
    return [
        at for at, (node, role) in sorted(found, key=lambda it: (it[1][1] != "rank", -many[it[1][0]], it[1][0], it[0]))
    ]


def _counted(count: int, resource: str) -> str:
    return f"{count} {WORDS[resource]}{'' if count == 1 else 's'}"


def _total(there: Sequence[int], resource: str) -> str:
    """8 NPUs on 2 nodes (4 + 4)"""
    nodes = f"{len(there)} node{'' if len(there) == 1 else 's'}"
    if not sum(there):
        return f"no {WORDS[resource]} on {nodes}"
    parts = f" ({' + '.join(map(str, there))})" if len(there) > 1 else ""
    return f"{_counted(sum(there), resource)} on {nodes}{parts}"


def _advice(total: int) -> str:
    if total == 0:
        return "`ray status` lists what there is"
    return "lower launch.devices or launch.samplers; `ray status` lists what there is"
