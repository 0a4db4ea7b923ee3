"""Hints for a word that is no verb: verbs of other tools, names of components, typing errors."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path

from runner.core.package import conf_dir, recipes_dir
from runner.spec import suggest

# Words of other tools, each line with what does the same here. A verb that is added leaves this table.
OTHER_TOOLS = {
    "deploy server api": "to serve a model over HTTP, with OpenAI's API: run serve latest",
    "talk dialogue": "to chat with a model in the terminal: run chat latest",
    "evaluate evaluation score": ("to evaluate models: run eval latest '+evaluation=[gsm8k]'"),
    "test": "to evaluate models: run eval latest '+evaluation=[SET]'; to test this machine: run doctor",
    "train fit finetune fine-tune": (
        "to train: run +recipe=NAME, or run algorithm=sft data=file data.path=FILE model=hf model.path=FOLDER"
    ),
    "launch start exec submit": (
        "to train on several devices: run +recipe=NAME launch.devices=4; elsewhere: launch=ray, launch=slurm"
    ),
    "pretrain pt": "for continued pre-training: run algorithm=cpt data=file data.path=FILE model=hf model.path=FOLDER",
    "rl rlhf rft": "for reinforcement learning: run +recipe=grpo_demo, or run algorithm=grpo …",
    "reward": "to train a reward model: run algorithm=rm …; rewards: run list reward",
    "merge merge-lora": "to merge an adapter into its base model: run export latest --merge",
    "convert save consolidate": "to write a Hugging Face folder: run export latest",
    "quantize quant": "there is no `run quantize`; other tools quantize the folder that `run export latest` writes",
    "generate predict inference sample complete ask prompt": 'to try a model: run infer latest "…"',
    "ls": "groups, options and recipes: run list; runs are folders below outputs/",
    "recipes": "recipes: run list recipe, or run help recipes",
    "options groups parameters": "groups and their options: run help options",
    "verbs commands usage docs man": "the verbs: run help verbs",
    "show": "a run: run status latest; a component: run explain GROUP=OPTION; a job: run --cfg job …",
    "ps top watch monitor progress log logs tail": (
        "progress of a run: run status latest; its log: outputs/latest/run.log"
    ),
    "compare": "to compare two runs: run diff A B",
    "init create scaffold": (
        "your own component: run new reward NAME; your own recipe is a YAML file: run +recipe=FILE.yaml"
    ),
    "check validate lint dry-run": (
        "a job without running it: run --cfg job …; its memory: run plan …; this machine: run doctor"
    ),
    "env system info diagnose": "what this machine has: run doctor",
    "config cfg": "to print a job: run --cfg job …",
    "preprocess prepare tokenize": "a run reads and tokenizes its data by itself: run data=file data.path=FILE …",
    "continue restart retry": "to continue a run: run resume latest",
    "stop kill cancel": (
        "to stop a run: Ctrl-C, or SIGTERM to its process (run status latest); it saves a checkpoint first"
    ),
    "push upload publish": "to share a model: run export latest --push hub:OWNER/NAME",
    "download pull": "a run downloads its model and data itself: model=hf model.path=ORGANIZATION/NAME, data=hub",
    "plot curves dashboard ui webui": "curves of a run: run report latest",
    "estimate estimate-memory memory profile": "memory of a job: run plan …; speed of a device: run bench",
    "hpo search tune optimize": "a search over options: run -m …; see: run help sweep",
    "delete remove clean prune": "a run is a folder below outputs/, which you can delete",
    "install setup update upgrade": "a package: pip install …; what this machine lacks: run doctor",
    "version": "the version: run --version",
}
HINTS = {word: hint for words, hint in OTHER_TOOLS.items() for word in words.split()}


def hint(word: str, verbs: Mapping[str, str]) -> str:
    """What to type instead of `word`; empty where nothing is near. verbs: name → example."""
    if (known := HINTS.get(word.lower().replace("_", "-"))) is not None:
        return known
    if (conf_dir() / word).is_dir():
        return f"'{word}' is a group; its options: run list {word}; to choose one: run {word}=NAME"
    if of_component := component_hint(word):
        return of_component
    meant = suggest.nearest_word(word, [*verbs, *HINTS])
    if meant is None:
        return ""
    return f"did you mean '{meant}'? {'e.g. ' + verbs[meant] if meant in verbs else HINTS[meant]}"


def component_hint(word: str) -> str:
    """How to choose a component by its name; empty where it is none."""
    groups = sorted(path.parent.name for path in conf_dir().glob("*/*.yaml") if path.stem == word.lower())
    demo = f"; a demo: run +recipe={word}_demo" if (recipes_dir() / f"{word}_demo.yaml").is_file() else ""
    return f"to choose it: run {' or '.join(f'{g}={word.lower()}' for g in groups)} …{demo}" if groups else ""


def near_flag(word: str, parser: ArgumentParser) -> str | None:
    """The option with two dashes that an unknown word probably means."""
    known = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    return suggest.nearest_word(word.replace("_", "-").partition("=")[0], known, cutoff=0.8)


def flag_hint(message: str, parser: ArgumentParser) -> str:
    """What to type instead of the first unknown word with dashes that argparse names."""
    near = next(filter(None, (near_flag(word, parser) for word in message.split())), None)
    return f"; did you mean {near}?" if near else "; options of a job are written without dashes: key=value"


def recipe_hint(word: str) -> str:
    """How to run a recipe that was typed as a verb; empty where it is none."""
    by_name = any((place / f"{word}.yaml").is_file() for place in (Path("recipes"), recipes_dir()))
    if by_name or Path(word).suffix in (".yaml", ".yml"):
        return f"to run a recipe (a name, or the path of a file): run +recipe={word}"
    return ""
