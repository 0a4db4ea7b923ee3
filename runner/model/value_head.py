"""Value head and reward head: a critic's values, a reward model's scores, alone or beside the LM head.

    batch ──layout──▶ backbone ──▶ hidden [W, H] ──▶ scores [N]  read at each row's last token
                                                └──▶ values [T]  read at each token's parent

    policy and critic in one:      hidden [W, H] ──rows of parents──┬─▶ chunked LM head ──▶ logprobs, entropy [T]
                                                                    └─▶ value head ───────▶ values [T]

There the value head is trained in float32, with all its parameters also beside an adapter. It is no part of `module`,
but of what is sharded: checkpoints hold it, an export is the language model alone.

Legend: N rows, T tokens, W of them on this rank (all, or see `context`), S predicted there, H hidden size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from runner.core.errors import EnvironmentProblem, UnsupportedModelError
from runner.interfaces import Decide
from runner.interfaces.model import REWARD_MODEL_FILE
from runner.model.batch_layout import BatchTokens
from runner.model.causal_lm import CausalLM
from runner.model.transformers_model import TransformersModel


class ScalarHeadModel(TransformersModel):
    """A transformers sequence classifier with one label (`num_labels=1`).

    Saved and loaded as by `AutoModelForSequenceClassification`.
    """

    supported_outputs = frozenset({"scores", "values"})

    def __init__(self, module: nn.Module, *arguments: Any, **options: Any) -> None:
        """See `TransformersModel`.

        Raises EnvironmentProblem for a classifier whose head is not one linear layer `score`.
        """
        super().__init__(module, *arguments, **options)
        found = [m for name, m in self.inner.named_modules() if name == "score"]
        if not found:
            raise EnvironmentProblem(
                f"{type(self.inner).__name__} has no head named `score`; a reward model or critic needs a decoder "
                "model whose sequence classifier has one (Qwen2, Qwen3, Llama, Mistral, Gemma, …)"
            )
        self.head: nn.Module = found[0]

    def save(self, folder: Path | None) -> None:
        """Write the folder (see `TransformersModel`) and the token that its score is read at."""
        super().save(folder)
        if folder is not None:
            (folder / REWARD_MODEL_FILE).write_text(json.dumps({"score_position": "end_of_turn"}) + "\n")

    def _compute_outputs(self, tokens: BatchTokens, needs: frozenset[str]) -> dict[str, Tensor]:
        """See `TransformersModel`.

        scores: [N], of the whole row; values: [T], V(state before ids[t]), 0 at roots; float32 or better.
        """
        batch, hidden, out = tokens.batch, self._backbone(tokens), dict[str, Tensor]()
        if "scores" in needs:
            rows, ends = tokens.row_ends()
            out["scores"] = tokens.scatter_and_sum(self._head_values(tokens, hidden, ends), rows, batch.num_rows)
        if "values" in needs:
            places = tokens.predicted_positions()
            values = self._head_values(tokens, hidden, batch.tokens["parent"][places])
            out["values"] = tokens.scatter_and_sum(values, places, batch.num_tokens)
        return out

    def _head_values(self, tokens: BatchTokens, hidden: Tensor, places: Tensor) -> Tensor:
        head: Any = self.head  # beside an adapter it learns in float32 whatever the backbone's type
        values: Tensor = head(tokens.values_at(hidden, places).to(head.weight.dtype))[:, 0]
        return values.to(torch.promote_types(values.dtype, torch.float32))


class PolicyWithValueHead(CausalLM):
    """A causal LM that also says V(state before ids[t]) of every token."""

    supported_outputs = CausalLM.supported_outputs | {"values"}

    def __init__(self, module: nn.Module, *arguments: Any, decide: Decide, **options: Any) -> None:
        """See `TransformersModel`. The value head starts at zero, and so do values and their gradient.

        Raises UnsupportedModelError for one whose hidden states cannot be had.
        """
        super().__init__(module, *arguments, decide=decide, **options)
        if self.causal.base_model is self.causal:
            text = f"a value head needs a language model that exposes its backbone: {type(self.causal).__name__}"
            raise UnsupportedModelError(f"{text} does not")
        size = self.causal.config.get_text_config().hidden_size
        self.whole.register_module("value_head", ValueHead(size, self.device))

    @property
    def value_head(self) -> nn.Parameter:
        """The weights [H] of the value head."""
        head: Any = self.whole.value_head
        return cast(nn.Parameter, head.weight)

    def trainable(self) -> dict[str, nn.Parameter]:
        """What learns of the module, and the value head under the name `value_head`."""
        return {**super().trainable(), "value_head": self.value_head}

    def _compute_outputs(self, tokens: BatchTokens, needs: frozenset[str]) -> dict[str, Tensor]:
        """Outputs of `CausalLM` and values [T], from one pass of the backbone.

        Values are read at each token's parent, in units of the reward, float32 or better, 0 at roots. `temperature`
        changes no value; without logprobs and entropy the LM head does not run.
        """
        if "values" not in needs:
            return super()._compute_outputs(tokens, needs)
        batch, places, scored = tokens.batch, tokens.predicted_positions(), bool(needs & {"logprobs", "entropy"})
        hidden, made = self._hidden(tokens, scored)
        states = tokens.values_at(hidden, batch.tokens["parent"][places])
        head: Any = self.whole.value_head
        found: dict[str, Tensor] = {"hidden": states, "values": head(states)}
        if scored:
            found |= self._score(tokens, places, needs, made)
        return {name: tokens.scatter_and_sum(found[name], places, batch.num_tokens) for name in sorted(needs)}

    def _hidden(self, tokens: BatchTokens, scored: bool) -> tuple[Tensor, Tensor]:
        """Hidden states [W, H], and the input of `_score`: those, or logits [W, V] where the head is not cut."""
        if self.chunked or not scored:
            hidden = self._backbone(tokens)
            return hidden, hidden
        kept: list[Tensor] = []

        def forward(**keywords: Any) -> Tensor:
            handle = self.causal.base_model.register_forward_hook(
                lambda module, inputs, output: kept.append(output.last_hidden_state)
            )
            try:
                logits: Tensor = self.causal(use_cache=False, **keywords).logits
            finally:
                handle.remove()
            return torch.cat([kept.pop().to(logits.dtype), logits], -1)

        both = self._forward_tokens(forward, tokens)
        size = len(self.value_head)
        return both[:, :size], both[:, size:]


class ValueHead(nn.Module):
    """Values of hidden states by one vector of weights [H], in float32."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, device=device, dtype=torch.float32))

    def forward(self, states: Tensor) -> Tensor:
        """Values [S] of hidden states [S, H]."""
        return states.to(self.weight.dtype) @ self.weight
