"""Where a model's first weights come from, and what has to be equal for them to be the same again.

folder   sha256 of config.json; of the weights too where some of them never learn, which no checkpoint holds
hub      the commit
drawn    the seed, and what it was drawn for

What the building of every model has in common: random weights, data type, device, dropout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from runner.core.auto_choices import Decisions
from runner.core.device_kinds import NPU
from runner.core.errors import EnvironmentProblem
from runner.core.progress_bars import no_load_report, no_progress_bar
from runner.core.quantized_weight import QuantizedWeight, Scheme, quantize_weight
from runner.interfaces import Decide
from runner.model.config import require_bitsandbytes
from runner.model.model_folder import files_digest, weights_digest
from runner.model.model_parts import decoder_blocks
from runner.model.parameters import float32_modules
from runner.spec.base import Dtype


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """A local folder, a commit of the hub, or random weights (of a folder's or commit's shape).

    drawn: what random weights are a function of, in words; None where weights are read; adapter: the folder of a PEFT
    adapter that was loaded onto them; files: the local folder with the files of either of the first two; unread:
    tensors in it that the architecture does not have (multi-token prediction), which an export takes over.
    """

    folder: Path | None = None
    commit: str | None = None
    drawn: str | None = None
    adapter: Path | None = None
    files: Path | None = None
    unread: tuple[str, ...] = ()

    def identity(self, *, weights: bool) -> dict[str, str]:
        """What identifies the source; `weights` adds the sha256 of a folder's weights (1 to 2 GB a second)."""
        found = {}
        if self.commit is not None:
            found["commit"] = self.commit
        if self.folder is not None:
            found["config"] = files_digest(self.folder.glob("config.json"))
        if self.adapter is not None:
            found["adapter"] = files_digest(sorted(self.adapter.glob("adapter_*")))
        if self.drawn is not None:
            found["drawn"] = self.drawn
        elif self.folder is not None and weights:
            found["weights"] = weights_digest(self.folder)
        return found


DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEADS = frozenset({"lm_head.weight", "score.weight"})  # what a model with the other head has instead
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
InstallFusedOps = Callable[[nn.Module], None]
CheckArchitecture = Callable[[Any], None]  # raises for a transformers config that will not do, before there are weights
M = TypeVar("M", bound=nn.Module)


def init_with_seed(make: Callable[[], M], seed: int) -> M:
    """`make()` with its random numbers from `seed`; the process's own stream is left as it was.

    Drawn on the CPU in float32, so that every device and data type starts from the same model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def place_on_device(
    module: M,
    dtype: torch.dtype,
    device: torch.device,
    fit: InstallFusedOps | None = None,
    compute: torch.dtype | None = None,
    quantization: Scheme | None = None,
    decide: Decide | None = None,
) -> M:
    """The module with its parameters in `dtype` on `device`, `float32_modules` in float32.

    Buffers (rotary frequencies) keep their type. `fit` may replace modules by the device's own, which it tries in
    `compute`, the data type that the module will compute in (None: `dtype`). quantization: see
    `quantize_layers`; host memory has the whole module in `dtype`, the device one such layer at a time.
    """
    wide = {id(parameter) for part in float32_modules(module) for parameter in part.parameters()}
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.float32 if id(parameter) in wide else dtype)
    module.config.dtype = dtype
    if quantization is not None:
        quantize_layers(module, device, quantization, decide or Decisions())
    module = module.to(device)
    if fit is not None:
        plain = (one for one in module.parameters() if not isinstance(one, QuantizedWeight))
        kept = [(parameter, parameter.data) for parameter in plain]
        for parameter, data in kept:
            parameter.data = data.to(compute or data.dtype)
        fit(module)
        for parameter, data in kept:
            parameter.data = data
    return module


def quantize_layers(module: Any, device: torch.device, scheme: Scheme, decide: Decide) -> None:
    """Quantize the decoder's linear layers except routers and, with a line, experts in one tensor.

    Raises EnvironmentProblem for a model that does not name its layers, without bitsandbytes, and on an NPU, which
    device=auto may be.
    """
    require_bitsandbytes(scheme)
    if device.type == NPU.name:
        raise EnvironmentProblem(
            f"model.quantization={scheme}: not supported on an NPU (chosen by device=auto); leave it out"
        )
    wide = set(float32_modules(module))
    parts = [part for block in decoder_blocks(module, ()) for part in block.modules()]
    linears = [part for part in parts if type(part) is nn.Linear and part not in wide]
    if not linears:
        text = f"model.quantization={scheme}: {type(module).__name__} has no linear layers in its decoder blocks"
        raise EnvironmentProblem(f"{text}; leave it out")
    before = sum(parameter.nbytes for parameter in module.parameters())
    fused = sum(p.nbytes for part in parts for p in part._parameters.values() if p is not None and p.dim() == 3)
    if fused:
        text = f"experts in one tensor, {fused / before:.0%} of the model's bytes, stay as they are"
        decide("model.quantization", scheme, f"{scheme} without the experts", text)
    for linear in linears:
        linear.weight = nn.Parameter(quantize_weight(linear.weight.to(device), scheme), False)
    after = sum(parameter.nbytes for parameter in module.parameters())
    text = f"of {len(linears)} linear layers; the model's {before / 2**20:.4g} MiB become {after / 2**20:.4g} MiB"
    decide.record_fact("model.quantization", scheme, text)


def refuse_nonfinite_weights(tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise EnvironmentProblem, with their names, for weights that hold NaN or infinity.

    `source`: the option and path that they were read from.
    """
    found = {
        name: int((~tensor.isfinite()).sum())
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    }
    if found:
        shown = "; ".join(f"{name} ({count} numbers)" for name, count in list(found.items())[:3])
        raise EnvironmentProblem(
            f"{source}: {len(found)} of its weights contain NaN or infinity: {shown}\n"
            "  the file is corrupted, or the run that wrote it diverged; use another folder, or an earlier checkpoint"
        )


def load_folder(module: nn.Module, folder: str) -> None:
    """Fill `module` with a folder's safetensors; ignore a head of another kind on both sides.

    An adapter that is saved later names the folder as its base. On the meta device nothing is read. Raises
    EnvironmentProblem for NaN, and unless all other names and shapes agree, and the number of heads, which no shape
    shows.
    """
    module.config._name_or_path = folder  # type: ignore[union-attr]
    if next(module.parameters()).device.type == "meta":
        return
    described = Path(folder) / "config.json"
    theirs = json.loads(described.read_text()) if described.is_file() else {}
    _refuse_other_heads(module.config, theirs, folder)
    layers, own_layers = theirs.get("num_hidden_layers"), getattr(module.config, "num_hidden_layers", None)
    hint = f"; the folder has {layers} layers, this model {own_layers}" if layers not in (None, own_layers) else ""
    files = sorted(Path(folder).glob("*.safetensors"))
    wanted = dict(module.state_dict(keep_vars=True))
    filled = dict.fromkeys(wanted, 0)  # how many numbers of each were there
    with torch.no_grad():
        for file in files:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # safe_open is no mapping
                    tensor = tensors.get_tensor(name)
                    whole, part = _find_target(name, wanted)
                    if part is not None and part.shape == tensor.shape:
                        part.copy_(tensor)
                        filled[whole] += tensor.numel()
                    elif name not in HEADS:
                        shapes = part is not None and f"has shape {list(tensor.shape)}, but {list(part.shape)}"
                        why = f"{name} {shapes or 'does not exist'} in this model ({file.name}){hint}"
                        raise EnvironmentProblem(f"init_from={folder}: {why}")
    if missing := sorted({name for name in wanted if filled[name] < wanted[name].numel()} - HEADS):
        lacks = f"lacks {len(missing)} of the model's weights, e.g. {missing[0]}{hint}"
        raise EnvironmentProblem(f"init_from={folder} {lacks}")
    refuse_nonfinite_weights(module.state_dict(), f"init_from={folder}")


def load_renamed(module: nn.Module, folder: str) -> None:
    """The same of a model whose tensors have other names in a folder, which transformers knows.

    Raises EnvironmentProblem unless the folder has all of the model's tensors, in their shapes.
    """
    config: Any = module.config
    config._name_or_path = folder
    if next(module.parameters()).device.type == "meta":
        return
    kind: Any = type(module)
    options = {"config": config, "use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
    with no_progress_bar(), no_load_report():
        loaded, info = kind.from_pretrained(folder, **options)
    if faults := sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}):
        raise EnvironmentProblem(f"init_from={folder} does not fit this model, e.g. in {faults[0]}")
    module.load_state_dict(loaded.state_dict())
    refuse_nonfinite_weights(module.state_dict(), f"init_from={folder}")


def _find_target(name: str, wanted: Mapping[str, Tensor]) -> tuple[str, Tensor | None]:
    """The model's tensor that a tensor of a folder belongs to, and the part of it.

    A folder has each expert of a layer by itself, with gate and up apart.
    """
    if (found := EXPERT.fullmatch(name)) is None:
        return name, wanted.get(name)
    layer, number, kind = found.groups()
    whole = f"{layer}.{'down_proj' if kind == 'down' else 'gate_up_proj'}"
    if whole not in wanted or int(number) >= len(wanted[whole]):
        return whole, None
    own = wanted[whole][int(number)]
    return whole, own if kind == "down" else own.chunk(2)[kind == "up"]


def _refuse_other_heads(config: Any, theirs: Mapping[str, Any], folder: str) -> None:
    """Weights of as many numbers for other heads would load, and be another function."""
    for name in ("num_attention_heads", "num_key_value_heads", "num_experts_per_tok"):
        if (there := theirs.get(name)) not in (None, here := getattr(config, name, None)):
            raise EnvironmentProblem(
                f"init_from={folder} has {name}={there}, but this model has {here}\n"
                "  the weights need the model options that they were trained with"
            )


def max_dropout_rate(module: nn.Module) -> float:
    """The largest dropout rate: of activations, attention, adapters' inputs or whole layers."""
    return max((getattr(part, name) for part, name in _dropout_rates(module)), default=0.0)


def disable_dropout(module: nn.Module) -> None:
    """Let training mode drop nothing."""
    for part, name in list(_dropout_rates(module)):
        setattr(part, name, 0.0)


def _dropout_rates(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Where models keep rates: in dropout modules, or in numbers of their own that are named after it
    (attention_dropout, attn_pdrop, layerdrop, …)."""
    for part in module.modules():
        rates = [name for name, value in vars(part).items() if "drop" in name and isinstance(value, float)]
        yield from ((part, name) for name in (["p"] if isinstance(part, _DropoutNd) else rates))
