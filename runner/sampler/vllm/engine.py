"""A vLLM engine in this process: built without weights, given them, asked, put to sleep, ended.

blueprint ──dummy weights──▶ LLM ◀── load: by reference, or to its workers by path ── weights
                              │ generate, prompt_logprobs
                              └─ sleep 1: weights to the host, cache dropped   2: both dropped   wake: at the next use
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from runner.core.errors import EnvironmentProblem, RunnerError, SamplerError
from runner.core.fsync_io import keep_rendezvous_names, remove_temporary_folder, temporary_folder
from runner.sampler.vllm.process_isolation import (
    allow_nondeterminism,
    free_cached_memory,
    keep_process_group,
    preserve_process_state,
    redirect_tempdir,
)

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

    def load(self, weights: Mapping[str, Tensor], changed: frozenset[str] | None) -> None:
        """Load `weights`, complete; changed: names that may differ from the last ones, None = all.

        Nothing moves where none do, as for a base whose adapter is sent separately. Raises EnvironmentProblem for
        tensors that vLLM's model does not take or lacks, SamplerError if old answers stay cached.
        """
        with self._translate_errors():
            self._wake("weights")
            whole = changed is None or not self._whole or (self._experts and bool(changed))
            names = [name for name in weights if whole or name in changed]  # type: ignore[operator]
            self._whole = False
            if names or whole:
                self._send_weights(weights, names, whole)
            self._whole = True
        self.reset_cache()

    def reset_cache(self) -> None:
        """What was computed with other weights. Raises SamplerError if vLLM keeps it."""
        if self._llm.reset_prefix_cache() is False:
            raise SamplerError("vLLM did not drop the keys and values of its old weights: answers would mix both")

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

    def generate(self, prompts: Sequence[Sequence[int]], params: Any, adapter: Any) -> list[Any]:
        """vLLM's output for each prompt, in their order. Raises RuntimeError where it has no weights."""
        if not self._whole:
            raise RuntimeError("the engine holds no weights: load comes first, and again after sleep=2")
        with self._translate_errors():
            self._wake(*PARTS)
            given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
            return [*self._llm.generate(given, params, use_tqdm=False, lora_request=adapter)]

    def release(self) -> None:
        """Sleep as deep as it was told to."""
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
                advice = (
                    "a smaller sampler.gpu_memory_utilization or algorithm.micro_batch_tokens leaves it "
                    "room, or launch.samplers"
                )
                raise SamplerError(f"vLLM's engine cannot take its memory back: {error}; {advice}") from error
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
            text = f"cannot make {made} for vLLM's temporary files: {error.strerror}"
            raise EnvironmentProblem(f"sampler=vllm: {text}; TMPDIR names another place") from error
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
                raise SamplerError(f"vLLM's engine is gone: {type(error).__name__}: {error}") from error
            raise


def device_type() -> str:
    """The device type of vLLM here: cpu, cuda, npu. Raises EnvironmentProblem where it does not import."""
    try:
        with preserve_process_state():
            from vllm import LLM  # noqa: F401
            from vllm.platforms import current_platform
    except (ImportError, OSError, RuntimeError) as error:
        text = f"import vllm fails: {type(error).__name__}: {error}"
        raise EnvironmentProblem(f"sampler=vllm: {text}\n  what is wrong: run doctor") from error
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
