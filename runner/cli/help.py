"""`run --help` on one screen, and `run help recipes|options|verbs|VERB` for the rest."""

from __future__ import annotations

import argparse
from argparse import Namespace

from runner.cli.args import EXAMPLES, TOPICS, VERBS, UsageError, all_verbs, parser_of
from runner.cli.conf import scalar
from runner.cli.config_sources import GROUP
from runner.cli.listing import option_summary, print_table
from runner.cli.sources import group_options, hydra_session
from runner.spec.registry import default_registry
from runner.spec.schema import groups_of
from runner.sweep.config import SweepConfig
from runner.tracker.text import print_text

SCREEN_WIDTH = 110
HEAD = """run trains language models after pre-training (SFT, preferences, RL, distillation) from one declarative job.
usage  run [VERB] [+recipe=NAME] [group=option] [group.key=value]
"""
MORE_EXAMPLES = """
  run                                           the demo, on this machine, in under 90 s
  run data=file data.path=my.jsonl model=hf model.path=/models/Qwen3-0.6B      your data and your model
  run +recipe=grpo_demo launch.devices=2 parallelism=ddp                       one job on two devices
  run -m +recipe=sft_demo seed=1,2,3            a sweep: a job for each combination

more   run help recipes, run help options, run help verbs, run help VERB; docs/index.md"""
JOBS = """ways to name a job
  run +recipe=sft_demo optimizer.lr=1e-3         the command line beats the recipe
  run +recipe=exp/mine.yaml                      a recipe by its file's path
  run --cfg job +recipe=sft_demo                 print the job, run nothing
  run --info defaults +recipe=sft_demo           the files that it is composed of
  run --spec outputs/latest/spec.yaml seed=1     the job of a run, again
  eval "$(run -sc install=bash)"                 tab completion (bash, zsh, fish)
"""
SWEEPS = """start a sweep
  run -m +recipe=sft_demo optimizer.lr=1e-4,3e-4 seed=1,2,3     a job for each combination
  run -m +recipe=a,b 'seed=range(1,4)'                          recipes, ranges, globs: Hydra's grammar
  run -m +recipe=mine                                           a recipe with a section sweep.over; or a search
  run -m --spec outputs/latest seed=1,2,3                       the job of a run, varied
  run -m hydra/sweeper=optuna sweep.trials=20 'optimizer.lr=tag(log,interval(1e-5,1e-2))'     a search (docs/sweeps.md)
  run -m --cfg job …                                            print the jobs (of a search: its corners), run nothing
"""


def show(args: Namespace) -> int:
    """`run --help`, `run VERB --help`, `run help TOPIC`. Raises UsageError for an unknown topic."""
    if args.verb != "help":
        _verb(args.verb) if args.verb != "run" else _screen()
        return 0
    topic = args.words[0] if args.words else ""
    if topic in ("", "help"):
        _screen()
    elif topic in VERBS:
        _verb(topic)
    elif topic in all_verbs():  # of a plug-in, which reads its words itself
        print_text(f"{all_verbs()[topic]}\n\nusage: run {topic} …")
    elif topic == "verbs":
        _verbs()
    elif topic in TOPICS:
        _recipes(args) if topic == "recipes" else _options(args)
    else:
        from runner.cli.verb_hints import hint

        known = EXAMPLES | {name: f"run help {name}" for name in TOPICS}
        instead = hint(topic, known) or f"there are {', '.join(TOPICS)}, and the verbs: {', '.join(all_verbs())}"
        raise UsageError(f"no help on '{topic}'; {instead}")
    return 0


def _screen() -> None:
    """Everything that a first hour needs, on one screen."""
    print(HEAD)
    verbs = all_verbs()
    wide, wider = max(map(len, verbs)), max(len(VERBS[verb]) for verb in VERBS)
    for verb, line in verbs.items():
        text = f"  {verb.ljust(wide)}  {line.ljust(wider)}  {EXAMPLES.get(verb, '')}".rstrip()
        print_text(text if len(text) <= SCREEN_WIDTH else f"{text[: SCREEN_WIDTH - 1]}…")  # of a plug-in
    print(MORE_EXAMPLES)


def _verb(verb: str) -> None:
    print_text(f"{VERBS[verb]}; e.g. {EXAMPLES[verb]}\n\n{parser_of(verb).format_help()}", end="")
    if verb == "run":
        print_text(f"\n{JOBS}", end="")
    if verb == "sweep":
        _about_sweeps()


def _verbs() -> None:
    """Each verb with what it takes; what all of them take at the end."""
    common = {action.dest for action in parser_of("schema")._actions}
    for verb, line in all_verbs().items():
        print_text(f"{verb}: {line}")
        actions = parser_of(verb)._actions if verb in VERBS else []
        words = [("WORDS", str(a.help)) for a in actions if a.dest == "words"]
        flags = [(_flag(a), str(a.help).replace("%%", "%")) for a in actions if a.dest not in common]
        print_table([("e.g.", EXAMPLES.get(verb, f"run {verb}")), *words, *flags])
    print("every verb")
    print_table([(_flag(a), str(a.help)) for a in parser_of("schema")._actions if a.help != argparse.SUPPRESS][:-1])


def _flag(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" {action.metavar or '|'.join(action.choices or [action.dest.upper()])}"
    return f"{', '.join(action.option_strings)}{value}"


def _recipes(args: Namespace) -> None:
    registry = default_registry()
    with hydra_session(registry, args.config_dir) as loader:
        sources = loader.get_sources()
        print("recipes: run +recipe=NAME; what one sets: run --cfg job +recipe=NAME")
        print_table([(name, option_summary(sources, GROUP, name, registry)) for name in group_options(sources, GROUP)])


def _options(args: Namespace) -> None:
    registry = default_registry()
    with hydra_session(registry, args.config_dir) as loader:
        sources = loader.get_sources()
        print("groups and their options: run GROUP=OPTION; more on them: run list GROUP, run explain GROUP=OPTION")
        print_table([(group, ", ".join(group_options(sources, group))) for group in groups_of(registry)])
    print_text(f"\n{JOBS}", end="")


def _about_sweeps() -> None:
    """How a sweep is started, and what can be set of it."""
    print_text(f"\n{SWEEPS}\noptions of a sweep, with run -m and with run sweep resume")
    fields = [(name, info) for name, info in SweepConfig.model_fields.items() if name != "over"]
    values = {name: info.get_default(call_default_factory=True) for name, info in fields}
    print_table([(f"sweep.{name}={scalar(values[name])}", str(info.description)) for name, info in fields])
