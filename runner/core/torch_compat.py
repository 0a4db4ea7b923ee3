"""Replacements for features of the newest torch that supported releases since 2.7.1 lack.

All other files assume the newest torch. A feature without a replacement is an error with the version and a remedy.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from runner.core.errors import EnvironmentProblem

library: Any = distributed  # many of its functions have no types
collectives: Any = _fsdp_collectives  # differs between releases
cpu: Any = torch.cpu


def aten_operators(*names: str) -> list[Any]:
    """The operators of torch with these names, as far as they exist."""
    return [getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)]


# --- attention -------------------------------------------------------------------------------------------------------


def varlen_attention() -> Callable[..., Any] | None:
    """torch's `varlen_attn` with the signature of torch 2.13; None if it has no scale or window."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:  # torch 2.9 and older
        return None
    function: Callable[..., Any] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    known = inspect.signature(function).parameters
    if not {"scale", "window_size"} <= known.keys():  # torch 2.10
        return None
    return function if "enable_gqa" in known else partial(_repeat_kv_heads, function)


def has_grouped_cpu_attention() -> bool:
    """Whether the CPU's attention kernel supports grouped queries; older ones read beyond the keys."""
    return importlib.util.find_spec("torch.nn.attention.varlen") is not None  # torch 2.10 and newer have both


def _repeat_kv_heads(
    function: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *rest: Any, enable_gqa: bool, **named: Any
) -> Any:
    """For torch 2.11: keys and values, [K, fewer heads, D], are repeated for the queries, [Q, heads, D]."""
    if enable_gqa:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
    return function(query, key, value, *rest, **named)


# --- random generators -----------------------------------------------------------------------------------------------


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed like torch.manual_seed, but only the devices that this process uses.

    torch.manual_seed looks for backends that are not there, at 200 times the cost.
    """
    torch.default_generator.manual_seed(seed)
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).manual_seed(seed)


# --- the rendezvous store --------------------------------------------------------------------------------------------


def serve_tcp_store(host: str, port: int, listener: int, **options: Any) -> Any:
    """Serve the rendezvous store of a job in this process.

    listener: descriptor of a socket that listens on `port`, owned by the store from now on; options: those of TCPStore
    """
    serve = partial(library.TCPStore, host, port, is_master=True, master_listen_fd=listener, **options)
    try:
        with _silence_cpp_stderr():
            return serve()
    except NotImplementedError:  # torch 2.7: its newer server opens a socket of its own
        return serve(use_libuv=False)


@contextmanager
def _silence_cpp_stderr() -> Iterator[None]:
    """Suppress stderr inside the block: torch's C++ code also logs the errors that it raises."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


# --- fully_shard (FSDP2) ---------------------------------------------------------------------------------------------


def set_gradient_sum_reduction(part: FSDPModule) -> None:
    """Let a sharded module sum gradients over the ranks instead of averaging them.

    Plain sums, because gloo and HCCL have no scaled sum. Parameters without gradient on a rank count as zeros. Tensors
    of several data types are gathered as signed bytes, the only bytes that HCCL supports. Raises EnvironmentProblem for
    a torch with an unsupported fully_shard.
    """
    if hasattr(part, "set_force_sum_reduction_for_comms"):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    else:  # torch 2.7
        _patch_gradient_division()
        for group in _param_groups(part):
            group._init_mp_dtypes = partial(_init_trainable_dtypes, group, group._init_mp_dtypes)
    if hasattr(part, "set_custom_all_gather"):
        part.set_custom_all_gather(_gather())
    elif not isinstance(collectives.dist, _SignedBytes):  # torch 2.8 and older
        collectives.dist = _SignedBytes("distributed")
    if hasattr(part, "set_reduce_scatter_unused_params"):
        part.set_reduce_scatter_unused_params(True)
    else:  # torch 2.12 and older
        for group in _param_groups(part):
            group.post_backward = partial(_fill_missing_gradients, group, group.post_backward)


def _patch_gradient_division() -> None:
    """For torch 2.7, whose reduction needs a mean, which gloo lacks, and events, which a CPU lacks."""
    if not hasattr(collectives, "_get_gradient_divide_factors"):
        text = f"torch {torch.__version__}: the FSDP gradient reduction of this release is not supported"
        raise EnvironmentProblem(f"{text}; install torch 2.7.1 or 2.10 to 2.13, or type parallelism=ddp")
    collectives._get_gradient_divide_factors = lambda *_: (1.0, 1.0)  # factors before and after the sum
    if cpu.Stream().record_event() is None:
        cpu.Stream.record_event = lambda _: cpu.Event()


def _gather() -> Any:
    class Gather(collectives.DefaultAllGather):  # type: ignore[misc]  # it is Any
        """All-gather in which tensors of several data types are sent as signed bytes."""

        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **named: Any) -> Any:
            return super().__call__(*_as_signed_bytes(output_tensor, input_tensor), *rest, **named)

    return Gather()


class _SignedBytes(ModuleType):
    """torch.distributed with an all-gather that sends signed bytes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(distributed, name)

    def all_gather_into_tensor(self, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **named: Any) -> Any:
        return library.all_gather_into_tensor(*_as_signed_bytes(output_tensor, input_tensor), *rest, **named)


def _as_signed_bytes(*tensors: Tensor) -> list[Tensor]:
    return [one.view(torch.int8) if one.dtype == torch.uint8 else one for one in tensors]


def _param_groups(part: FSDPModule) -> list[Any]:
    """The internal parameter groups of fully_shard, each of which is gathered at once."""
    state: Any = part._get_fsdp_state()
    found = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [one for one in found if one is not None]


def discard_unsharded_gradients(root: torch.nn.Module) -> None:
    """Drop the gradients of sharded modules that are not reduced yet."""
    for part in root.modules():
        for group in _param_groups(part) if isinstance(part, FSDPModule) else ():
            for one in group.fsdp_params:
                one.unsharded_accumulated_grad = None
                if hasattr(one, "_unsharded_param"):
                    one._unsharded_param.grad = None


def _fill_missing_gradients(group: Any, post_backward: Any, *unused: Any) -> None:
    """Fill missing gradients of this rank with zeros before they are summed."""
    for one in group.fsdp_params if group.reduce_grads else ():
        full = getattr(one, "_unsharded_param", None)
        if full is not None and full.requires_grad and full.grad is None and one.unsharded_accumulated_grad is None:
            full.grad = torch.zeros_like(full)
    post_backward()


def _init_trainable_dtypes(group: Any, init: Any) -> None:
    """Require one data type only of trainable parameters, not of frozen ones."""
    every = group.fsdp_params
    try:
        init()
    except AssertionError:
        for one in every:
            one.init_dtype_attrs(group.mp_policy)
        group.fsdp_params = [one for one in every if one.sharded_param.requires_grad] or every[:1]
        try:
            init()
        finally:
            group.fsdp_params = every


def reshard_after_forward(part: FSDPModule, reshard: bool) -> None:
    """Set whether `part` alone, without its submodules, is freed after its next forward passes."""
    if hasattr(part, "set_reshard_after_forward"):
        part.set_reshard_after_forward(reshard, recurse=False)
        return
    for group in _param_groups(part):  # torch 2.7
        group.post_forward_mesh_info = group.mesh_info if reshard else None


def reset_iteration_state(root: FSDPModule) -> None:
    """Free gathered parameters and reset the order of layers for backward prefetching.

    That order must be the same on all ranks.
    """
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    shared: Any = root._get_fsdp_state()  # torch 2.12 and older
    shared._comm_ctx.all_gather_state = None
    getattr(shared._comm_ctx, "post_forward_order", []).clear()
    for part in root.modules():  # type: ignore[attr-defined]
        if isinstance(part, FSDPModule):
            for group in _param_groups(part):
                group._post_forward_indices.clear()
            part.reshard()
