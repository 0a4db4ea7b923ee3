"""What `launch` accepts, alone and with the parallelism."""

from __future__ import annotations

import pytest

from runner.cli.job_builder import compose_job
from runner.core.errors import SpecError

TWO = ("+recipe=sft_demo", "parallelism=ddp", "launch.devices=2")
MACHINES = (*TWO, "launch.nodes=2", "launch.node_rank=1", "launch.rdzv_endpoint=node-0.local:29400")


def test_the_processes_of_a_job_are_those_of_all_machines() -> None:
    spec = compose_job(MACHINES).spec
    assert spec.launch.world == 4 and spec.launch.rdzv_address == ("node-0.local", 29400)
    assert compose_job(["+recipe=sft_demo"]).spec.launch.world == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("+recipe=sft_demo", "launch.devices=2"), "launch.devices: parallelism=single runs one process"),
        ((*TWO, "launch.node_rank=0"), "launch.node_rank: is used only with launch.nodes above 1"),
        ((*TWO, "launch.rdzv_endpoint=a:1"), "launch.rdzv_endpoint: is used only with launch.nodes above 1"),
        ((*TWO, "launch.address=auto"), "launch.address: not an option of launch=local; an option of launch=ray"),
        (
            (*MACHINES, "launch.node_rank=2"),
            "launch.node_rank: must be 0 to 1 with launch.nodes=2, a different number on each machine",
        ),
        (
            (*TWO, "launch.nodes=2", "launch.rdzv_endpoint=a:1"),
            "launch.node_rank: must be 0 to 1 with launch.nodes=2, a different number on each machine",
        ),
        ((*TWO, "launch.nodes=2", "launch.node_rank=0"), "launch.rdzv_endpoint: expected HOST:PORT of machine 0"),
        ((*MACHINES, "launch.rdzv_endpoint=a"), "launch.rdzv_endpoint: expected HOST:PORT"),
        ((*MACHINES, "launch.rdzv_endpoint=a:70000"), "launch.rdzv_endpoint: expected HOST:PORT"),
    ],
)
def test_what_does_not_fit_is_refused(words: tuple[str, ...], said: str) -> None:
    last = {word.partition("=")[0]: word for word in words}  # of a word that is given twice, the last
    with pytest.raises(SpecError, match=said.replace(".", r"\.")):
        compose_job(list(last.values()))
