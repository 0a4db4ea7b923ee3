"""What all trained transformers models share: running a packed batch through the backbone, and modes.

    batch ──layout──▶ backbone ──▶ hidden [W, H]

Legend: T tokens, W of them on this rank (all, or see `context`), H hidden size. Passes with gradient run in training
mode (dropout, gradient checkpointing), all others in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor, distributed, nn

from runner.core.batch import Batch, pack
from runner.core.errors import Problem, SpecError
from runner.distributed.work_partition import SINGLE_STAGE
from runner.interfaces import ContextParallelStyle, Decide, PipelineStage, VarlenAttention, WeightSubset
from runner.model import batch_layout, export, hf_state_dict
from runner.model.adapters import SharedByAdapters
from runner.model.batch_layout import BatchTokens, MakeTokens, check_row_length, max_row_length
from runner.model.capability_probe import PROBE_ROWS, forget_positions, is_close, kernel_objection, packed_objection
from runner.model.config import ModelConfig
from runner.model.export import gather_adapter, rebuild_module
from runner.model.flops import model_flops
from runner.model.initial_weights import WeightsSource, disable_dropout, max_dropout_rate
from runner.model.media import media_inputs
from runner.model.model_parts import decoder_blocks, freeze_parts, splittable_ends
from runner.model.packed_attention import set_text_attention, text_attention
from runner.model.parameters import FsdpRoot, cast_on_read, float32_modules, read_as_stored
from runner.model.router_replay import WithRouters

if TYPE_CHECKING:
    from runner.model.checkpointing_and_compile import CompiledLayers

T = TypeVar("T")


class TransformersModel(SharedByAdapters, WithRouters):
    """A transformers model, or a peft model around one, with its tokenizer.

    module: what is saved and whose parameters learn; inner: the transformers model inside (the same without peft);
    whole: the module around all, through which every pass goes, and what may be sharded;
    supported_outputs: the names of the outputs it can give; weights_source: where its first weights come from.
    """

    supported_outputs: frozenset[str]

    def __init__(
        self,
        module: nn.Module,
        tokenizer: Any,
        config: ModelConfig,
        *,
        seed: int,
        decide: Decide,
        source: WeightsSource | None = None,
    ) -> None:
        """Choose how the model runs. `module` is on its device; `seed`: of its initial weights and adapters."""
        self.module = module
        self.whole = FsdpRoot(module)
        peft: Any = module
        self.inner: Any = peft.get_base_model() if hasattr(peft, "get_base_model") else peft
        self.tokenizer = tokenizer
        self.config = config
        self.seed = seed
        self.weights_source = source or WeightsSource()
        self.length_limit = max_row_length(self.inner.config)  # row in tokens, and why; None = no limit
        self.device: torch.device = self.inner.device
        self.stage: PipelineStage = SINGLE_STAGE
        self.flops = model_flops(module, self.inner)  # while it is whole
        self._training = True
        self._kernel: VarlenAttention | None = None
        self._compiled: CompiledLayers | None = None
        self.shard_tokens: MakeTokens = BatchTokens
        self.media = media_inputs(self.inner, tokenizer)
        self.module.eval()
        if self._compute_dtype is not None:
            if config.head_dtype == "float32" and (head := self.inner.get_output_embeddings()) is not None:
                head.computes_in_float32 = True
            cast_on_read(self.module, self._compute_dtype)
        self._choose_layout(decide)
        self._choose_checkpointing(decide)
        self._choose_export(decide)

    def _choose_layout(self, decide: Decide) -> None:
        self.layout: batch_layout.BatchLayout = self.config.batch_layout
        self.default_attention: str = text_attention(self.inner)
        objection = packed_objection(self.inner, self.device, self.media) if self.layout == "packed" else None
        forget_positions(self.inner)
        if objection:
            self.layout = "padded"
            decide("model.batch_layout", "packed", "padded", objection)

    def _choose_checkpointing(self, decide: Decide) -> None:
        if how := self.config.gradient_checkpointing:
            from runner.model.checkpointing_and_compile import enable_checkpointing

            enable_checkpointing(self.inner, how, offload=self.config.activation_offloading, decide=decide)

    def _choose_export(self, decide: Decide) -> None:
        self.merges = False
        if self.module is not self.inner and (reason := export.merge_reason(self.module, self.weights_source)):
            decide("export", "an adapter", "a merged model", reason)
            self.merge_on_save()

    def export_probe(self) -> dict[str, Any]:
        """Results of probing, for the model without weights on the meta device (`import_probe`)."""
        own = {"layout": self.layout, "attention": self.default_attention}
        conversions = getattr(self.inner, "_weight_conversions", None)  # how transformers renamed and cut what it read
        return own | {"generation_config": getattr(self.inner, "generation_config", None), "conversions": conversions}

    def import_probe(self, probe: Mapping[str, Any]) -> None:
        """Be as the same model with its weights was found to be."""
        self.default_attention, self.inner.generation_config = probe["attention"], probe["generation_config"]
        if probe["conversions"] is not None:
            self.inner._weight_conversions = probe["conversions"]
        if probe["layout"] != self.layout:
            self.layout = probe["layout"]
            set_text_attention(self.inner, self.default_attention)

    def set_varlen_kernel(self, kernel: VarlenAttention, *, decide: Decide) -> None:
        """Let packed rows attend by a device's kernel, unless it errs on a few tokens in its shape."""
        objection = kernel_objection(kernel, self.inner.config.get_text_config(), self.compute_dtype, self.device)
        if objection is None:
            self._kernel = kernel
        else:
            decide("attention", "fused", "sdpa", objection)

    @torch.no_grad()
    def replace_dense_attention(self, exchange: Callable[[Any], None]) -> None:
        """Let `exchange` replace the attention of padded rows, in a model that is sharded by now. Collective."""
        before = text_attention(self.inner)
        set_text_attention(self.inner, self.default_attention)
        self._set_mode(False)
        with nullcontext() if self.stage.num_stages == 1 else self.summon_full_params():
            self.whole.run(lambda: exchange(self.inner))
        self.default_attention = text_attention(self.inner)
        if not self.is_padded:
            set_text_attention(self.inner, before)

    def compile(self, decide: Decide) -> None:
        """Compile the layers, in their final layout. See `compile_layers`."""
        from runner.model.checkpointing_and_compile import compile_layers

        self._compiled = compile_layers(self, decide)

    def merge_on_save(self) -> None:
        """Let `save` merge the adapter. Raises SpecError if there is none, or it cannot be merged."""
        if self.module is self.inner:
            raise SpecError([Problem("adapter", "there is none to merge; leave --merge out")])
        self.merges = True
        self._refuse_unmergeable()

    def _refuse_unmergeable(self) -> None:
        """Raise SpecError for an adapter that cannot be merged."""
        ends = [end for end in (self.inner.get_input_embeddings(), self.inner.get_output_embeddings()) if end]
        if self.inner.config.tie_word_embeddings and any(p.requires_grad for end in ends for p in end.parameters()):
            text = "the embedding and the LM head are tied, so an adapter on them cannot be merged"
            raise SpecError([Problem("adapter", f"{text}; remove them from adapter.targets and modules_to_save")])
        if layers := export.unmergeable_layers(self.module):
            text = f"the adapter has a bias (lora_bias) on {layers[0]}, which has none itself, so it cannot be merged"
            raise SpecError([Problem("adapter", f"{text}; continue it as an adapter, or train one without lora_bias")])

    def with_peft_module(self, module: nn.Module, *, decide: Decide) -> Self:
        """The same model inside `module`, a peft model around it, probed again; use it instead of this one."""
        set_text_attention(self.inner, self.default_attention)
        made = type(self)(
            module, self.tokenizer, self.config, seed=self.seed, decide=decide, source=self.weights_source
        )
        made._kernel = self._kernel
        return made

    def merge_adapter(self, *, decide: Decide) -> Self:
        """The same model with its adapter merged into its weights, in float32; use it instead of this one."""
        self._refuse_unmergeable()
        read_as_stored(self.module)
        from runner.model.peft_adapter import merge_into_base

        return self.with_peft_module(merge_into_base(self.module, self.inner), decide=decide)

    @cached_property
    def base_fingerprint(self) -> dict[str, str]:
        """What has to be equal for a checkpoint to fit this model, beside the parameters that it holds.

        Reads a local folder's weights in full where some of them are frozen; made at the first request.
        """
        return self.weights_source.identity(weights=not all(p.requires_grad for p in self.module.parameters()))

    @property
    def compute_dtype(self) -> torch.dtype:
        """Data type that matrix products are computed in."""
        return self._compute_dtype or self.inner.dtype

    def float32_modules(self) -> list[nn.Module]:
        """The modules that compute in float32 where `compute_dtype` is another."""
        return float32_modules(self.whole)

    @property
    def is_padded(self) -> bool:
        """Whether every row of a batch takes as many places as the longest."""
        return self.layout == "padded"

    def enable_context_parallel(self, group: Any, style: ContextParallelStyle) -> None:
        """Compute only a part of every batch's tokens, packed; the ranks of `group` compute the others."""
        from runner.model.context_parallel import ContextParallelGroup

        rank, size = distributed.get_rank(group), distributed.get_world_size(group)
        self.shard_tokens = ContextParallelGroup(group, rank, size, style).shard_tokens

    def transformer_blocks(self) -> list[nn.Module]:
        """The layers of this rank that FSDP gathers one by one, first to last; empty if they are not named."""
        return decoder_blocks(self.inner, self.stage.absent_modules)

    def summon_full_params(self) -> AbstractContextManager[None]:
        """See `FsdpRoot.summon_full_params`."""
        return self.whole.summon_full_params()

    def train(self) -> None:
        """Let passes with gradient run in training mode, as they do from the start."""
        self._training = True

    def eval(self) -> None:
        """Let every pass run in evaluation mode."""
        self._training = False

    def disable_dropout(self) -> float:
        """Switch the dropout of model and adapter off for good; returns the largest rate there was."""
        rate = self.dropout_rate()
        disable_dropout(self.module)
        return rate

    def dropout_rate(self) -> float:
        """The largest rate of dropout of model and adapter; 0 = nothing is ever dropped."""
        return max_dropout_rate(self.module)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by the names they have in `module`; tied ones once."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def freeze_parts(self, decide: Decide) -> set[str]:
        """See `model_parts.freeze_parts`."""
        return freeze_parts(self.inner, self.config.frozen_parts, decide)

    def outputs(self, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        """The outputs named in `needs`, differentiable where gradients are enabled; see `_compute_outputs`.

        Raises SpecError for an unknown name.
        """
        if needs - self.supported_outputs:
            wanted, known = ", ".join(sorted(needs - self.supported_outputs)), ", ".join(sorted(self.supported_outputs))
            text = f"its loss needs the model output {wanted}, which does not exist"
            raise SpecError([Problem("algorithm", f"{text}; {type(self).__name__} makes {known}")])
        if not needs:
            return {}
        if not self.stage.is_last:
            return dict.fromkeys(needs, self._pipeline_placeholder(batch))
        tokens = self.local_tokens(batch)
        return self._run_pass(lambda: self._compute_outputs(tokens, needs))

    def local_tokens(self, batch: Batch) -> BatchTokens:
        """This rank's tokens of a batch, whose images are apart from its ids."""
        batch = self.drop_unused_experts(batch)
        return self.shard_tokens(batch if self.media is None else self.media.prepare(batch))

    def _compute_outputs(self, tokens: BatchTokens, needs: frozenset[str]) -> dict[str, Tensor]:
        """The outputs of one pass of the backbone, of all ranks that share a batch's tokens."""
        raise NotImplementedError

    def save(self, folder: Path | None) -> None:
        """Write a Hugging Face folder (safetensors, configs, tokenizer) or a PEFT adapter folder.

        An adapter folder if `module` is a peft model whose base exists elsewhere. Raises RunnerError if the files lack
        numbers that are trainable. Of a sharded model all ranks are needed: one gives the folder, the others None.
        """
        # where another than torch keeps the pieces
        with nullcontext() if self.whole.is_sharded else self.summon_full_params():
            if self.merges or (self.whole.is_sharded and self.module is self.inner):
                wide = self.merges and not self.config.quantization  # else little of the adapter would stay
                hf_state_dict.write_hf_folder(self._hf_state_dict, folder, torch.float32 if wide else None)
            else:
                module = self._gather_module(folder is not None)
                if folder is not None:
                    export.write_model(module, folder)
            if folder is not None:
                num_trained = sum(p.numel() for p in self.module.parameters() if p.requires_grad)
                export.write_tokenizer_and_verify(folder, self.tokenizer, num_trained)
                export.write_image_processor(self.weights_source, folder, self.tokenizer)
                if self.merges or self.module is self.inner:
                    export.copy_unused_tensors(self.weights_source, folder)

    def hf_tensors(
        self, subset: WeightSubset, *, keep: bool = True, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of a part (see `hf_state_dict`), named as in a Hugging Face or PEFT folder.

        Collective: all ranks iterate, and those without `keep` get nothing. dtype: of floating-point numbers, None =
        that of the base. Raises SpecError, at the first tensor, for an adapter that cannot be merged.
        """
        if subset not in ("base", "adapter") and self.module is not self.inner:
            self._refuse_unmergeable()
        with nullcontext() if self.whole.is_sharded else self.summon_full_params():  # see `save`
            yield from self._hf_state_dict.tensors(subset, keep=keep, dtype=dtype)

    def hf_tensor_bytes(self, subset: WeightSubset) -> int:
        """Size of what `hf_tensors` gives in the base's own types."""
        return self._hf_state_dict.num_bytes(subset)

    @cached_property
    def _hf_state_dict(self) -> hf_state_dict.HfStateDict:
        return hf_state_dict.HfStateDict(self.module, self.inner)

    def save_configs(self, folder: Path) -> None:
        """Write configs, tokenizer and image processor, merged; an adapter's in `adapter`. OSError."""
        hf_state_dict.write_configs(self._hf_state_dict.converter.model, folder)
        export.write_tokenizer(folder, self.tokenizer)
        export.write_image_processor(self.weights_source, folder, self.tokenizer)
        if self.module is not self.inner:
            hf_state_dict.write_adapter_config(self.module, folder / "adapter")

    def _gather_module(self, keep: bool) -> Any:
        """The module, or its adapter gathered where `keep`."""
        if not self.whole.is_sharded:
            return self.module
        tensors = gather_adapter(self.module, keep=keep)
        return rebuild_module(self.module, self.inner, tensors) if keep else None

    @property
    def _compute_dtype(self) -> torch.dtype | None:
        """Data type of matrix products where it may not be that of the stored weights; see `parameters`."""
        return torch.bfloat16 if self.config.dtype == "bfloat16" else None

    @property
    def _head_dtype(self) -> torch.dtype | None:
        """The same for the LM head."""
        return torch.float32 if self._compute_dtype and self.config.head_dtype == "float32" else self._compute_dtype

    def _set_mode(self, training: bool) -> None:
        if self.module.training != training:
            self.module.train(training)

    def _run_pass(self, work: Callable[[], T]) -> T:
        """What `work` gives in the mode of a pass, with the parameters there."""
        self._set_mode(self._training and torch.is_grad_enabled())
        return self.whole.run(work)

    def _backbone(self, tokens: BatchTokens) -> Tensor:
        """The hidden states [W, H] of this rank's tokens of a batch."""
        base = self.inner.base_model
        return self._forward_tokens(lambda **keywords: base(use_cache=False, **keywords).last_hidden_state, tokens)

    @torch.no_grad()
    def probe_hidden(self) -> Tensor:
        """Hidden states [T, H] of a few tokens, to compare models; [0] on a stage that is not the last."""
        batch = pack(PROBE_ROWS, [[1.0] * len(row) for row in PROBE_ROWS]).to(self.device)
        tokens = self.shard_tokens(batch)
        for turn in self.stage.forward_schedule(1):
            self.stage.begin_op(turn)
            if self.stage.is_last:
                break
            found = self._pipeline_placeholder(batch)
        return self._run_pass(lambda: tokens.gather_all(self._visible_output(tokens))) if self.stage.is_last else found

    def _visible_output(self, tokens: BatchTokens) -> Tensor:
        """The last of what it computes that can be seen, [W, …]."""
        return self._backbone(tokens)

    def matches_probe(self, wanted: Tensor) -> bool:
        """Whether it still computes `wanted`, an earlier `probe_hidden`, up to rounding."""
        found, wanted = (one.to(self.device, self.compute_dtype) for one in (self.probe_hidden(), wanted))
        return not self.stage.is_last or is_close(found, wanted)

    def embedding_and_head(self) -> list[Any]:
        """The embedding and LM head that can be split by rows; with tied weights both or none."""
        return splittable_ends(self.inner, self._plain_lm_head())

    def _plain_lm_head(self) -> Any:
        """The LM head, if it is nothing but a matrix, and used as one."""
        return None

    def _forward_tokens(self, forward: batch_layout.ForwardFn, tokens: BatchTokens) -> Tensor:
        """Output of `forward` for each of this rank's tokens, [W, H]. Raises SpecError for a too long row."""
        check_row_length(int(tokens.batch.structure.tokens["positions"].max()) + 1, self.length_limit)
        run = partial(batch_layout.run_padded, batch=tokens.batch, is_routed=self.routing is not None)
        if not self.is_padded:
            run = partial(tokens.run, kernel=self._kernel)
        return self.stage.run_local(self.with_routing(run), forward)

    def _pipeline_placeholder(self, batch: Batch) -> Tensor:
        """An empty tensor [0] of a stage that is not the last; its backward pass begins here."""
        return self._run_pass(lambda: self._backbone(self.local_tokens(batch)))
