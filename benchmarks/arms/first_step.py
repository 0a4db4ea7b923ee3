"""One optimizer step written by hand: data, tokenizer, model and AdamW in plain PyTorch and transformers.

    python -m arms.first_step WORKLOAD

Reads WORKLOAD/batch.jsonl, renders and tokenizes it by the model's chat template, takes one step on the padded batch
and prints the loss.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

IGNORED = -100


def main(folder: Path) -> None:
    """Train one step and print its loss."""
    chats = [json.loads(line)["messages"] for line in (folder / "batch.jsonl").read_text().splitlines()]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
    rows = tokenizer.apply_chat_template(
        chats, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt", padding=True
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    labels = rows["input_ids"].masked_fill(rows["assistant_masks"] == 0, IGNORED)[:, 1:]
    logits = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"], use_cache=False).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(float(loss.detach()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
