"""The tiny model's tokenizer: one token per byte, three special ones, a ChatML template; built in memory.

    text ──UTF-8──▶ bytes ──▶ ids 0 … 255        <|pad|> 256   <|im_start|> 257   <|im_end|> 258

No merges are learnt, so any UTF-8 text survives encode and decode, and no file has to be shipped. Of an export,
AutoTokenizer takes the class of the model's architecture: the same ids, but it first composes accents that stand apart.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"

# What the model has to write itself (content, tool calls and the end mark) stands between the generation markers.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>tools\\n' + tools | tojson + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] or '' }}
            {%- if message['tool_calls'] %}
                {{- '<tool_calls>' + message['tool_calls'] | tojson + '</tool_calls>' }}
            {%- endif %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- (message['content'] or '') + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def byte_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer of 259 ids: the 256 bytes, <|pad|>, <|im_start|>, <|im_end|> (end of sequence).

    `max_length` is the longest sequence, in tokens, of the model that it belongs to.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, START, END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        unk_token=PAD,  # no byte is unknown; where none is named, the class that AutoTokenizer takes adds an id
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
