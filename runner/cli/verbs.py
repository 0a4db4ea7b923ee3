"""The verbs of the command `run`, from verbs.yaml: what each does, its words, options and handler."""

from typing import Any

from runner.core.package import read_table

_TABLE: dict[str, Any] = read_table(__file__, "verbs.yaml")
_OF_VERBS: dict[str, dict[str, Any]] = _TABLE["verbs"]
VERBS: dict[str, str] = {verb: one["about"] for verb, one in _OF_VERBS.items()}
EXAMPLES: dict[str, str] = {verb: one["example"] for verb, one in _OF_VERBS.items()}
RESOURCE_NAMES: dict[str, str] = {verb: one["words"] for verb, one in _OF_VERBS.items()}
HANDLERS: dict[str, str] = {verb: one["handler"] for verb, one in _OF_VERBS.items()} | _TABLE["hidden_handlers"]
SCREENS: dict[str, str] = _TABLE["screens"]
VERBS_GROUP = "runner.verbs"  # entry points: name → "module:function" of the words after it, which returns a code
ACTIONS = ("resume", "status", "report")  # of run sweep
TOPICS = ("recipes", "options", "verbs")  # of run help


def options_of(verb: str) -> list[dict[str, Any]]:
    """The options with dashes of a verb: flags, and the other arguments of `add_argument`."""
    return [*_TABLE["every_verb"], *_OF_VERBS.get(verb, {}).get("options", ())]
