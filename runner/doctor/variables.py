"""Checks of environment variables: mistakes that a driver or allocator ignores, or ends the process over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from packaging.version import Version

from runner.device.presets import HCCL_DEFAULTS, hccl_objection
from runner.device.visible import VARIABLES, parse
from runner.doctor.finding import Finding, ok, problem, skipped, warning
from runner.doctor.machine import Machine
from runner.doctor.versions import release

SHARED_ALLOCATOR = "PYTORCH_ALLOC_CONF"
ALLOCATORS = {"npu": "PYTORCH_NPU_ALLOC_CONF", "cuda": "PYTORCH_CUDA_ALLOC_CONF"}
# What may not stand beside growing segments on an NPU.
EXCLUDES = ("max_split_size_mb", "garbage_collection_threshold")
HCCL_STEP_S = 68  # HCCL counts its execution time-out in steps of so many seconds

# Variable → the values CANN or torch_npu documents.
CHOICES = {
    "TASK_QUEUE_ENABLE": ("0", "1", "2"),
    "ASCEND_LAUNCH_BLOCKING": ("0", "1"),
    "INF_NAN_MODE_ENABLE": ("0", "1"),
    "HCCL_DETERMINISTIC": ("true", "false", "strict"),
    "TORCH_HCCL_ASYNC_ERROR_HANDLING": ("0", "1"),
}
# What a documented value means that one rarely wants.
REMARKS = {
    ("INF_NAN_MODE_ENABLE", "0"): "numbers saturate, and no guard sees an overflow",
    ("ASCEND_LAUNCH_BLOCKING", "1"): "every operator waits for the one before: for debugging only",
}


def npu_allocator(machine: Machine) -> Finding:
    """The NPU's allocator: one variable, and no settings that exclude one another."""
    return _allocator(machine, "npu")


def cuda_allocator(machine: Machine) -> Finding:
    """The same for CUDA."""
    return _allocator(machine, "cuda")


def _allocator(machine: Machine, kind: str) -> Finding:
    own = ALLOCATORS[kind]
    given = {name: machine.environment[name] for name in (own, SHARED_ALLOCATOR) if name in machine.environment}
    seen = ", ".join(f"{name}={value}" for name, value in given.items()) or "none set"
    if len(given) == 2:
        fatal = kind == "npu" and Version(release(machine.version("torch") or "2.10")) >= Version("2.10")
        how = "torch_npu ends the process over that" if fatal else "only one of them is read"
        answer = problem if fatal else warning
        return answer(f"{own} and {SHARED_ALLOCATOR} are both set; {how}", f"unset {own}")
    for name, text in given.items():
        settings = [piece.partition(":") for piece in text.split(",")]
        if malformed := [key for key, colon, value in settings if not (colon and value)]:
            return problem(f"{name}: '{malformed[0]}' is no key:value", f"export {name}=expandable_segments:True")
        keys = [key.strip() for key, _, _ in settings]
        if repeated := {key for key in keys if keys.count(key) > 1}:
            return problem(f"{name}: {', '.join(sorted(repeated))} stands twice", f"export {name}=…")
        grows = any(key.strip() == "expandable_segments" and value == "True" for key, _, value in settings)
        if kind == "npu" and grows and (beside := [key for key in keys if key in EXCLUDES]):
            return problem(f"{name}: expandable_segments excludes {', '.join(beside)}", f"export {name}=…")
    return ok(seen)


def hccl(machine: Machine) -> Finding:
    """HCCL's time-outs: in range, and in the order CONNECT, EXEC < EVENT."""
    env = machine.environment
    seen = ", ".join(
        f"{name.removeprefix('HCCL_')}={env.get(name, f'{d} (default)')}" for name, d in HCCL_DEFAULTS.items()
    )
    if objection := hccl_objection(env):
        text, _, remedy = objection.rpartition("; ")
        return problem(text, remedy)
    execute, event = (
        int(env.get(f"HCCL_{name}_TIMEOUT", HCCL_DEFAULTS[f"HCCL_{name}_TIMEOUT"])) for name in ("EXEC", "EVENT")
    )
    if execute == 0:
        return warning(
            f"{seen}: 0 = wait for ever is not honoured by every release, and a hang is then never noticed",
            "export HCCL_EXEC_TIMEOUT=7208 HCCL_EVENT_TIMEOUT=7300",
        )
    counted = -(-execute // HCCL_STEP_S) * HCCL_STEP_S
    if 0 < event <= counted:
        return problem(
            f"{seen}: EXEC is counted in steps of {HCCL_STEP_S} s, so as {counted}, and EVENT must be above that",
            f"export HCCL_EVENT_TIMEOUT={counted + HCCL_STEP_S}",
        )
    if not env.get("HCCL_BUFFSIZE", "200").isdecimal():
        return problem(f"HCCL_BUFFSIZE={env['HCCL_BUFFSIZE']} is no number of MB", "unset HCCL_BUFFSIZE")
    return ok(seen)


def choices(machine: Machine) -> Finding:
    """Variables that take one of a few values: another value is taken for the default, silently."""
    given = {name: machine.environment[name] for name in CHOICES if name in machine.environment}
    wrong = {name: value for name, value in given.items() if value not in CHOICES[name]}
    if wrong:
        texts = [f"{name}={value} (known: {', '.join(CHOICES[name])})" for name, value in wrong.items()]
        return warning("; ".join(texts), f"unset {' '.join(wrong)}")
    old = machine.environment.get("HCCL_ASYNC_ERROR_HANDLING")
    if old is not None and old != machine.environment.get("TORCH_HCCL_ASYNC_ERROR_HANDLING", old):
        return warning(
            "HCCL_ASYNC_ERROR_HANDLING, the older name, says other than TORCH_HCCL_ASYNC_ERROR_HANDLING",
            "unset HCCL_ASYNC_ERROR_HANDLING",
        )
    remarks = {
        f"{name}={value}: {REMARKS[name, value]}": name for name, value in given.items() if (name, value) in REMARKS
    }
    if remarks:
        return warning("; ".join(remarks), f"unset {' '.join(remarks.values())}")
    return ok(", ".join(f"{name}={value}" for name, value in given.items()) or "none set")


def npu_visible(machine: Machine, count: Callable[[Machine], int]) -> Finding:
    """ASCEND_RT_VISIBLE_DEVICES against the chips there are: CANN drops a number it does not have, silently."""
    return _visible(machine, VARIABLES["npu"], count(machine), ())


def cuda_visible(machine: Machine, count: Callable[[Machine], int]) -> Finding:
    """CUDA_VISIBLE_DEVICES against the GPUs there are: CUDA forgets what stands behind a wrong entry, silently."""
    return _visible(machine, VARIABLES["cuda"], count(machine), ("GPU-", "MIG-"))


def _visible(machine: Machine, variable: str, count: int, names: Sequence[str]) -> Finding:
    text = machine.environment.get(variable)
    if text is None:
        return ok(f"{variable} is not set: all {count}" if count else f"{variable} is not set")
    asked = parse(text, names)
    if asked.faults:
        return problem(f"{variable}={text}: {'; '.join(asked.faults)}", f"export {variable}=0")
    if not asked.ids:
        return problem(f"{variable} is set and empty: no device is visible", f"unset {variable}")
    if not count:
        return skipped(f"{variable}={text}, and no device to hold against it")
    if beyond := asked.beyond(count):
        rest = [str(number) for number in asked.ids if number not in beyond]
        return problem(
            f"{variable}={text} asks for {len(asked.ids)} devices; there are {count}, so "
            f"{', '.join(map(str, beyond))} {'is' if len(beyond) == 1 else 'are'} dropped without a word",
            f"export {variable}={','.join(rest) or '0'}",
        )
    return ok(f"{variable}={text}: {len(asked.ids)} of {count}")
