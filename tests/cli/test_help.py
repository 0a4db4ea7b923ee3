"""The help that fits one screen, the rest of it, and what a word that is no verb is answered with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner.cli.args import flags_of, parse
from runner.cli.main import main
from runner.cli.verbs import EXAMPLES, HANDLERS, TOPICS, VERBS
from runner.spec.migrate import table
from runner.spec.registry import resolve


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    return capsys.readouterr().err


def test_help_fits_one_screen_and_names_every_verb(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(["--help"], capsys)
    assert len(out.splitlines()) <= 32 and max(map(len, out.splitlines())) <= 110 and "…" not in out
    for verb in VERBS:
        assert f"\n  {verb} " in out
    for topic in TOPICS:
        assert f"run help {topic}" in out
    assert out == printed(["help"], capsys) == printed(["help", "--help"], capsys)


def test_every_handler_of_the_table_exists() -> None:
    assert all(callable(resolve(f"runner.cli.{handler}")) for handler in HANDLERS.values())


def test_the_examples_of_the_verbs_are_command_lines() -> None:
    for verb, example in EXAMPLES.items():
        assert parse(example.split()[1:]).verb == verb


def test_help_topics_have_all_recipes_options_and_flags(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "more" / "recipes").mkdir(parents=True)
    (workdir / "more" / "recipes" / "mine.yaml").write_text("# @package _global_\n# What mine does.\nsteps: 3\n")
    out = printed(["help", "recipes", "--config-dir", "more"], capsys)
    assert "  sft_demo " in out and "What mine does." in out
    out = printed(["help", "options"], capsys)
    assert "auto, cpu, cuda, npu" in out and "install=bash" in out
    out = printed(["help", "verbs"], capsys)
    assert [flag for verb in VERBS for flag in flags_of(verb) if flag not in out] == [] and "%%" not in out


@pytest.mark.parametrize("words", [["infer", "--help"], ["help", "infer"]])
def test_a_verb_has_a_help_of_its_own(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(words, capsys)
    assert "usage: run infer" in out and "maximum tokens of a completion (256)" in out and "--spec" not in out


def test_run_is_a_verb_with_help_too(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(["help", "run"], capsys)
    assert "--spec" in out and "--folder" in out and "--info defaults" in out


def test_an_unknown_topic_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no help topic 'recipe'" in (err := refused(["help", "recipe"], capsys)) and "run help recipes" in err
    assert "'optimizer' is a group; its options: run list optimizer" in refused(["help", "optimizer"], capsys)
    assert "there are recipes, options, verbs" in refused(["help", "zzz"], capsys)


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("shema", "did you mean 'schema'? e.g. run schema recipe"),
        ("deploy", "to serve a model over HTTP, with OpenAI's API: run serve latest"),
        ("talk", "to chat with a model in the terminal: run chat latest"),
        ("merge_lora", "run export latest --merge"),
        ("Compare", "run diff A B"),
        ("finetun", "did you mean 'finetune'? to train: run +recipe=NAME"),
        ("cuda", "run device=cuda"),
        ("none", "run adapter=none or data=none or"),
        ("model", "'model' is a group; its options: run list model"),
    ],
)
def test_a_word_that_is_no_verb_is_answered_with_what_was_meant(
    word: str, answer: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err = refused([word, "seed=1"], capsys)
    assert f"no verb named '{word}'; " in err and answer in err and err.endswith("see: run --help\n")
    assert len(err.splitlines()) == 2, "not every verb, where one is known to be meant"


def test_the_words_of_other_tools_name_verbs_that_exist_and_are_none_of_ours() -> None:
    hints = table().verbs
    assert not set(hints) & set(VERBS), "a verb that was added leaves the table"
    pattern = r"(?:: |, |or |(?<!no )`)run ([a-z]+)(?![=\w.])"
    commands = {found for hint in hints.values() for found in re.findall(pattern, hint)}
    assert {"infer", "export", "doctor"} <= commands <= set(VERBS)
