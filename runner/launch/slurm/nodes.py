"""The machines of a Slurm job: their names, and where they are found. Raises EnvironmentProblem where Slurm refuses."""

from __future__ import annotations

import re

from runner.launch.slurm.commands import told

ADDRESS = re.compile(r"\bNodeAddr=(\S+)")


def hosts(listed: str) -> list[str]:
    """The names in Slurm's short form of a list of nodes, `a[1-3,7],b2`."""
    is_one = not {"[", ","} & set(listed)
    return [listed] if is_one else told("scontrol", "show", "hostnames", listed).split()


def address_of(node: str) -> str:
    """The host's name or number by which Slurm itself finds a node: the node's name, where it has no other."""
    found = ADDRESS.search(told("scontrol", "show", "node", node))
    return found[1] if found else node
