"""NVIDIA GPUs as a device, and variable-length attention by flash-attn or torch.

Both align queries with the last keys and take cumulative lengths, here with the leading 0, as int32 on the device.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from runner.core import torch_compat
from runner.core.errors import EnvironmentProblem
from runner.device.base import TorchDevice, select_card
from runner.device.config import CudaConfig
from runner.device.device_stats import StatsReader, gpu_stats_reader
from runner.device.fused_modules import install_liger_kernels
from runner.interfaces import Decide, VarlenAttention
from runner.interfaces.model import VarlenOptions

FLASH_TYPES = frozenset({torch.float16, torch.bfloat16})


class FlashAttention:
    """`VarlenAttention` by `function`, which is called like `flash_attn.flash_attn_varlen_func`."""

    def __init__(self, function: Callable[..., Any], deterministic: bool) -> None:
        self._function, self._deterministic = function, deterministic

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[VarlenOptions]) -> Tensor:
        """See `VarlenAttention`."""
        queries, keys = options["queries"], options["keys"]
        lengths = (queries.cumulative, keys.cumulative, queries.longest, keys.longest)
        own = self._options(options["window"], options["dropout"], options["scale"], query.shape[1] != key.shape[1])
        return self._function(query, key, value, *lengths, **own)

    def _options(self, window: int | None, dropout: float, scale: float, grouped: bool) -> dict[str, Any]:
        return {
            "dropout_p": dropout,
            "softmax_scale": scale,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "deterministic": self._deterministic,
        }


class TorchFlashAttention(FlashAttention):
    """The same by `function`, called like `varlen_attn` of torch.nn.attention.varlen; it has no dropout.

    Raises EnvironmentProblem for a model whose attention has dropout.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function, deterministic=False)

    def _options(self, window: int | None, dropout: float, scale: float, grouped: bool) -> dict[str, Any]:
        if dropout:
            raise EnvironmentProblem(
                f"torch's kernel for packed batches has no dropout, but this model's attention has {dropout}\n"
                "  set device.attention=sdpa, or install flash-attn"
            )
        return {"scale": scale, "window_size": (-1 if window is None else window - 1, 0), "enable_gqa": grouped}


def varlen_kernel(config: CudaConfig, dtype: torch.dtype, decide: Decide) -> VarlenAttention | None:
    """The kernel of `device.attention`, if it supports this dtype; None = torch's, padded buckets."""
    if config.attention == "sdpa":
        return None
    found: tuple[VarlenAttention, str] | str = f"flash kernels support float16 and bfloat16, not {dtype}"
    if dtype in FLASH_TYPES:
        found = installed_kernel(config.deterministic)
    if isinstance(found, str):
        decide("attention", "fused", "sdpa", found.replace("torch.", ""))
        return None
    decide.record_fact("attention", "fused", found[1])
    return found[0]


def installed_kernel(deterministic: bool) -> tuple[VarlenAttention, str] | str:
    """The best kernel that is installed, and its name; or why there is none."""
    if importlib.util.find_spec("flash_attn") is not None:
        try:
            package = importlib.import_module("flash_attn")  # built for one torch and one CUDA, or it does not load
        except ImportError as error:
            return f"flash-attn is installed but cannot be loaded: {str(error).splitlines()[0]}"
        return FlashAttention(package.flash_attn_varlen_func, deterministic), f"flash-attn {package.__version__}"
    if (function := torch_compat.varlen_attention()) is not None:
        return TorchFlashAttention(function), "the flash kernel in torch"
    return f"flash-attn is not installed, and torch {torch.__version__} has no such kernel"


@contextmanager
def _refuse_waits() -> Iterator[None]:
    """Make it an error inside the block that the host waits for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@torch.no_grad()
def record_experts(module: nn.Module, refuse_waits: Callable[[], AbstractContextManager[Any]], decide: Decide) -> None:
    """Record whether the experts of a layer are multiplied at once, by a trial; if not, it is a decision.

    transformers calls torch's grouped product. Without a kernel for a data type and a card, torch copies the numbers
    of rows to the host and multiplies expert by expert; `refuse_waits` makes that copy an error.
    """
    found = (part for part in module.modules() if hasattr(part, "_is_expert_parallel"))
    experts: Any = next((part for part in found if not next(part.parameters()).is_meta), None)
    if experts is None:
        return
    weight, config = experts.down_proj, experts.config
    width = getattr(config, "moe_latent_size", None) or config.hidden_size
    given = (weight.new_ones(16, width), torch.zeros(16, 1, dtype=torch.int64, device=weight.device))
    try:
        experts(*given, weight.new_ones(16, 1))  # which makes handles and workspaces, and may wait
        with refuse_waits():
            experts(*given, weight.new_ones(16, 1))
    except RuntimeError as error:
        dtype = str(weight.dtype).removeprefix("torch.")
        if "synchroniz" not in str(error):
            decide.record_fact("experts", "unknown", f"a trial failed: {str(error).splitlines()[0]}")
            return
        text = f"torch {torch.__version__} has no grouped kernel for {dtype} on this card; bfloat16 has one on Hopper"
        decide("experts", "grouped products", "one after the other", text)
    else:
        decide.record_fact("experts", "grouped products", f"of the {experts.num_experts} experts of a layer, by torch")


class Cuda(TorchDevice[CudaConfig]):
    """One NVIDIA GPU of this process. Raises EnvironmentProblem where there is none."""

    name = "cuda"

    def __init__(self, config: CudaConfig, *, decide: Decide) -> None:
        if not torch.cuda.is_available():
            built = torch.version.cuda or "none: this is a CPU build of torch"
            raise EnvironmentProblem(
                f"device=cuda: torch {torch.__version__} sees no GPU (CUDA of the build: {built}).\n"
                "  in order: 1. nvidia-smi must list a GPU  2. CUDA_VISIBLE_DEVICES must not be empty  "
                "3. install a CUDA build of torch\n  or run it here: device=cpu"
            )
        super().__init__(config, select_card(config.kind, torch.cuda.device_count()), decide)

    def prepare(self) -> None:
        """Choose precision and determinism."""
        super().prepare()
        torch.backends.cuda.matmul.allow_tf32 = self.config.tf32
        torch.backends.cudnn.allow_tf32 = self.config.tf32

    def describe(self) -> dict[str, Any]:
        """What exactness depends on."""
        return {"device": "cuda", "card": torch.cuda.get_device_name(), "cuda": torch.version.cuda}

    def stats_readers(self) -> Sequence[StatsReader]:
        """Of the card as nvidia-smi sees it, and of this process's allocator."""
        uuid = str(torch.cuda.get_device_properties(self.torch_device).uuid)
        return gpu_stats_reader(uuid), self.allocator

    def unsupported_reason(self, dtype: torch.dtype) -> str | None:
        """Nothing: what an old card does not have, torch emulates, which is a decision."""
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        if dtype == torch.bfloat16 and major < 8:
            text = f"{torch.cuda.get_device_name(self.torch_device)} has compute capability {major}.{minor}"
            text = f"{text}; bfloat16 in hardware needs 8.0, and emulation is slow; model.dtype=float32 may be faster"
            self._decide("device", "bfloat16 in hardware", "bfloat16 is emulated", text)
        return None

    def varlen_attention(self, dtype: torch.dtype) -> VarlenAttention | None:
        """The flash kernel that is installed, for models that compute in float16 or bfloat16."""
        return varlen_kernel(self.config, dtype, self._decide)

    def apply_fused_ops(self, module: nn.Module, kernels: str | None = None) -> None:
        """Use Liger's kernels, if requested; experts are multiplied by transformers, and how is recorded."""
        if kernels is not None:
            install_liger_kernels(module, importlib.import_module("liger_kernel.ops"), self._decide)
        record_experts(module, _refuse_waits, self._decide)
