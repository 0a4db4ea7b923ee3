"""What a run says of itself can be typed, and is right."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

from runner.cli.job_builder import compose_job
from runner.core.rank_info import RankInfo
from runner.data.config import ChatConfig
from runner.interfaces import Prompt, TokenizedExample
from runner.launch.run_messages import ChatMarkers, data_text, example_prompt, plain_sample, ranks_text, run_facts
from tests.data.conftest import byte_tokenizer

HEADERS = (
    "{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content }}<|eot|>{% endfor %}"
    "<|head|>assistant<|/head|>\n\n"
)
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("template", [None, HEADERS, BRACKETS], ids=["own", "headers", "brackets"])
@pytest.mark.parametrize("asked", ["sort 31", "two\nlines", ""])
def test_the_last_message_is_found_in_a_rendered_prompt(template: str | None, asked: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    turns = [("user", "before"), ("assistant", "so"), ("user", asked)]
    messages = [{"role": role, "content": content} for role, content in turns]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    turn = ChatMarkers.from_tokenizer(tokenizer, ChatConfig())
    assert turn.user_message(prompt) == asked
    assert turn.user_message("plain text") == "plain text"
    row = {"prompt": prompt, "chosen": f"x{tokenizer.eos_token}", "margin": 0.5}
    assert plain_sample(row, turn) == {"prompt": asked, "chosen": "x", "margin": 0.5}
    assert plain_sample({"prompt": prompt}, None) == {"prompt": prompt}


@pytest.mark.parametrize(
    ("text", "trained_from", "said"),
    [
        ("sort 31 13", 7, '"sort 31"'),
        ("once upon a time there", 0, '"once upon a time"'),
        ("it's $5 13", 7, "'it'\"'\"'s $5'"),
        ("two\nlines 13", 9, '"…"'),
        ("x" * 200, 150, '"…"'),
    ],
)
def test_an_example_can_be_typed(text: str, trained_from: int, said: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tuple(tokenizer(text)["input_ids"])
    item = TokenizedExample(ids, tuple(float(i >= trained_from) for i in range(len(ids))))
    assert example_prompt([item], tokenizer, None) == said
    assert len(shlex.split(said)) == 1


def test_the_example_of_a_prompt_is_its_text() -> None:
    tokenizer = byte_tokenizer()
    ids = tuple(tokenizer("2+2=")["input_ids"])
    assert example_prompt([Prompt(ids, "2+2=")], tokenizer, None) == '"2+2="'


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "tiny (random weights)"),
        (["init_from=/runs/a/export"], "tiny (weights of /runs/a/export)"),
        (["model=hf", "model.path=/models/x"], "/models/x"),
        (["model=hf", "model.path=/models/x", "model.from_scratch=true"], "/models/x (random weights)"),
    ],
)
def test_the_title_says_what_learns_and_how_much_of_it(words: list[str], said: str) -> None:
    class Model:
        module = torch.nn.Linear(30, 50)

        def trainable(self) -> dict[str, torch.nn.Parameter]:
            return {"bias": self.module.bias}

    facts = run_facts(compose_job(["data=demo", *words]).spec, Model())
    assert (facts["model"], facts["parameters"]) == (said, "1.55k parameters, 50 trainable")


def test_steps_are_said_in_epochs() -> None:
    spec = compose_job(["+recipe=sft_demo", "algorithm.batch_size=32", "steps=60"]).spec
    assert data_text(spec, 3) == "data     3 items · 32 per step · 60 steps = 640 epochs"
    assert data_text(spec, 7000).endswith("60 steps = 0.274 epochs")
    once = compose_job(["+recipe=sft_demo", "algorithm.batch_size=1", "steps=1"]).spec
    assert data_text(once, 1) == "data     1 item · 1 per step · 1 step = 1 epochs"
    mixture = ["data=file", "data.path=[a,b]", "data.mixture_weights=[1,2]"]
    data, tokens = data_text(compose_job(mixture).spec, 3).splitlines()
    assert data.endswith(" steps") and "run explain chat" in tokens


@pytest.mark.parametrize(
    ("word", "size", "said"),
    [
        (
            "parallelism=ddp",
            2,
            "ranks    2: parallelism=ddp, dp_replicate=2; this is rank 0, logs of the others: a/ranks/1.log",
        ),
        ("parallelism=fsdp", 8, "ranks    8: parallelism=fsdp, dp_shard=4 × tp=2; "),
        ("parallelism=deepspeed_zero2", 4, "ranks    4: parallelism=deepspeed_zero2; this is rank 0, "),
    ],
)
def test_several_ranks_are_said(word: str, size: int, said: str) -> None:
    slices = ["parallelism.tp=2"] if size == 8 else []
    spec = compose_job(["+recipe=sft_demo", word, f"launch.devices={size}", *slices]).spec
    line = ranks_text(spec, RankInfo(size=size, local_size=size), Path("a"))
    assert line.startswith(said) and line.endswith("1.log" if size == 2 else f"1.log to {size - 1}.log")
