"""What of an environment goes with a job to another machine; all else is that machine's own."""

from __future__ import annotations

from collections.abc import Mapping

# `_` at the end: all that begin so. Those that may hold a secret are handed over in memory only.
CARRIED = (
    "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "VLLM_", "TORCH_", "PYTORCH_", "GLOO_", "NCCL_",
    "HCCL_", "RUNNER_CACHE", "RUNNER_FAILPOINT", "PYTHONPATH", "NO_COLOR", "OMP_NUM_THREADS", "http_proxy",
    "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE",
)  # fmt: skip


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment goes with a job to where it runs."""
    prefixes = tuple(name for name in CARRIED if name.endswith("_"))
    return {name: value for name, value in environment.items() if name in CARRIED or name.startswith(prefixes)}
