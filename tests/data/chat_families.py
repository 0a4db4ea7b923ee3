"""The table of docs/chats.md: what becomes of conversations under the chat templates of twelve families of models.

    python -m tests.data.chat_families --write      writes the table into docs/chats.md

The templates are those that TRL's installed package ships. The tokenizer is a byte-level one with the family's tokens.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken

from runner.data.config import ChatConfig
from runner.data.examples import ChatExample, Message
from runner.data.jinja_sandbox import TEMPLATES
from runner.data.readers import Problems, SourceLocation
from runner.data.tokenization import EncodedExample, EncodedRows, ExampleTokenizer
from tests.data.conftest import byte_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "chats.md"
BEGIN, END = "<!-- table: python -m tests.data.chat_families --write -->", "<!-- end of table -->"
TOKEN = re.compile(r"<[|｜]?[A-Za-z_/▁]+[|｜]?>|<\|\"\|>|\[gMASK\]|\[/?INST\]")
WORD = re.compile(r"<[a-z/_]+>")  # added tokens that are not special, such as <think>
MISTRAL = (  # of the kind of Mistral's first templates: the system prompt stands in the last user message
    "{{ bos_token }}{% set ns = namespace(system='', last=0) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}{% endif %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ ns.system if loop.index0 == ns.last }}{{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% elif m.role != 'system' %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)


class Family(NamedTuple):
    """A chat template: its file in TRL's package, the tokens that begin and end a text, and options of `chat`."""

    name: str
    file: str
    bos: str
    eos: str
    options: ChatConfig = ChatConfig()

    def template(self) -> str:
        """The text of the template."""
        if self.options.template:
            return (TEMPLATES / f"{self.options.template}.jinja").read_text()
        return MISTRAL if self.file == "mistral" else trl_template(self.file)


DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
FAMILIES = (
    Family("Qwen2.5", "qwen2_5", "<|endoftext|>", "<|im_end|>"),
    Family("Qwen3", "qwen3", "<|endoftext|>", "<|im_end|>"),
    Family("Qwen3.5", "qwen3_5_think", "<|endoftext|>", "<|im_end|>"),
    Family("Llama-3", "llama3", "<|begin_of_text|>", "<|eot_id|>"),
    Family("Gemma-3", "gemma3", "<bos>", "<end_of_turn>"),
    Family("Gemma-4", "gemma4_v5", "<bos>", "<turn|>"),
    Family("DeepSeek-V3/R1", "deepseekv3", *DEEPSEEK),
    Family("DeepSeek, `chat.template=deepseek_r1`", "deepseekv3", *DEEPSEEK, ChatConfig(template="deepseek_r1")),
    Family("gpt-oss", "gptoss", "<|startoftext|>", "<|return|>"),
    Family("Phi-3", "phi3", "<s>", "<|endoftext|>"),
    Family("GLM-4.5", "glm4moe", "[gMASK]", "<|endoftext|>"),
    Family("Mistral", "mistral", "<s>", "</s>"),
    Family("Cohere", "cohere2", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
)


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


FUNCTION = {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}
CALLS = [{"type": "function", "id": "abcdefgh1", "function": FUNCTION}]
PROPERTIES = {"city": {"type": "string", "description": "a city"}}
SCHEMA = {
    "name": "get_weather",
    "description": "the weather",
    "parameters": {"type": "object", "properties": PROPERTIES},
}
TOOLS = ({"type": "function", "function": SCHEMA},)
RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "name": "get_weather", "content": "sunny, 21 degrees"}
TURNS = [_user("first question"), _assistant("first answer"), _user("second question"), _assistant("second answer")]
KINDS: dict[str, tuple[list[Message], tuple[dict[str, Any], ...]]] = {
    "one turn": (TURNS[:2], ()),
    "three turns": ([*TURNS, _user("third question"), _assistant("third answer")], ()),
    "system": ([{"role": "system", "content": "be brief"}, *TURNS], ()),
    "tools": ([_user("weather?"), _assistant("", tool_calls=CALLS), RESULT, _assistant("It is sunny.")], TOOLS),
    "reasoning": ([TURNS[0], _assistant("first answer", reasoning_content="deep thought")], ()),
    "reasoning in history": (
        [
            *(TURNS[0], _assistant("first answer", reasoning_content="deep thought")),
            *(TURNS[2], _assistant("second answer", reasoning_content="other idea")),
        ],
        (),
    ),
    "no content": ([_user("weather?"), _assistant(None, tool_calls=CALLS), RESULT, _assistant("It is sunny.")], TOOLS),
    "content parts": (
        [_user([{"type": "text", "text": "first "}, {"type": "text", "text": "question"}]), TURNS[1]],
        (),
    ),
    "unicode": ([_user("héllo 你好 🙂 عربى"), _assistant("naïve “quotes” 🙃")], ()),
}


def trl_template(name: str) -> str:
    """A template of TRL's installed package, which is not imported."""
    found = find_spec("trl")
    assert found is not None and found.submodule_search_locations, "pip install -c constraints/cpu.txt --no-deps trl"
    return (Path(found.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja").read_text()


def trl_names() -> list[str]:
    """Every template that TRL ships."""
    found = find_spec("trl")
    assert found is not None and found.submodule_search_locations
    return sorted(path.stem for path in (Path(found.submodule_search_locations[0]) / "chat_templates").glob("*.jinja"))


def family_tokenizer(template: str, bos: str, eos: str) -> Any:
    """A byte-level tokenizer with the tokens that a template names."""
    tokenizer = byte_tokenizer(template=None)
    found = sorted({*TOKEN.findall(template), bos, eos})
    special = [AddedToken(t, special=t in (bos, eos) or not WORD.fullmatch(t), normalized=False) for t in found]
    tokenizer.add_tokens(special)
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template = bos, eos, template
    return tokenizer


def encode_chat(
    tokenizer: Any, messages: Sequence[Message], tools: Any = (), options: ChatConfig | None = None
) -> list[EncodedExample] | str:
    """The rows of a conversation, or the words that refuse it."""
    problems = Problems("data.path", "a.jsonl")
    example = ChatExample(SourceLocation("a.jsonl", 1), tuple(messages), 0, tuple(tools))
    found = ExampleTokenizer(tokenizer, options).encode([example], problems)
    if problems.count:
        return str(problems.error())
    return found[0].rows if isinstance(found[0], EncodedRows) else [found[0]]


def spans(tokenizer: Any, ids: Sequence[int], mask: Sequence[int]) -> list[str]:
    """The stretches that are trained on, as text."""
    cut = [0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), len(mask)]
    return [tokenizer.decode(ids[a:b]) for a, b in pairwise(cut) if a < b and mask[a]]


def equals_trl(family: Family, messages: Sequence[Message], tools: Any, row: EncodedExample) -> bool:
    """Whether TRL's training template gives the same ids, and trains on the same tokens.

    Generation does not write what opens an answer, nor blanks after its end: these may differ.
    """
    try:
        training = trl_template(f"{family.file}_training")
        tokenizer = family_tokenizer(training + trl_template(family.file), family.bos, family.eos)
        tokenizer.chat_template = training
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        theirs = tokenizer.apply_chat_template([dict(m) for m in messages], tools=list(tools) or None, **options)
    except Exception:  # some of these templates take no parts, no reasoning or no calls
        return False
    ours = spans(tokenizer, row.ids, row.loss_mask)
    other = spans(tokenizer, theirs["input_ids"], theirs["assistant_masks"])
    same = len(ours) == len(other) and all(b.strip().endswith(a.strip()) for a, b in zip(ours, other, strict=True))
    return same and list(theirs["input_ids"]) == row.ids


def cell(family: Family, kind: str) -> str:
    """What becomes of a kind of conversation under a family's template."""
    messages, tools = KINDS[kind]
    template = family.template()
    tokenizer = family_tokenizer(template, family.bos, family.eos)
    rows = encode_chat(tokenizer, messages, tools, family.options)
    if isinstance(rows, str):
        lost = re.search(r"does not render the (reasoning|tool call|tool|content)\b", rows)
        if lost:
            return f"refused: {lost.group(1)}"
        return "refused: `chat.template`" if "type chat.template=" in rows else "refused: the template's words"
    if len(rows) > 1:
        return f"{len(rows)} branches"
    return "= TRL" if equals_trl(family, messages, tools, rows[0]) else "one row"


def table() -> str:
    """The table as Markdown."""
    lines = ["| template | " + " | ".join(KINDS) + " |", "| --- |" + " --- |" * len(KINDS)]
    lines += [f"| {f.name} | " + " | ".join(cell(f, kind) for kind in KINDS) + " |" for f in FAMILIES]
    return "\n".join(lines)


if __name__ == "__main__":
    if "--write" in sys.argv:
        head, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")
    else:
        print(table())
