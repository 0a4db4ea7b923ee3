"""A small byte-level tokenizer with a chat template, and decisions that are kept for looking at."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from runner.core.auto_choices import Decisions

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    template: str | None = CHATML, merges: list[tuple[str, str]] | None = None, bos: bool = False
) -> Any:
    """Bytes (and the given merges) as tokens; with `bos`, a beginning-of-sequence token before every text."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges or []:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab, merges or []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "bos_token": "<|bos|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=["<|im_start|>"], **names)
    if bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)]
        )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture
def decide() -> Decisions:
    return Decisions()


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes rows to a JSONL file and gives its path."""

    def write(rows: list[Any], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def chat(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Alternating user and assistant turns."""
    head = [{"role": "system", "content": system}] if system is not None else []
    return head + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
