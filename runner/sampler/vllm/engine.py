"""A vLLM engine in this process: start without weights, load them, sample, sleep, stop.

blueprint ──dummy weights──▶ LLM ◀── load: by reference, or to its workers by path ── weights
                              │ generate, prompt_logprobs
                              └─ sleep 1: weights to the host, cache dropped   2: both dropped   wake: at the next use

What the engine changes in a process that trains is restored. vLLM sets seeds of the whole process, exchanges
torch.set_num_threads, writes variables for its workers that ours would inherit, runs kernels that torch refuses where
it is to be deterministic, and its end destroys all process groups.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from runner.core.errors import EnvironmentProblem, RunnerError, SamplerError
from runner.core.fsync_io import keep_rendezvous_names, remove_temporary_folder, temporary_folder

# vllm-ascend (0.23) says where its operators lie, and how triton-ascend is to compile, as its parts are first used
KEPT_PREFIXES = ("VLLM_", "TRITON_", "ASCEND_CUSTOM_OPP_PATH")


@contextmanager
def allow_nondeterminism() -> Iterator[None]:
    """Allow any kernel while an engine computes: its samples are recorded, not repeated."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """Restore random states, threads and environment after vLLM is imported or an engine is built."""
    logging.getLogger("vllm").setLevel(logging.CRITICAL)  # until it reads VLLM_LOGGING_LEVEL
    environment, set_threads, threads = dict(os.environ), torch.set_num_threads, torch.get_num_threads()
    streams = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        with allow_nondeterminism(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what vLLM and what it brings say of one another
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(streams[0])
        np.random.set_state(streams[1])
        torch.set_rng_state(streams[2])
        _restore(environment)


def _restore(environment: dict[str, str]) -> None:
    """Restore the environment, except variables that vLLM, its compiler and its operators still read."""
    for name in [name for name in os.environ if name not in environment and not name.startswith(KEPT_PREFIXES)]:
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if not name.startswith(KEPT_PREFIXES)})


@contextmanager
def redirect_tempdir(folder: Path) -> Iterator[None]:
    """Put temporary files of an engine that is built inside the block, and of its workers, in this folder."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    os.environ["TMPDIR"] = str(folder)  # which `preserve_process_state` puts back
    try:
        yield
    finally:
        tempfile.tempdir = before


def free_cached_memory() -> None:
    """Return cached memory of torch's allocator to the card before an engine wakes.

    vLLM's own memory runs out otherwise (0.23; newer versions free it).
    """
    if (card := torch.accelerator.current_accelerator(check_available=True)) is not None:
        gc.collect()
        torch.get_device_module(card).empty_cache()


@contextmanager
def keep_process_group(keep: bool) -> Iterator[None]:
    """While an engine is ended; keep: the process group that was there before it stays."""
    destroy: Any = dist.destroy_process_group

    def spare(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    if keep:
        dist.destroy_process_group = spare
    try:
        yield
    finally:
        dist.destroy_process_group = destroy


PARTS = ("weights", "kv_cache")  # of an engine's memory, by vLLM's names
DEAD_ENGINE_ERRORS = ("EngineDeadError", "TimeoutError")  # a worker ended, or does not answer


class VllmEngine:
    """vLLM's LLM with the verbs of a sampler. `scratch`: a folder for what goes to its workers by path."""

    def __init__(self, arguments: Mapping[str, Any], *, sleep: int, timeout_s: float, scratch: Path) -> None:
        """Raises EnvironmentProblem where vLLM does not start."""
        self._keep = dist.is_initialized()
        self._level, self._timeout_s, self._scratch = sleep, timeout_s, scratch
        self._spread = arguments["tensor_parallel_size"] > 1
        self._asleep: set[str] = set()
        self._whole = False  # whether all weights were given, and none was forgotten
        self._llm: Any = None
        temporary = self._create_temp_folder()
        try:
            with preserve_process_state(), redirect_tempdir(temporary):
                self._llm = _start_llm(arguments)
            keep_rendezvous_names(temporary)
        except BaseException:
            remove_temporary_folder(temporary)
            raise
        self._experts = any(self._call("knows_experts"))

    def load(self, weights: Mapping[str, Tensor], own: Sequence[str], changed: frozenset[str] | None) -> None:
        """Load those of `weights` that are the model's own.

        own: their names, complete; changed: names that may differ from the last ones, None = all.

        Nothing moves where none do, as for a base whose adapter is sent separately. Raises EnvironmentProblem for
        tensors that vLLM's model does not take or lacks, SamplerError if old answers stay cached.
        """
        with self._translate_errors():
            self._wake("weights")
            names = [name for name in own if changed is None or name in changed]
            whole = changed is None or not self._whole or (self._experts and bool(names))
            names = [*own] if whole else names
            self._whole = False
            if names or whole:
                self._send_weights(weights, names, whole)
            self._whole = True
        self.reset_cache()

    def reset_cache(self) -> None:
        """What was computed with other weights. Raises SamplerError if vLLM keeps it."""
        if self._llm.reset_prefix_cache() is False:
            raise SamplerError("vLLM did not reset its prefix cache of old weights: versions would mix")

    def _send_weights(self, weights: Mapping[str, Tensor], names: Sequence[str], whole: bool) -> None:
        if not self._spread:
            self._call("load_tensors", weights, names, whole)
            return
        files: Sequence[Path] = getattr(weights, "files", ())
        made = self._scratch / "weights.safetensors"
        if not files:
            save_file({name: weights[name].detach().cpu().contiguous() for name in names}, made)
        try:
            self._call("load_files", [str(path) for path in files or (made,)], names, whole)
        finally:
            made.unlink(missing_ok=True)

    def generate(self, prompts: Sequence[Mapping[str, Any]], params: Any, adapter: Any) -> list[Any]:
        """vLLM's output for each of its prompts, in their order. Raises RuntimeError where it has no weights."""
        if not self._whole:
            raise RuntimeError("the engine has no weights: load them first, and again after sleep=2")
        with self._translate_errors():
            self._wake(*PARTS)
            return [*self._llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)]

    def release(self) -> None:
        """Sleep at the configured level."""
        if self._level and not self._asleep:
            with self._translate_errors():
                self._llm.sleep(level=self._level)
            self._asleep = set(PARTS)
            self._whole = self._level < 2

    def _wake(self, *parts: str) -> None:
        if wanted := [part for part in parts if part in self._asleep]:
            free_cached_memory()
            try:
                self._llm.wake_up(tags=wanted)
            except RuntimeError as error:
                advice = "lower sampler.gpu_memory_utilization or algorithm.micro_batch_tokens, or set launch.samplers"
                raise SamplerError(f"vLLM's engine cannot allocate its memory again: {error}; {advice}") from error
            self._asleep.difference_update(wanted)

    def close(self) -> None:
        """End it and its workers; process groups that were there before it stay."""
        if self._llm is None:
            return
        with keep_process_group(self._keep):
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
        remove_temporary_folder(temporary_folder(self._scratch))

    def _create_temp_folder(self) -> Path:
        """A new folder for its temporary files. Raises EnvironmentProblem where it is another user's."""
        made = temporary_folder(self._scratch)
        remove_temporary_folder(made)  # of a process that was killed
        try:
            made.mkdir(mode=0o700)
        except OSError as error:
            text = f"cannot create {made} for vLLM's temporary files: {error.strerror}"
            raise EnvironmentProblem(f"sampler=vllm: {text}; set TMPDIR to another folder") from error
        return made

    def _call(self, method: str, *args: Any) -> list[Any]:
        return [*self._llm.collective_rpc(method, timeout=self._timeout_s, args=args)]

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        if self._llm is None:
            raise SamplerError("the engine was closed")
        try:
            with allow_nondeterminism():
                yield
        except RunnerError:
            raise
        except Exception as error:
            own = self._spread and isinstance(error, RuntimeError)  # a worker's error comes as its words alone
            if own or any(kind.__name__ in DEAD_ENGINE_ERRORS for kind in type(error).__mro__):
                raise SamplerError(f"vLLM's engine died: {type(error).__name__}: {error}") from error
            raise


def device_type() -> str:
    """The device type of vLLM here: cpu, cuda, npu. Raises EnvironmentProblem where it does not import."""
    try:
        with preserve_process_state():
            from vllm import LLM  # noqa: F401
            from vllm.platforms import current_platform
    except (ImportError, OSError, RuntimeError) as error:
        text = f"import vllm fails: {type(error).__name__}: {error}"
        raise EnvironmentProblem(f"sampler=vllm: {text}\n  find the cause: run doctor") from error
    return str(current_platform.device_type)


def _start_llm(arguments: Mapping[str, Any]) -> Any:
    from vllm import LLM

    spread = arguments["tensor_parallel_size"] > 1  # then what its workers die of is an Exception, and in the log
    try:
        return LLM(**arguments)
    except Exception as error:
        if not (isinstance(error, (ValueError, AssertionError, NotImplementedError)) or spread):
            raise
        text = " ".join(str(error).split())[:500]
        raise EnvironmentProblem(
            f"sampler=vllm: vLLM does not start: {text}\n"
            "  less memory: sampler.gpu_memory_utilization, sampler.kv_cache_memory_bytes, "
            "sampler.max_model_len; or without it: sampler=torch"
        ) from error
