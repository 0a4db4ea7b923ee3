"""What of an environment goes with a job to another machine; all else is that machine's own."""

from __future__ import annotations

import json
from collections.abc import Mapping

RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set in a command that `ray job submit` has started
# `_` at the end: all that begin so. Those that may hold a secret are handed over in memory only.
CARRIED = (
    "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "VLLM_", "TORCH_", "PYTORCH_", "GLOO_", "NCCL_",
    "HCCL_", "RUNNER_CACHE", "RUNNER_FAILPOINT", "PYTHONPATH", "NO_COLOR", "OMP_NUM_THREADS", "http_proxy",
    "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE",
)  # fmt: skip


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment goes with a job to where it runs."""
    prefixes = tuple(name for name in CARRIED if name.endswith("_"))
    found = {name: value for name, value in environment.items() if name in CARRIED or name.startswith(prefixes)}
    given = json.loads(environment.get(RAY_JOB, "{}")).get("runtime_env", {}).get("env_vars", {})
    if RAY_JOB in environment and "OMP_NUM_THREADS" not in given:
        found.pop("OMP_NUM_THREADS", None)  # Ray's own, for the one process that it has started: 1
    return found
