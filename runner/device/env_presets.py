"""Environment variables that suit the work of an accelerator, as presets.yaml has them.

    presets of a job ──┐
    what the user set ─┴─ resolve() ─▶ what to set before torch is imported, and which of the user's own stand

What the user has set stands, always. Nothing here imports torch: torch, torch_npu and CANN read these variables when
they are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from runner.core.rank_info import RankInfo
from runner.device.device_kinds import NPU


@dataclass(frozen=True, slots=True)
class EnvVariable:
    """A value, why it has it, and the variable beside which it must not stand."""

    value: str
    reason: str
    rival: str | None = None


@dataclass(frozen=True, slots=True)
class Preset:
    """Variables for one kind of work."""

    name: str
    variables: Mapping[str, EnvVariable]


@dataclass(frozen=True, slots=True)
class ResolvedEnv:
    """set: what is to be set; kept: by name, the user's own value and the variable that gives way to it."""

    set: Mapping[str, EnvVariable]
    kept: Mapping[str, tuple[str, EnvVariable]]


def resolve_presets(presets: Sequence[Preset], own: Mapping[str, str]) -> ResolvedEnv:
    """What the presets add to the environment `own`; where they differ, the later one counts."""
    wanted = {name: variable for preset in presets for name, variable in preset.variables.items()}
    free: dict[str, EnvVariable] = {}
    kept: dict[str, tuple[str, EnvVariable]] = {}
    for name, variable in wanted.items():
        theirs = [found for found in (name, variable.rival) if found is not None and found in own]
        if not theirs:
            free[name] = variable
        kept |= {found: (own[found], variable) for found in theirs if own[found] != variable.value}
    return ResolvedEnv(free, kept)


def _read() -> dict[str, dict[str, Preset]]:
    table = yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8"))
    return {
        kind: {
            name: Preset(name, {key: EnvVariable(**one) for key, one in found.items()}) for name, found in own.items()
        }
        for kind, own in table.items()
    }


_TABLE = _read()
PRESETS = _TABLE["npu"]
CUDA_DETERMINISTIC = _TABLE["cuda"]["deterministic"]


def engine_presets(job: Any, *, threads: int | None = None) -> tuple[Preset, ...]:
    """What an engine in a process of `job` wants; threads: of the processor, where the engine runs on it."""
    if not job.sampler.starts_engine:
        return ()
    own = {name: preset.variables for name, preset in _TABLE["vllm"].items()}
    variables = {**own["engine"], **(own["workers"] if job.sampler.cards() > 1 else {})}
    if threads is not None:
        variables["OMP_NUM_THREADS"] = EnvVariable(str(threads), "device.threads; vLLM's kernels would take every core")
        variables |= own["processor"] if job.model.compile else {**own["processor"], **own["uncompiled"]}
    return (Preset("vllm", variables),)


FIRST_PORT, LAST_PORT = 20000, 32767  # below those that Linux hands out by itself, which begin at 32768
PORT_BLOCK = 16  # ports that HCCL takes, one for each card of a machine


def hccl_port_presets(environment: Mapping[str, str]) -> tuple[Preset, ...]:
    """Port range of HCCL for a job of several processes, derived from the port of their rendezvous.

    HCCL's own 60000 … 60015 are those of every job on the machine, and Linux may have given them to any program. Two
    jobs have the same block only if their MASTER_PORT differ by a multiple of 797. HCCL_HOST_SOCKET_PORT_RANGE and
    HCCL_NPU_SOCKET_PORT_RANGE are left alone: they are for processes that share a card, which those of a job never
    do, and on an A2 they exclude operators that compute and communicate at once.
    Source: CANN 8.5's reference of these variables.
    """
    if RankInfo.from_environment(environment).size < 2 or not environment.get("MASTER_PORT", "").isdecimal():
        return ()
    meeting = int(environment["MASTER_PORT"])
    spare = (LAST_PORT + 1 - FIRST_PORT) // PORT_BLOCK - 1  # the last block: for a job that meets within its own
    first = FIRST_PORT + PORT_BLOCK * (meeting % spare)
    if first <= meeting < first + PORT_BLOCK:
        first = FIRST_PORT + PORT_BLOCK * spare
    reason = f"the first of HCCL's {PORT_BLOCK} ports, from MASTER_PORT={meeting}; its own 60000 would be every job's"
    rival = "HCCL_HOST_SOCKET_PORT_RANGE"  # beside which HCCL reads no other
    return (Preset("ports", {"HCCL_IF_BASE_PORT": EnvVariable(str(first), reason, rival)}),)


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
    """What is wrong with the timeouts (seconds) of this environment, and what to type; None if nothing."""
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
