"""The smallest model that learns: a bigram table, behind the same verbs as a real one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from runner.core.batch import Batch


class Bigram:
    """logprobs[t] = log softmax(table[ids[parent[t]]])[ids[t]], 0 at roots; dropout draws from torch's generator."""

    is_padded = False
    media = None
    routing = None

    def __init__(self, vocab: int = 12, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(vocab, vocab, generator=generator, dtype=dtype))
        self.dropout = nn.Dropout(dropout)

    def outputs(self, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        assert needs <= {"logprobs"}
        parent, ids = batch.tokens["parent"], batch.tokens["ids"]
        logits = self.dropout(self.table[ids[parent.clamp(min=0)]])
        picked = torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0]
        return {"logprobs": torch.where(parent < 0, 0.0, picked)}

    def linear_loss(self, batch: Batch, coefficients: Tensor, terms: object = None) -> tuple[Tensor, dict[str, Tensor]]:
        assert terms is None
        outputs = self.outputs(batch, frozenset({"logprobs"}))
        return (coefficients * outputs["logprobs"]).sum(), {"logprobs": outputs["logprobs"].detach()}

    def trainable(self) -> dict[str, nn.Parameter]:
        return {"table": self.table}

    def train(self) -> None:
        self.dropout.train()

    def eval(self) -> None:
        self.dropout.eval()
