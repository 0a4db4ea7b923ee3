"""Sets up a process for its device: environment variables before torch is imported, then torch.

    presets of a job ─────┐
    the user's variables ─┴─ resolve_presets() ─▶ variables to set, and the user's values that replace presets

The user's variables always have priority. torch, torch_npu and CANN read these variables when they are loaded. torch
loads an installed torch_npu by itself, and transformers imports it. Without CANN it breaks `import torch`:
`hide_torch_npu` hides it from processes that do not use it.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.core.auto_choices import Decisions
from runner.core.device_kinds import NPU, Kind
from runner.core.errors import EnvironmentProblem
from runner.core.package import import_frozen, read_table
from runner.core.rank_info import RankInfo

if TYPE_CHECKING:
    from runner.spec.job import JobSpec


@dataclass(frozen=True, slots=True)
class EnvVariable:
    """A value, its reason, and a variable with which it must not be combined."""

    value: str
    reason: str
    rival: str | None = None


@dataclass(frozen=True, slots=True)
class Preset:
    """Variables for one kind of job."""

    name: str
    variables: Mapping[str, EnvVariable]


@dataclass(frozen=True, slots=True)
class ResolvedEnv:
    """set: variables to set; kept: name → the user's value and the preset that it replaces."""

    set: Mapping[str, EnvVariable]
    kept: Mapping[str, tuple[str, EnvVariable]]


def resolve_presets(presets: Sequence[Preset], own: Mapping[str, str]) -> ResolvedEnv:
    """The variables that presets add to the environment `own`; later presets override earlier ones."""
    wanted = {name: variable for preset in presets for name, variable in preset.variables.items()}
    free: dict[str, EnvVariable] = {}
    kept: dict[str, tuple[str, EnvVariable]] = {}
    for name, variable in wanted.items():
        theirs = [found for found in (name, variable.rival) if found is not None and found in own]
        if not theirs:
            free[name] = variable
        kept |= {found: (own[found], variable) for found in theirs if own[found] != variable.value}
    return ResolvedEnv(free, kept)


_TABLE: dict[str, dict[str, Preset]] = {
    kind: {name: Preset(name, {key: EnvVariable(**one) for key, one in each.items()}) for name, each in own.items()}
    for kind, own in read_table(__file__, "presets.yaml").items()
}
PRESETS = _TABLE["npu"]
CUDA_DETERMINISTIC = _TABLE["cuda"]["deterministic"]


def engine_presets(job: Any, *, threads: int | None = None) -> tuple[Preset, ...]:
    """Variables for an engine in a process of `job`; threads: of the CPU, if the engine uses it."""
    if not job.sampler.starts_engine:
        return ()
    own = {name: preset.variables for name, preset in _TABLE["vllm"].items()}
    variables = {**own["engine"], **(own["workers"] if job.sampler.cards() > 1 else {})}
    if threads is not None:
        variables["OMP_NUM_THREADS"] = EnvVariable(str(threads), "device.threads; vLLM's kernels would use every core")
        variables |= own["processor"] if job.model.compile else {**own["processor"], **own["uncompiled"]}
    return (Preset("vllm", variables),)


FIRST_PORT, LAST_PORT = 20000, 32767  # below the ephemeral ports of Linux, which begin at 32768
PORT_BLOCK = 16  # ports that HCCL takes, one for each card of a machine


def hccl_port_presets(environment: Mapping[str, str]) -> tuple[Preset, ...]:
    """Port range of HCCL for a job of several processes, derived from the port of their rendezvous.

    HCCL's default ports 60000 … 60015 are the same for all jobs, and Linux may assign them to other programs. Two jobs
    have the same block only if their MASTER_PORT differ by a multiple of 797. HCCL_HOST_SOCKET_PORT_RANGE and
    HCCL_NPU_SOCKET_PORT_RANGE are not set: they are for processes that share a card, and on an A2 they disable
    operators that compute and communicate at once.
    Source: CANN 8.5's reference of these variables.
    """
    if RankInfo.from_environment(environment).size < 2 or not environment.get("MASTER_PORT", "").isdecimal():
        return ()
    meeting = int(environment["MASTER_PORT"])
    # The last block is for a job whose MASTER_PORT is in its own block.
    spare = (LAST_PORT + 1 - FIRST_PORT) // PORT_BLOCK - 1
    first = FIRST_PORT + PORT_BLOCK * (meeting % spare)
    if first <= meeting < first + PORT_BLOCK:
        first = FIRST_PORT + PORT_BLOCK * spare
    reason = f"the first of HCCL's {PORT_BLOCK} ports, from MASTER_PORT={meeting}; all jobs share its default 60000"
    rival = "HCCL_HOST_SOCKET_PORT_RANGE"  # beside which HCCL reads no other
    return (Preset("ports", {"HCCL_IF_BASE_PORT": EnvVariable(str(first), reason, rival)}),)


QUEUES = ("0", "1", "2")  # values of TASK_QUEUE_ENABLE
HCCL_DEFAULTS = {"HCCL_CONNECT_TIMEOUT": 120, "HCCL_EXEC_TIMEOUT": 1836, "HCCL_EVENT_TIMEOUT": 1868}
CONNECT_RANGE = (120, 7200)
EXEC_STEP_S = 68  # HCCL rounds its execution timeout up to a multiple of this


def npu_objection(environment: Mapping[str, str]) -> str | None:
    """A variable with which torch_npu or HCCL would exit, and what to type; None if there is none."""
    own, shared = NPU.allocator, "PYTORCH_ALLOC_CONF"
    if own in environment and shared in environment:
        return f"{own} and {shared} are both set, which makes torch_npu exit; unset {own}"
    queue = environment.get("TASK_QUEUE_ENABLE", "1")
    if queue not in QUEUES:
        known = ", ".join(QUEUES)
        return f"TASK_QUEUE_ENABLE={queue}: torch_npu accepts only {known}; unset TASK_QUEUE_ENABLE"
    return hccl_objection(environment)


def hccl_objection(environment: Mapping[str, str]) -> str | None:
    """What is wrong with HCCL's timeouts in this environment, and what to type; None if nothing is."""
    seconds: dict[str, int] = {}
    for name, default in HCCL_DEFAULTS.items():
        text = environment.get(name, str(default))
        if not text.isdecimal():
            return f"{name}={text} is not an integer number of seconds; unset {name}"
        seconds[name] = int(text)
    connect, execute, event = seconds.values()
    low, high = CONNECT_RANGE
    if not low <= connect <= high:
        return f"HCCL_CONNECT_TIMEOUT={connect} is outside {low} … {high} seconds; export HCCL_CONNECT_TIMEOUT=600"
    counted = -(-execute // EXEC_STEP_S) * EXEC_STEP_S
    if 0 < event <= counted:
        steps = "" if counted == execute else f", which HCCL rounds up to {counted}, a multiple of {EXEC_STEP_S}"
        more = f"export HCCL_EVENT_TIMEOUT={counted + EXEC_STEP_S}"
        return f"HCCL_EVENT_TIMEOUT={event} must be above HCCL_EXEC_TIMEOUT={execute}{steps}; {more}"
    return None


MODULE = "torch_npu"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
LIBRARY = "libhccl.so"  # CANN's library of collectives, the first that torch_npu loads


def hide_torch_npu(device: str, kind: Kind) -> str | None:
    """Hide torch_npu from this process, before torch is imported, if `device` does not use it.

    `auto` uses it, unless it cannot be loaded. Returns the reason; None if nothing is hidden. Child processes inherit
    the variable that keeps torch from loading it.
    """
    uses = kind is NPU and device != "auto"
    if uses or MODULE in sys.modules or importlib.util.find_spec(MODULE) is None:
        return None
    fault = torch_npu_problem()
    if device == "auto" and fault is None:
        return None
    os.environ[AUTOLOAD] = "0"
    sys.modules[MODULE] = None  # type: ignore[assignment]  # importing it raises ImportError
    reason = f"device={device} does not use it" if device != "auto" else "it cannot be loaded"
    return reason if fault is None else f"{reason}; {fault}: for the steps to fix it, type: run doctor device=npu"


def torch_npu_problem() -> str | None:
    """Why `import torch_npu` will fail, as far as that is known without importing it."""
    torch, npu = _version("torch"), _version(MODULE)
    if torch and npu and torch.split(".")[:3] != npu.split(".")[:3]:
        return f"torch_npu {npu} does not match torch {torch}"
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return f"CANN is not installed or not loaded ({LIBRARY} is not found)"
    return None


def _version(name: str) -> str | None:
    """The version of an installed distribution, without a local part (+cpu)."""
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def set_environment(spec: JobSpec, decide: Decisions) -> None:
    """Set the variables of the device's presets that the user has not set; the manifest records them.

    A torch_npu that the device does not use is hidden. Raises EnvironmentProblem if the device cannot work, if
    torch_npu would reject the user's variables, or if HCCL's timeouts contradict each other.
    """
    if not spec.launch.here:
        spec.device.preflight()
    presets = spec.device.environment(spec)
    found = resolve_presets(presets, dict(os.environ))
    for name, (value, variable) in found.kept.items():
        decide.record_fact(f"environment.{name}", value, f"set by you, not {variable.value}: {variable.reason}")
    os.environ.update({name: variable.value for name, variable in found.set.items()})
    if found.set:
        late = "; too late for those that torch reads at import" if "torch" in sys.modules else ""
        words = " ".join(f"{name}={variable.value}" for name, variable in found.set.items())
        decide.record_fact("environment", " + ".join(preset.name for preset in presets), words + late)
    if left_out := hide_torch_npu(spec.device.name, spec.device.kind):
        decide.record_fact("environment.torch_npu", "not imported in this process", left_out)
    if spec.device.kind is NPU and (objection := npu_objection(os.environ)):
        raise EnvironmentProblem(f"device={spec.device.name}: {objection}")
    spec.device.enter()


def load_torch(device: str) -> None:
    """Import torch. Raises EnvironmentProblem if it fails, e.g. if torch_npu does not match torch or CANN."""
    try:
        import_frozen("torch")
    except (ImportError, OSError, RuntimeError) as error:
        cause = f"{error} (from {type(error.__cause__).__name__}: {error.__cause__})" if error.__cause__ else str(error)
        text = f"import torch fails: {cause}\n  find the cause: run doctor device={device}"
        raise EnvironmentProblem(text) from error
