"""The rank of a process among all ranks of the job and among those on its machine; and the machine."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runner.core.errors import EnvironmentProblem

ELASTIC = "TORCHELASTIC_"  # prefix of torchrun's other variables
RENDEZVOUS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")  # the address of the rendezvous store
# Parts of error messages of gloo, NCCL, HCCL and torch's store after the loss of another process
GONE = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited", "remote error", "Connection refused")
LATE = ("Timed out waiting", "timed out", "timeout")  # if another process does not respond
# torchrun's names, in the order of RankInfo's fields
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")  # srun's; a script of sbatch has SLURM_NTASKS instead
# Variables that a launcher sets for its process; child processes must not inherit them
LAUNCHER_VARIABLES = frozenset((*VARIABLES, *RENDEZVOUS_VARIABLES, *STEP_VARIABLES))
BOOT = Path("/proc/sys/kernel/random/boot_id")  # random, from the kernel, at each boot


@dataclass(frozen=True, slots=True)
class Host:
    """A machine's name and boot id, which distinguishes machines with the same name."""

    host: str
    boot_id: str

    @classmethod
    def current(cls) -> Host:
        """This machine; the boot id is empty if the system has none."""
        return cls(socket.gethostname(), BOOT.read_text().strip() if BOOT.exists() else "")


@dataclass(frozen=True, slots=True)
class RankInfo:
    """`rank` of `size` processes of the job, `local_rank` of the `local_size` of them on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.local_rank < self.local_size <= self.size and self.local_rank <= self.rank < self.size):
            raise EnvironmentProblem(f"{self.to_environment()}: not a valid rank; RANK counts from 0 to WORLD_SIZE - 1")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> RankInfo:
        """The rank by torchrun's variables; the only rank if none is set, or WORLD_SIZE is 1.

        Raises EnvironmentProblem if some are missing or contradict each other.
        """
        found = {name: environment[name] for name in VARIABLES if name in environment}
        if not found or found.get("WORLD_SIZE") == "1":
            return cls()
        if missing := [name for name in VARIABLES if name not in found]:
            given, lacking = ", ".join(found), ", ".join(missing)
            raise EnvironmentProblem(
                f"{given} set, {lacking} not: a rank needs all four, as torchrun sets them. If the first two count "
                "machines, type: run … launch.nodes=$WORLD_SIZE launch.node_rank=$RANK "
                "launch.rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT; if another command set them, type: "
                f"unset {' '.join(found)}"
            )
        try:
            return cls(*(int(found[name]) for name in VARIABLES))
        except ValueError as error:
            raise EnvironmentProblem(f"{found}: expected integers") from error

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0, which alone writes the run's files and prints to the user."""
        return self.rank == 0

    @property
    def node_rank(self) -> int:
        """The machine's number, if all machines have the same number of processes."""
        return self.rank // self.local_size

    def to_environment(self) -> dict[str, str]:
        """The variables from which `from_environment` reads this rank."""
        values = (self.rank, self.size, self.local_rank, self.local_size)
        return {name: str(value) for name, value in zip(VARIABLES, values, strict=True)}

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"


def is_launched_rank(environment: Mapping[str, str]) -> bool:
    """Whether another program, such as torchrun, started this process as one of several."""
    names = (*VARIABLES, *RENDEZVOUS_VARIABLES)
    return all(name in environment for name in names) and RankInfo.from_environment(environment).size > 1


def is_connection_loss(message: str) -> bool:
    """Whether a library's error message reports the loss of another process."""
    return any(words in message for words in GONE)


def is_timeout(message: str) -> bool:
    """Whether a library's error message reports that another process did not respond in time."""
    return any(words in message for words in LATE)


def without_rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child process of a rank that is not a rank itself, and no task of srun."""
    kept = environment.keys() - LAUNCHER_VARIABLES
    return {name: value for name, value in environment.items() if name in kept and not name.startswith(ELASTIC)}
