"""What a user can set of a model."""

import importlib.util
import os
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from runner.core.errors import EnvironmentProblem, SpecError
from runner.spec.base import ComponentConfig, Dtype, ResolveSource, absolute_if_local

ModelPart = Literal["vision", "aligner", "language", "router"]


def require_liger() -> None:
    """Raise EnvironmentProblem where Liger-Kernel is not installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise EnvironmentProblem(
            'model.kernels=liger needs the package liger-kernel\n  pip install "posttrain-run[liger]"'
        )


def require_bitsandbytes(quantization: str | None) -> None:
    """Raise EnvironmentProblem where it is needed (nf4) and not installed."""
    if quantization == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        text = "a base in nf4 (model.quantization) needs bitsandbytes, which is not installed"
        raise EnvironmentProblem(f"{text}\n  pip install 'bitsandbytes>=0.50'")


class ModelConfig(ComponentConfig):
    """A causal language model and how it runs ragged batches."""

    group: ClassVar[str] = "model"
    tokenizer_factory: ClassVar[str]  # "module:attribute" of config -> tokenizer, needed before the weights are
    image_reader_factory: ClassVar[str | None] = None  # of config, tokenizer → reader of images, or None
    architecture_factory: ClassVar[str | None] = None  # the same of its transformers config; None = sets no limit
    dtype: Dtype | None = Field(
        default=None,
        description="Data type of computation and of frozen weights (mixed precision); trainable weights are stored "
        "in float32. null = bfloat16 on cuda and npu, float32 on cpu.",
    )
    head_dtype: Literal["float32"] | None = Field(
        default=None,
        description="Data type of the LM head's matrix product and of the logits, in training and with sampler=torch; "
        "null = model.dtype.",
    )
    batch_layout: Literal["packed", "padded"] = Field(
        default="packed",
        description="Layout of a micro-batch: packed = sequences end to end without padding; padded = the model's own "
        "attention.",
    )
    gradient_checkpointing: bool | Literal["selective"] | Annotated[int, Field(ge=2)] = Field(
        default=False,
        description="Recompute activations in the backward pass to save memory: true = every layer, about a third "
        "more time; n = every n-th layer; selective = all but attention and every second matrix product.",
    )
    activation_offloading: bool = Field(
        default=False, description="Offload the inputs of recomputed layers to host memory: less device memory, slower."
    )
    compile: bool | None = Field(
        default=None,
        description="Compile the decoder layers (torch.compile): the first step is slow, later steps are faster. "
        "null = true in training on cuda if torch has a compiler there and nothing in the job excludes it.",
    )
    kernels: Literal["liger"] | None = Field(
        default=None,
        description="Kernels of norms, rotary positions and SwiGLU: liger = those of Liger-Kernel, on CUDA, in Qwen2, "
        "Qwen2.5, Qwen3, Qwen3-MoE and Llama models; null = those of transformers, or of the device.",
    )
    quantization: Literal["nf4", "int8"] | None = Field(
        default=None,
        description="Store the linear layers of the frozen decoder in 4 bits (nf4, by bitsandbytes) or 8 bits (int8); "
        "needs adapter=lora.",
    )
    router_replay: Literal["auto", "off", "sampler", "old"] = Field(
        default="auto",
        description="Router replay: off = the routers choose experts in training; sampler = use those of each token "
        "in sampling; old = those of the pass for the old log-probabilities; auto = sampler where the two can differ.",
    )
    lm_head_chunk_tokens: int = Field(
        default=2048, ge=1, description="Tokens per chunk of the LM head; logits of one chunk exist at a time."
    )

    @property
    def source(self) -> str | None:
        """The folder or hub id that the model is read from; None = it is made here."""
        return None

    @property
    def tokenizer_source(self) -> str | None:
        """The folder or hub id of a tokenizer that was chosen beside the model; None = the model's own."""
        return None

    @property
    def runs_remote_code(self) -> bool:
        """Whether code from the model's folder may run."""
        return False

    @property
    def draws_weights(self) -> bool:
        """Whether its first weights are random numbers."""
        return True

    @property
    def frozen_parts(self) -> tuple[ModelPart, ...] | None:
        """Parts of an image-text model that are not trained; None = all but the language model."""
        return None

    @property
    def compute_dtype(self) -> Dtype:
        """`dtype`; of a config that no job was decoded with, and that leaves it out, that of the CPU."""
        return self.dtype or "float32"

    def preflight(self) -> None:
        """Raise EnvironmentProblem where this machine cannot get the model's files, or quantize them."""
        require_bitsandbytes(self.quantization)
        if self.kernels is not None:
            require_liger()

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = list(self._head_dtype_problems(job))
        if self.compile and (used := list(self._uncompilable(job))):
            found.append(("model.compile", f"{' and '.join(used)} is not tested with torch.compile; leave it out"))
        if self.kernels is not None:
            found += [("model.kernels", f"liger: {text}") for text in self._liger_problems(job)]
        if self.quantization is not None:
            found += [("model.quantization", text) for text in self._unquantizable(job)]
        if self.router_replay in ("sampler", "old") and (reason := self.replay_objection(job)):
            found.append(("model.router_replay", f"{reason}; type model.router_replay=off"))
        if self.activation_offloading and not self.gradient_checkpointing:
            text = "offloads the inputs of recomputed layers; type model.gradient_checkpointing=true, or leave"
            found.append(("model.activation_offloading", f"{text} it out"))
        elif self.activation_offloading and job.device.is_cpu:
            text = "device=cpu already has activations in host memory; leave it out"
            found.append(("model.activation_offloading", text))
        return found

    def replay_objection(self, job: Any) -> str | None:
        """Why a job cannot replay the experts of `router_replay`; None = it can, if its model has routers."""
        if not job.algorithm.needs_sampler:
            return f"algorithm={job.algorithm.name} samples nothing"
        if self.router_replay == "old":
            if job.algorithm.old_logprobs_source != "trainer":
                return "the trainer makes no pass for old log-probabilities, as with algorithm.mini_batches=2"
        elif not job.sampler.shares_model:
            return f"sampler={job.sampler.name} does not return the experts of its tokens: {job.sampler.lacks_experts}"
        return self.router_objection(job)

    def router_objection(self, job: Any) -> str | None:
        """Why experts cannot be counted nor replayed in a job; None = they can."""
        if job.parallelism.deepspeed:
            return f"parallelism={job.parallelism.name} does not support it"
        if self.compile and self.gradient_checkpointing:  # a recomputed layer is compiled as one graph, or not at all
            return "model.compile=true compiles recomputed layers with their routers"
        if cut := [name for name in _parallel_sizes(job) if name in ("pp", "cp")]:
            return f"parallelism.{cut[0]} does not support it"
        return None

    def _head_dtype_problems(self, job: Any) -> Iterator[tuple[str, str]]:
        """Where a head is not read in float32 beside bfloat16 layers."""
        if self.head_dtype is None or self.compute_dtype == "float32":
            return
        cut = [name for name in _parallel_sizes(job) if not name.startswith("dp_")]
        if cut or job.parallelism.deepspeed:
            kind = "|".join(cut) or job.parallelism.name
            text = f"with {kind}, embedding and head are cut or gathered in bfloat16, so a float32 head has no effect"
            yield "model.head_dtype", f"{text}; leave it out, or type parallelism=ddp or fsdp"

    def _liger_problems(self, job: Any) -> Iterator[str]:
        """Why not to use Liger's kernels."""
        if reason := job.device.liger_problem():
            yield reason
        if self.compile:
            text = "model.compile=true fuses the same operations, and is not tested with Triton kernels"
            yield f"{text}; type model.compile=false"
        if self.gradient_checkpointing == "selective":
            text = "its rotary kernel overwrites the keys that model.gradient_checkpointing=selective keeps"
            yield f"{text}, so gradients would be wrong; type model.gradient_checkpointing=true"

    def _unquantizable(self, job: Any) -> Iterator[str]:
        """Why not to quantize the base."""
        if job.adapter.trains_base:
            yield "quantized weights cannot be trained; type adapter=lora, or leave model.quantization out"
        elif job.adapter.needs_whole_layers:
            option = job.adapter.needs_whole_layers
            text = f"{option} reads the norms of the base's weights, which is not tested with quantized weights"
            yield f"{text}; leave {option} out"
        if reason := job.device.quantization_problem():
            yield f"{reason}; leave it out: LoRA on a bfloat16 base"
        sizes = [name for name in _parallel_sizes(job) if name != "dp_replicate"]
        if sizes or job.parallelism.deepspeed:
            kind = ", ".join(f"parallelism.{name}" for name in sizes) or f"parallelism={job.parallelism.name}"
            yield f"{kind} cuts weights, and a quantized one cannot be cut; type parallelism=ddp"
        if job.sampler.weights_to_send() == ("adapter",):
            text = "the server's base is not quantized, so the adapter would run on different base weights"
            yield f"{text}; type sampler.weight_sync=reload"

    def compile_objection(self, job: Any) -> str | None:
        """Why layers are not compiled by default; None = nothing in the job excludes it."""
        used = [*self._uncompilable(job)]
        if self.kernels is not None:
            used.append(f"model.kernels={self.kernels}")
        return f"not tested with torch.compile: {', '.join(used)}" if used else None

    def _uncompilable(self, job: Any) -> Iterator[str]:
        """Options of a job that exclude compiled layers."""
        if self.quantization:
            yield f"model.quantization={self.quantization}"
        if self.activation_offloading:  # its hooks break the graph
            yield "model.activation_offloading=true"
        if job.parallelism.deepspeed:
            yield f"parallelism={job.parallelism.name}"
        for name, size in _parallel_sizes(job).items():
            if name not in ("dp_replicate", "dp_shard"):
                yield f"parallelism.{name}={size}"
        if job.device.deterministic and not job.device.is_cpu:  # inductor may choose a kernel by its speed
            yield "device.deterministic=true"

    def sizes(self) -> dict[str, tuple[str, int]]:
        """Sizes that parallelism divides (heads, kv_heads, features, layers, experts): option and value.

        Empty where only the model's folder has them.
        """
        return {}


def _parallel_sizes(job: Any) -> dict[str, int]:
    """The dimensions of the job's mesh that have several ranks; none for a mesh that is refused elsewhere."""
    try:
        mesh = job.parallelism.mesh(job.launch.world)
    except SpecError:
        return {}
    return {name: size for name, size in mesh._asdict().items() if size > 1}


class SmallConfig(ModelConfig):
    """A small model from random weights, with its own byte-level tokenizer and chat template."""

    factory: ClassVar[str] = "runner.model.tiny:build"
    tokenizer_factory: ClassVar[str] = "runner.model.tiny:tokenizer"
    architecture_factory: ClassVar[str | None] = "runner.model.tiny:architecture"
    hidden_size: int = Field(default=128, ge=8, multiple_of=8, description="Width of the residual stream.")
    intermediate_size: int = Field(default=384, ge=8, description="Width of the feed-forward layers.")
    layers: int = Field(default=4, ge=1, description="Decoder layers.")
    heads: int = Field(default=4, ge=1, description="Attention heads.")
    kv_heads: int = Field(
        default=4, ge=1, description="Key-value heads; fewer than heads means grouped-query attention."
    )
    vocab_size: int = Field(default=512, ge=259, description="Vocabulary size; at least the tokenizer's 259.")
    max_positions: int = Field(default=2048, ge=16, description="Longest sequence in tokens.")
    divided: ClassVar[dict[str, str]]  # what parallelism divides, by the option that says how many there are

    def sizes(self) -> dict[str, tuple[str, int]]:
        return {kind: (f"model.{name}", getattr(self, name)) for kind, name in self.divided.items()}

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if (job.data.max_length or 0) > self.max_positions:
            text = f"{job.data.max_length} is above model.max_positions={self.max_positions}"
            found.append(("data.max_length", f"{text}; lower data.max_length or raise model.max_positions"))
        if self.hidden_size % self.heads:
            found.append(("model.heads", f"{self.heads} does not divide model.hidden_size={self.hidden_size}"))
        elif (self.hidden_size // self.heads) % 2:
            found.append(
                ("model.heads", "rotary embeddings need an even head size; change model.heads or model.hidden_size")
            )
        if self.heads % self.kv_heads:
            found.append(("model.kv_heads", f"{self.kv_heads} does not divide model.heads={self.heads}"))
        return found


class TinyConfig(SmallConfig):
    """A small Qwen2-type model from random weights, with its own byte-level tokenizer and chat template."""

    name: Literal["tiny"] = "tiny"
    divided: ClassVar[dict[str, str]] = {
        "heads": "heads",
        "kv_heads": "kv_heads",
        "features": "intermediate_size",
        "layers": "layers",
    }


class TinyMoeConfig(SmallConfig):
    """A small Qwen3-MoE-type model from random weights: each token uses some of a layer's experts."""

    name: Literal["tiny_moe"] = "tiny_moe"
    intermediate_size: int = Field(default=64, ge=8, description="Width of each expert's feed-forward layer.")
    experts: int = Field(default=8, ge=1, description="Number of experts per layer.")
    experts_per_token: int = Field(default=2, ge=1, description="Experts per token (top-k routing).")
    divided: ClassVar[dict[str, str]] = {
        "heads": "heads",
        "kv_heads": "kv_heads",
        "layers": "layers",
        "experts": "experts",
    }

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if self.experts_per_token > self.experts:
            text = f"{self.experts_per_token} is above model.experts={self.experts}"
            found.append(("model.experts_per_token", text))
        return found


class TinyVlConfig(SmallConfig):
    """A small Qwen2-VL-type model from random weights: it reads images, and all of it is trained."""

    image_reader_factory: ClassVar[str | None] = "runner.model.tiny:image_reader"
    name: Literal["tiny_vl"] = "tiny_vl"
    vocab_size: int = Field(default=512, ge=263, description="Vocabulary size; at least the tokenizer's 263.")
    layers: int = Field(default=2, ge=1, description="Decoder layers.")
    vision_layers: int = Field(default=1, ge=1, description="Layers of the vision part.")
    patch_size: int = Field(default=4, ge=2, description="Width of a patch in pixels; an image token is 2 x 2 patches.")
    divided: ClassVar[dict[str, str]] = {"heads": "heads", "kv_heads": "kv_heads", "layers": "layers"}

    @property
    def frozen_parts(self) -> tuple[ModelPart, ...] | None:
        return ()


class HfConfig(ModelConfig):
    """Any Hugging Face causal LM or image-text model, by folder or hub id."""

    factory: ClassVar[str] = "runner.model.hf:build"
    tokenizer_factory: ClassVar[str] = "runner.model.hf:tokenizer"
    image_reader_factory: ClassVar[str | None] = "runner.model.hf:image_reader"
    architecture_factory: ClassVar[str | None] = "runner.model.hf:architecture"
    name: Literal["hf"] = "hf"
    path: str = Field(
        min_length=1,
        description="The model: a folder, a run, a PEFT adapter's folder, a hub id or modelscope:ID, e.g. "
        "/models/Qwen3-0.6B or Qwen/Qwen3-0.6B.",
    )
    base: str | None = Field(
        default=None,
        description="Base model of the adapter at model.path: folder or hub id; null = the one the adapter names.",
    )
    revision: str | None = Field(
        default=None, description="Branch, tag or commit on the hub or ModelScope; null = the default branch."
    )
    tokenizer: str | None = Field(default=None, description="Folder or hub id of the tokenizer; null = model.path.")
    trust_remote_code: bool = Field(
        default=False, description="Run Python code from the model folder. Only for models whose code you have read."
    )
    from_scratch: bool = Field(default=False, description="Keep the architecture and initialize the weights at random.")
    freeze: Annotated[tuple[ModelPart, ...], Field(strict=False)] | None = Field(
        default=None,
        description="Parts that are not trained, nor get an adapter by name: of an image-text model vision, aligner, "
        "language (null = [vision,aligner]; [] = all are trained); of a mixture of experts router.",
    )

    @property
    def source(self) -> str | None:
        return self.path

    @property
    def tokenizer_source(self) -> str | None:
        return self.tokenizer

    @property
    def runs_remote_code(self) -> bool:
        return self.trust_remote_code

    @property
    def draws_weights(self) -> bool:
        return self.from_scratch

    @property
    def frozen_parts(self) -> tuple[ModelPart, ...] | None:
        return self.freeze

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if self.from_scratch and job.init_from is not None:
            found.append(("model.from_scratch", "init_from gives the weights; leave one of them out"))
        if self.revision is not None and (self.path == "latest" or os.path.exists(os.path.expanduser(self.path))):
            found.append(("model.revision", f"{self.path} is a folder, which has no revisions; leave it out"))
        return found

    def with_absolute_paths(self) -> Self:
        tokenizer, base = (text and absolute_if_local(text) for text in (self.tokenizer, self.base))
        return self.model_copy(update={"path": absolute_if_local(self.path), "base": base, "tokenizer": tokenizer})

    def with_resolved_source(self, resolve: ResolveSource) -> Self:
        path = resolve(self.path, "model.path", self.base, not self.from_scratch, self.revision)
        revision = self.revision if path == self.path else None  # a folder has none
        return self.model_copy(update={"path": path, "revision": revision})

    def preflight(self) -> None:
        super().preflight()
        from runner.model.model_folder import check  # here, because every command reads this module

        check(self.path, "model.path")


COMPONENTS = (TinyConfig, TinyMoeConfig, TinyVlConfig, HfConfig)
