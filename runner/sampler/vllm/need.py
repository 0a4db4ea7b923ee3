"""What is said where vLLM is not installed; neither torch nor vLLM is imported."""

from __future__ import annotations

import importlib.util

from runner.core.errors import EnvironmentProblem

ABSENT = """sampler=vllm: vLLM is not installed here
  for CUDA: pip install vllm in an environment of its own, then this project in the same (docs/vllm.md)
  for Ascend: vllm and vllm-ascend of one version, with the torch_npu of the same set (docs/npu.md, part 2)
  for the processor, to try it: make test-vllm VLLM_VENV=.venv-vllm, then .venv-vllm/bin/run …
  without it: sampler=torch"""


def need_vllm() -> None:
    """Raise EnvironmentProblem where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise EnvironmentProblem(ABSENT)
