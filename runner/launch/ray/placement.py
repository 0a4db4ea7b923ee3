"""The resources that a job reserves of Ray, or a refusal that shows the arithmetic.

spec ─▶ seats ─▶ refuse_too_many(nodes) ─▶ one placement group ─▶ table

Ray itself would wait for ever for what no node has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd
from typing import NamedTuple

from runner.core.device_kinds import CPU, KINDS
from runner.core.errors import EnvironmentProblem
from runner.launch.supervisor import sampler_count
from runner.launch.worker_process import Role
from runner.spec.job import JobSpec
from runner.tracker.text import count_noun

TASKS: dict[Role, str] = {"rank": "to train", "sampler": "to sample"}  # in the order of bundles
OPTIONS: dict[Role, str] = {"rank": "devices", "sampler": "samplers"}  # of launch


@dataclass(frozen=True, slots=True)
class Bundle:
    """One process of the job: what it requests of its node, `count` of `resource`."""

    role: Role
    index: int
    resource: str
    count: int


class BundleLocation(NamedTuple):
    """Where a bundle is. `devices`: as the node's list of visible ones names them; none on the processor."""

    node: str  # its address
    host: str
    devices: tuple[str, ...]


def bundles(spec: JobSpec) -> list[Bundle]:
    """One bundle per rank and sampler. A process on cards requests no cores: cards are scarce."""
    kind = spec.device.kind
    each = spec.device.host_threads if kind is CPU else 1
    ranks = [Bundle("rank", rank, kind.resource, each) for rank in range(spec.launch.world)]
    cards = spec.sampler.cards()
    return ranks + [Bundle("sampler", index, kind.resource, each * cards) for index in range(sampler_count(spec))]


def refuse_too_many(wanted: Sequence[Bundle], nodes: Sequence[Mapping[str, float]], where: str) -> None:
    """Raise EnvironmentProblem where these nodes could not hold all bundles even without other jobs.

    A sampler's bundle is as large as several ranks', so that counting is exact: the larger ones go first.
    """
    there = [int(node.get(wanted[0].resource, 0)) for node in nodes]
    unit, asked = gcd(*(seat.count for seat in wanted)), sum(seat.count for seat in wanted)
    text = f"the job needs {request_text(wanted)}, but {where} has {_total(there, wanted[0].resource)}"
    if asked > (room := sum(there)):
        raise EnvironmentProblem(f"{text}: {asked - room} too few; {_advice(room, wanted)}")
    _refuse_large(wanted, there, where)
    if asked > (room := sum(count // unit * unit for count in there)):
        text = f"{text}, {room} of them in groups of {unit} on one node"
        raise EnvironmentProblem(f"{text}: {asked - room} too few; {_advice(room, wanted)}")


def _refuse_large(wanted: Sequence[Bundle], there: Sequence[int], where: str) -> None:
    """Raise EnvironmentProblem where the largest bundles do not fit on single nodes."""
    resource, largest = wanted[0].resource, max(seat.count for seat in wanted)
    alike = [seat for seat in wanted if seat.count == largest]
    if len(alike) > (fit := sum(count // largest for count in there)):
        each = f"{count_noun(largest, _word(resource))} of one node"
        who = (
            f"1 {alike[0].role} needs {each}" if len(alike) == 1 else f"{len(alike)} {alike[0].role}s need {each} each"
        )
        text = f"{who}, but {where} has {_total(there, resource)}: room for {fit}"
        raise EnvironmentProblem(f"{text}; {_advice(sum(there), wanted)}")


def request_text(wanted: Sequence[Bundle]) -> str:
    """All that is wanted, in words: 8 NPUs (6 to train, 2 to sample)."""
    total = count_noun(sum(seat.count for seat in wanted), _word(wanted[0].resource))
    tasks = [
        f"{sum(seat.count for seat in wanted if seat.role == role)} {task}"
        for role, task in TASKS.items()
        if any(seat.role == role for seat in wanted)
    ]
    return total if {seat.role for seat in wanted} == {"rank"} else f"{total} ({', '.join(tasks)})"


def free_text(wanted: Sequence[Bundle], nodes: Sequence[Mapping[str, float]], left: Mapping[str, float]) -> str:
    """How much of the requested resources is free: 3 of 8 NPUs."""
    resource = wanted[0].resource
    return (
        f"{int(left.get(resource, 0))} of "
        f"{count_noun(sum(int(node.get(resource, 0)) for node in nodes), _word(resource))}"
    )


def placement_table(wanted: Sequence[Bundle], taken: Sequence[BundleLocation]) -> Iterator[str]:
    """Who is where: role, node, devices; neighbors on one node share a line."""
    rows = [("role", "node", "devices")]
    pairs = zip(wanted, taken, strict=True)
    for (role, node, host), group in groupby(pairs, key=lambda pair: (pair[0].role, pair[1].node, pair[1].host)):
        own = list(group)
        first, last = own[0][0], own[-1][0]
        name = f"{role} {first.index}" if len(own) == 1 else f"{role}s {first.index} to {last.index}"
        devices = ", ".join(device for _, place in own for device in place.devices)
        count = count_noun(sum(seat.count for seat, _ in own), _word(first.resource))
        rows.append((name, f"{host} ({node})", f"{first.resource} {devices}" if devices else count))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, where, what in rows:
        yield f"  {name.ljust(widths[0])}  {where.ljust(widths[1])}  {what}"


def bundle_order(nodes: Sequence[str], roles: Iterable[Role]) -> list[int]:
    """Order of bundles in which ranks of one node are neighbors: the fullest node first.

    nodes, roles: of each bundle, in the order of processes; returns bundles' numbers
    """
    found = list(enumerate(zip(nodes, roles, strict=True)))
    many, order = {node: sum(other == node for other in nodes) for node in nodes}, list(TASKS)
    return [
        at
        for at, (node, role) in sorted(found, key=lambda it: (order.index(it[1][1]), -many[it[1][0]], it[1][0], it[0]))
    ]


def _total(there: Sequence[int], resource: str) -> str:
    """8 NPUs on 2 nodes (4 + 4)"""
    nodes = count_noun(len(there), "node")
    if not sum(there):
        return f"no {_word(resource)} on {nodes}"
    parts = f" ({' + '.join(map(str, there))})" if len(there) > 1 else ""
    return f"{count_noun(sum(there), _word(resource))} on {nodes}{parts}"


def _advice(total: int, wanted: Sequence[Bundle]) -> str:
    if total == 0:
        return "`ray status`, or `run doctor` there, lists the resources"
    lower = " or ".join(f"launch.{OPTIONS[role]}" for role in dict.fromkeys(seat.role for seat in wanted))
    return f"lower {lower}; `ray status`, or `run doctor` there, lists the resources"


def _word(resource: str) -> str:
    """What people call what Ray counts."""
    return next(kind.word for kind in KINDS.values() if kind.resource == resource)
