"""A language model's backbone with a head of one number: a reward model's scores, or a critic's values.

    batch ──layout──▶ backbone ──▶ hidden [T, H] ──▶ scores [N]  read at each row's last token
                                                └──▶ values [T]  read at each token's parent

Legend: N rows, T tokens, H hidden size (see `runner.batch`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runner.batch import Batch
from runner.errors import EnvironmentProblem
from runner.model.ragged import RaggedModel, predicted, scatter


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

        def work() -> dict[str, Tensor]:
            hidden = self._backbone(batch)
            out: dict[str, Tensor] = {}
            if "scores" in needs:
                out["scores"] = self._read(hidden, torch.cumsum(batch.rows["lengths"], 0) - 1)
            if "values" in needs:
                places = predicted(batch)
                values = self._read(hidden, batch.tokens["parent"][places])
                out["values"] = scatter(values, places, batch.num_tokens)
            return out

        return self._pass(work)

    def _read(self, hidden: Tensor, places: Tensor) -> Tensor:
        head: Any = self.head  # beside an adapter it learns in float32 whatever the backbone's type
        values: Tensor = head(hidden.index_select(0, places).to(head.weight.dtype))
        values = values[:, 0].clone()  # no view leaves a pass: its backward pass begins at what it returns
        return values.to(torch.promote_types(values.dtype, torch.float32))
