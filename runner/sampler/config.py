"""What draws rollouts from the policy."""

import os
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from runner.errors import EnvironmentProblem
from runner.spec.base import ComponentConfig, Dtype, address_problem

Stop = Annotated[str, Field(min_length=1)]
Sent = Literal["changed", "fixed", "adapter", "base"]  # as `model.published` calls them
PATIENCE_S = 1500.0
TokenId = Annotated[int, Field(ge=0)]
LOOPBACK = ("localhost", "127.0.0.1", "::1")


VLLM_COLDEST, VLLM_HOTTEST = 0.01, 2.0  # temperatures that vLLM draws at
VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # sizes that its attention on the CPU has


class SamplerConfig(ComponentConfig):
    """Where rollouts come from."""

    group: ClassVar[str] = "sampler"
    engine: ClassVar[bool] = False  # it has weights of its own, under the names that a model on the hub has them by
    served: ClassVar[bool] = False  # it runs already, outside of the job

    def answer_tokens(self) -> int:
        """Most tokens of one answer."""
        return 0

    @property
    def patience_s(self) -> float:
        """Seconds that a sampler outside of the trainer is waited for: fewer than ranks wait for one another."""
        return PATIENCE_S

    def sent(self) -> tuple[Sent, ...]:
        """What an engine is sent of the policy: at every version, and, before the first one, for all of them."""
        return ()

    def cards(self) -> int:
        """Devices that one process which only samples takes."""
        return 1

    def stopping(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The strings and the token ids that end an answer, beside the model's own end of sequence."""
        return (), ()

    def preflight(self) -> None:
        """Raise EnvironmentProblem for what is missing on this machine."""


class NoSamplerConfig(SamplerConfig):
    """No rollouts: for algorithms that learn from given data."""

    factory: ClassVar[str] = "runner.sampler.none:build"
    name: Literal["none"] = "none"


class DrawingConfig(SamplerConfig):
    """What every sampler draws from, and how an answer ends."""

    temperature: float = Field(default=1.0, gt=0, description="Divides the logits; below 1 the likely grows likelier.")
    top_k: int | None = Field(default=None, ge=1, description="Draw from this many likeliest tokens; null = from all.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Draw from the fewest likeliest tokens whose probability reaches this."
    )
    min_p: float = Field(
        default=0.0, ge=0, lt=1, description="Draw from tokens at least this many times as likely as the likeliest."
    )
    max_new_tokens: int = Field(default=256, ge=1, description="Most tokens of an answer, the end token included.")
    stop: Annotated[tuple[Stop, ...], Field(strict=False)] = Field(
        default=(), description="Strings that end an answer when they appear in it; they stay part of it."
    )
    stop_tokens: Annotated[tuple[TokenId, ...], Field(strict=False)] = Field(
        default=(), description="Token ids that end an answer, beside the model's own end of sequence."
    )
    batch_size: int = Field(
        default=256, ge=1, description="Most answers in work at once; one that ends makes room for the next."
    )
    timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds that a sampler outside of the trainer may take for its part of a step; null = 1500.",
    )
    probe: float | None = Field(
        default=None,
        gt=0,
        description="Most that a sampler with weights of its own may differ from the trainer after they were sent (mean"
        " |log-prob.| of fixed tokens); null = 1e-3 for float32 weights, 0.05 for others.",
    )

    @property
    def patience_s(self) -> float:
        return PATIENCE_S if self.timeout_s is None else self.timeout_s

    def answer_tokens(self) -> int:
        return self.max_new_tokens

    def stopping(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return self.stop, self.stop_tokens


class TorchSamplerConfig(DrawingConfig):
    """The model itself draws, in plain PyTorch: rollouts are equal bit for bit in every run on the same machine."""

    factory: ClassVar[str] = "runner.sampler.torch:build"
    name: Literal["torch"] = "torch"

    def problems(self, job: Any) -> list[tuple[str, str]]:
        if job.launch.samplers:
            return []
        text = "is about samplers of their own, and here the ranks sample; leave it out, or set launch.samplers"
        given = {"timeout_s": self.timeout_s, "probe": self.probe}
        return [(f"sampler.{name}", text) for name, value in given.items() if value is not None]


class VllmSamplerConfig(DrawingConfig):
    """A vLLM engine draws: in each rank's process, asleep while that trains, or with launch.samplers in its own.

    Rollouts do not repeat bit for bit; on a resume those that were used are read from a journal."""

    factory: ClassVar[str] = "runner.sampler.vllm.build:build"
    engine: ClassVar[bool] = True
    name: Literal["vllm"] = "vllm"
    tp: int = Field(default=1, ge=1, description="Devices that one engine is spread over; with launch.samplers.")
    memory: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Share of a card's memory that an engine may take; null = 0.45 beside a trainer, else 0.9.",
    )
    cache_gib: float | None = Field(
        default=None, gt=0, description="GiB for keys and values; null = what sampler.memory leaves, on the CPU 1."
    )
    sleep: Literal[0, 1, 2] | None = Field(
        default=None,
        description="What an engine beside a trainer gives up meanwhile: 0 = nothing, 1 = its cache, weights go to the "
        "host, 2 = both; null = 1, on the CPU 0.",
    )
    sync: Literal["merged", "adapter"] = Field(
        default="merged",
        description="What is sent after a step: merged = the weights that it changed, the adapter's merged into them; "
        "adapter = the adapter alone, beside a base that was sent once.",
    )
    dtype: Dtype | None = Field(
        default=None,
        description="Data type of the engine's weights; null = that of the policy's matrix products.",
    )
    eager: bool | None = Field(
        default=None,
        description="Run without captured graphs; null = false on CUDA, else true.",
    )
    max_length: int | None = Field(
        default=None, ge=2, description="Most tokens of a prompt and its answer; null = what the job may need."
    )

    def sent(self) -> tuple[Sent, ...]:
        return ("adapter", "base") if self.sync == "adapter" else ("changed", "fixed")

    def cards(self) -> int:
        return self.tp

    def problems(self, job: Any) -> list[tuple[str, str]]:
        return [*self._placing(job), *self._sending(job), *self._computing(job)]

    def _placing(self, job: Any) -> Iterator[tuple[str, str]]:
        own, cpu = job.launch.samplers > 0, job.device.name == "cpu"
        if self.tp > 1 and not own:
            text = "an engine over several devices has processes of its own; set launch.samplers, or leave it out"
            yield "sampler.tp", text
        if self.sleep is not None and own:
            yield "sampler.sleep", "a sampler of its own shares its device with nobody; leave it out"
        elif self.sleep and cpu:
            yield "sampler.sleep", "vLLM knows no sleep on the CPU (a call does nothing); leave it out"
        if self.timeout_s is not None and not own:
            text = "is about samplers of their own, and here the ranks sample; leave it out, or set launch.samplers"
            yield "sampler.timeout_s", text
        if self.memory is not None and cpu:
            yield "sampler.memory", "is a share of a card's memory, and this is the CPU; set sampler.cache_gib instead"

    def _sending(self, job: Any) -> Iterator[tuple[str, str]]:
        if self.sync != "adapter":
            return
        if job.adapter.name == "none":
            yield "sampler.sync", "adapter=none has no adapter to send; type sampler.sync=merged"
        elif getattr(job.adapter, "dora", False):
            yield "sampler.sync", "vLLM knows no DoRA; type sampler.sync=merged"

    def _computing(self, job: Any) -> Iterator[tuple[str, str]]:
        longest = job.data.max_length + self.max_new_tokens
        if self.max_length is not None and self.max_length < longest:
            text = f"data.max_length and sampler.max_new_tokens come to {longest} tokens; give as many, or leave it out"
            yield "sampler.max_length", text
        if not VLLM_COLDEST <= self.temperature <= VLLM_HOTTEST:
            text = f"vLLM draws at {VLLM_COLDEST} to {VLLM_HOTTEST}, and takes colder for {VLLM_COLDEST} without a word"
            yield "sampler.temperature", f"{text}; give one of these"
        if self.eager is False and job.device.name == "cpu":
            yield "sampler.eager", "the CPU captures no graphs; leave it out"
        heads, groups = getattr(job.model, "heads", 0), getattr(job.model, "kv_heads", 0)  # of a folder vLLM says it
        size = job.model.hidden_size // heads if heads else VLLM_CPU_HEADS[0]
        if job.device.name == "cpu" and size not in VLLM_CPU_HEADS:
            text = f"vLLM's attention on the CPU has no heads of {size} numbers, but of 32, 64 …; take fewer heads"
            yield "model.heads", text
        if heads % self.tp:
            yield "sampler.tp", f"model.heads={heads} do not divide into {self.tp}; give a divisor of it"
        elif groups and groups % self.tp and self.tp % groups:
            yield "sampler.tp", f"model.kv_heads={groups} neither divide into {self.tp} nor divide it; give another tp"


class VllmServerConfig(DrawingConfig):
    """A server that runs already draws: vLLM, or another that speaks OpenAI's completions and gives token ids."""

    factory: ClassVar[str] = "runner.sampler.server.build:build"
    engine: ClassVar[bool] = True
    served: ClassVar[bool] = True
    name: Literal["vllm_server"] = "vllm_server"
    url: str = Field(description="Address of the server, e.g. http://127.0.0.1:8000.")
    model: str | None = Field(
        default=None, min_length=1, description="Name that the server has the model by; null = the only one it has."
    )
    key_variable: str | None = Field(
        default=None, min_length=1, description="Environment variable with the server's key; null = it wants none."
    )
    sync: Literal["none", "adapter", "reload"] = Field(
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

    def sent(self) -> tuple[Sent, ...]:
        sent: dict[str, tuple[Sent, ...]] = {"none": (), "adapter": ("adapter",), "reload": ("changed", "fixed")}
        return sent[self.sync]

    def preflight(self) -> None:
        """Raise EnvironmentProblem where the key is not there."""
        if self.key_variable is not None and not os.environ.get(self.key_variable):
            text = f"the environment variable {self.key_variable} is not set; type export {self.key_variable}=..."
            raise EnvironmentProblem(f"sampler.key_variable: {text}")

    def problems(self, job: Any) -> list[tuple[str, str]]:
        wrong = address_problem(self.url)
        found = [] if wrong is None else [("sampler.url", wrong)]
        if job.launch.samplers:
            found.append(("launch.samplers", f"the server at {self.url} samples; leave it out"))
        if self.sleep and job.algorithm.steps_ahead():
            found.append(("sampler.sleep", "sampling goes on while training (algorithm.lag); leave it out"))
        return [*found, *(self._unsent(job) if self.sync == "none" else self._sent(job, wrong is None))]

    def _unsent(self, job: Any) -> list[tuple[str, str]]:
        text = "is about weights that are sent, and sampler.sync=none sends none; leave it out"
        given = {"folder": self.folder, "probe": self.probe}
        found = [(f"sampler.{name}", text) for name, value in given.items() if value is not None]
        if job.algorithm.samples and not job.algorithm.weighs_samples():
            text = (
                "none leaves the server its weights, and this algorithm learns from the policy's own answers; type"
                " sampler.sync=adapter (adapter=lora) or reload, or weigh the samples: algorithm.correction=tis"
            )
            found.append(("sampler.sync", text))
        return found

    def _sent(self, job: Any, understood: bool) -> list[tuple[str, str]]:
        found = []
        if self.sync == "adapter" and job.adapter.name == "none":
            found.append(("sampler.sync", "adapter=none has no adapter to send; type sampler.sync=reload"))
        if self.sync == "adapter" and getattr(job.adapter, "dora", False):
            found.append(("sampler.sync", "vLLM knows no DoRA; type sampler.sync=reload"))
        if understood and self.folder is None and urlsplit(self.url).hostname not in LOOPBACK:
            text = f"{urlsplit(self.url).hostname} may be another machine; set sampler.folder=PATH, seen by both"
            found.append(("sampler.folder", text))
        return found


COMPONENTS = (NoSamplerConfig, TorchSamplerConfig, VllmSamplerConfig, VllmServerConfig)
