"""Chat templates as sandboxed programs with a deadline.

A template comes with a model folder or from the user: it is code that somebody else wrote. It runs in jinja's sandbox,
sees plain values only, and is stopped where it runs for too long: every loop iteration and every call looks at the
clock. The variables, filters and tags are those that transformers gives to templates.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

DEADLINE_S = 10.0  # of one rendering; a long conversation takes some milliseconds
LONGEST_REPEAT = 10_000_000  # characters or elements that `*` may make


class TemplateTimeout(Exception):
    """The template ran for longer than the deadline."""


class _GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's part for other frameworks; it changes no text."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """The body in a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with the deadline of the rendering in this thread."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self._thread = threading.local()
        self.filters["tojson"] = _tojson
        self.filters["_check_deadline"] = self._check_in_loop
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)

    def set_deadline(self, seconds: float) -> None:
        """Stop what this thread renders after so many seconds from now."""
        self._thread.until = time.monotonic() + seconds

    def check_deadline(self) -> None:
        """Raise TemplateTimeout after the deadline."""
        if time.monotonic() > self._thread.until:
            raise TemplateTimeout

    @jinja2.pass_context
    def _check_in_loop(self, context: Context, value: object) -> object:
        self.check_deadline()
        return value

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or macro of the template."""
        self.check_deadline()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left * right` of a bounded size; no powers."""
        sizes = [len(value) if isinstance(value, str | list | tuple) else value for value in (left, right)]
        if operator == "**" or (sizes != [left, right] and sizes[0] * sizes[1] > LONGEST_REPEAT):
            raise jinja2.exceptions.SecurityError(f"the template applies {operator} to values that are too large")
        return super().call_binop(context, operator, left, right)


@lru_cache(maxsize=16)
def _compile(source: str) -> tuple[_Sandbox, jinja2.Template]:
    """The template with a look at the clock in every loop."""
    sandbox = _Sandbox()
    tree = sandbox.parse(source)
    for loop in tree.find_all(nodes.For):
        look = nodes.Filter(nodes.Const(None), "_check_deadline", [], [], None, None)
        loop.body.insert(0, nodes.ExprStmt(look).set_lineno(loop.lineno, override=True))
    tree.set_environment(sandbox)
    return sandbox, sandbox.template_class.from_code(sandbox, sandbox.compile(tree), sandbox.make_globals(None))


def render(source: str, variables: Mapping[str, Any], deadline_s: float = DEADLINE_S) -> str:
    """The text that a template writes; `variables` are plain values.

    Raises TemplateTimeout, and whatever the template raises.
    """
    sandbox, template = _compile(source)
    sandbox.set_deadline(deadline_s)
    return template.render(**variables)


@lru_cache(maxsize=16)
def read_variables(source: str) -> frozenset[str]:
    """The variables that a template reads, `strftime_now` among them."""
    sandbox = _Sandbox()
    del sandbox.globals["strftime_now"]
    return frozenset(jinja2.meta.find_undeclared_variables(sandbox.parse(source)))


@lru_cache(maxsize=16)
def literal_text(source: str) -> str:
    """The texts that are written in a template, joined by NUL, so that no match crosses two of them."""
    tree = _Sandbox().parse(source)
    found = [node.data for node in tree.find_all(nodes.TemplateData)]
    found += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    return "\0".join(found)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML that jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)
