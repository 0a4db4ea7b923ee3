"""Checks a user's reward before a job starts, without running it and without torch.

The columns that a function needs; whether a folder is a reward model whose weights run no code.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from runner.core.errors import EnvironmentProblem
from runner.core.untrusted_text import parse_json
from runner.interfaces.rewards import ENVIRONMENT_ARGUMENTS, RESERVED_ARGUMENTS, TRL_ARGUMENTS
from runner.user_code.source_check import name_bindings


def required_columns(file: Path, function: str) -> list[str]:
    """The columns that `function` names without a default; none where that is unknown (e.g. decorated)."""
    node = dict(name_bindings(ast.parse(file.read_bytes(), filename=str(file)).body)).get(function)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return []
    plain = [*node.args.posonlyargs, *node.args.args]
    needed = plain[: len(plain) - len(node.args.defaults)]
    given = (*RESERVED_ARGUMENTS, *TRL_ARGUMENTS, *ENVIRONMENT_ARGUMENTS)
    needed += [arg for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if default is None]
    return [arg.arg for arg in needed if arg.arg not in given]


LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "CAUSAL_LM")  # how their classes, and tasks of adapters, are called
ADAPTER_CONFIG = "adapter_config.json"


def check_folder(path: str) -> None:
    """Raise EnvironmentProblem for the folder of a language model; a hub id passes."""
    name, key = (ADAPTER_CONFIG, "task_type") if is_adapter(path) else ("config.json", "architectures")
    if (file := Path(path).expanduser() / name).is_file():
        found = parse_json(file.read_bytes()).get(key)
        refuse_language_model(path, [found] if isinstance(found, str) else found)


def is_adapter(path: str) -> bool:
    """Whether a folder is a PEFT adapter, whose base is elsewhere."""
    folder = Path(path).expanduser()
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def refuse_language_model(path: str, architectures: Sequence[str | None] | None) -> None:
    """Raise EnvironmentProblem where the config of a model or an adapter says that it writes text."""
    if found := next((name for name in architectures or () if name and name.endswith(LANGUAGE_MODELS)), None):
        raise EnvironmentProblem(
            f"reward.path={path} is a language model ({found}), not a sequence classifier\n"
            "  train a reward model from it: run algorithm=rm model=hf model.path=… data=… (docs/preference.md)"
        )
