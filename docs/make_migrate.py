"""Writes docs/migrate.md from the table of other frameworks' options. `make generate` runs it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from runner.cli.other_frameworks import foreign_command, refuse
from runner.core.errors import RunnerError
from runner.spec.migrate import Entry, Job, Rule, format_value, table

# key=value, the value a list, a quoted text, or what ends before punctuation
TYPED = re.compile(r"(?:'[^']+=[^']+'|\b[a-z_]+(?:[./@][a-z_0-9]+)*=(?:\[[^\]]*\]|[^\s;,()|]*[^\s;,()|.:])?)")
OTHERS = "others"  # values that a rule does not list
PATH = Path(__file__).with_name("migrate.md")
COMMAND = (
    "swift rlhf --rlhf_type grpo --train_type lora --lora_rank 8 --learning_rate 1e-5 --num_generations 8 \\\n"
    "    --per_device_train_batch_size 4 --gradient_accumulation_steps 4 --beta 0.04 --max_completion_length 512"
)
HEAD = """# From another framework

Translate a job of TRL, verl, ms-swift, LLaMA-Factory, OpenRLHF or axolotl: type its command after `run`, unchanged.
The error names our option for each option that it knows, with the value converted:

```text
$ run {command}
{output}
```

- The start `python -m MODULE`, `torchrun … FILE.py`, `accelerate launch … FILE.py` or `deepspeed … FILE.py` may stay.
- Options without dashes work, too: `run actor_rollout_ref.rollout.n=8`, `run num_generations=8`.
- The YAML file of another framework works as well: `run +recipe=FILE.yaml` names our option for each of its keys.
- One key: `run explain num_generations`.
- The translation depends on the algorithm (`beta` weighs the KL penalty of GRPO, and scales the log-ratios of DPO):
  choose it with `algorithm=NAME` in the same line.
- Three options describe a batch: `algorithm.batch_size` counts the prompts, rows or pairs of a step over all ranks,
  `algorithm.mini_batches` the optimizer steps in it, and `algorithm.micro_batch_tokens` bounds what a device computes
  at once; it never changes the update.

Written by `docs/make_migrate.py` from `runner/spec/migrate.yaml`; do not edit. A missing option is a line in that file.
"""


def example() -> str:
    """What the command of the head prints."""
    try:
        refuse(foreign_command(COMMAND.replace("\\", "").split()))
    except RunnerError as error:
        return f"error: {error}"


def rows(entry: Entry) -> Iterator[str]:
    """One option: its spellings with an example, and the answer for each algorithm and value."""
    typed = "<br>".join(f"`{key}`" for key in entry.keys)
    for algorithms, value, rule in _cases(entry.rule, format_value(entry.example)):
        example = None if value.startswith(OTHERS) else entry.example
        said = " / ".join(str(one) for one in table().answers(Entry(entry.keys, "", rule), example, Job()))
        yield f"| {typed} | {value.replace('|', ' ')} | {algorithms.replace(' ', ', ')} | {_code(said)} |"
        typed = ""


def _cases(rule: Rule, value: str, algorithms: str = "") -> Iterator[tuple[str, str, Rule]]:
    """(algorithms, value, rule) of each case of a rule."""
    if not isinstance(rule, Mapping):
        yield algorithms, value, rule
    elif "by" in rule:
        for names, inner in rule["by"].items():
            yield from _cases(inner, value, names)
    else:
        for settings, inner in rule.get("with", {}).items():
            beside = " or ".join(f"`{setting}`" for setting in settings.split())
            for names, shown, one in _cases(inner, value, algorithms):
                yield names, f"{shown}, with {beside}", one
        for name, inner in rule.get("values", {}).items():
            yield from _cases(inner, format_value(name).replace(" ", ", "), algorithms)
        if rule.keys() & {"to", "say"}:
            other = {name: inner for name, inner in rule.items() if name not in ("values", "with")}
            listed = [text for name in rule.get("values", {}) for text in format_value(name).split()]
            yield algorithms, OTHERS if listed and ("to" not in rule or value in listed) else value, other


def _code(text: str) -> str:
    """Words that are typed, as code."""
    return TYPED.sub(lambda found: f"`{found[0]}`", text.removeprefix("type ")).replace("|", "\\|")


def migrate() -> str:
    """The whole page."""
    known = table()
    lines = [HEAD.format(command=COMMAND, output=example())]
    for about, entries in known.pages.values():
        title, _, more = about.partition(". ")
        lines += [f"## {title}", "", *([more, ""] if more else [])]
        lines += ["| typed | value | algorithm | here |", "| --- | --- | --- | --- |"]
        lines += [row for entry in entries for row in rows(entry)]
        lines.append("")
    lines += ["## Flags and commands", "", "| typed | here |", "| --- | --- |"]
    lines += [f"| `run {flag}` | {_code(said)} |" for flag, said in known.flags.items()]
    lines += [
        f"| `{command}` | {_code(said) if ' ' in said else f'`run {said or chr(8230)}`'} |"
        for command, said in known.commands.items()
    ]
    lines += ["", "## Metrics", "", "| typed | here |", "| --- | --- |"]
    lines += [f"| `{theirs}` | `{ours}` |" for theirs, ours in known.metrics.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PATH.write_text(migrate(), encoding="utf-8")
