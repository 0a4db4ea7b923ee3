"""What there is: `run --help`, `run list` and `run schema`."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Sequence
from itertools import dropwhile, takewhile
from pathlib import Path

from hydra.plugins.config_source import ConfigSource

from runner.cli.args import VERBS, UsageError, all_verbs, parser_of
from runner.cli.compose import Composer
from runner.cli.conf import BESIDE, choices, scalar
from runner.cli.config_sources import GROUP, file_of, holders, label
from runner.cli.sources import options, session
from runner.core.errors import SpecError
from runner.spec import suggest
from runner.spec.registry import Registry, default_registry
from runner.spec.schema import CALLBACKS, groups_of, job_schema, recipe_schema
from runner.sweep.config import SweepConfig

INFO = {  # Hydra's other words after --info
    "config": "the job is printed by: run --cfg job …",
    "all": "there is --info defaults, --info searchpath, and for the job itself: run --cfg job …",
    "defaults-tree": "--info defaults says of each file in which one it was chosen",
    "plugins": "what there is, plug-ins included, is listed by: run list",
}
ROOT = "<root>"  # what Hydra calls the parent of job.yaml
PROVIDERS = {"main": "shipped", "runner": "shipped", "files": "+recipe=FILE", "schema": "components without a file"}
PLACES = {"files": "any file, by its path", "schema": "structured://"}
# A full stop before a capital letter, but not that of an initial or of an abbreviation.
SENTENCE_END = re.compile(r"(?<!\b[A-Z])(?<!\bDr)(?<!\bal)(?<!\be\.g)(?<!\bi\.e)\. (?=[A-Z])")
SWEEP_FIELDS = [(name, info) for name, info in SweepConfig.model_fields.items() if name != "over"]
SWEEPS = """start a sweep
  run -m +recipe=sft_demo optimizer.lr=1e-4,3e-4 seed=1,2,3     a job for each combination
  run -m +recipe=a,b 'seed=range(1,4)'                          recipes, ranges, globs: Hydra's grammar
  run -m +recipe=mine                                           a recipe with a section sweep.over; or a search
  run -m --spec outputs/latest seed=1,2,3                       the job of a run, varied
  run -m hydra/sweeper=optuna sweep.trials=20 'optimizer.lr=tag(log,interval(1e-5,1e-2))'     a search (docs/sweeps.md)
  run -m --cfg job …                                            print the jobs (of a search: its corners), run nothing
"""
EXAMPLES = """examples
  run                                            the demo, on this machine, in under 90 s
  run algorithm=sft data=file data.path=my.jsonl model=hf model.path=/models/Qwen3-0.6B
  run +recipe=sft_demo optimizer.lr=1e-3         the command line beats the recipe
  run +recipe=exp/mine.yaml                      a recipe by its file's path
  run --cfg job +recipe=sft_demo                 print the job, run nothing
  run --info defaults +recipe=sft_demo           the files that it is composed of
  run --spec outputs/latest/spec.yaml seed=1     the job of a run, again
  run +recipe=sft_demo launch.devices=4 parallelism=ddp     one job on four devices (docs/parallelism.md)
  run -m +recipe=sft_demo seed=1,2,3             a sweep (run sweep --help)
  eval "$(run -sc install=bash)"                 tab completion (bash, zsh, fish)

any verb --help (its options and their defaults), --debug (tracebacks), --version
run      --cfg job, --info defaults|searchpath, --spec FILE, --config-dir FOLDER, --folder FOLDER, -m/--multirun
resume   --cfg job
status   --json
infer    --file PROMPTS, --checkpoint STEP|best, --max-new-tokens, --temperature, --top-p, --seed, device=NAME
export   --checkpoint STEP|best, --merge, --out FOLDER, device=NAME
sweep    resume [latest|FOLDER] --retry-failed, --only 3,7, sweep.parallel=N …; status, report [latest|FOLDER]
report, diff   --out FILE.html
doctor   --json, --no-trial, device=NAME
plan     --card NAME, --spec FILE, --json
bench    --out FILE, --compare FILE, --min-mfu SHARE, device=NAME
parity   --record FILE|DEVICE --steps N +recipe=… …; --compare FILE --tolerance 0.5% device=NAME
list, explain  --config-dir FOLDER"""


def usage(args: Namespace) -> int:
    """`run --help`, and `run VERB --help`."""
    if args.verb != "run":
        print(f"{VERBS[args.verb]}\n\n{parser_of(args.verb).format_help()}", end="")
        if args.verb == "sweep":
            _about_sweeps()
        return 0
    print("run: trains language models after pre-training, from one declarative job\n")
    print("usage  run [verb] [+recipe=NAME] [group=option] [group.key=value]\n\nverbs")
    _table(list(all_verbs().items()))
    registry = default_registry()
    with session(registry, args.config_dir) as loader:
        sources = loader.get_sources()
        print("\ngroups (the options of each: run list GROUP)")
        _table([(group, ", ".join(options(sources, group))) for group in groups_of(registry)])
        print("\nrecipes")
        _table([(f"+recipe={name}", about(sources, GROUP, name, registry)) for name in options(sources, GROUP)])
    print(f"\n{EXAMPLES}")
    return 0


def _about_sweeps() -> None:
    """How a sweep is started, and what can be set of it."""
    print(f"\n{SWEEPS}\noptions of a sweep, with run -m and with run sweep resume")
    values = {name: info.get_default(call_default_factory=True) for name, info in SWEEP_FIELDS}
    rows = [(f"sweep.{name}={scalar(values[name])}", str(info.description)) for name, info in SWEEP_FIELDS]
    _table(rows)


def show(args: Namespace) -> int:
    """`run list [group]`: options with one line each."""
    registry = default_registry()
    known = (*groups_of(registry), CALLBACKS, GROUP)
    wanted = [_group(word, known) for word in args.words] or list(known)
    with session(registry, args.config_dir) as loader:
        sources = loader.get_sources()
        found = {group: options(sources, group) for group in wanted}
        for index, group in enumerate(group for group in wanted if found[group] or args.words):
            print(("\n" if index else "") + group)
            _table([(name, about(sources, group, name, registry)) for name in found[group]])
    return 0


def schema(args: Namespace) -> int:
    """`run schema [recipe]`."""
    if args.words not in ([], ["job"], [GROUP]):
        raise UsageError(f"run schema: job or recipe, not {' '.join(args.words)}")
    registry = default_registry()
    of_recipe = args.words == [GROUP]
    found = recipe_schema(choices(registry), BESIDE, registry) if of_recipe else job_schema(registry)
    print(json.dumps(found, indent=1))
    return 0


def info(args: Namespace) -> int:
    """`run --info defaults|searchpath`. Raises UsageError with what says the same where Hydra has another word."""
    if args.info not in ("defaults", "searchpath"):
        instead = INFO.get(args.info, "there is --info defaults and --info searchpath")
        raise UsageError(f"run --info {args.info}: {instead}")
    others = {"--multirun": args.multirun, "--spec": args.spec, "--cfg": args.cfg, "--folder": args.folder}
    if named := [flag for flag, value in others.items() if value]:
        raise UsageError(f"--info is about one job and its files, and runs nothing; leave {' and '.join(named)} out")
    with session(default_registry(), args.config_dir) as loader:
        sources = loader.get_sources()
        if args.info == "searchpath":
            _columns([("provider", "search path"), *((PROVIDERS.get(s.provider, s.provider), url(s)) for s in sources)])
            return 0
        drafted = Composer(loader).draft(args.words)
        rows = [("config", "package", "file", "chosen in")]
        for entry in drafted.entries:
            path = str(entry.config_path)
            file = file_of(holders(sources, path)[0], path)
            parent = label(entry.parent, sources) if entry.parent not in (None, path, ROOT) else ""
            rows.append((label(path, sources), entry.package or "_global_", file, parent))
    _columns(rows)
    for note in drafted.notes:
        print(f"\nnote: {note}")
    if drafted.problems:
        raise SpecError(drafted.problems)
    return 0


def url(source: ConfigSource) -> str:
    """Where a source looks, as a user would say it."""
    return PLACES.get(source.provider) or (source.path if source.path.startswith("/") else source.full_path())


def _columns(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def about(sources: Sequence[ConfigSource], group: str, name: str, registry: Registry) -> str:
    """The first sentence on an option: of its class's docstring, or of the first comment of its file."""
    if cls := registry.classes(group).get(name):
        return first_sentence((cls.__doc__ or "").strip().splitlines())
    source = holders(sources, f"{group}/{name}")[0]
    path = Path(file_of(source, f"{group}/{name}"))
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    comments = [line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines)]
    said = [c for c in comments if not c.startswith(("@", "yaml-language-server"))]
    return first_sentence(list(dropwhile(lambda line: not line, said)))


def first_sentence(lines: Sequence[str]) -> str:
    """The first sentence of the first paragraph of a wrapped text, on one line."""
    text = " ".join(line.strip() for line in takewhile(str.strip, lines))
    end = SENTENCE_END.search(text)
    return text[: end.start() + 1] if end else text


def _group(word: str, known: Sequence[str]) -> str:
    word = {"recipes": GROUP}.get(word, word)
    if word not in known:
        meant = suggest.nearest(word, known)
        hint = f"; did you mean '{meant}'?" if meant else ""
        raise UsageError(f"no group named '{word}'{hint} ({', '.join(known)})")
    return word


def _table(rows: Sequence[tuple[str, str]]) -> None:
    width = max((len(left) for left, _ in rows), default=0)
    for left, right in rows:
        print(f"  {left.ljust(width)}  {right}".rstrip())
