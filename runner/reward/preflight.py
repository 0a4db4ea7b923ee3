"""Checks a user's reward before a job starts, without running it and without torch.

Whether a function's file parses and has the function; whether a folder is a reward model whose weights run no code.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.core.errors import EnvironmentProblem, SecurityError
from runner.core.untrusted_text import parse_json
from runner.interfaces.rewards import RESERVED_ARGUMENTS, TRL_ARGUMENTS
from runner.spec.suggest import nearest_word

BLOCKS = (ast.If, ast.Try, ast.With, ast.For, ast.While)  # what may bind a name at the level of the module


def function_fault(file: Path, function: str) -> str | None:
    """What is wrong with `file` or with `function` in it; None if nothing can be seen."""
    if not file.is_file():
        return f"there is no file {file}; give FILE.py:FUNCTION, e.g. reward.path=my_reward.py:score"
    if file.stem in sys.stdlib_module_names:
        return f"{file} has the name of a standard library module ({file.stem}); rename the file"
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        return f"{file}:{error.lineno}: syntax error: {error.msg}"
    except (ValueError, OSError) as error:
        return f"{file} cannot be read: {error}"
    return _missing(file, function, tree)


def required_columns(file: Path, function: str) -> list[str]:
    """The columns that `function` names without a default; none where that is unknown (e.g. decorated)."""
    node = dict(_name_bindings(ast.parse(file.read_bytes(), filename=str(file)).body)).get(function)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return []
    plain = [*node.args.posonlyargs, *node.args.args]
    needed = plain[: len(plain) - len(node.args.defaults)]
    needed += [arg for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if default is None]
    return [arg.arg for arg in needed if arg.arg not in (*RESERVED_ARGUMENTS, *TRL_ARGUMENTS)]


def _missing(file: Path, function: str, tree: ast.Module) -> str | None:
    bound = dict(_name_bindings(tree.body))
    if function in bound or "*" in bound:
        node = bound.get(function)
        return (
            f"{file}:{node.lineno}: {function} is a class; give a function" if isinstance(node, ast.ClassDef) else None
        )
    functions = [n for n, node in bound.items() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    meant = nearest_word(function, functions)
    hint = f"did you mean '{meant}'? " if meant else ""
    has = f"it has: {', '.join(functions)}" if functions else "it has no function"
    return f"{file} has no function '{function}'; {hint}{has}"


def _name_bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """(name, statement) for each name that these statements bind; `*` stands for any number of them."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (((alias.asname or alias.name).partition(".")[0], node) for alias in node.names)
        elif isinstance(node, BLOCKS):
            yield from _name_bindings([inner for inner in ast.iter_child_nodes(node) if isinstance(inner, ast.stmt)])
            yield from _name_bindings([s for h in getattr(node, "handlers", []) for s in h.body])
        else:
            names = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            yield from ((name.id, node) for name in names)


LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "CAUSAL_LM")  # how their classes, and tasks of adapters, are called
ADAPTER_CONFIG = "adapter_config.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def check_folder(path: str) -> None:
    """Raise EnvironmentProblem or SecurityError; a hub id, which is not here, passes."""
    folder = Path(path).expanduser()
    if not folder.exists():
        if path.startswith(("/", ".", "~")) or path.count("/") > 1:
            raise EnvironmentProblem(
                f"reward.path={path}: no such folder; set it to the folder of a reward model or to a hub id"
            )
        return
    if is_adapter(path):
        refuse_language_model(path, [_read_config(folder / ADAPTER_CONFIG).get("task_type")])
    elif not (folder / "config.json").is_file():
        raise EnvironmentProblem(
            f"reward.path={path} is no model folder (no config.json)\n  set it to the folder of a reward model"
        )
    else:
        refuse_language_model(path, _read_config(folder / "config.json").get("architectures"))
    if list(folder.glob("*.safetensors")):
        return
    if pickles := sorted(found.name for pattern in PICKLES for found in folder.glob(pattern)):
        raise SecurityError(
            f"reward.path={path} has pickle weights ({pickles[0]}), which can run code when they are loaded\n"
            "  convert them once, if you trust them: "
            "AutoModelForSequenceClassification.from_pretrained(...).save_pretrained(...)"
        )
    raise EnvironmentProblem(f"reward.path={path} has no weights (*.safetensors)")


def _read_config(file: Path) -> Mapping[str, Any]:
    """The JSON object in a file of a model. Raises EnvironmentProblem where it has none."""
    try:
        found = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"reward.path: {file} cannot be read: {error}; copy or download it again") from error
    if not isinstance(found, Mapping):
        raise EnvironmentProblem(f"reward.path: {file} is not a JSON object; copy or download it again")
    return found


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
