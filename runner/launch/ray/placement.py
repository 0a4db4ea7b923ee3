"""The resources that a job reserves in Ray, or an error that shows the arithmetic.

spec ─▶ bundles ─▶ refuse_too_many(nodes) ─▶ one placement group ─▶ table

Ray itself would wait forever for resources that no node has.
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
from runner.tracker.text import align_columns, count_noun

TASKS: dict[Role, str] = {"rank": "to train", "sampler": "to sample"}  # in the order of bundles
OPTIONS: dict[Role, str] = {"rank": "devices", "sampler": "samplers"}  # of launch


@dataclass(frozen=True, slots=True)
class Bundle:
    """The resources of one process: `count` of `resource` on its node."""

    role: Role
    index: int
    resource: str
    count: int


class BundleLocation(NamedTuple):
    """Where a bundle is. devices: their names in the node's list of visible devices; none on the CPU."""

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
    """Raise EnvironmentProblem if these nodes cannot hold all bundles even without other jobs.

    A sampler's bundle is a multiple of a rank's, so the count is exact: larger bundles are placed first.
    """
    there = [int(node.get(wanted[0].resource, 0)) for node in nodes]
    unit, asked = gcd(*(bundle.count for bundle in wanted)), sum(bundle.count for bundle in wanted)
    text = f"the job needs {request_text(wanted)}, but {where} has {_total(there, wanted[0].resource)}"
    if asked > (room := sum(there)):
        raise EnvironmentProblem(f"{text}: {asked - room} too few; {_advice(room, wanted)}")
    _refuse_large(wanted, there, where)
    if asked > (room := sum(count // unit * unit for count in there)):
        text = f"{text}, {room} of them in groups of {unit} on one node"
        raise EnvironmentProblem(f"{text}: {asked - room} too few; {_advice(room, wanted)}")


def _refuse_large(wanted: Sequence[Bundle], there: Sequence[int], where: str) -> None:
    """Raise EnvironmentProblem if the largest bundles do not fit on the nodes."""
    resource, largest = wanted[0].resource, max(bundle.count for bundle in wanted)
    alike = [bundle for bundle in wanted if bundle.count == largest]
    if len(alike) > (fit := sum(count // largest for count in there)):
        each = f"{count_noun(largest, _word(resource))} of one node"
        role = alike[0].role
        who = f"1 {role} needs {each}" if len(alike) == 1 else f"{len(alike)} {role}s need {each} each"
        text = f"{who}, but {where} has {_total(there, resource)}: room for {fit}"
        raise EnvironmentProblem(f"{text}; {_advice(sum(there), wanted)}")


def request_text(wanted: Sequence[Bundle]) -> str:
    """The request as text: 8 NPUs (6 to train, 2 to sample)."""
    total = count_noun(sum(bundle.count for bundle in wanted), _word(wanted[0].resource))
    tasks = [
        f"{sum(bundle.count for bundle in wanted if bundle.role == role)} {task}"
        for role, task in TASKS.items()
        if any(bundle.role == role for bundle in wanted)
    ]
    return total if {bundle.role for bundle in wanted} == {"rank"} else f"{total} ({', '.join(tasks)})"


def free_text(wanted: Sequence[Bundle], nodes: Sequence[Mapping[str, float]], left: Mapping[str, float]) -> str:
    """The free part of the requested resource: 3 of 8 NPUs."""
    resource = wanted[0].resource
    total = sum(int(node.get(resource, 0)) for node in nodes)
    return f"{int(left.get(resource, 0))} of {count_noun(total, _word(resource))}"


def placement_table(wanted: Sequence[Bundle], taken: Sequence[BundleLocation]) -> Iterator[str]:
    """A table of role, node and devices; neighbors on one node share a line."""
    rows = [("role", "node", "devices")]
    pairs = zip(wanted, taken, strict=True)
    for (role, node, host), group in groupby(pairs, key=lambda pair: (pair[0].role, pair[1].node, pair[1].host)):
        own = list(group)
        first, last = own[0][0], own[-1][0]
        name = f"{role} {first.index}" if len(own) == 1 else f"{role}s {first.index} to {last.index}"
        devices = ", ".join(device for _, place in own for device in place.devices)
        count = count_noun(sum(bundle.count for bundle, _ in own), _word(first.resource))
        rows.append((name, f"{host} ({node})", f"{first.resource} {devices}" if devices else count))
    yield from (f"  {line}" for line in align_columns(rows))


def bundle_order(nodes: Sequence[str], roles: Iterable[Role]) -> list[int]:
    """Order of bundles in which ranks of one node are neighbors: the fullest node first.

    nodes: of each bundle; roles: of each process; returns indices of bundles
    """
    kinds, order = list(roles), list(TASKS)
    return sorted(range(len(nodes)), key=lambda at: (order.index(kinds[at]), -nodes.count(nodes[at]), nodes[at], at))


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
    lower = " or ".join(f"launch.{OPTIONS[role]}" for role in dict.fromkeys(bundle.role for bundle in wanted))
    return f"lower {lower}; `ray status`, or `run doctor` there, lists the resources"


def _word(resource: str) -> str:
    """The word for a resource of Ray."""
    return next(kind.word for kind in KINDS.values() if kind.resource == resource)
