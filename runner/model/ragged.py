"""What every trained transformers model has in common: how a ragged batch runs through its backbone, and its modes.

    batch ──layout──▶ backbone ──▶ hidden [T, H]

Legend: T tokens, H hidden size. Passes with gradient run in training mode (dropout, gradient checkpointing), all
others in evaluation mode.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.batch import Batch
from runner.errors import Problem, SpecError
from runner.model import layout
from runner.model.config import ModelConfig
from runner.model.probe import packed_objection
from runner.model.quiet import no_progress_bar
from runner.protocols import Decide


class RaggedModel:
    """A transformers model, or a peft model around one, with its tokenizer.

    module: what is saved and whose parameters learn; inner: the transformers model inside (the same without peft);
    made: the names of the outputs it can give.
    """

    made: frozenset[str]

    def __init__(self, module: nn.Module, tokenizer: Any, config: ModelConfig, *, seed: int, decide: Decide) -> None:
        """Look at the model and decide how it runs. `module` is on its device and in its data type; `seed` is that
        of its initial weights, adapters included."""
        self.module = module
        self.inner: Any = module
        if hasattr(module, "get_base_model"):
            self.inner = module.get_base_model()  # type: ignore[operator]
        self.tokenizer = tokenizer
        self.config = config
        self.seed = seed
        self.device: torch.device = self.inner.device
        self._training = True
        self.module.eval()
        self._choose_layout(decide)
        self._choose_checkpointing(decide)

    def _choose_layout(self, decide: Decide) -> None:
        self.layout: layout.Layout = self.config.layout
        self.own_attention: str = self.inner.config._attn_implementation
        objection = packed_objection(self.inner, self.device) if self.layout == "packed" else None
        if objection:
            self.layout = "padded"
            decide("model.layout", "packed", "padded", objection)

    def _choose_checkpointing(self, decide: Decide) -> None:
        if not self.config.gradient_checkpointing:
            return
        if self.inner.supports_gradient_checkpointing:
            # the older name, until transformers 5.5 is no longer supported
            enable = getattr(self.inner, "activation_checkpointing_enable", None)
            (enable or self.inner.gradient_checkpointing_enable)({"use_reentrant": False})
        else:
            decide("model.gradient_checkpointing", "on", "off", f"{type(self.inner).__name__} does not support it")

    def train(self) -> None:
        """Let passes with gradient run in training mode, as they do from the start."""
        self._training = True

    def eval(self) -> None:
        """Let every pass run in evaluation mode."""
        self._training = False

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by the names they have in `module`; tied ones once."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def save(self, folder: Path) -> None:
        """Write what loads without this program: a Hugging Face folder (safetensors, configs, tokenizer with its
        chat template), or a PEFT adapter folder if `module` is one. Changes nothing of the model."""
        folder.mkdir(parents=True, exist_ok=True)
        # or peft would ask the hub whether the embedding was resized
        options = {} if self.module is self.inner else {"save_embedding_layers": False}
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

    def _backbone(self, batch: Batch) -> Tensor:
        """The hidden states [T, H] of a batch."""

        def forward(**keywords: Any) -> Tensor:
            hidden: Tensor = self.inner.base_model(use_cache=False, **keywords).last_hidden_state
            return hidden

        return layout.run(self.layout, forward, batch)

    def _refuse_unknown(self, needs: frozenset[str]) -> None:
        if needs - self.made:
            wanted, known = ", ".join(sorted(needs - self.made)), ", ".join(sorted(self.made))
            text = (
                f"its loss needs the model output {wanted}, which does not exist; {type(self).__name__} makes {known}"
            )
            raise SpecError([Problem("algorithm", text)])


def scatter(values: Tensor, places: Tensor, size: int) -> Tensor:
    """`values` at `places`, 0 elsewhere, [size]; differentiable."""
    return values.new_zeros(size).index_copy(0, places, values)
