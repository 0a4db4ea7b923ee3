"""A causal language model behind the verbs of training: score a ragged batch, write text, be saved.

    batch ──layout──▶ backbone ──▶ hidden [T, H] ──rows of parents──▶ chunked LM head ──▶ logprobs [T]

Legend: N rows, T tokens, H hidden size (see `runner.batch`). Passes with gradient run in training mode (dropout,
gradient checkpointing), all others in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.batch import Batch
from runner.errors import Problem, SpecError
from runner.model import generation, head, layout
from runner.model.config import ModelConfig
from runner.model.probe import head_objection, packed_objection
from runner.model.quiet import no_progress_bar
from runner.protocols import Decide

OUTPUTS = frozenset({"logprobs"})


class CausalLM:
    """A transformers causal LM, or a peft model around one, with its tokenizer.

    module: what is saved and whose parameters learn; causal: the transformers model inside (the same without peft).
    """

    def __init__(self, module: nn.Module, tokenizer: Any, config: ModelConfig, *, seed: int, decide: Decide) -> None:
        """Look at the model and decide how it runs. `module` is on its device and in its data type; `seed` is that
        of its initial weights, adapters included."""
        self.module = module
        self.causal: Any = module
        if hasattr(module, "get_base_model"):
            self.causal = module.get_base_model()  # type: ignore[operator]
        self.tokenizer = tokenizer
        self.config = config
        self.seed = seed
        self.device: torch.device = self.causal.device
        self._training = True
        self.module.eval()
        self._choose_head(decide)
        self._choose_layout(decide)
        self._choose_checkpointing(decide)

    def _choose_head(self, decide: Decide) -> None:
        objection = head_objection(self.causal, self.device)
        self.chunked = objection is None
        if objection:
            decide("lm_head", "chunked", "full logits", objection)

    def _choose_layout(self, decide: Decide) -> None:
        self.layout: layout.Layout = self.config.layout
        self.own_attention: str = self.causal.config._attn_implementation
        objection = packed_objection(self.causal, self.device) if self.layout == "packed" else None
        if objection:
            self.layout = "padded"
            decide("model.layout", "packed", "padded", objection)

    def _choose_checkpointing(self, decide: Decide) -> None:
        if not self.config.gradient_checkpointing:
            return
        if self.causal.supports_gradient_checkpointing:
            # the older name, until transformers 5.5 is no longer supported
            enable = getattr(self.causal, "activation_checkpointing_enable", None)
            (enable or self.causal.gradient_checkpointing_enable)({"use_reentrant": False})
        else:
            decide("model.gradient_checkpointing", "on", "off", f"{type(self.causal).__name__} does not support it")

    def wrapped(self, module: nn.Module, *, decide: Decide) -> CausalLM:
        """The same model inside `module` (a peft model around it), looked at afresh; use it instead of this one."""
        self.causal.set_attn_implementation(self.own_attention)
        return CausalLM(module, self.tokenizer, self.config, seed=self.seed, decide=decide)

    def train(self) -> None:
        """Let passes with gradient run in training mode, as they do from the start."""
        self._training = True

    def eval(self) -> None:
        """Let every pass run in evaluation mode."""
        self._training = False

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by the names they have in `module`; tied ones once."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def outputs(self, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        """The outputs named in `needs`, differentiable where gradients are enabled.

        logprobs: float32 [T], log p(ids[t] | its ancestors), 0 at roots. Raises SpecError for an unknown name.
        """
        if needs - OUTPUTS:
            raise SpecError([Problem("algorithm", _unknown_outputs(needs - OUTPUTS))])
        if not needs:
            return {}
        places = (batch.tokens["parent"] >= 0).nonzero()[:, 0]
        with self._pass():
            values = self._logprobs(batch, places)
        return {"logprobs": _scatter(values, places, batch.num_tokens)}

    def linear(self, batch: Batch, coefficients: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Σ coefficients · logprobs, and the detached outputs; the head runs only where a coefficient is not 0.

        coefficients: float [T], constant, 0 at roots. The total can be differentiated once. Outputs: logprobs,
        float32 [T], 0 where the coefficient is.
        """
        places = coefficients.nonzero()[:, 0]
        chosen = coefficients[places]
        with self._pass():
            if self.chunked:
                parts = self._head_inputs(batch, places)
                total, values = head.linear(*parts, chosen, self.config.head_chunk_tokens, self._compute)
            else:
                values = self._logprobs(batch, places)
                total = (values * chosen).sum()
        return total, {"logprobs": _scatter(values.detach(), places, batch.num_tokens)}

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Greedy answers: the new ids of each prompt, up to but excluding the end of sequence."""
        with self._writing():
            return generation.greedy(self.causal, self.tokenizer, prompts, max_new_tokens)

    def stream(
        self, prompt_ids: Sequence[int], max_new_tokens: int, temperature: float, top_p: float, seed: int
    ) -> Iterator[str]:
        """Text pieces of one answer as they are made, never half a character; temperature 0 is greedy.

        Draws from a generator of its own, seeded with `seed`. Raises ValueError for an empty prompt.
        """
        if not prompt_ids:
            raise ValueError("a prompt needs at least one token")
        generator = torch.Generator().manual_seed(seed)
        pick = partial(generation.draw, temperature=temperature, top_p=top_p, generator=generator)
        ends = generation.end_ids(self.causal, self.tokenizer)
        ids = generation.sampled_ids(self._step, prompt_ids, ends, max_new_tokens, pick, self.device)
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        return generation.whole_characters(ids, decode)

    def save(self, folder: Path) -> None:
        """Write what loads without this program: a Hugging Face folder (safetensors, configs, tokenizer with its
        chat template), or a PEFT adapter folder if `module` is one. Changes nothing of the model."""
        folder.mkdir(parents=True, exist_ok=True)
        # or peft would ask the hub whether the embedding was resized
        options = {} if self.module is self.causal else {"save_embedding_layers": False}
        with no_progress_bar():
            self.module.save_pretrained(folder, **options)  # type: ignore[operator]
            self.tokenizer.save_pretrained(folder)

    @property
    def _compute(self) -> torch.dtype | None:
        """Data type of matrix products where it is not that of the weights."""
        return torch.bfloat16 if self.config.autocast == "bfloat16" else None

    def _set_mode(self, training: bool) -> None:
        if self.module.training != training:
            self.module.train(training)

    def _pass(self) -> AbstractContextManager[Any]:
        self._set_mode(self._training and torch.is_grad_enabled())
        return torch.autocast(self.device.type, dtype=self._compute, enabled=self._compute is not None)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Evaluation mode, no gradient, the model's own attention, and no trace of it afterwards."""
        self._set_mode(False)
        config = self.causal.config
        before, config._attn_implementation = config._attn_implementation, self.own_attention
        try:
            with torch.no_grad(), self._pass():
                yield
        finally:
            config._attn_implementation = before

    def _step(self, ids: Tensor, cache: Any) -> Any:
        with self._writing():
            return self.causal(input_ids=ids, past_key_values=cache, use_cache=True)

    def _hidden(self, **keywords: Any) -> Tensor:
        hidden: Tensor = self.causal.base_model(use_cache=False, **keywords).last_hidden_state
        return hidden

    def _logits(self, **keywords: Any) -> Tensor:
        logits: Tensor = self.causal(use_cache=False, **keywords).logits
        return logits

    def _head_inputs(self, batch: Batch, places: Tensor) -> tuple[nn.Module, Tensor, Tensor]:
        """The head, the hidden states [S, H] that predict the tokens at `places` [S], and those tokens' ids [S]."""
        hidden = layout.run(self.layout, self._hidden, batch)
        states = hidden.index_select(0, batch.tokens["parent"][places])
        return self.causal.get_output_embeddings(), states, batch.tokens["ids"][places]

    def _logprobs(self, batch: Batch, places: Tensor) -> Tensor:
        """logprobs [S] of the tokens at `places` [S], none of them a root."""
        if self.chunked:
            return head.logprobs(*self._head_inputs(batch, places), self.config.head_chunk_tokens, self._compute)
        logits = layout.run(self.layout, self._logits, batch)
        return head.gather_logprobs(logits.index_select(0, batch.tokens["parent"][places]), batch.tokens["ids"][places])


def _scatter(values: Tensor, places: Tensor, size: int) -> Tensor:
    return values.new_zeros(size).index_copy(0, places, values)


def _unknown_outputs(names: frozenset[str]) -> str:
    wanted, known = ", ".join(sorted(names)), ", ".join(sorted(OUTPUTS))
    return f"its loss needs the model output {wanted}, which does not exist; a model makes {known}"
