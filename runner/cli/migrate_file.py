"""`run migrate`: writes the option names of this version into YAML files, and leaves all other text.

text ─▶ its entries, with their places ─▶ migrate.yaml (page `ours`) ─▶ edits ─▶ text
"""

from __future__ import annotations

import difflib
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from runner.cli.args import UsageError
from runner.cli.user_yaml import compose_yaml, load_yaml
from runner.core.errors import EnvironmentProblem, Problem, SpecError
from runner.core.fsync_io import atomic_write, error_reason
from runner.spec import migrate
from runner.spec.saved_spec import options_of_group, reused_options
from runner.spec.suggest import Job
from runner.tracker.text import print_text


@dataclass(frozen=True, slots=True)
class OldOption:
    """An entry with an old name.

    successors: our options and their values; None where a person has to decide.
    """

    group: str
    key: yaml.Node
    value: yaml.Node
    in_braces: bool
    old: Any
    successors: Mapping[str, Any] | None

    @property
    def name(self) -> str:
        """group.option"""
        return f"{self.group}.{self.key.value}"

    @property
    def new_name(self) -> str:
        """The option's new name, where that is all that changes in its section; else empty."""
        successors = self.successors or {}
        group, _, option = next(iter(successors), "").partition(".")
        return option if len(successors) == 1 and group == self.group else ""


def run(args: Namespace) -> int:
    """Rewrite the files and print what changed; returns 0.

    Raises UsageError, EnvironmentProblem for a file that cannot be read, SpecError for options left for a person.
    """
    if not args.words:
        raise UsageError("run migrate needs files, e.g. run migrate recipes/mine.yaml")
    left = list[Problem]()
    for word in args.words:
        path = Path(word)
        try:
            with path.open(encoding="utf-8", newline="") as file:
                text = file.read()
            new, undecided = migrated_text(text, word)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise EnvironmentProblem(f"{word}: {error_reason(error)}") from error
        content = OmegaConf.to_container(load_yaml(new, word))
        if new != text:
            atomic_write(path, new.encode())
        lines = difflib.unified_diff(text.splitlines(), new.splitlines(), word, word, lineterm="", n=1)
        print_text("\n".join(lines) or f"{word}: nothing to rename")
        for option, successor in reused_options().items() if new != text or undecided else ():
            group, _, leaf = option.partition(".")
            if isinstance(content, Mapping) and leaf in (content.get(group) or ()):
                print_text(f"{word}: {option} stays; in a file of an older version it meant {successor}: rename it")
        left += undecided
    if left:
        raise SpecError(left)
    return 0


def migrated_text(text: str, name: str = "") -> tuple[str, list[Problem]]:
    """The text with the option names of this version, and what has to be changed by hand.

    Raises ValueError, yaml.YAMLError for a text that is no mapping of options.
    """
    root, content = compose_yaml(text, name), OmegaConf.to_container(load_yaml(text, name))
    if not isinstance(root, yaml.MappingNode) or not isinstance(content, dict):
        return text, []
    edits, added, undecided = list[tuple[int, int, str]](), dict[str, list[str]](), list[Problem]()
    for one in _old_options(root, content):
        start, end = one.key.start_mark.index, _end(text, one.value)
        if one.successors is None or (one.in_braces and not one.new_name):
            said = migrate.answer(one.name, one.old, Job({}, {}, {}), {}) or "write it without braces"
            undecided.append(Problem(one.name, said, f"{name}:{one.key.start_mark.line + 1}"))
        elif one.new_name:
            edits.append((start, one.key.end_mark.index, one.new_name))
            (new,) = one.successors.values()
            edits += [] if new == one.old else [(one.value.start_mark.index, end, migrate.format_value(new))]
        else:
            old_text, comment = text[one.value.start_mark.index : end], text[end:].partition("\n")[0].rstrip()
            edits.append((text.rfind("\n", 0, start) + 1, text.find("\n", end) + 1 or len(text), ""))
            for option, value in one.successors.items():
                group, _, leaf = option.partition(".")
                shown = old_text if value == one.old else migrate.format_value(value)
                added.setdefault(group, []).append(f"{leaf}: {shown}{comment}")
    edits += _additions(text, root, added)
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text, undecided


def _old_options(root: yaml.MappingNode, content: Mapping[Any, Any]) -> Iterator[OldOption]:
    """The options below a group that no component of the group has, and that have a successor."""
    for group_key, section in root.value:
        values = content.get(group_key.value)
        known = options_of_group(group_key.value)
        if not isinstance(section, yaml.MappingNode) or not isinstance(values, Mapping) or not known:
            continue
        for key, value in section.value:
            name = f"{group_key.value}.{key.value}"
            if key.value not in known and migrate.table().older_entry(name):
                successors = migrate.table().successors(name, values[key.value])
                braces = bool(section.flow_style)
                yield OldOption(group_key.value, key, value, braces, values[key.value], successors)


def _additions(text: str, root: yaml.MappingNode, added: Mapping[str, list[str]]) -> Iterator[tuple[int, int, str]]:
    """Edits that append options to the sections of their groups; new sections at the end."""
    line_end = "\r\n" if "\r\n" in text else "\n"
    sections = {key.value: node for key, node in root.value if isinstance(node, yaml.MappingNode)}
    for group, lines in added.items():
        section = sections.get(group)
        if section is not None and (section.flow_style or not section.value):
            raise ValueError(f"write the section {group} without braces first")
        if section is None:
            block = "".join(f"  {line}{line_end}" for line in lines)
            before = line_end if text.endswith(line_end) else 2 * line_end
            yield len(text), len(text), f"{before}{group}:{line_end}{block}"
            continue
        at = text.find("\n", _end(text, section.value[-1][1])) + 1 or len(text)
        indent = " " * section.value[0][0].start_mark.column
        before = "" if text[at - 1] == "\n" else line_end
        yield at, at, before + "".join(f"{indent}{line}{line_end}" for line in lines)


def _end(text: str, node: yaml.Node) -> int:
    """Where a value's own text ends: a block's mark is that of the next entry."""
    return len(text[: node.end_mark.index].rstrip())
