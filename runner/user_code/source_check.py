"""Checks the user's Python files before a job starts, without running them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from runner.spec.suggest import nearest_word

BLOCKS = (ast.If, ast.Try, ast.With, ast.For, ast.While)  # what may bind a name at the level of the module


def source_fault(file: Path, name: str, example: str, classes: bool = False) -> str | None:
    """What is wrong with `file`, or with the function `name` in it; None if nothing can be seen.

    example: of the option, e.g. reward.path=my_reward.py:score; classes: whether `name` may be a class, too
    """
    if not file.is_file():
        return f"there is no file {file}; give FILE.py:{'CLASS' if classes else 'FUNCTION'}, e.g. {example}"
    if file.stem in sys.stdlib_module_names:
        return f"{file} has the name of a standard library module ({file.stem}); rename the file"
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        return f"{file}:{error.lineno}: syntax error: {error.msg}"
    except (ValueError, OSError) as error:
        return f"{file} cannot be read: {error}"
    return _missing(file, name, tree, classes)


def _missing(file: Path, name: str, tree: ast.Module, classes: bool) -> str | None:
    bound = dict(name_bindings(tree.body))
    if name in bound or "*" in bound:
        node = bound.get(name)
        is_class = isinstance(node, ast.ClassDef) and not classes
        return f"{file}:{bound[name].lineno}: {name} is a class; give a function" if is_class else None
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, *((ast.ClassDef,) if classes else ()))
    known = [n for n, node in bound.items() if isinstance(node, kinds)]
    word = "class or function" if classes else "function"
    meant = nearest_word(name, known)
    hint = f"did you mean '{meant}'? " if meant else ""
    has = f"it has: {', '.join(known)}" if known else f"it has no {word}"
    return f"{file} has no {word} '{name}'; {hint}{has}"


def name_bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """(name, statement) for each name that these statements bind; `*` stands for any number of them."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (((alias.asname or alias.name).partition(".")[0], node) for alias in node.names)
        elif isinstance(node, BLOCKS):
            yield from name_bindings([inner for inner in ast.iter_child_nodes(node) if isinstance(inner, ast.stmt)])
            yield from name_bindings([s for h in getattr(node, "handlers", []) for s in h.body])
        else:
            names = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            yield from ((name.id, node) for name in names)
