"""What vllm-ascend wants where weights are replaced while it runs: the plain layout; to sleep, no growing segments.

vllm-ascend 0.23 asks for the layout twice: waking looks at its config, an update of weights at the environment alone,
whose default is another layout (worker.py and utils.py of its sdist). Both are set; neither has been run on a card.
Waking, it also turns the matrices of experts over, for somebody who then loads them as they are on the disk: with
weights that stay it computes nonsense, and vLLM's own way to new ones (`experts`) fails on them. That is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.core.errors import EnvironmentProblem

LAYOUT = "VLLM_ASCEND_ENABLE_NZ"
LOST = "an engine on an NPU that sleeps loses its experts' layout as it wakes (vllm-ascend 0.23)"
REMEDY = "type sampler.sleep=0, or give it devices of its own: launch.samplers"
ALLOCATORS = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def options(environment: Mapping[str, str], sleeps: bool, experts: bool) -> dict[str, Any]:
    """What an engine on an NPU is built with beside what all are. Raises EnvironmentProblem for an environment in which
    it would keep old weights, or refuse to sleep, and for experts that it would not find again after that."""
    if environment.get(LAYOUT) != "0":
        raise EnvironmentProblem(
            f"sampler=vllm: {LAYOUT}={environment.get(LAYOUT, '')!r}; new weights need the plain layout\n"
            f"  export {LAYOUT}=0, or leave it to device.preset=colocated_rl"
        )
    if sleeps and experts:
        raise EnvironmentProblem(f"sampler=vllm: {LOST}\n  {REMEDY}")
    growing = [name for name in ALLOCATORS if "expandable_segments:true" in environment.get(name, "").lower()]
    if sleeps and growing:
        raise EnvironmentProblem(
            f"sampler=vllm: {growing[0]}={environment[growing[0]]}; an engine cannot sleep in segments that grow\n"
            "  device.preset=colocated_rl sets what it can, or sampler.sleep=0"
        )
    return {"additional_config": {"weight_nz_mode": 0}}
