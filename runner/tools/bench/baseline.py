"""The baseline: the loop one writes by hand for the same model, in plain transformers and torch.

    micro-batch ──rows side by side──▶ model(ids).logits ──cross-entropy──▶ backward  …  clip, AdamW

Rows are padded to the longest, a shared prompt is repeated for each of its completions, logits are whole. A reference
scores every micro-batch, completions come from `generate`. Weights are random, as the job's are.

Legend: N rows, L longest row, V vocabulary.
"""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.core.batch import Batch, micro_batches
from runner.core.prefix_tree import paths, rows_as_paths
from runner.model.initial_weights import DTYPES
from runner.spec.job import JobSpec


class BaselineLoop:
    """One model and its optimizer; `step` does what a step of the job does with a batch."""

    def __init__(self, spec: JobSpec, device: torch.device) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self._spec, self._device = spec, device
        assert spec.model.source is not None  # the cases write a model's folder
        config = AutoConfig.from_pretrained(spec.model.source, local_files_only=True)
        make: Any = AutoModelForCausalLM.from_config
        with torch.device(device):
            model = make(config, dtype=DTYPES[spec.stored_dtype()])
        self._reference: Any = None
        if spec.algorithm.frozen_models():
            self._reference = deepcopy(model).requires_grad_(False).to(DTYPES[spec.stored_dtype(trains=False)])
        if spec.model.gradient_checkpointing:
            # the older name, until transformers 5.5 is no longer supported
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        if not spec.adapter.trains_base:
            model = _with_adapter(spec, model)
        self.model = model.train()
        self._learning = [p for p in model.parameters() if p.requires_grad]
        own = spec.optimizer
        self._optimizer = torch.optim.AdamW(self._learning, lr=own.lr, weight_decay=0.0, fused=True)

    def step(self, batch: Batch) -> None:
        """Sample if the job samples, then learn."""
        if self._spec.algorithm.needs_sampler:
            self._generate(batch)
        total = max(batch.totals["tokens"], 1)
        for micro in micro_batches(batch, self._spec.algorithm.micro_batch_tokens):
            ids, mask, weight = pad_batch(micro)
            ids, mask, weight = (tensor.to(self._device, non_blocking=True) for tensor in (ids, mask, weight))
            if self._reference is not None:
                with torch.no_grad():
                    self._nll(self._reference, ids, mask)
            loss = (self._nll(self.model, ids, mask) * weight[:, 1:]).sum() / total
            loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._learning, self._spec.optimizer.clip_norm or float("inf"))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _nll(self, model: Any, ids: Tensor, mask: Tensor) -> Tensor:
        """−log-probability of every token but the first of its row, float32 [N, L - 1]."""
        with self._precision():
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        flat = logits[:, :-1].flatten(0, 1).float()
        return F.cross_entropy(flat, ids[:, 1:].flatten(), reduction="none").view(ids.shape[0], -1)

    def _generate(self, batch: Batch) -> None:
        """As many completions of as many tokens, by transformers."""
        lengths, kinds = batch.rows["lengths"].tolist(), batch.rows["branch"].tolist()
        rows = zip(torch.split(batch.tokens["ids"], lengths), kinds, strict=True)
        prompts = [ids for ids, branch in rows if branch < 0]
        group = (len(lengths) - len(prompts)) // len(prompts)
        width = min(map(len, prompts))
        ids = torch.stack([one[-width:] for one in prompts]).repeat_interleave(group, 0).to(self._device)
        new = self._spec.sampler.answer_tokens()
        how: dict[str, Any] = {"do_sample": True, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
        self.model.eval()
        with torch.no_grad(), self._precision():
            self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **how)
        self.model.train()

    def _precision(self) -> Any:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._spec.model.compute_dtype == "bfloat16")


def _with_adapter(spec: JobSpec, model: Any) -> Any:
    """With the job's adapter, by peft."""
    import peft

    if spec.model.gradient_checkpointing:
        model.enable_input_require_grads()
    own: Any = spec.adapter
    targets = own.targets if isinstance(own.targets, str) else list(own.targets)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=own.rank, lora_alpha=own.alpha, target_modules=targets)
    with warnings.catch_warnings():  # peft asks transformers under an older name
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return peft.get_peft_model(model, settings)


def pad_batch(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The sequences of a batch on the CPU, padded on the right: ids, mask and weights, each [N, L]."""
    tree = paths(batch) or rows_as_paths(batch)
    lengths = list(tree.lengths)
    ids, weight = (torch.split(batch.tokens[name].index_select(0, tree.index), lengths) for name in ("ids", "weight"))
    mask = [torch.ones(length, dtype=torch.int64) for length in lengths]
    padded = (nn.utils.rnn.pad_sequence(list(part), batch_first=True) for part in (ids, mask, weight))
    return tuple(padded)  # type: ignore[return-value]
