"""Checks that import torch or run a job (`smoke_test`) in a child process; judges what they leave.

An import that fails or aborts is a finding.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

from runner.core.device_kinds import VARIABLES
from runner.device.process_setup import AUTOLOAD
from runner.spec.registry import resolve
from runner.tools.doctor import driver, nvidia
from runner.tools.doctor.cann import find_cann
from runner.tools.doctor.report import CheckResult, CheckStatus, ok, problem, skip, warning
from runner.tools.doctor.system_info import IMPORT_DEADLINE_S, CommandResult, SystemInfo, device_config, trial_simulator

# -P: a file torch.py in the user's folder is not torch.
PROGRAM = (sys.executable, "-P", "-c", "import torch; print(torch.__version__)")
_ERROR = re.compile(r"^(?:[\w.]*(?:Error|Exception)): .+$", re.MULTILINE)


def torch_alone(machine: SystemInfo) -> CheckResult:
    """`import torch` without any backend package, as a job on cpu or cuda does it."""
    if machine.version("torch") is None:
        return problem("torch is not installed", "pip install -e . -c constraints/cpu.txt")
    answer = machine.command_result(*PROGRAM, deadline_s=IMPORT_DEADLINE_S, **{AUTOLOAD: "0"})
    if answer.code != 0:
        return problem(
            f"import torch fails: {import_error_cause(answer)}",
            "pip install --force-reinstall torch -c constraints/cpu.txt",
        )
    left_out = " (without torch_npu)" if machine.version("torch-npu") else ""
    return ok(f"torch {answer.out.strip()} imports{left_out}")


def torch_with_npu(machine: SystemInfo) -> CheckResult:
    """`import torch` as any program does it: torch loads torch_npu on the way."""
    if machine.version("torch-npu") is None or machine.version("torch") is None:
        return skip("torch or torch_npu is not installed")
    answer = machine.command_result(*PROGRAM, deadline_s=IMPORT_DEADLINE_S, **{AUTOLOAD: "1"})
    if answer.code == 0:
        return ok(f"torch {answer.out.strip()} imports and loads torch_npu")
    return problem(
        f"import torch fails, because it loads torch_npu: {import_error_cause(answer)}", _import_remedy(machine, answer)
    )


def _import_remedy(machine: SystemInfo, answer: CommandResult) -> str:
    found = find_cann(machine)
    if "cannot open shared object file" in answer.err:
        return f"source {found.set_env_script(machine)}" if found else "source /usr/local/Ascend/cann/set_env.sh"
    if "undefined symbol" in answer.err:
        return "install the torch, torch_npu and CANN of one row of docs/npu-versions.md"
    return "run doctor device=npu --no-trial"


def import_error_cause(answer: CommandResult) -> str:
    """The errors of a traceback, the first one first: it is the cause of those that follow."""
    errors = list(dict.fromkeys(_ERROR.findall(answer.err)))
    if not errors:
        return answer.last_line
    return errors[0] if len(errors) == 1 else f"{errors[0]} (then {errors[-1].partition(':')[0]})"


KERNELS_DEADLINE_S = 300.0  # an NPU compiles each operator at its first use
REDUCE_DEADLINE_S = 150.0
STEP_DEADLINE_S = 300.0
PREPARE_DEADLINE_S = 900.0  # what a simulator is made of is fetched and built
LOGS = {"npu": "; ls -t ~/ascend/log/debug/plog  # CANN's own log"}

Trial = tuple[str, Callable[[SystemInfo], CheckResult]]


def devices(machine: SystemInfo) -> list[str]:
    """The kinds of device to test: the requested ones, or all that exist."""
    if machine.wanted != "auto":
        return [machine.wanted]
    present = {"npu": bool(machine.nodes), "cuda": nvidia.count(machine) > 0}
    return ["cpu", *(kind for kind, is_there in present.items() if is_there)]


def trials_of_device(device: str, count: int) -> Iterator[Trial]:
    """The trials of one kind of device, of which there are `count`."""
    world = 2 if device == "cpu" else count
    if trial_simulator(device):
        yield "preparation", _skip_if_blocked(device, count, partial(_prepare, device=device))
    yield "kernels", _skip_if_blocked(device, count, lambda machine: _kernels(machine, device, count))
    yield "all-reduce", _skip_if_blocked(device, count, lambda machine: _all_reduce(machine, device, world))
    steps = 1 if _is_unlimited(device) else count
    for index in range(steps):
        name = "training step" if steps == 1 else f"step on {device}:{index}"
        yield name, _skip_if_blocked(device, count, partial(_step, device=device, index=index))


def plugin_checks(device: str) -> tuple[Trial, ...]:
    """The checks that a plug-in's device brings."""
    path = device_config(device).checks
    return () if path is None else cast(tuple[Trial, ...], resolve(path))


def _is_unlimited(device: str) -> bool:
    """Whether a process sees as many devices as expected."""
    return device == "cpu" or trial_simulator(device) is not None


def _skip_if_blocked(
    device: str, count: int, trial: Callable[[SystemInfo], CheckResult]
) -> Callable[[SystemInfo], CheckResult]:
    def look(machine: SystemInfo) -> CheckResult:
        return trial(machine) if count and _can_begin(machine, device) else skip("see the problems above")

    return look


def _can_begin(machine: SystemInfo, device: str) -> bool:
    """Whether torch imports for this kind of device, and the driver answers."""
    needed = {
        "cpu": (torch_alone,),
        "cuda": (torch_alone, nvidia.products, nvidia.driver),
        "npu": (driver.device_nodes, driver.products, torch_with_npu),
    }
    own = (torch_alone, *(look for _, look in plugin_checks(device)))
    return all(check(machine).verdict is not CheckStatus.PROBLEM for check in needed.get(device, own))


def _prepare(machine: SystemInfo, device: str) -> CheckResult:
    """Fetch and build what the device is made of, as its first use does."""
    begin, command = time.perf_counter(), f"run doctor --prepare {device}"
    words = (sys.executable, "-P", "-m", "runner", *command.split()[1:])
    answer = machine.command_result(*words, deadline_s=PREPARE_DEADLINE_S)
    if answer.code != 0:
        return problem(f"it cannot be built: {_error_text(answer)}", command)
    return ok(f"{answer.out.strip()}, after {time.perf_counter() - begin:.0f} s")


def _kernels(machine: SystemInfo, device: str, expected: int) -> CheckResult:
    """Matmul and attention on every device."""
    answer = _child(machine, "kernels", device, deadline_s=KERNELS_DEADLINE_S)
    records = _records(answer)
    if answer.code != 0 or not records:
        after = f"after {records[-1]['what']} on {records[-1]['device']}: " if records else ""
        return problem(after + import_error_cause(answer), _remedy(device))
    wrong = [f"{r['what']} on {r['device']} is off by {r['error']:.1e}" for r in records if not r["good"]]
    if wrong:
        return problem("; ".join(wrong), f"a device computes wrong values: test it alone{LOGS.get(device, '')}")
    count = len({r["device"] for r in records})
    if count < expected:
        return problem(f"torch sees {count} of {expected} devices", _remedy(device))
    worst = {what: max(r["error"] for r in records if r["what"] == what) for what in ("matmul", "attention")}
    seen = ", ".join(f"{what} within {error:.0e}" for what, error in worst.items())
    return ok(f"{seen} of float64" + (f", on {count} devices" if count > 1 else ""))


def _all_reduce(machine: SystemInfo, device: str, world: int) -> CheckResult:
    """A sum over processes."""
    answer = _child(machine, "reduce", device, str(world), deadline_s=REDUCE_DEADLINE_S)
    records = _records(answer)
    if answer.code == 0 and records:
        return ok(f"{records[0]['backend']} sums over {world} process{'es' if world > 1 else ''}")
    text = f"{world} processes could not all-reduce: {import_error_cause(answer)}"
    if device == "cpu":
        return warning(text, "export GLOO_SOCKET_IFNAME=lo")
    return problem(text, _remedy(device))


def _step(machine: SystemInfo, device: str, index: int) -> CheckResult:
    """One training step by the command `run`, in a folder that is removed."""
    visible = {} if _is_unlimited(device) else {VARIABLES[device]: _visible_entry(machine, device, index)}
    with tempfile.TemporaryDirectory(prefix="run-doctor-") as folder:
        begin = time.perf_counter()
        answer = _child(machine, "train", device, folder, deadline_s=STEP_DEADLINE_S, **visible)
        seconds = time.perf_counter() - begin
        loss = _loss(Path(folder))
    if answer.code != 0 or loss is None or not math.isfinite(loss):
        return problem(
            f"run device={device} steps=1 failed with code {answer.code}: {_error_text(answer)}", _remedy(device)
        )
    return ok(f"one step of model=tiny, a checkpoint and an export in {seconds:.0f} s; loss {loss:.2f}")


def _child(machine: SystemInfo, *words: str, deadline_s: float, **extra: str) -> CommandResult:
    if words[1] == "npu":
        extra[AUTOLOAD] = "1"  # whatever the shell says
    return machine.command_result(
        sys.executable, "-P", "-m", "runner.tools.doctor.smoke_test", *words, deadline_s=deadline_s, **extra
    )


def _records(answer: CommandResult) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.out.splitlines() if line.startswith("{")]


def _loss(folder: Path) -> float | None:
    """train/loss of the only step; None where the job left none."""
    found = list(folder.glob("outputs/*/*/metrics.jsonl"))
    lines = found[0].read_text(encoding="utf-8").splitlines() if found else []
    return float(json.loads(lines[0]).get("train/loss", math.nan)) if lines else None


def _error_text(answer: CommandResult) -> str:
    """The error that the command reports, which may be followed by advice."""
    lines = answer.err.splitlines()
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), answer.last_line)


def _visible_entry(machine: SystemInfo, device: str, index: int) -> str:
    """The entry of the visible devices that device number `index` is."""
    text = machine.environment.get(VARIABLES[device], "")
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    return entries[index] if entries else str(index)


def _remedy(device: str) -> str:
    return f"run doctor device={device} --no-trial{LOGS.get(device, '')}"
