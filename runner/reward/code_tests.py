"""The forms in which data sets hold tests of code, and how the output of code is compared.

    a column ──parse_tests──▶ Assertions     Python that runs after the code (MBPP, HumanEval)
                         ├──▶ ProgramTests   standard input → standard output ┐ APPS, TACO, PRIME, verl, and
                         └──▶ CallTests      arguments → returned value       ┘ LiveCodeBench, DeepCoder

A text that is JSON is read as JSON first, as verl's files carry tests. Sources of the forms and of the comparison:
https://github.com/hendrycks/apps eval/testing_util.py, https://github.com/FlagOpen/TACO metrics/testing_util.py,
https://github.com/LiveCodeBench/LiveCodeBench lcb_runner/evaluation/testing_util.py, and
https://github.com/volcengine/verl verl/utils/reward_score/prime_code and sandbox_fusion.

Departures: the order of lines and of tokens counts (APPS compares sets of them), blanks between tokens do not (to
LiveCodeBench they do), tuples equal lists at every depth, and all calls of a row share one run with one time limit.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from runner.core.untrusted_text import parse_json
from runner.interfaces.rewards import UnscorableError

NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
RELATIVE, ABSOLUTE = 1e-5, 1e-8  # of numpy.allclose, by which APPS and TACO compare numbers
# What the judges import before a function; `builtins` is last, so that no module replaces a built-in function
IMPORTED = (
    "typing", "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
    "itertools", "functools", "operator", "io", "sys", "json", "builtins",
)  # fmt: skip
KNOWN = 'known are "inputs", "outputs", "fn_name" (APPS, TACO), and lists of {input, output, testtype} (LiveCodeBench)'
PICKLED = (
    "the tests are LiveCodeBench's compressed ones: a pickle, which can run code when it is read\n"
    "  convert them once, where you trust the file: json.loads(pickle.loads(zlib.decompress(base64.b64decode(text))))"
)

# Calls a function with each list of arguments of the standard input, and prints the results after the word.
CALL = """\
import json as _json, sys as _sys
_calls = [[{{int(key): value for key, value in one.items()}} if isinstance(one, dict)
           and all(key.lstrip("-").isdigit() for key in one) else one for one in call]
          for call in _json.load(_sys.stdin)]  # JSON has no integer keys
_scope = {{"__name__": "answer"}}
exec({imports!r}, _scope)
_scope.pop({function!r}, None)  # a module's own function of that name is not the answer's
exec(compile({code!r}, "answer.py", "exec"), _scope)
_owner = _scope["Solution"]() if isinstance(_scope.get("Solution"), type) else None
_function = getattr(_owner, {function!r}, None) or _scope[{function!r}]
_results = [_function(*_arguments) for _arguments in _calls]
print("\\n{word}" + _json.dumps(_results))
"""


@dataclass(frozen=True, slots=True)
class Assertions:
    """Python that raises where the code before it is wrong."""

    text: str

    def program(self, code: str, word: str) -> str:
        """The code, then the tests; it prints `word` after the last test."""
        return f"{code}\n{self.text}\nprint('\\n{word}')"


@dataclass(frozen=True, slots=True)
class ProgramTests:
    """What a program prints for each standard input. exact: numbers are compared as LiveCodeBench does."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    exact: bool = False


@dataclass(frozen=True, slots=True)
class CallTests:
    """What a function, or a method of the class Solution, returns for each list of arguments.

    wrapped: a value may also be the only element of the list that is expected (APPS, TACO)
    """

    function: str
    calls: tuple[list[Any], ...]
    results: tuple[Any, ...]
    wrapped: bool = False

    def program(self, code: str, word: str) -> str:
        """Prints `word` and the results as JSON; the calls are its standard input."""
        imports = "\n".join(f"from {name} import *\nimport {name}" for name in IMPORTED)
        return CALL.format(imports=imports, code=code, function=self.function, word=word)

    def accepts(self, returned: Any) -> bool:
        """Whether these are the expected results."""
        if not isinstance(returned, list) or len(returned) != len(self.results):
            return False
        return all(
            got == wanted or (self.wrapped and isinstance(wanted, list) and len(wanted) == 1 and got == wanted[0])
            for got, wanted in zip(returned, self.results, strict=True)
        )


Tests = Assertions | ProgramTests | CallTests


def parse_tests(value: Any, metadata: Any = None) -> Tests:
    """The tests in a column; metadata: the row's column of that name, which LiveCodeBench's tests need.

    Raises UnscorableError for a form that is not known, and for tests that assert nothing.
    """
    if isinstance(value, str):
        value = _parse_text(value)
    if isinstance(value, Mapping):
        return _parse_mapping(value, metadata)
    if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        return _parse_cases(value, metadata)
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, list) or not lines or not all(isinstance(one, str) and one.strip() for one in lines):
        raise _no_tests(f"expected Python code, a list of it, or inputs and outputs, got {value!r:.80}")
    return Assertions(_checked_python("\n".join(lines)))


def _parse_text(text: str) -> Any:
    """The JSON in a text; a text that is no JSON as it is. Raises UnscorableError for a pickle."""
    try:
        found = parse_json(text)
    except (ValueError, RecursionError):
        if is_pickle(text):
            raise _no_tests(PICKLED) from None
        return text
    return found if isinstance(found, Mapping | list) else text


def is_pickle(text: str) -> bool:
    """Whether a text is base64 of a compressed pickle. Reads two bytes of it."""
    try:
        return zlib.decompressobj().decompress(base64.b64decode(text, validate=True), 2)[:1] == b"\x80"
    except (binascii.Error, ValueError, zlib.error):
        return False


def _parse_mapping(tests: Mapping[str, Any], metadata: Any) -> Tests:
    """{"inputs": […], "outputs": […], "fn_name": …}, or LiveCodeBench's public and private test cases."""
    given = {key: value for key, value in tests.items() if value not in (None, "", [], {})}
    if cases := {"public_test_cases", "private_test_cases"} & given.keys():
        parts = [_parse_text(given[name]) if isinstance(given[name], str) else given[name] for name in sorted(cases)]
        if not all(isinstance(part, list) for part in parts):
            raise _no_tests(f"expected lists of test cases, got {parts!r:.80}")
        return parse_tests([case for part in parts for case in part], given.get("metadata", metadata))
    if odd := given.keys() - {"inputs", "outputs", "fn_name"}:
        raise _no_tests(f"the tests have the unknown key {', '.join(map(repr, sorted(odd)))}; {KNOWN}")
    inputs, outputs, name = given.get("inputs"), given.get("outputs"), given.get("fn_name")
    if not (isinstance(inputs, list) and isinstance(outputs, list) and inputs and len(inputs) == len(outputs)):
        raise _no_tests('expected equally many "inputs" and "outputs", at least one of each')
    if name is None:
        return _program_tests([_lines(one) for one in inputs], [_lines(one) for one in outputs])
    if not isinstance(name, str):
        raise _no_tests(f'expected the name of a function in "fn_name", got {name!r:.80}')
    return CallTests(name, tuple(map(_arguments, inputs)), tuple(map(_json, outputs)), wrapped=True)


def _parse_cases(cases: Sequence[Mapping[str, Any]], metadata: Any) -> Tests:
    """LiveCodeBench's [{"input": …, "output": …, "testtype": "stdin" or "functional"}, …]."""
    if odd := next((one for one in cases if not {"input", "output", "testtype"} <= one.keys()), None):
        raise _no_tests(f"a test case has the keys {', '.join(odd)}; {KNOWN}")
    kinds = {one["testtype"] for one in cases}
    if kinds in ({"stdin"}, {"stdin_stdout"}):
        return _program_tests([_lines(c["input"]) for c in cases], [_lines(c["output"]) for c in cases], exact=True)
    if kinds != {"functional"}:
        raise _no_tests(f"expected test cases of the testtype stdin, or all of functional, got {sorted(kinds)}")
    name = _function_name(cases[0].get("metadata")) or _function_name(metadata)
    if name is None:
        raise _no_tests("functional test cases need the function's name: a column metadata with func_name in the row")
    return CallTests(name, tuple(_arguments(c["input"]) for c in cases), tuple(_json(c["output"]) for c in cases))


def _function_name(metadata: Any) -> str | None:
    """`func_name` of a mapping, or of its JSON text."""
    found = _parse_text(metadata) if isinstance(metadata, str) else metadata
    name = found.get("func_name") if isinstance(found, Mapping) else None
    return name if isinstance(name, str) else None


def _program_tests(inputs: list[str], outputs: list[str], exact: bool = False) -> ProgramTests:
    if not any(text.strip() for text in outputs):
        raise _no_tests("the tests assert nothing: every expected output is empty")
    return ProgramTests(tuple(inputs), tuple(outputs), exact)


def _lines(value: Any) -> str:
    """A text, a list of its lines, or a number."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _no_tests(f"an input or output of a program is text, got {value!r:.80}")
    return str(value)


def _arguments(value: Any) -> list[Any]:
    """A list, or a text with an argument in JSON on each line."""
    found = [_json(line) for line in value.split("\n") if line.strip()] if isinstance(value, str) else value
    if not isinstance(found, list):
        raise _no_tests(f"the input of a function is a list of arguments, got {value!r:.80}")
    return found


def _json(value: Any) -> Any:
    """A value, or the one that a text has in JSON."""
    try:
        return parse_json(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise _no_tests(f"an input or output of a function is JSON, got {value!r:.80}") from error


def _checked_python(text: str) -> str:
    """The text. Raises UnscorableError where it is not Python."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = f"they are neither JSON nor Python ({error}): {text!r:.80}"
        raise _no_tests(reason) from error
    return text


def _no_tests(reason: str) -> UnscorableError:
    return UnscorableError("no tests", reason)


def prints_same(printed: str, wanted: str, exact: bool) -> bool:
    """Whether two outputs have the same tokens on each line; blank lines count only if `exact`.

    Two numbers are the same if their values are; else, without `exact` and where one has a fraction or exponent, if
    they differ by at most 1e-8 + 1e-5·|wanted|.
    """
    lines, expected = ([line.split() for line in text.strip().splitlines()] for text in (printed, wanted))
    if not exact:
        lines, expected = list(filter(None, lines)), list(filter(None, expected))
    return [len(line) for line in lines] == [len(line) for line in expected] and all(
        _is_same_token(got, right, exact)
        for line, other in zip(lines, expected, strict=True)
        for got, right in zip(line, other, strict=True)
    )


def _is_same_token(got: str, wanted: str, exact: bool) -> bool:
    if got == wanted or not (NUMBER.fullmatch(got) and NUMBER.fullmatch(wanted)):
        return got == wanted
    if exact or (got.lstrip("+-").isdigit() and wanted.lstrip("+-").isdigit()):
        return Decimal(got) == Decimal(wanted)
    a, b = float(got), float(wanted)
    return Decimal(got) == Decimal(wanted) or abs(a - b) <= ABSOLUTE + RELATIVE * abs(b)


def read_results(stdout: str, word: str) -> Any:
    """What a program of CallTests printed after the word; None if that is nothing."""
    try:
        return json.loads(stdout.rpartition(word)[2])
    except (ValueError, RecursionError):
        return None
