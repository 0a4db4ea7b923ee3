"""Which cards Slurm has given a job on a machine, where it sets no variable that shows them: NPUs."""

from __future__ import annotations

import re
import subprocess

from runner.launch.slurm.nodes import hosts

NODES = re.compile(r"\bNodes=(\S+)")
CARDS = r"GRES=.*?\b{name}(?::\w+)?:\d+\(IDX:([\d,-]+)\)"


def handed_out(job: str, gres: str, node: str = "") -> list[int]:
    """The numbers of the cards that a job has on a node (its only one, if none is named); empty where Slurm does not
    number them."""
    command = ["scontrol", "show", "job", "--details", job]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return numbered(_about(said, node), gres.partition(":")[0])


def numbered(said: str, name: str) -> list[int]:
    """`… GRES=npu:910b:3(IDX:0-1,5)` → [0, 1, 5]."""
    found = re.search(CARDS.format(name=re.escape(name)), said)
    numbers: list[int] = []
    for piece in found[1].split(",") if found else ():
        low, _, high = piece.partition("-")
        numbers += range(int(low), int(high or low) + 1)
    return numbers


def _about(said: str, node: str) -> str:
    """The line about a node: `Nodes=a3 CPU_IDs=…`; nodes that are alike share one, `Nodes=a[3-4] …`."""
    lines = [(found[1], line) for line in said.splitlines() if (found := NODES.search(line))]
    return "\n".join(line for nodes, line in lines if node in hosts(nodes)) if node else said
