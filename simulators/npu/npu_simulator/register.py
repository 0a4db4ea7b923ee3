"""Puts the simulated card behind torch_npu's names, once it is imported: kernels, fused operators, collectives."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from npu_simulator import attention
from npu_simulator.draw import STEP
from npu_simulator.operators import OPERATORS
from npu_simulator.schema import bound
from npu_simulator.strict import need
from runner.device.base import translate_startup_errors

PADDING = "32 padding size"  # torch_npu's remark, at the first memory, on every card of this kind
_LIBRARIES: list[torch.library.Library] = []  # a registration lives as long as its library
_REPLACED: list[int] = []


def install(built: Path) -> int:
    """Register everything that `built` holds and the operators here, once; returns how many aten kernels that are."""
    if not _REPLACED:
        _REPLACED.append(_install(built))
    return _REPLACED[0]


def _install(built: Path) -> int:
    path = str(built / "kernels.so")
    torch.ops.load_library(path)
    library = ctypes.CDLL(path)
    replaced: int = library.npu_sim_install()
    with _without(PADDING), translate_startup_errors("npu_sim"):
        torch.empty(1, device="npu")
    for namespace, functions in {"npu": {**OPERATORS, **_attention()}, "aten": CONVOLUTIONS}.items():
        own = torch.library.Library(namespace, "IMPL")
        _LIBRARIES.append(own)
        for name, function in functions.items():
            own.impl(name, _kernel(namespace, name, function), "PrivateUse1", allow_override=True)
    _install_collectives(built)
    return replaced


@contextmanager
def _without(text: str) -> Iterator[None]:
    """Leave out of standard error, which C++ writes to, the lines that hold `text`."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile("w+", errors="replace") as aside:
        os.dup2(aside.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            aside.seek(0)
            sys.stderr.writelines(line for line in aside if text not in line)


def _attention() -> Mapping[str, Callable[[Mapping[str, Any]], Any]]:
    return {
        "npu_fusion_attention": lambda given: attention.forward(given, *_drawn(given["keep_prob"])),
        "npu_fusion_attention_grad": attention.backward,
        # what torch's scaled_dot_product_attention becomes: the same, with numbers in tensors
        "npu_fusion_attention_v3": lambda given: _in_tensors(
            attention.forward(_plain(given), *_drawn(given["keep_prob"]))
        ),
        "npu_fusion_attention_grad_v3": lambda given: attention.backward(_plain(given)),
    }


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """Seed, offset and lengths as numbers."""
    plain = dict(given)
    for name in ("seed", "offset"):
        if isinstance(given.get(name), Tensor):
            plain[name] = int(given[name])
    for name in ("actual_seq_qlen", "actual_seq_kvlen"):
        if given[name] is not None:
            plain[name] = given[name].tolist()
    return plain


def _in_tensors(outputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    *tensors, seed, offset, _ = outputs
    return (*tensors, torch.tensor([seed], dtype=torch.int64), torch.tensor([offset], dtype=torch.int64))


def _drawn(keep: float) -> tuple[int, int]:
    """Seed and offset of the card's generator, which moves on where something is dropped."""
    if keep == 1.0:
        return 0, 0
    generator: torch.Generator = torch.npu.default_generators[torch.npu.current_device()]  # type: ignore[attr-defined]
    offset = generator.get_offset()
    generator.set_offset(offset + STEP)
    return generator.initial_seed(), offset


def _convolution_backward(given: Mapping[str, Any]) -> Any:
    sizes = [given["grad_output"].shape[1]]  # of the bias
    named = {key: value for key, value in given.items() if key not in ("grad_output", "input", "weight")}
    tensors = (given["grad_output"], given["input"], given["weight"])
    return torch.ops.aten.convolution_backward(*tensors, sizes, *named.values())


# what torch calls for other devices than its own; the CPU's kernel of that name is none
CONVOLUTIONS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "convolution_overrideable": lambda given: torch.ops.aten.convolution(*given.values()),
    "convolution_backward_overrideable": _convolution_backward,
}


def _kernel(namespace: str, name: str, function: Callable[[Mapping[str, Any]], Any]) -> Callable[..., Any]:
    """The function as a kernel: arguments by the schema's names, on the host; results on the card."""
    base, _, overload = name.partition(".")
    schema = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")._schema

    @torch.no_grad()
    def kernel(*args: Any, **options: Any) -> Any:
        twins: dict[int, Tensor] = {}
        given = {key: _on_host(name, value, twins) for key, value in bound(schema, args, options).items()}
        return _on_card(function(given), twins)

    return kernel


def _on_host(name: str, value: Any, twins: dict[int, Tensor]) -> Any:
    """Tensors of the card as tensors of the host on the same memory; `twins` remembers whose they are."""
    if isinstance(value, Tensor):
        need(value.device.type == "npu", name, f"a tensor on the NPU is expected, not on {value.device}")
        card = twins.setdefault(-1, value).device  # where the results go
        need(value.device == card, name, f"found at least two devices, {card} and {value.device}")
        host: Tensor = torch.ops.npu_sim.host(value)
        twins[id(host)] = value
        return host
    if isinstance(value, list | tuple):
        return [_on_host(name, entry, twins) for entry in value]
    return value


def _on_card(value: Any, twins: Mapping[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return twins[id(value)] if id(value) in twins else torch.ops.npu_sim.card(value, twins[-1].device)
    if isinstance(value, list | tuple):
        return type(value)(_on_card(entry, twins) for entry in value)
    return value


def _install_collectives(built: Path) -> None:
    """The backend "hccl" on gloo, in the place of torch_npu's."""
    loader = importlib.machinery.ExtensionFileLoader("hccl", str(built / "hccl.so"))
    spec = importlib.util.spec_from_file_location("hccl", str(built / "hccl.so"), loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return module.create(distributed.ProcessGroupGloo(store, rank, size, timeout=timeout))

    known: Any = distributed.Backend
    known.backend_list.remove("hccl")
    known._plugins.pop("HCCL")
    known.register_backend("hccl", create, devices=["npu"])
