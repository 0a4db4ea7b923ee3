"""`run --help` on one screen, and `run help recipes|options|verbs|VERB` for the rest.

Also what there is: `run list` and `run schema`, and the files of a job: `run --info`.
"""

from __future__ import annotations

import argparse
import json
import re
from argparse import Namespace
from collections.abc import Sequence
from itertools import dropwhile, takewhile
from pathlib import Path

from hydra.plugins.config_source import ConfigSource

from runner.cli.args import UsageError, all_verbs, parser_of, verb_hint
from runner.cli.conf import BESIDE, choices, scalar
from runner.cli.config_sources import GROUP, file_of, hydra_session, label, sources_with
from runner.cli.hydra_compose import group_options
from runner.cli.job_builder import Composer
from runner.cli.verbs import EXAMPLES, SCREENS, TOPICS, VERBS
from runner.core.errors import SpecError
from runner.spec import suggest
from runner.spec.migrate import table
from runner.spec.registry import Registry, default_registry
from runner.spec.schema import CALLBACKS, EVALUATION, groups_of, job_schema, recipe_schema
from runner.sweep.config import SweepConfig
from runner.tracker.text import align_columns, print_text

ROOT = "<root>"  # what Hydra calls the parent of job.yaml
PROVIDERS = {"main": "shipped", "runner": "shipped", "files": "+recipe=FILE", "schema": "components without a file"}
PLACES = {"files": "any file, by its path", "schema": "structured://"}
# A full stop before a capital letter, but not that of an initial or of an abbreviation.
SENTENCE_END = re.compile(r"(?<!\b[A-Z])(?<!\bDr)(?<!\bal)(?<!\be\.g)(?<!\bi\.e)\. (?=[A-Z])")


def show_list(args: Namespace) -> int:
    """`run list [group]`: options with one line each."""
    registry = default_registry()
    known = (*groups_of(registry), CALLBACKS, EVALUATION, GROUP)
    wanted = [_group(word, known) for word in args.words] or list(known)
    with hydra_session(registry, args.config_dir) as loader:
        sources = loader.get_sources()
        found = {group: group_options(sources, group) for group in wanted}
        for index, group in enumerate(group for group in wanted if found[group] or args.words):
            print_text(("\n" if index else "") + group)
            print_table([(name, option_summary(sources, group, name, registry)) for name in found[group]])
    return 0


def schema(args: Namespace) -> int:
    """`run schema [recipe]`."""
    if args.words not in ([], ["job"], [GROUP]):
        raise UsageError(f"run schema: expected job or recipe, got {' '.join(args.words)}")
    registry = default_registry()
    of_recipe = args.words == [GROUP]
    found = recipe_schema(choices(registry), BESIDE, registry) if of_recipe else job_schema(registry)
    print(json.dumps(found, indent=1))
    return 0


def info(args: Namespace) -> int:
    """`run --info defaults|searchpath`. Raises UsageError with our word where Hydra has another one."""
    if args.info not in ("defaults", "searchpath"):
        instead = table().flags.get(f"--info {args.info}", "use --info defaults or --info searchpath")
        raise UsageError(f"run --info {args.info}: {instead}")
    others = {"--multirun": args.multirun, "--spec": args.spec, "--cfg": args.cfg, "--folder": args.folder}
    if named := [flag for flag, value in others.items() if value]:
        raise UsageError(f"--info prints the files of one job and runs nothing; leave {' and '.join(named)} out")
    with hydra_session(default_registry(), args.config_dir) as loader:
        sources = loader.get_sources()
        if args.info == "searchpath":
            found = [(PROVIDERS.get(s.provider, s.provider), source_url(s)) for s in sources]
            print_text("\n".join(align_columns([("provider", "search path"), *found])))
            return 0
        drafted = Composer(loader).draft(args.words)
        rows = [("config", "package", "file", "chosen in")]
        for entry in drafted.entries:
            path = str(entry.config_path)
            file = file_of(sources_with(sources, path)[0], path)
            parent = label(entry.parent, sources) if entry.parent not in (None, path, ROOT) else ""
            rows.append((label(path, sources), entry.package or "_global_", file, parent))
    print_text("\n".join(align_columns(rows)))
    for note in drafted.notes:
        print_text(f"\nnote: {note}")
    if drafted.problems:
        raise SpecError(drafted.problems)
    return 0


def source_url(source: ConfigSource) -> str:
    """Where a source looks, as a user would say it."""
    return PLACES.get(source.provider) or (source.path if source.path.startswith("/") else source.full_path())


def option_summary(sources: Sequence[ConfigSource], group: str, name: str, registry: Registry) -> str:
    """The first sentence on an option: of its class's docstring, or of the first comment of its file."""
    if cls := registry.classes(group).get(name):
        return first_sentence((cls.__doc__ or "").strip().splitlines())
    source = sources_with(sources, f"{group}/{name}")[0]
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
        raise UsageError(f"no group named '{word}'{suggest.did_you_mean(word, known)} ({', '.join(known)})")
    return word


def print_table(rows: Sequence[tuple[str, str]]) -> None:
    """Two columns, indented."""
    width = max((len(left) for left, _ in rows), default=0)
    for left, right in rows:
        print_text(f"  {left.ljust(width)}  {right}".rstrip())


SCREEN_WIDTH = 110


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
        known = EXAMPLES | {name: f"run help {name}" for name in TOPICS}
        instead = verb_hint(topic, known) or f"there are {', '.join(TOPICS)}, and the verbs: {', '.join(all_verbs())}"
        raise UsageError(f"no help topic '{topic}'; {instead}")
    return 0


def _screen() -> None:
    """Everything that a first hour needs, on one screen."""
    print_text(SCREENS["head"])
    verbs = all_verbs()
    wide, wider = max(map(len, verbs)), max(len(VERBS[verb]) for verb in VERBS)
    for verb, line in verbs.items():
        text = f"  {verb.ljust(wide)}  {line.ljust(wider)}  {EXAMPLES.get(verb, '')}".rstrip()
        print_text(text if len(text) <= SCREEN_WIDTH else f"{text[: SCREEN_WIDTH - 1]}…")  # of a plug-in
    print_text(SCREENS["examples"])


def _verb(verb: str) -> None:
    print_text(f"{VERBS[verb]}; e.g. {EXAMPLES[verb]}\n\n{parser_of(verb).format_help()}", end="")
    if verb == "run":
        print_text(f"\n{SCREENS['jobs']}", end="")
    if verb == "sweep":
        print_text(f"\n{SCREENS['sweeps']}\noptions of a sweep, with run -m and with run sweep resume")
        fields = [(name, info) for name, info in SweepConfig.model_fields.items() if name != "over"]
        values = {name: info.get_default(call_default_factory=True) for name, info in fields}
        print_table([(f"sweep.{name}={scalar(values[name])}", str(info.description)) for name, info in fields])


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
    print_text(f"\n{SCREENS['jobs']}", end="")
