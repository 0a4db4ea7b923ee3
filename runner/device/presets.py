"""Environment variables that suit the work of an accelerator, as data: each with its value and the reason for it.

    presets of a job ──┐
    what the user set ─┴─ resolve() ─▶ what to set before torch is imported, and which of the user's own stand

What the user has set stands, always. Nothing here imports torch: torch, torch_npu and CANN read these variables when
they are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.core.rank_info import Place
from runner.device.kinds import NPU


@dataclass(frozen=True, slots=True)
class Variable:
    """A value, why it has it, and the variable beside which it must not stand."""

    value: str
    reason: str
    rival: str | None = None


@dataclass(frozen=True, slots=True)
class Preset:
    """Variables for one kind of work."""

    name: str
    variables: Mapping[str, Variable]


@dataclass(frozen=True, slots=True)
class Resolved:
    """set: what is to be set; kept: by name, the user's own value and the variable that gives way to it."""

    set: Mapping[str, Variable]
    kept: Mapping[str, tuple[str, Variable]]


def resolve(presets: Sequence[Preset], own: Mapping[str, str]) -> Resolved:
    """What the presets add to the environment `own`; where they differ, the later one counts."""
    wanted = {name: variable for preset in presets for name, variable in preset.variables.items()}
    free: dict[str, Variable] = {}
    kept: dict[str, tuple[str, Variable]] = {}
    for name, variable in wanted.items():
        theirs = [found for found in (name, variable.rival) if found is not None and found in own]
        if not theirs:
            free[name] = variable
        kept |= {found: (own[found], variable) for found in theirs if own[found] != variable.value}
    return Resolved(free, kept)


_GROWING = Variable(
    "expandable_segments:True",
    "batches change their size from step to step; segments that grow do not leave unusable gaps",
    rival="PYTORCH_ALLOC_CONF",  # torch_npu reads either name, and ends the process where it finds both
)
_FIXED = Variable(
    "expandable_segments:False",
    "an engine that hands its memory back between steps (vllm-ascend's sleep mode) refuses growing segments",
    rival="PYTORCH_ALLOC_CONF",
)
_PATIENT = Variable("600", "seconds; CANN's 120 pass while one process still reads a large model")
_PLAIN = Variable("0", "weights that are replaced while the engine runs must lie in the plain layout, not in NZ")

PRESETS = {  # of an NPU
    preset.name: preset
    for preset in (
        Preset(
            "train",
            {
                "PYTORCH_NPU_ALLOC_CONF": _GROWING,
                "TASK_QUEUE_ENABLE": Variable("2", "more of an operator's launch runs in a second thread"),
                "CPU_AFFINITY_CONF": Variable("2", "the launching threads stay on cores close to their card"),
                "HCCL_CONNECT_TIMEOUT": _PATIENT,
            },
        ),
        Preset(
            "colocated_rl",
            {
                "PYTORCH_NPU_ALLOC_CONF": _FIXED,
                "TASK_QUEUE_ENABLE": Variable("1", "2 is faster and peaks higher, and the sampler needs that memory"),
                "HCCL_CONNECT_TIMEOUT": _PATIENT,
                "VLLM_ASCEND_ENABLE_NZ": _PLAIN,
            },
        ),
        Preset(
            "disaggregated_rl",
            {
                "PYTORCH_NPU_ALLOC_CONF": _GROWING,
                "TASK_QUEUE_ENABLE": Variable("2", "more of an operator's launch runs in a second thread"),
                "CPU_AFFINITY_CONF": Variable("2", "the launching threads stay on cores close to their card"),
                "HCCL_CONNECT_TIMEOUT": Variable("7200", "seconds, CANN's most: samplers are up long before trainers"),
                "HCCL_EXEC_TIMEOUT": Variable("14416", "seconds, in CANN's steps of 68: trainers wait for samples"),
                "HCCL_EVENT_TIMEOUT": Variable("14500", "seconds; has to be above HCCL_EXEC_TIMEOUT"),
                "VLLM_ASCEND_ENABLE_NZ": _PLAIN,
            },
        ),
        Preset(
            "debug",
            {
                "ASCEND_LAUNCH_BLOCKING": Variable("1", "an error is raised by the operator that made it; slow"),
                "TORCH_NPU_COMPACT_ERROR_OUTPUT": Variable("0", "errors are printed in full"),
                "OOM_SNAPSHOT_ENABLE": Variable("1", "a picture of the memory is written where it runs out"),
            },
        ),
        Preset(
            "deterministic",
            {
                "HCCL_DETERMINISTIC": Variable(
                    "strict", "sums over cards keep their order; CANN knows true, false, strict"
                ),
                "LCCL_DETERMINISTIC": Variable("1", "the same for sums within a machine"),
                "ATB_MATMUL_SHUFFLE_K_ENABLE": Variable("0", "ATB's products add up in one order"),
                "ATB_LLM_LCOC_ENABLE": Variable("0", "no products that overlap with communication"),
                "CLOSE_MATMUL_K_SHIFT": Variable("1", "products add up in one order whichever core makes them"),
            },
        ),
    )
}

_ENGINE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": Variable("0", "the engine runs in this process, and takes weights as they lie"),
    "VLLM_NO_USAGE_STATS": Variable("1", "vLLM would report the machine and the model to its makers"),
    "VLLM_LOGGING_LEVEL": Variable("CRITICAL", "what goes wrong reaches the run as an error, without pages beside it"),
}
_WORKERS = {  # of an engine over several cards, which has a process for each
    "VLLM_WORKER_MULTIPROC_METHOD": Variable("spawn", "vLLM would fork them, and a process that has an NPU cannot be"),
    "VLLM_LOGGING_LEVEL": Variable("ERROR", "what a worker dies of is nowhere but in its words, which go to the log"),
}
_NO_COMPILER = Variable("1", "else a kernel that ranks log-probabilities is compiled, for ten seconds")
_UNBOUND = Variable("nobind", "vLLM would bind its workers to memory nodes, and wants one for each")


def engine(job: Any, *, threads: int | None = None) -> tuple[Preset, ...]:
    """What an engine in a process of `job` wants; threads: of the processor, where the engine runs on it."""
    if not job.sampler.starts_engine:
        return ()
    variables = _ENGINE | (_WORKERS if job.sampler.cards() > 1 else {})
    if threads is not None:
        variables["OMP_NUM_THREADS"] = Variable(str(threads), "device.threads; vLLM's kernels would take every core")
        variables["VLLM_CPU_OMP_THREADS_BIND"] = _UNBOUND
        if not job.model.compile:
            variables["TORCH_COMPILE_DISABLE"] = _NO_COMPILER
    return (Preset("vllm", variables),)


CUDA_DETERMINISTIC = Preset(
    "deterministic",
    {"CUBLAS_WORKSPACE_CONFIG": Variable(":4096:8", "cuBLAS repeats itself only with workspaces of fixed size")},
)

FIRST_PORT, LAST_PORT = 20000, 32767  # below those that Linux hands out by itself, which begin at 32768
BLOCK = 16  # ports that HCCL takes, one for each card of a machine


def ports(environment: Mapping[str, str]) -> tuple[Preset, ...]:
    """Where HCCL meets, for a job of several processes: a block of ports that follows from where the processes meet.

    HCCL's own 60000 … 60015 are those of every job on the machine, and Linux may have given them to any program. Two
    jobs have the same block only if their MASTER_PORT differ by a multiple of 797. HCCL_HOST_SOCKET_PORT_RANGE and
    HCCL_NPU_SOCKET_PORT_RANGE are left alone: they are for processes that share a card, which those of a job never
    do, and on an A2 they exclude operators that compute and communicate at once.
    Source: CANN 8.5's reference of these variables.
    """
    if Place.of(environment).size < 2 or not environment.get("MASTER_PORT", "").isdecimal():
        return ()
    meeting = int(environment["MASTER_PORT"])
    spare = (LAST_PORT + 1 - FIRST_PORT) // BLOCK - 1  # the last block: for a job that meets within its own
    first = FIRST_PORT + BLOCK * (meeting % spare)
    if first <= meeting < first + BLOCK:
        first = FIRST_PORT + BLOCK * spare
    reason = f"the first of HCCL's {BLOCK} ports, from MASTER_PORT={meeting}; its own 60000 would be every job's"
    rival = "HCCL_HOST_SOCKET_PORT_RANGE"  # beside which HCCL reads no other
    return (Preset("ports", {"HCCL_IF_BASE_PORT": Variable(str(first), reason, rival)}),)


QUEUES = ("0", "1", "2")  # values of TASK_QUEUE_ENABLE
HCCL_DEFAULTS = {"HCCL_CONNECT_TIMEOUT": 120, "HCCL_EXEC_TIMEOUT": 1836, "HCCL_EVENT_TIMEOUT": 1868}
CONNECT_RANGE = (120, 7200)
EXEC_STEP_S = 68  # HCCL counts its execution time-out in steps of so many seconds, the last of them whole


def npu_objection(environment: Mapping[str, str]) -> str | None:
    """What torch_npu or HCCL would end a process over, and what to type; None if nothing is."""
    own, shared = NPU.allocator, "PYTORCH_ALLOC_CONF"
    if own in environment and shared in environment:
        return f"{own} and {shared} are both set, and torch_npu ends the process over that; unset {own}"
    queue = environment.get("TASK_QUEUE_ENABLE", "1")
    if queue not in QUEUES:
        known = ", ".join(QUEUES)
        return f"TASK_QUEUE_ENABLE={queue}: torch_npu knows {known}, and refuses all else; unset TASK_QUEUE_ENABLE"
    return hccl_objection(environment)


def hccl_objection(environment: Mapping[str, str]) -> str | None:
    """What is wrong with the timeouts (seconds) of this environment together, and what to type; None if nothing is."""
    seconds: dict[str, int] = {}
    for name, default in HCCL_DEFAULTS.items():
        text = environment.get(name, str(default))
        if not text.isdecimal():
            return f"{name}={text} is no whole number of seconds; unset {name}"
        seconds[name] = int(text)
    connect, execute, event = seconds.values()
    low, high = CONNECT_RANGE
    if not low <= connect <= high:
        return f"HCCL_CONNECT_TIMEOUT={connect} is outside {low} … {high} seconds; export HCCL_CONNECT_TIMEOUT=600"
    counted = -(-execute // EXEC_STEP_S) * EXEC_STEP_S
    if 0 < event <= counted:
        steps = "" if counted == execute else f", which HCCL counts as {counted}, in steps of {EXEC_STEP_S}"
        more = f"export HCCL_EVENT_TIMEOUT={counted + EXEC_STEP_S}"
        return f"HCCL_EVENT_TIMEOUT={event} must be above HCCL_EXEC_TIMEOUT={execute}{steps}; {more}"
    return None
