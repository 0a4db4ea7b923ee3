"""A language model's backbone with a head of one number: a reward model's scores, or a critic's values.

    batch ──layout──▶ backbone ──▶ hidden [W, H] ──▶ scores [N]  read at each row's last token
                                                └──▶ values [T]  read at each token's parent

Legend: N rows, T tokens, W of them on this rank (all, or see `context`), H hidden size (see `runner.batch`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runner.batch import Batch
from runner.errors import EnvironmentProblem
from runner.model.context import Tokens
from runner.model.ragged import RaggedModel


class ScalarModel(RaggedModel):
    """A transformers sequence classifier with one label (`num_labels=1`), as `AutoModelForSequenceClassification`
    saves and loads it."""

    made = frozenset({"scores", "values"})

    def __init__(self, module: nn.Module, *arguments: Any, **options: Any) -> None:
        """See `RaggedModel`. Raises EnvironmentProblem for a classifier whose head is not one linear layer `score`."""
        super().__init__(module, *arguments, **options)
        found = [m for name, m in self.inner.named_modules() if name == "score"]
        if not found:
            raise EnvironmentProblem(
                f"{type(self.inner).__name__} has no head called `score`; a reward model or critic needs a decoder "
                "model whose sequence classifier has one (Qwen2, Qwen3, Llama, Mistral, Gemma, …)"
            )
        self.head: nn.Module = found[0]

    def outputs(self, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        """The outputs named in `needs`, differentiable where gradients are enabled.

        scores: [N], of the whole row; values: [T], V(state before ids[t]), 0 at roots; float32 or better. Raises
        SpecError for an unknown name.
        """
        self._refuse_unknown(needs)
        if not needs:
            return {}
        if not self.stage.ends:
            return dict.fromkeys(needs, self._handed_on(batch))

        tokens = self.tokens_of(batch)

        def work() -> dict[str, Tensor]:
            hidden = self._backbone(tokens)
            out: dict[str, Tensor] = {}
            if "scores" in needs:
                rows, ends = tokens.ended()
                out["scores"] = tokens.filled(self._read(tokens, hidden, ends), rows, batch.num_rows)
            if "values" in needs:
                places = tokens.predicted()
                values = self._read(tokens, hidden, batch.tokens["parent"][places])
                out["values"] = tokens.filled(values, places, batch.num_tokens)
            return out

        return self._pass(work)

    def _read(self, tokens: Tokens, hidden: Tensor, places: Tensor) -> Tensor:
        head: Any = self.head  # beside an adapter it learns in float32 whatever the backbone's type
        values: Tensor = head(tokens.read(hidden, places).to(head.weight.dtype))[:, 0]
        return values.to(torch.promote_types(values.dtype, torch.float32))
