"""Samplers: the model itself, a vLLM engine, or a server that runs already."""

import os
import socket
from collections.abc import Iterator
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from runner.core.errors import EnvironmentProblem
from runner.sampler.base import SamplerConfig as SamplerConfig
from runner.sampler.base import SamplingConfig, WeightParts
from runner.spec.base import Dtype, address_problem

COLDEST, HOTTEST = 0.01, 2.0  # temperatures that vLLM draws at
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # sizes that its attention on the CPU has


class VllmSamplerConfig(SamplingConfig):
    """A vLLM engine in each rank's process, asleep while that trains, or with launch.samplers in its own.

    Rollouts do not repeat bit for bit; a resumed run reads those that were used from a journal.
    """

    factory: ClassVar[str] = "runner.sampler.vllm.build:build"
    engine: ClassVar[bool] = True
    name: Literal["vllm"] = "vllm"
    tensor_parallel_size: int = Field(
        default=1, ge=1, description="Devices that one engine is spread over; with launch.samplers."
    )
    gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Share of a card's memory that an engine may take; null = 0.45 beside a trainer, else 0.9.",
    )
    kv_cache_memory_bytes: int | None = Field(
        default=None,
        gt=0,
        description="Bytes of the KV cache; null = what sampler.gpu_memory_utilization leaves, on the CPU 1 GiB.",
    )
    sleep: Literal[0, 1, 2] | None = Field(
        default=None,
        description="What an engine beside a trainer gives up meanwhile: 0 = nothing, 1 = its cache, weights go to the "
        "host, 2 = both; null = 1, on the CPU 0.",
    )
    weight_sync: Literal["merged", "adapter"] = Field(
        default="merged",
        description="What is sent after a step: merged = the weights that it changed, the adapter's merged into them; "
        "adapter = the adapter alone, beside a base that was sent once.",
    )
    dtype: Dtype | None = Field(
        default=None,
        description="Data type of the engine's weights; null = that of the policy's matrix products.",
    )
    enforce_eager: bool | None = Field(
        default=None,
        description="Run without captured graphs; null = false on CUDA, else true.",
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="Most tokens of a prompt and its answer; null = what the job may need."
    )

    def weights_to_send(self) -> tuple[WeightParts, ...]:
        return ("adapter", "base") if self.weight_sync == "adapter" else ("changed", "fixed")

    def cards(self) -> int:
        return self.tensor_parallel_size

    @property
    def memory_share(self) -> float | None:
        return self.gpu_memory_utilization

    @property
    def kv_cache_bytes(self) -> int | None:
        return self.kv_cache_memory_bytes

    @property
    def sleep_level(self) -> int | None:
        return self.sleep

    def weights_dtype(self, products: Dtype) -> Dtype | None:
        return self.dtype or products

    def preflight_here(self) -> None:
        from runner.sampler.vllm.versions import require_vllm  # here, because every command reads this module

        require_vllm()

    def problems(self, job: Any) -> list[tuple[str, str]]:
        return [
            *self._placement_problems(job),
            *self._sync_problems(job),
            *self._engine_problems(job),
        ]

    def _placement_problems(self, job: Any) -> Iterator[tuple[str, str]]:
        own, cpu = job.launch.samplers > 0, job.device.is_cpu
        if self.tensor_parallel_size > 1 and not own:
            text = "an engine over several devices has processes of its own; set launch.samplers, or leave it out"
            yield "sampler.tensor_parallel_size", text
        if not own and job.algorithm.steps_ahead():
            text = "an engine in a rank draws while that waits, and so not ahead of it; set launch.samplers, or 0"
            yield "algorithm.lag", text
        if self.sleep is not None and own:
            yield "sampler.sleep", "a sampler of its own shares its device with nobody; leave it out"
        elif self.sleep and cpu:
            yield "sampler.sleep", "vLLM knows no sleep on the CPU (a call does nothing); leave it out"
        if self.timeout_s is not None and not own:
            text = "is about samplers of their own, and here the ranks sample; leave it out, or set launch.samplers"
            yield "sampler.timeout_s", text
        if self.gpu_memory_utilization is not None and cpu:
            yield (
                "sampler.gpu_memory_utilization",
                "is a share of a card's memory, and this is the CPU; set sampler.kv_cache_memory_bytes instead",
            )

    def _sync_problems(self, job: Any) -> Iterator[tuple[str, str]]:
        if self.weight_sync != "adapter":
            return
        if job.adapter.trains_base:
            yield "sampler.weight_sync", "adapter=none has no adapter to send; type sampler.weight_sync=merged"
        elif job.adapter.needs_whole_layers:
            yield "sampler.weight_sync", "vLLM knows no DoRA; type sampler.weight_sync=merged"

    def _engine_problems(self, job: Any) -> Iterator[tuple[str, str]]:
        longest = job.data.max_length + self.max_new_tokens
        if self.max_model_len is not None and self.max_model_len < longest:
            text = f"data.max_length and sampler.max_new_tokens come to {longest} tokens; give as many, or leave it out"
            yield "sampler.max_model_len", text
        if not COLDEST <= self.temperature <= HOTTEST:
            text = f"vLLM draws at {COLDEST} to {HOTTEST}, and takes colder for {COLDEST} without a word"
            yield "sampler.temperature", f"{text}; give one of these"
        if self.truncates and self.temperature != 1 and job.algorithm.needs_sampler_logprobs():
            text = (
                "this algorithm learns from log-probabilities at this temperature and before truncation, and vLLM "
                "reports them before both or after both; type sampler.temperature=1, leave top_k, top_p and min_p out, "
                "or type sampler=torch"
            )
            yield "sampler.temperature", text
        if self.enforce_eager is False and job.device.is_cpu:
            yield "sampler.enforce_eager", "the CPU captures no graphs; leave it out"
        sizes = job.model.sizes()  # of a folder vLLM says it
        heads, groups = (sizes[kind][1] if kind in sizes else 0 for kind in ("heads", "kv_heads"))
        size = job.model.hidden_size // heads if heads else CPU_HEADS[0]
        if job.device.is_cpu and size not in CPU_HEADS:
            text = f"vLLM's attention on the CPU has no heads of {size} numbers, but of 32, 64 …; take fewer heads"
            yield "model.heads", text
        if heads % self.tensor_parallel_size:
            yield (
                "sampler.tensor_parallel_size",
                f"model.heads={heads} do not divide into {self.tensor_parallel_size}; give a divisor of it",
            )
        elif groups and groups % self.tensor_parallel_size and self.tensor_parallel_size % groups:
            yield (
                "sampler.tensor_parallel_size",
                f"model.kv_heads={groups} neither divide into {self.tensor_parallel_size} nor divide it; give "
                "another tp",
            )


CONNECT_TIMEOUT_S = 10.0  # for a server to be there
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class ServerSamplerConfig(SamplingConfig):
    """A running server: vLLM, run serve, or another whose OpenAI completions return token ids."""

    factory: ClassVar[str] = "runner.sampler.server.build:build"
    engine: ClassVar[bool] = True
    served: ClassVar[bool] = True
    name: Literal["server"] = "server"
    url: str = Field(description="Address of the server, e.g. http://127.0.0.1:8000.")
    model: str | None = Field(
        default=None, min_length=1, description="Name that the server has the model by; null = the only one it has."
    )
    api_key_env: str | None = Field(
        default=None, min_length=1, description="Environment variable with the server's key; null = it wants none."
    )
    weight_sync: Literal["none", "adapter", "reload"] = Field(
        default="none",
        description="What the server gets after a step: none = nothing, its weights are what they are; adapter = the "
        "adapter under a new name; reload = all weights, merged, through vLLM's endpoints for development.",
    )
    folder: str | None = Field(
        default=None,
        min_length=1,
        description="Folder that both this machine and the server see, for weights; null = the server is on this one.",
    )
    sleep: bool = Field(
        default=False, description="Put the server to sleep while training, where it shares the cards with it."
    )
    retries: int = Field(
        default=10, ge=0, description="Further tries of a request after no answer, or a status of 429 or 500 to 599."
    )

    def weights_to_send(self) -> tuple[WeightParts, ...]:
        sent: dict[str, tuple[WeightParts, ...]] = {"none": (), "adapter": ("adapter",), "reload": ("changed", "fixed")}
        return sent[self.weight_sync]

    def extra_weight_copies(self) -> int:
        """Versions in this machine's memory for the server, beyond those that the lag needs.

        An adapter is copied, and the one before is deleted once it was read; full weights are linked, and those before
        are deleted then.
        """
        return 0 if self.folder else {"none": 0, "adapter": 2, "reload": 1}[self.weight_sync]

    def preflight(self) -> None:
        """Raise EnvironmentProblem where the key is not there."""
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            text = f"the environment variable {self.api_key_env} is not set; type export {self.api_key_env}=..."
            raise EnvironmentProblem(f"sampler.api_key_env: {text}")

    def preflight_here(self) -> None:
        """Raise EnvironmentProblem where no server answers: a started run would wait for it."""
        at = urlsplit(self.url)
        try:
            port = at.port or {"http": 80, "https": 443}[at.scheme]
            socket.create_connection((at.hostname or "", port), CONNECT_TIMEOUT_S).close()
        except OSError as error:
            text = f"nobody listens at {self.url} ({error.strerror or error}); start the server, and wait until it does"
            raise EnvironmentProblem(f"sampler.url: {text}") from error

    def problems(self, job: Any) -> list[tuple[str, str]]:
        wrong = address_problem(self.url)
        found = [] if wrong is None else [("sampler.url", wrong)]
        if job.launch.samplers:
            found.append(("launch.samplers", f"the server at {self.url} samples; type launch.samplers=0"))
        if self.sleep and job.algorithm.steps_ahead():
            found.append(("sampler.sleep", "sampling continues while training (algorithm.lag); leave it out"))
        return [
            *found,
            *(
                self._problems_without_sync(job)
                if self.weight_sync == "none"
                else self._problems_of_sync(job, wrong is None)
            ),
        ]

    def _problems_without_sync(self, job: Any) -> list[tuple[str, str]]:
        text = "is about weights that are sent, and sampler.weight_sync=none sends none; leave it out"
        given = {"folder": self.folder, "sync_logprob_tolerance": self.sync_logprob_tolerance}
        found = [(f"sampler.{name}", text) for name, value in given.items() if value is not None]
        if job.algorithm.needs_sampler and not job.algorithm.needs_sampler_logprobs():
            text = (
                "none leaves the server its weights, and this algorithm learns from the policy's own answers; type"
                " sampler.weight_sync=adapter (adapter=lora) or reload, or weigh the samples: algorithm.correction=tis"
            )
            found.append(("sampler.weight_sync", text))
        return found

    def _problems_of_sync(self, job: Any, understood: bool) -> list[tuple[str, str]]:
        found = []
        if self.weight_sync == "adapter" and job.adapter.trains_base:
            found.append(
                ("sampler.weight_sync", "adapter=none has no adapter to send; type sampler.weight_sync=reload")
            )
        if self.weight_sync == "adapter" and job.adapter.needs_whole_layers:
            found.append(("sampler.weight_sync", "vLLM knows no DoRA; type sampler.weight_sync=reload"))
        if understood and self.folder is None and urlsplit(self.url).hostname not in LOOPBACK:
            text = f"{urlsplit(self.url).hostname} may be another machine; set sampler.folder=PATH, seen by both"
            found.append(("sampler.folder", text))
        return found


class NoSamplerConfig(SamplerConfig):
    """No rollouts: for algorithms that learn from given data."""

    factory: ClassVar[str] = "runner.sampler.config:no_sampler"
    name: Literal["none"] = "none"


class TorchSamplerConfig(SamplingConfig):
    """The model itself, in plain PyTorch: rollouts are equal bit for bit in every run on one machine."""

    factory: ClassVar[str] = "runner.sampler.torch:build"
    shares_model: ClassVar[bool] = True
    name: Literal["torch"] = "torch"

    def problems(self, job: Any) -> list[tuple[str, str]]:
        if job.launch.samplers:
            return []
        text = "is about samplers of their own, and here the ranks sample; leave it out, or set launch.samplers"
        given = {"timeout_s": self.timeout_s, "sync_logprob_tolerance": self.sync_logprob_tolerance}
        return [(f"sampler.{name}", text) for name, value in given.items() if value is not None]


def no_sampler(config: NoSamplerConfig) -> None:
    """Nothing to build."""


COMPONENTS = (NoSamplerConfig, TorchSamplerConfig, VllmSamplerConfig, ServerSamplerConfig)
