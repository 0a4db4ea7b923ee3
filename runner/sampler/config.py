"""Samplers: the model itself, a vLLM engine, or a server that runs already."""

import os
import socket
from collections.abc import Iterator
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from runner.core.device_kinds import CUDA
from runner.core.errors import EnvironmentProblem
from runner.sampler.base import SamplerConfig as SamplerConfig
from runner.sampler.base import SamplingConfig, WeightParts
from runner.spec.base import LOOPBACK, Dtype, address_problem

COLDEST, HOTTEST = 0.01, 2.0  # temperatures that vLLM draws at
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # sizes that its attention on the CPU has


def _adapter_problems(job: Any, instead: str) -> Iterator[tuple[str, str]]:
    """Why an adapter cannot be sent alone; instead: the value of sampler.weight_sync that can be used."""
    remedy = f"type sampler.weight_sync={instead}"
    if job.adapter.trains_base:
        yield "sampler.weight_sync", f"adapter=none has no adapter to send; {remedy}"
    elif job.adapter.needs_whole_layers:
        yield "sampler.weight_sync", f"vLLM does not support DoRA; {remedy}"
    elif job.adapter.trained_modules:
        yield "sampler.weight_sync", f"vLLM does not support adapter.modules_to_save; {remedy}, or leave it out"


class VllmSamplerConfig(SamplingConfig):
    """vLLM in each rank, asleep during updates, or in separate processes (launch.samplers).

    Not bit-reproducible; a resume reads the rollout journal.
    """

    factory: ClassVar[str] = "runner.sampler.vllm.build:build"
    engine: ClassVar[bool] = True
    lacks_experts: ClassVar[str] = "vLLM 0.32 returns them with its Model Runner V2 alone, which is not used"
    name: Literal["vllm"] = "vllm"
    tensor_parallel_size: int = Field(
        default=1, ge=1, description="Devices per engine (tensor parallel); needs launch.samplers."
    )
    gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Fraction of device memory for an engine; null = 0.45 on the trainer's device, else 0.9.",
    )
    kv_cache_memory_bytes: int | None = Field(
        default=None,
        gt=0,
        description="Size of the KV cache; null = what sampler.gpu_memory_utilization leaves, on the CPU 1 GiB.",
    )
    sleep: Literal[0, 1, 2] | None = Field(
        default=None,
        description="Memory that an engine on the trainer's device frees during training: 0 = none, 1 = its KV cache, "
        "and weights move to the host, 2 = both; null = 1, on the CPU 0.",
    )
    weight_sync: Literal["merged", "adapter"] = Field(
        default="merged",
        description="Weights that are sent after a step: merged = the changed weights, with the adapter merged; "
        "adapter = only the adapter, as the base was sent once.",
    )
    dtype: Dtype | None = Field(
        default=None, description="Data type of the engine; null = that of the policy's matrix products."
    )
    match: Literal["none", "fp32_head", "batch_invariant"] = Field(
        default="none",
        description="Options of vLLM that bring it closer to the trainer: fp32_head = its LM head in float32, with "
        "model.head_dtype=float32; batch_invariant = kernels whose results do not depend on other sequences (CUDA).",
    )
    enforce_eager: bool | None = Field(
        default=None, description="Run without CUDA graphs; null = false on CUDA, else true."
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="Maximum tokens of prompt and completion, or of an episode; null = what the job needs; "
        "for episodes of several turns, and in launch.samplers without data.max_length, what the model allows.",
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

    @property
    def length_limit(self) -> int | None:
        return self.max_model_len

    def weights_dtype(self, products: Dtype) -> Dtype | None:
        return self.dtype or products

    def preflight_here(self) -> None:
        from runner.sampler.vllm.versions import require_vllm  # here, because every command reads this module

        require_vllm()

    def problems(self, job: Any) -> list[tuple[str, str]]:
        return [
            *self._placement_problems(job),
            *(_adapter_problems(job, "merged") if self.weight_sync == "adapter" else ()),
            *self._engine_problems(job),
            *self._match_problems(job),
        ]

    def _match_problems(self, job: Any) -> Iterator[tuple[str, str]]:
        if self.match == "batch_invariant" and job.device.kind is not CUDA and not job.device.is_auto:
            text = f"vLLM has no batch-invariant kernels for device={job.device.name} that come with its packages"
            yield "sampler.match", f"{text}; leave it out"
        if self.match == "fp32_head" and self.weights_dtype(job.model.compute_dtype) == "float32":
            yield "sampler.match", "the whole engine computes in float32; leave it out"
        elif self.match == "fp32_head" and job.model.head_dtype != "float32":
            yield "sampler.match", "only the engine would have a float32 head; type model.head_dtype=float32 as well"

    def _placement_problems(self, job: Any) -> Iterator[tuple[str, str]]:
        own, cpu = job.launch.samplers > 0, job.device.is_cpu
        if self.tensor_parallel_size > 1 and not own:
            text = "an engine on several devices needs its own processes; set launch.samplers, or leave it out"
            yield "sampler.tensor_parallel_size", text
        if not own and job.algorithm.steps_ahead():
            text = (
                "a rank waits while its engine samples, so it cannot run ahead; set launch.samplers, or algorithm.lag=0"
            )
            yield "algorithm.lag", text
        if self.sleep is not None and own:
            yield "sampler.sleep", "with launch.samplers no trainer shares the engine's device; leave it out"
        elif self.sleep and cpu:
            yield "sampler.sleep", "vLLM has no sleep mode on the CPU; leave it out"
        if self.timeout_s is not None and not own:
            text = "is used only with launch.samplers, but here the ranks sample; leave it out, or set launch.samplers"
            yield "sampler.timeout_s", text
        if self.gpu_memory_utilization is not None and cpu:
            yield (
                "sampler.gpu_memory_utilization",
                "is a fraction of device memory, but this is the CPU; set sampler.kv_cache_memory_bytes instead",
            )

    def _engine_problems(self, job: Any) -> Iterator[tuple[str, str]]:
        longest = (job.data.max_length or 0) + self.max_new_tokens  # null is checked again when it is known
        if self.max_model_len is not None and self.max_model_len < longest:
            text = f"data.max_length and sampler.max_new_tokens need {longest} tokens; set that, or leave it out"
            yield "sampler.max_model_len", text
        if not COLDEST <= self.temperature <= HOTTEST:
            text = f"vLLM supports {COLDEST} to {HOTTEST}, and silently raises lower values to {COLDEST}"
            yield "sampler.temperature", f"{text}; set a supported value"
        if self.truncates and self.temperature != 1 and job.algorithm.needs_sampler_logprobs():
            text = (
                "this algorithm needs log-probabilities at this temperature and before truncation, but vLLM reports "
                "them before both or after both; type sampler.temperature=1, leave top_k, top_p and min_p out, or "
                "type sampler=torch"
            )
            yield "sampler.temperature", text
        if self.enforce_eager is False and job.device.is_cpu:
            yield "sampler.enforce_eager", "the CPU has no CUDA graphs; leave it out"
        sizes = job.model.sizes()  # of a folder vLLM says it
        heads, groups = (sizes[kind][1] if kind in sizes else 0 for kind in ("heads", "kv_heads"))
        size = job.model.hidden_size // heads if heads else CPU_HEADS[0]
        if job.device.is_cpu and size not in CPU_HEADS:
            text = f"vLLM's attention on the CPU does not support head size {size}, only 32, 64 …; set fewer heads"
            yield "model.heads", text
        if heads % self.tensor_parallel_size:
            yield (
                "sampler.tensor_parallel_size",
                f"{self.tensor_parallel_size} does not divide model.heads={heads}; set a divisor of it",
            )
        elif groups and groups % self.tensor_parallel_size and self.tensor_parallel_size % groups:
            yield (
                "sampler.tensor_parallel_size",
                f"model.kv_heads={groups} is neither a multiple nor a divisor of {self.tensor_parallel_size}; set "
                "another size",
            )


CONNECT_TIMEOUT_S = 10.0  # for a server to be there


class ServerSamplerConfig(SamplingConfig):
    """A running server: vLLM, run serve, or another whose OpenAI completions return token ids."""

    factory: ClassVar[str] = "runner.sampler.server.build:build"
    engine: ClassVar[bool] = True
    served: ClassVar[bool] = True
    lacks_experts: ClassVar[str] = "OpenAI's completions have no field for them"
    name: Literal["server"] = "server"
    url: str = Field(description="URL of the server, e.g. http://127.0.0.1:8000.")
    model: str | None = Field(
        default=None, min_length=1, description="Name of the model on the server; null = its only model."
    )
    api_key_env: str | None = Field(
        default=None, min_length=1, description="Environment variable with the server's API key; null = no key."
    )
    weight_sync: Literal["none", "adapter", "reload"] = Field(
        default="none",
        description="Weights that are sent after a step: none = nothing, the server keeps its weights; adapter = the "
        "adapter under a new name; reload = all weights, merged, through vLLM's development endpoints.",
    )
    folder: str | None = Field(
        default=None,
        min_length=1,
        description="Folder for weights that this machine and the server share; null = the server is on this machine.",
    )
    sleep: bool = Field(default=False, description="Put the server to sleep during training, if it shares the devices.")
    retries: int = Field(
        default=10, ge=0, description="Retries of a request after no response, or after status 429 or 500 to 599."
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
            text = f"no server listens at {self.url} ({error.strerror or error}); start it, and wait until it listens"
            raise EnvironmentProblem(f"sampler.url: {text}") from error

    def problems(self, job: Any) -> list[tuple[str, str]]:
        wrong = address_problem(self.url)
        found = [] if wrong is None else [("sampler.url", wrong)]
        if job.launch.samplers:
            found.append(("launch.samplers", f"the server at {self.url} is the sampler; type launch.samplers=0"))
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
        text = "is used only when weights are sent, but sampler.weight_sync=none; leave it out"
        given = {"folder": self.folder, "sync_logprob_tolerance": self.sync_logprob_tolerance}
        found = [(f"sampler.{name}", text) for name, value in given.items() if value is not None]
        if job.algorithm.needs_sampler and not job.algorithm.needs_sampler_logprobs():
            text = (
                "none sends no weights, but this algorithm needs samples of the current policy; type "
                "sampler.weight_sync=adapter (adapter=lora) or reload, or algorithm.correction=tis"
            )
            found.append(("sampler.weight_sync", text))
        return found

    def _problems_of_sync(self, job: Any, understood: bool) -> list[tuple[str, str]]:
        found = [*_adapter_problems(job, "reload")] if self.weight_sync == "adapter" else []
        if understood and self.folder is None and urlsplit(self.url).hostname not in LOOPBACK:
            text = f"{urlsplit(self.url).hostname} may be another machine; set sampler.folder=PATH, shared by both"
            found.append(("sampler.folder", text))
        return found


class NoSamplerConfig(SamplerConfig):
    """No rollouts: for algorithms that train on a data set."""

    factory: ClassVar[str] = "runner.sampler.config:no_sampler"
    name: Literal["none"] = "none"


class TorchSamplerConfig(SamplingConfig):
    """The model itself, in plain PyTorch; rollouts repeat bit for bit, except with interruptible=true."""

    factory: ClassVar[str] = "runner.sampler.torch:TorchSampler"
    shares_model: ClassVar[bool] = True
    name: Literal["torch"] = "torch"
    interruptible: bool = Field(
        default=False,
        description="Load newer weights during generation, between two tokens; requires algorithm.lag above 0. Not "
        "reproducible, because it depends on timing; a resume reads completions from the rollout journal.",
    )

    @property
    def is_interruptible(self) -> bool:
        return self.interruptible

    def problems(self, job: Any) -> list[tuple[str, str]]:
        return [*self._interruptible_problems(job), *self._problems_of_place(job)]

    def _interruptible_problems(self, job: Any) -> list[tuple[str, str]]:
        if not self.interruptible:
            return []
        if job.launch.samplers:
            text = "rollout servers cannot load weights during generation; type launch.samplers=0"
            return [("sampler.interruptible", text)]
        if not job.algorithm.steps_ahead():
            text = "lag 0 has no newer weights during generation; type algorithm.lag=1"
            return [("sampler.interruptible", text)]
        return []

    def _problems_of_place(self, job: Any) -> list[tuple[str, str]]:
        if job.launch.samplers:
            return []
        text = "is used only with launch.samplers, but here the ranks sample; leave it out, or set launch.samplers"
        given = {"timeout_s": self.timeout_s, "sync_logprob_tolerance": self.sync_logprob_tolerance}
        return [(f"sampler.{name}", text) for name, value in given.items() if value is not None]


def no_sampler(config: NoSamplerConfig) -> None:
    """Nothing to build."""


COMPONENTS = (NoSamplerConfig, TorchSamplerConfig, VllmSamplerConfig, ServerSamplerConfig)
