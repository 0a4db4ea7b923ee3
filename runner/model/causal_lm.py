"""Causal LM: compute log-probabilities of a packed batch, generate, save.

    batch ──layout──▶ backbone ──▶ hidden [W, H] ──rows of parents──▶ chunked LM head ──▶ logprobs, entropy [T]

Legend: N rows, T tokens, W of them on this rank (all, or see `context`), S predicted there, H hidden size (see
`runner.core.batch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from runner.core.batch import Batch
from runner.core.errors import UnsupportedModelError
from runner.distributed.dtensor_utils import full_tensor
from runner.interfaces import Decide, LogitTermsFn, ModelLimits
from runner.model import chunked_lm_head
from runner.model.batch_layout import BatchTokens, max_row_length
from runner.model.capability_probe import forget_positions, head_objection
from runner.model.config import ModelConfig
from runner.model.export import merge_temporarily
from runner.model.parameters import cache_casts
from runner.model.transformers_model import TransformersModel
from runner.spec.base import Head

if TYPE_CHECKING:
    from runner.model.generation import CompletionGenerator


class CausalLM(TransformersModel):
    """A transformers causal LM, or a peft model around one, with its tokenizer."""

    supported_outputs = frozenset({"logprobs", "entropy", "hidden"})

    def __init__(self, module: nn.Module, tokenizer: Any, config: ModelConfig, *, decide: Decide, **more: Any) -> None:
        """See `TransformersModel`."""
        super().__init__(module, tokenizer, config, decide=decide, **more)
        self.causal: Any = self.inner
        self._choose_head(decide)

    def _choose_head(self, decide: Decide) -> None:
        with self._own_attention():
            objection = head_objection(self.causal, self.device)
        forget_positions(self.causal)
        self.chunked = objection is None
        if objection:
            decide("lm_head", "chunked", "full logits", objection)

    def export_probe(self) -> dict[str, Any]:
        """See `TransformersModel`."""
        return {**super().export_probe(), "chunked": self.chunked}

    def import_probe(self, found: Mapping[str, Any]) -> None:
        """See `TransformersModel`."""
        super().import_probe(found)
        self.chunked = found["chunked"]

    def _plain_lm_head(self) -> Any:
        """See `TransformersModel`."""
        lm_head = self.causal.get_output_embeddings()
        return lm_head if self.chunked and chunked_lm_head.is_plain_linear(lm_head) and lm_head.bias is None else None

    def _compute_outputs(self, tokens: BatchTokens, needs: frozenset[str]) -> dict[str, Tensor]:
        """See `TransformersModel`.

        logprobs: [T], log p(ids[t] | its ancestors); entropy: [T], of the distribution that ids[t] was drawn from, in
        nats; float32 or better, 0 at roots. The token channel `temperature`, where the batch has it, divides the
        logits that predict each token; `target_tokens` are scored in the places of `ids`. hidden: [T, H], what ids[t]
        is predicted from, see `lm_head`.
        """
        places, values = tokens.predicted_positions(), dict[str, Tensor]()
        if "hidden" in needs:
            values["hidden"] = tokens.values_at(self._backbone(tokens), tokens.batch.tokens["parent"][places])
        if needs & {"logprobs", "entropy"}:
            values |= self._score(tokens, places, needs)
        return {name: tokens.scatter_and_sum(values[name], places, tokens.batch.num_tokens) for name in sorted(needs)}

    def lm_head(self) -> Callable[[Tensor], Tensor]:
        """The function from `hidden` [S, H] to logits [S, V], without gradient; for a frozen model.

        Of a sharded model it holds the whole head, and is collective to get, not to call.

        Raises UnsupportedModelError where the logits are not the head's, of the last hidden states.
        """
        if not self.chunked:
            text = f"the logits of {type(self.causal).__name__} are not its LM head applied to its last hidden states"
            raise UnsupportedModelError(text)

        lm_head = self.causal.get_output_embeddings()
        parameters = {name: full_tensor(p) for name, p in lm_head.named_parameters()}
        if self._head_dtype is not None:
            parameters = {name: p.to(self._head_dtype) for name, p in parameters.items()}

        @torch.no_grad()
        def logits(hidden: Tensor) -> Tensor:
            return functional_call(lm_head, parameters, (hidden.to(parameters["weight"].dtype),))

        return logits

    def linear_loss(
        self, batch: Batch, coefficients: Tensor, terms: LogitTermsFn | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Σ coefficients · logprobs, or · terms["loss"], and the detached outputs; the head runs only where a
        coefficient is not 0.

        coefficients: float [T], constant, 0 at roots; best on the CPU, so that counting those that are not 0 waits for
        no device. The total can be differentiated once. Outputs: logprobs, or the terms, float32 [T], 0 where the
        coefficient is.
        """
        if not self.stage.is_last:
            return self._pipeline_placeholder(batch).sum(), {}
        tokens = self.local_tokens(batch)
        places = tokens.locally_predicted(coefficients.nonzero()[:, 0])
        chosen, places = tokens.to_device(coefficients[places]), tokens.to_device(places)

        def work() -> tuple[Tensor, dict[str, Tensor]]:
            if terms is None:
                total, values = self._logprob_loss(tokens, places, chosen)
            else:
                total, values = self._logit_loss(tokens, places, chosen, terms)
            outputs = {name: tokens.scatter_and_sum(value, places, batch.num_tokens) for name, value in values.items()}
            return tokens.sum_over_ranks(total), outputs

        return self._run_pass(work)

    def _logprob_loss(self, tokens: BatchTokens, places: Tensor, chosen: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Σ chosen · logprobs at `places` [S], with coefficients `chosen` [S], and the detached logprobs [S]."""
        if self.chunked:
            parts = self._head_inputs(tokens, places)
            total, values = chunked_lm_head.chunked_logprob_loss(
                *parts, chosen, self.config.lm_head_chunk_tokens, self._head_dtype, _temperature(tokens, places)
            )
        else:
            values = self._score(tokens, places)["logprobs"]
            total = (values * chosen).sum()
        return total, {"logprobs": values.detach()}

    def _logit_loss(
        self, tokens: BatchTokens, places: Tensor, chosen: Tensor, terms: LogitTermsFn
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Σ chosen · terms["loss"] at `places` [S] with coefficients `chosen` [S]; and the detached terms [S]."""
        from runner.model.chunked_logit_loss import chunked_logit_loss

        assert "temperature" not in tokens.batch.tokens, "a loss on logits has its own temperature"
        channels = {name: channel.index_select(0, places) for name, channel in tokens.batch.tokens.items()}
        if self.chunked:
            lm_head, states, _ = self._head_inputs(tokens, places)
        else:
            lm_head, states = (
                nn.Identity(),
                tokens.values_at(self._logits(tokens), tokens.batch.tokens["parent"][places]),
            )
        return chunked_logit_loss(
            lm_head, states, chosen, terms, channels, self.config.lm_head_chunk_tokens, self._head_dtype
        )

    def batch_decoder(self, *, decide: Decide, merge: bool = True) -> CompletionGenerator:
        """What writes many answers at once, as a sampler does; merge: adapters into their base meanwhile.

        Raises SpecError if the model cannot generate; `decide` records a slower decoder.
        """
        from runner.model.decoder_choice import choose_decoder  # a job that writes no text does without both
        from runner.model.generation import CompletionGenerator, eos_token_ids

        with torch.no_grad(), self._generation_mode():
            make_decoder = choose_decoder(self.causal, decide)
        ends, mode = eos_token_ids(self.causal, self.tokenizer), partial(self._bulk_generation_mode, merge)
        return CompletionGenerator(self.causal, ends, make_decoder, mode)

    def limits(self) -> ModelLimits:
        """What bounds an answer, whoever writes it."""
        from runner.model.generation import eos_token_ids

        config, ends = self.causal.config, eos_token_ids(self.causal, self.tokenizer)
        return ModelLimits(ends, config.get_text_config().vocab_size, max_row_length(config))

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        """The model's own attention for a while, as text is written and not scored."""
        config = self.causal.config.get_text_config()
        before, config._attn_implementation = config._attn_implementation, self.default_attention
        try:
            yield
        finally:
            config._attn_implementation = before

    @contextmanager
    def _generation_mode(self) -> Iterator[None]:
        """Evaluation mode, the model's own attention, and no trace of it afterwards.

        Whether gradients are computed is the thread's state and not the model's: it is for each call to say.
        """
        self._set_mode(False)
        if self.routing is not None:  # whose last pass may have been given experts
            self.routing.replay(lambda: None)
        # cached keys and values would be compiled in every pass
        uncompiled = nullcontext() if self._compiled is None else self._compiled.run_eagerly()
        with self.summon_full_params(), uncompiled, self._own_attention():
            yield

    @contextmanager
    def _bulk_generation_mode(self, merge: bool = True) -> Iterator[None]:
        """Generation mode with adapters merged where products are in float32, else with weights cast once."""
        training = self.module.training
        prepared: AbstractContextManager[None] = nullcontext()
        if self._compute_dtype is not None:
            prepared = cache_casts(self.module)
        elif merge:
            prepared = merge_temporarily(self.module)
        try:
            with self.summon_full_params(), prepared, self._generation_mode():
                yield
        finally:
            self._set_mode(training)

    def _visible_output(self, tokens: BatchTokens) -> Tensor:
        """See `TransformersModel`; logits of a model that shows no backbone."""
        return self._logits(tokens) if self.causal.base_model is self.causal else self._backbone(tokens)

    def _logits(self, tokens: BatchTokens) -> Tensor:
        return self._forward_tokens(lambda **keywords: self.causal(use_cache=False, **keywords).logits, tokens)

    def _head_inputs(
        self, tokens: BatchTokens, places: Tensor, hidden: Tensor | None = None
    ) -> tuple[nn.Module, Tensor, Tensor]:
        """The head, the hidden states [S, H] that predict the tokens at `places` [S], and their ids [S]."""
        batch, hidden = tokens.batch, self._backbone(tokens) if hidden is None else hidden
        states = tokens.values_at(hidden, batch.tokens["parent"][places])
        return self.causal.get_output_embeddings(), states, _targets(batch)[places]

    def _score(
        self, tokens: BatchTokens, places: Tensor, needs: frozenset[str] = frozenset(), made: Tensor | None = None
    ) -> dict[str, Tensor]:
        """logprobs [S], and the entropy [S] if needed, of the tokens at `places` [S], none of them a root.

        made: the hidden states [W, H], or the logits [W, V] where the head is not `chunked`; None = to be made.
        """
        batch, asked, temperature = tokens.batch, "entropy" in needs, _temperature(tokens, places)
        if self.chunked:
            logprobs, entropy = chunked_lm_head.chunked_logprobs(
                *self._head_inputs(tokens, places, made),
                self.config.lm_head_chunk_tokens,
                self._head_dtype,
                temperature,
                entropy=asked,
            )
        else:
            logits = tokens.values_at(self._logits(tokens) if made is None else made, batch.tokens["parent"][places])
            logits = chunked_lm_head.divide_logits(logits, temperature)
            logprobs, entropy = chunked_lm_head.logprobs_and_entropy(logits, _targets(batch)[places], asked)
        return {"logprobs": logprobs} | ({} if entropy is None else {"entropy": entropy})


def _targets(batch: Batch) -> Tensor:
    """The ids that are scored in the places of tokens, int64 [T]: their own, unless the batch has others."""
    return batch.tokens.get("target_tokens", batch.tokens["ids"])


def _temperature(tokens: BatchTokens, places: Tensor) -> Tensor | None:
    """What divides the logits that predict the tokens at `places` [S], [S]; None = 1 for all."""
    channel = tokens.batch.tokens.get("temperature")
    return None if channel is None else channel[places]


def model_class_for_head(head: Head) -> type[TransformersModel]:
    """What trains a model with this head."""
    if head == "lm":
        return CausalLM
    from runner.model.value_head import PolicyWithValueHead, ScalarHeadModel  # which are made of what is here

    return ScalarHeadModel if head == "scalar" else PolicyWithValueHead
