"""The model, the conversations and their tokens: made once, read by every arm.

python -m arms.workload FOLDER

FOLDER/model/               Qwen2-type model and tokenizer, as Hugging Face saves them
FOLDER/conversations.jsonl  {"messages": [...]} per line, for arms that tokenize by themselves
FOLDER/tokens.json          {"ids": [[...]], "mask": [[...]]}: the same conversations; mask 1 = learnt
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONVERSATIONS = 2000
SHORTEST, LONGEST = 20, 190  # tokens; a conversation outside is drawn again
VOCAB = 512
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SYLLABLES = ("ba", "co", "du", "fe", "gi", "ka", "lo", "mi", "nu", "pe", "ra", "so", "ti", "vu", "we", "zi")
MODEL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokenized conversations: ids and masks of equal lengths, one list per conversation."""

    ids: list[list[int]]
    mask: list[list[int]]

    def batch(self, step: int, size: int) -> Rows:
        """Conversations step·size … in the file's order, endlessly."""
        index = [(step * size + k) % len(self.ids) for k in range(size)]
        return Rows([self.ids[i] for i in index], [self.mask[i] for i in index])

    def tokens(self, step: int, size: int) -> int:
        """Tokens of `batch(step, size)`, without padding."""
        return sum(map(len, self.batch(step, size).ids))


def read(folder: Path) -> Rows:
    """The tokens that all arms learn."""
    stored = json.loads((folder / "tokens.json").read_text())
    return Rows(stored["ids"], stored["mask"])


def conversations(seed: int) -> Iterator[list[dict[str, str]]]:
    """Endless chats of 1-3 turns; the answer is the question's words in alphabetical order."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(SYLLABLES, k=rng.choice((1, 2, 2, 3)))) for _ in range(150)]
    while True:
        messages: list[dict[str, str]] = []
        for _ in range(rng.choices((1, 2, 3), (60, 28, 12))[0]):
            asked = rng.choices(words, k=max(1, round(rng.lognormvariate(1.9, 0.75))))
            messages.append({"role": "user", "content": "sort " + " ".join(asked)})
            messages.append({"role": "assistant", "content": " ".join(sorted(asked))})
        yield messages


def _tokenizer(sample: list[list[dict[str, str]]]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator((m["role"] + "\n" + m["content"] for chat in sample for m in chat), trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, eos_token=SPECIAL[2], pad_token=SPECIAL[0], chat_template=TEMPLATE
    )


def _tokenized(tokenizer: Any, chat: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    got = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    return list(got["input_ids"]), list(got["assistant_masks"])


def make(folder: Path) -> None:
    """Write model, conversations and tokens into `folder`; the same bytes every time."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    stream = conversations(seed=0)
    tokenizer = _tokenizer([next(stream) for _ in range(500)])
    chats: list[list[dict[str, str]]] = []
    ids: list[list[int]] = []
    masks: list[list[int]] = []
    while len(chats) < CONVERSATIONS:
        chat = next(stream)
        row, mask = _tokenized(tokenizer, chat)
        if SHORTEST <= len(row) <= LONGEST:
            chats.append(chat)
            ids.append(row)
            masks.append(mask)
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    Qwen2ForCausalLM(Qwen2Config(**MODEL)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "conversations.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats))
    (folder / "tokens.json").write_text(json.dumps({"ids": ids, "mask": masks}))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
