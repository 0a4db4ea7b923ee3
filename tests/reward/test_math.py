"""Mathematical equality with the real math-verify."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.core.errors import EnvironmentProblem
from runner.interfaces import Reward
from runner.reward.config import MathConfig
from runner.user_code import process as user_process
from tests.reward.samples import answer, made

PRESENT = importlib.util.find_spec("math_verify") is not None
needs_it = pytest.mark.skipif(not PRESENT, reason='math-verify is absent: pip install "posttrain-run[math]"')


@pytest.fixture(scope="module")
def reward() -> Iterator[Reward]:
    reward = made(MathConfig(timeout_s=100.0, max_failures=100))
    yield reward
    reward.close()


@needs_it
@pytest.mark.parametrize(
    ("wanted", "text", "score"),
    [
        (r"\frac{1}{2}", r"so it is \boxed{0.5}", 1),
        (r"\frac{1}{2}", r"$\frac{2}{4}$", 1),
        ("1/2", r"\boxed{\frac{1}{2}}", 1),
        (r"$x^2+2x+1$", r"\boxed{(x+1)^2}", 1),
        ("She sells 5 for 14.4 each.\n#### 72", "The answer is 72.", 1),
        ("#### 1,234", r"\boxed{1234}", 1),
        ("10^{3}", r"\boxed{1000}", 1),
        (r"\sqrt{3}/2", r"$\frac{\sqrt{3}}{2}$", 1),
        ("72", "The answer is 71.", 0),
        ("72", "I do not know", 0),
        ("72", "", 0),
        (r"x+1", r"\boxed{x+2}", 0),
        ("3", r"\boxed{\frac{1}{0}}", 0),
        ("72", "After 72 tries I give up: \\boxed{\\text{unknown}}", 0),  # a number outside the box is no answer
        (
            "72",
            r"First \boxed{71}, but that forgets the last step of the recipe in the question, and so \boxed{72}.",
            1,
        ),
        ("72", r"\[\boxed{72.}\]", 1),
        ("72", r"\boxed{71} ... no wait, 72", 0),
        ("4", r"<think>\boxed{5}?</think> So it is \boxed{4}.", 1),
        ("4", r"<think>\boxed{4}?</think> So it is $5$.", 0),
        (r"\sqrt{2}", "\\boxed{√2}", 1),
        ("300000", "\\boxed{3×10^5}", 1),
        ("x^2+1", "\\boxed{x²+1}", 1),
        ("1,2", r"\boxed{1} and \boxed{2}", 1),
        ("0.25", "25%", 1),
        (r"25\%", "The answer is 25%.", 1),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"$\begin{pmatrix}1\\2\end{pmatrix}$", 1),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "the answer is 2", 0),
        (r"\text{Monday}", r"\text{Monday}", 1),  # the very text of the right answer, without any mark
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
    ],
)
def test_equality(wanted: str, text: str, score: float, reward: Reward) -> None:
    assert reward.score([[answer(text, answer=wanted)]]) == [[score]]


TABLE = Path(__file__).with_name("math_answers.txt")
ROWS = [line for line in TABLE.read_text().splitlines() if not line.startswith("# ")]


def verdicts(line: str) -> tuple[str, list[tuple[str, bool]]]:
    """The right answer of a line, and each of its answers as marked there with the verdict by hand."""
    gold, right, wrong = (part.strip() for part in line.split("‖"))
    columns = ((right, True), (wrong, False))
    return gold.replace(r"\n", "\n") if r"\n#" in gold or r"\n\[" in gold else gold, [
        (given.strip(), verdict) for column, verdict in columns for given in column.split("¦")
    ]


@needs_it
@pytest.mark.parametrize("line", ROWS[::12])
def test_answers_of_the_table(line: str) -> None:
    check_line(line)


@needs_it
@pytest.mark.slow
@pytest.mark.parametrize("line", ROWS)
def test_all_answers_of_the_table(line: str) -> None:
    """Unmarked answers have math-verify's own verdict too, with the right answer in a box as its users write it."""
    from math_verify import LatexExtractionConfig, parse, verify  # type: ignore[import-not-found,unused-ignore]

    check_line(line)
    gold, answers = verdicts(line)
    own = parse(f"\\boxed{{{gold.rpartition('####')[2].strip()}}}", [LatexExtractionConfig()], parsing_timeout=None)
    for given, right in answers:
        if given[0] not in "~!":
            found = parse(f"So the answer is \\boxed{{{given}}}.", parsing_timeout=None)
            assert verify(own, found, timeout_seconds=None) == right, given


def check_line(line: str) -> None:
    from runner.reward import equality

    gold, answers = verdicts(line)
    for given, right in answers:
        [found] = equality.score([f"So the answer is \\boxed{{{given.lstrip('~!')}}}."], [gold])
        assert found == (right != given.startswith("~")), (gold, given)


@needs_it
def test_a_right_answer_that_cannot_be_read_is_said(reward: Reward, caplog: pytest.LogCaptureFixture) -> None:
    group = [answer("4", answer=" "), answer("4"), answer("4", answer=4)]
    assert reward.score([group]) == [[None, None, 1]]
    assert "the correct answer is not a mathematical expression" in caplog.text
    assert "column 'answer' is not there" in caplog.text


@needs_it
def test_an_answer_that_takes_too_long_loses_only_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    request = user_process.UserProcess.request

    def request_patiently(process: user_process.UserProcess, question: bytes, timeout_s: float) -> dict[str, Any]:
        return request(process, question, timeout_s if b"9^{9" in question else 100.0)

    monkeypatch.setattr(user_process.UserProcess, "request", request_patiently)
    reward = made(MathConfig(timeout_s=3.0))
    group = [answer(text, answer="3") for text in (r"\boxed{3}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{3}")]
    assert reward.score([group]) == [[1, None, 1]]
    assert "no response within 3 s" in caplog.text
    reward.close()


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not Path(entry, "math_verify").is_dir()])
    for name in [name for name in sys.modules if name.partition(".")[0] == "math_verify"]:
        monkeypatch.delitem(sys.modules, name)  # another test of this process may have imported it
    importlib.invalidate_caches()
    with pytest.raises(EnvironmentProblem, match=r'pip install "posttrain-run\[math\]"') as caught:
        MathConfig().preflight()
    assert caught.value.exit_code == 2
