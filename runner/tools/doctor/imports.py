"""Checks that import torch, each in a child process: an import that fails or aborts is a finding."""

from __future__ import annotations

import re
import sys

from runner.device.torch_npu_import import AUTOLOAD
from runner.tools.doctor.cann import find_cann
from runner.tools.doctor.check_result import CheckResult, ok, problem, skip
from runner.tools.doctor.system_info import IMPORT_DEADLINE_S, CommandResult, SystemInfo

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
        f"import torch fails, because it loads torch_npu: {import_error_cause(answer)}", _remedy(machine, answer)
    )


def _remedy(machine: SystemInfo, answer: CommandResult) -> str:
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
