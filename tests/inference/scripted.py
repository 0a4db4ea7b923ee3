"""A model that writes what it was told to, and a server over it: real processes, real HTTP, known answers.

Its logits depend on the position alone: up to SCRIPTS they are random, behind it they spell one text after the other.
A prompt that ends where a text begins is answered with that text.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

from runner.model.tiny import byte_tokenizer

END = "<|im_end|>"
SCRIPTS = 220  # the position where the first text is predicted
POSITIONS, USED = 1024, 512  # of them the last ones all have the same logits
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
TEXTS = {
    "thinks and calls": f"<think>\nAdd them.\n</think>\n\nI call it.\n{CALL}\n{CALL}{END}",
    "llama": '{"name": "add", "parameters": {"a": 3}}' + END,
    "plain": f"Größe: 5 €, {{not a call}}{END}",
}
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>tools\\n' + tools | tojson + '<|im_end|>' }}{%- endif %}
{%- for message in messages %}
    {%- if message['role'] != 'system' or not drop_system %}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
        {%- if message['tool_calls'] %}{{- message['tool_calls'] | tojson }}{%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def begins() -> dict[str, int]:
    """The position that each text begins at."""
    tokenizer, at, found = byte_tokenizer(POSITIONS), SCRIPTS, dict[str, int]()
    for name, text in TEXTS.items():
        found[name] = at
        at += len(tokenizer(text)["input_ids"])
    assert at < USED
    return found


def write_model(folder: Path) -> Path:
    """The model as a Hugging Face folder."""
    tokenizer = byte_tokenizer(POSITIONS)
    tokenizer.chat_template = TEMPLATE
    config = GPT2Config(
        vocab_size=259,
        n_positions=POSITIONS,
        n_embd=USED,
        n_layer=1,
        n_head=4,
        n_inner=8,
        eos_token_id=258,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.transformer.parameters():
            parameter.zero_()
        model.transformer.ln_f.weight.fill_(1.0)
        model.transformer.wpe.weight[:USED] = torch.eye(USED)
        model.lm_head.weight.copy_(torch.randn(259, USED) * 0.1)
        for name, at in begins().items():
            for offset, id in enumerate(tokenizer(TEXTS[name])["input_ids"]):
                model.lm_head.weight[:, at + offset - 1] = 0.0
                model.lm_head.weight[id, at + offset - 1] = 3.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass
class Server:
    """A `run serve` that answers. url: with /v1"""

    process: subprocess.Popen[bytes]
    url: str
    model: str
    printed: Path

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.removeprefix("http://").removesuffix("/v1").rpartition(":")
        return host, int(port)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit code after a signal."""
        self.process.send_signal(number)
        return self.process.wait(200)


@contextmanager
def serve(folder: Path, *words: str, cwd: Path) -> Iterator[Server]:
    """A server over a model's folder; killed at the end if it still runs."""
    printed = cwd / f"serve-{time.monotonic_ns()}.txt"
    command = [sys.executable, "-m", "runner", "serve", str(folder), "port=0", *words]
    with open(printed, "wb") as file:
        process = subprocess.Popen(command, cwd=cwd, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 300
        while not (
            found := re.search(r"^(\S+?)(?:, step \d+)?: (http://\S+/v1) \(", printed.read_text(), re.MULTILINE)
        ):
            assert process.poll() is None and time.monotonic() < end, printed.read_text()
            time.sleep(0.05)
        yield Server(process, found[2], found[1], printed)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
