"""What the items depend on, as a digest: contents, tokenizer, chat template, options and code."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from runner.data.tokenise import VERSION, special_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def digest(*parts: Any) -> str:
    """sha256 of plain values."""
    return hashlib.sha256(json.dumps([VERSION, *parts], sort_keys=True).encode()).hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of all of a tokenizer that can change the ids: its algorithm, vocabulary, special tokens and template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    algorithm: Any = (
        json.loads(backend.to_str()) if backend is not None else [type(tokenizer).__name__, tokenizer.get_vocab()]
    )
    if backend is not None:  # left by whoever used the tokenizer last; every call sets them anew
        algorithm.update(truncation=None, padding=None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return digest(algorithm, special, tokenizer.chat_template, special_ends(tokenizer))
