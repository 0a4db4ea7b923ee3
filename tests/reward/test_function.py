"""The user's function in real processes: what it is given, what it may return, and every way in which it can fail."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from threading import Thread
from types import NoneType
from typing import Any

import numpy as np
import pytest
import torch

from runner.core.auto_choices import Decisions
from runner.core.errors import DataError, SpecError
from runner.interfaces import Completion
from runner.interfaces.rewards import GroupScorer
from runner.reward import worker_pool
from runner.reward.config import FunctionConfig
from runner.reward.worker import validate_scores
from runner.user_code import process as user_process
from runner.user_code.process import CapturedOutput
from tests.reward.samples import answer, made

ROOT = Path(__file__).resolve().parents[2]
Write = Callable[..., GroupScorer]
GROUP = [answer("4", answer="4"), answer("5", answer="4")]


@pytest.fixture
def function(tmp_path: Path):
    """Builds the reward of a file with the given source; closes it in the end."""
    built: list[GroupScorer] = []

    def build(source: str, folder: Path | None = None, steps: int = 0, **options: Any) -> GroupScorer:
        (tmp_path / "mine.py").write_text(textwrap.dedent(source))
        config = FunctionConfig(path=f"{tmp_path}/mine.py:score", **{"timeout_s": 60.0} | options)
        built.append(made(config, folder=folder, steps=steps))
        return built[-1]

    yield build
    for reward in built:
        reward.close()


def one(reward: GroupScorer, *group: Completion) -> list[float | None]:
    [found] = reward.score([group or GROUP])
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(happened: Callable[[], Any]) -> None:
    end = time.monotonic() + 60.0
    while not happened():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def kill_only_after(happened: Callable[[user_process.UserProcess], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker does before its deadline may come later on a busy machine: let it live until then."""
    locate = user_process.UserProcess.hang_location

    def wait(process: user_process.UserProcess) -> str:
        wait_until(lambda: happened(process))
        return locate(process)

    monkeypatch.setattr(user_process.UserProcess, "hang_location", wait)


# --- what it is given ------------------------------------------------------------------------------------------------


def test_it_gets_texts_ids_and_every_column_one_value_per_answer(function: Write) -> None:
    reward = function("""
        def score(prompts, completions, completion_ids, **columns):
            assert prompts == ["2+2?"] * 2 and completion_ids == [[0, 1, 2], [0]], (prompts, completion_ids)
            assert [columns.pop(name) is None for name in ("trainer_state", "log_extra", "log_metric")] == [False] * 3
            assert columns == {"answer": ["4", "4"], "level": [{"n": None}, {"n": None}]}, columns
            return [float(c == a) for c, a in zip(completions, columns["answer"])]
    """)
    columns = {"answer": "4", "level": {"n": None}}
    assert one(reward, answer("4", **columns), answer("\ud800 ü", tokens=1, **columns)) == [1, 0]
    assert reward.score([]) == [] and reward.score([[]]) == [[]]


def test_conversations_come_as_messages_and_the_completion_is_what_was_added(function: Write) -> None:
    reward = function("""
        def score(prompts, completions):
            assert prompts[0] == [{"role": "user", "content": "2+2?"}]
            return [len(c) + float(c[-1]["content"]) / 10 for c in completions]
    """)
    before = [{"role": "user", "content": "2+2?"}]
    several = answer("4", messages=before)
    turns = (
        *before,
        {"role": "assistant", "content": "hm"},
        {"role": "tool", "content": "?"},
        {"role": "assistant", "content": "4"},
    )
    several = Completion(several.prompt, several.ids, "4", "stop", messages=turns)
    assert one(reward, answer("5", messages=before), several) == [1.5, 3.4]


def test_a_function_gets_only_what_it_names(function: Write) -> None:
    assert one(function("def score(completions, answer, extra=2): return [extra for _ in answer]")) == [2, 2]


def test_a_column_that_is_not_there_is_named(function: Write, caplog: pytest.LogCaptureFixture) -> None:
    reward = function("def score(completions, solution): ...", max_failures=2)
    with pytest.raises(
        DataError, match=r"(?s)mine\.py:score: no sample of 2 groups.*has the parameter solution; available: prompts"
    ):
        reward.score([GROUP] * 3)


def test_a_column_with_the_name_of_an_argument_is_refused(function: Write) -> None:
    reward = function("def score(completions): ...")
    with pytest.raises(DataError, match="a column 'completions'"):
        reward.score([[answer("4", completions=1)]])
    with pytest.raises(DataError, match="cannot be sent to the reward as JSON"):
        reward.score([[answer("4", answer={1, 2})]])


def test_an_async_function_and_a_module_beside_the_file(function: Write, tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("VALUE = 0.5")
    reward = function("""
        import asyncio, sys
        import beside_it
        async def score(completions):
            await asyncio.sleep(0)
            assert sys.stdin.read() == ""
            return [beside_it.VALUE for _ in completions]
    """)
    assert one(reward) == [0.5, 0.5]


def test_chance_depends_on_the_seed_and_the_group_alone(function: Write) -> None:
    source = """
        import random
        def score(completions, answer):
            return [random.random() for _ in completions]
    """
    random.seed(5)
    before = random.getstate()
    first = function(source, workers=2)
    others = [[answer(str(i), answer="x")] for i in range(4)]
    alone, *_, again = first.score([GROUP, *others, GROUP])
    assert alone == again == one(function(source)) and alone[0] != alone[1]
    assert len({row[0] for row in first.score(others)}) == 4
    other = made(FunctionConfig(path=f"{first_path(first)}:score"), seed=1)
    assert other.score([GROUP]) != [alone]
    other.close()
    assert random.getstate() == before


def first_path(reward: GroupScorer) -> str:
    """The file of a reward made by the fixture."""
    return str(reward._end.__self__._target.file)  # type: ignore[union-attr]


def test_text_of_megabytes_passes(function: Write) -> None:
    reward = function("def score(completions): return [len(c) for c in completions]", timeout_s=60)
    assert one(reward, answer("x" * 3_000_000), answer("y")) == [3_000_000, 1]


def test_the_example_of_the_documentation_works(function: Write) -> None:
    [source] = re.findall(r"```python\n(# my_reward.py\n.*?)```", (ROOT / "docs" / "rewards.md").read_text(), re.DOTALL)
    chat = [answer(text, messages=[{"role": "user", "content": "2+2?"}], answer="4", other=1) for text in ("4", "5")]
    assert one(function(source)) == one(function(source), *chat) == [1.1, 0.1]


def test_the_environment_is_an_allow_list_that_the_user_extends(
    function: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("JUDGE_KEY", "mine")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    source = """
        import os
        NAMES = ["PATH", "OMP_NUM_THREADS", "JUDGE_KEY", "HF_TOKEN", "VLLM_API_KEY"]
        def score(completions):
            return [sum(2.0 ** i for i, name in enumerate(NAMES) if name in os.environ) for _ in completions]
    """
    assert one(function(source)) == [3, 3]
    assert one(function(source, env=("JUDGE_KEY",))) == [7, 7]


# --- what it may return ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "scores", "said"),
    [
        ([1, 0.5], [1, 0.5], None),
        ((True, False), [1, 0], None),
        ([None, 1], [None, 1], None),
        (iter([Fraction(1, 2), Decimal("0.25")]), [0.5, 0.25], None),
        (np.array([1, 2], dtype=np.float16), [1, 2], None),
        (
            torch.tensor([1.0, float("nan")]),
            [1, None],
            "score 2 of 2 is tensor(nan) (Tensor); expected a finite number",
        ),
        ([math.nan, 1], [None, 1], "score 1 of 2 is nan (float); expected a finite number or None"),
        ([1, -math.inf], [1, None], "score 2 of 2 is -inf"),
        ([1, "1"], [1, None], "score 2 of 2 is '1' (str)"),
        ([1, [1]], [1, None], "score 2 of 2 is [1] (list)"),
        ([1, np.zeros(2)], [1, None], "(ndarray)"),
        ([1, 1j], [1, None], "1j (complex)"),
        ([10**400, 1], [None, 1], "score 1 of 2"),
        ([1], [None, None], "expected 2 scores, one for each completion, got 1: [1] (list)"),
        ([1, 2, 3], [None, None], "got 3"),
        ([], [None, None], "got 0"),
        (1.0, [None, None], "expected a list of 2 scores, got 1.0 (float)"),
        (np.float64(1), [None, None], "expected a list of 2 scores"),
        ({1.0, 0.0}, [None, None], "expected a list of 2 scores"),  # a set has no order
        (None, [None, None], "got None (NoneType)"),
        ("ab", [None, None], "got 'ab' (str)"),
        ({"a": 1, "b": 2}, [None, None], "(dict)"),
    ],
)
def test_returned_values(returned: Any, scores: list[float | None], said: str | None) -> None:
    found = validate_scores(returned, 2)
    assert found["values"] == scores and all(type(v) in (float, NoneType) for v in found["values"])
    assert [said in message for _, message, _ in found["faults"]] == ([True] if said else [])


@pytest.mark.parametrize(
    ("returned", "scores", "said"),
    [("[float('nan'), 1]", [None, 1], "score 1 of 2 is nan"), ("[1]", [None, None], "expected 2 scores")],
)
def test_what_is_wrong_with_them_is_said(
    returned: str, scores: list[float | None], said: str, function: Write, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "runner")
    assert one(function(f"def score(completions): return {returned}")) == scores
    assert [said in r.message for r in caplog.records] == [True]


# --- how it can fail -------------------------------------------------------------------------------------------------


def test_what_raises_is_said_once_per_place_and_only_its_group_is_lost(
    function: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "runner")
    reward = function(
        """
        def helper(text):
            return 1 / int(text)

        def score(completions):
            return [helper(c) for c in completions]
        """,
        folder=tmp_path,
    )
    groups = [[answer("2")], [answer("0")], [answer("1"), answer("0")], [answer("x")], [answer("1")]]
    assert reward.score(groups) == [[0.5], [None], [None, None], [None], [1]]
    assert [r.message for r in caplog.records] == [
        "mine.py:score: not scored: ZeroDivisionError: division by zero (mine.py:3 in helper)",
        "mine.py:score: not scored: ValueError: invalid literal for int() with base 10: 'x' (mine.py:3 in helper)",
    ]
    assert "Traceback (most recent call last)" in (tmp_path / "reward.log").read_text()
    reward.close()
    assert "4 of 6 samples could not be scored: 3 × ZeroDivisionError at mine.py:3 in helper; 1 × " in caplog.text


@pytest.mark.parametrize(
    "hanging",
    ["while True: pass", "__import__('time').sleep(1e6)", "sum(__import__('itertools').repeat(0))"],
    ids=["python", "sleep", "without letting go of the interpreter"],
)
def test_what_hangs_is_killed_and_the_next_group_is_scored(
    hanging: str, function: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "runner")
    kill_only_after(lambda process: b"in score" in os.pread(process._stack.fileno(), 9999, 0), monkeypatch)
    request = user_process.UserProcess.request

    def request_patiently(process: user_process.UserProcess, question: bytes, timeout_s: float) -> dict[str, Any]:
        return request(process, question, timeout_s if b'"h"' in question else 60.0)

    monkeypatch.setattr(user_process.UserProcess, "request", request_patiently)
    reward = function(
        f"def score(completions):\n  if completions[0] == 'h':\n    {hanging}\n  return [1]",
        folder=tmp_path,
        timeout_s=2.0,
    )
    begin = time.monotonic()
    assert reward.score([[answer("h")], [answer("4")]]) == [[None], [1]]
    assert time.monotonic() - begin < 60
    assert "no response within 2 s, at mine.py:3 in score; the worker was killed" in caplog.text
    assert "worker.py" not in caplog.text and "mine.py:score|" not in caplog.text  # it printed nothing
    assert 'mine.py", line 3 in score' in (tmp_path / "reward.log").read_text()


def test_what_nearly_hung_leaves_nothing(function: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    slow = """
        import faulthandler, os, time
        written = []
        dump = faulthandler.dump_traceback_later

        def dump_soon(seconds, file):  # at 90 % of the time limit, which nobody waits for here
            assert 0 < seconds < 60
            written[:] = [file]
            dump(0.01, file=file)

        faulthandler.dump_traceback_later = dump_soon

        def score(completions):
            while not os.fstat(written[0]).st_size:
                time.sleep(0.01)
            return [1]
    """
    reward = function(slow, folder=tmp_path, timeout_s=60.0)
    assert reward.score([[answer("4")]]) == [[1]]
    assert "Timeout" not in caplog.text and not (tmp_path / "reward.log").exists()


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("sys.exit(3)", "it exited with code 3"),
        ("os._exit(0)", "it exited with code 0"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("os.closerange(3, 100)", "killed by SIGKILL|exited with code"),
    ],
)
def test_a_worker_that_dies_is_replaced(end: str, said: str, function: Write, caplog: pytest.LogCaptureFixture) -> None:
    reward = function(f"""
        import os, signal, sys
        def score(completions):
            if completions[0] == "d":
                {end}
            return [1]
    """)
    assert reward.score([[answer("4")], [answer("d")], [answer("4")]]) == [[1], [None], [1]]
    assert "the worker exited: " in caplog.text and any(part in caplog.text for part in said.split("|"))


def test_a_group_whose_worker_is_killed_is_scored_again(
    function: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reward = function("""
        import os, pathlib, random, time
        def score(completions):
            mark = pathlib.Path(__file__).with_name("begun")
            drawn = random.random()
            if not mark.exists():
                mark.write_text(str(os.getpid()))
                time.sleep(60)
            return [drawn for _ in completions]
    """)
    mark = tmp_path / "begun"

    def kill() -> None:
        wait_until(lambda: mark.exists() and mark.read_text())
        os.kill(int(mark.read_text()), signal.SIGKILL)

    killer = Thread(target=kill)
    killer.start()
    found = one(reward)
    killer.join()
    assert "a new worker scores its group again" in caplog.text and "the worker exited" not in caplog.text
    assert found[0] is not None and found == one(reward), "the same seed, and so the same scores"


def test_a_child_that_comes_back_does_not_answer(function: Write) -> None:
    reward = function("""
        import os
        def score(completions):
            child = os.fork()
            return [0.5 if child else 0.1 for _ in completions]
    """)
    assert reward.score([GROUP] * 20) == [[0.5, 0.5]] * 20


FORGES = """
    import ctypes, json, os, subprocess, sys, time
    FORGED = json.dumps({"values": [1000.0, 1000.0], "faults": []}).encode() + b"\\n"
    MARK = os.path.join(os.path.dirname(__file__), "written")

    def write_everywhere():
        for descriptor in range(3, 256):
            try:
                os.write(descriptor, FORGED)
            except OSError:
                pass

    def flood():
        for _ in range(400):
            write_everywhere()
            open(MARK, "w").close()
            time.sleep(0.005)
        os._exit(0)

    def score(completions):
        if completions[0] == "forked" and os.fork() == 0:
            flood()
        if completions[0] == "forked unseen by Python" and ctypes.PyDLL(None).fork() == 0:
            flood()
        while completions[0].startswith("forked") and not os.path.exists(MARK):
            time.sleep(0.001)
        if completions[0] == "executed":
            program = f"import os\\nfor n in range(3, 256):\\n try: os.write(n, {FORGED!r})\\n except OSError: pass"
            subprocess.run([sys.executable, "-c", program], close_fds=False)
        time.sleep(0.1)
        return [0.5, 0.25]
"""


@pytest.mark.parametrize("way", ["forked", "forked unseen by Python", "executed"])
def test_no_process_below_the_function_can_write_scores(
    way: str, function: Write, caplog: pytest.LogCaptureFixture
) -> None:
    reward = function(FORGES)
    later = [answer("later"), answer("later")]  # while a child of the first group still writes
    assert reward.score([[answer(way), answer(way)], later, later]) == [[0.5, 0.25]] * 3
    assert ("wrote to its socket; this is ignored" in caplog.text) == (way == "forked unseen by Python")
    assert "not scored" not in caplog.text


LEAVES_CHILDREN = """
    import os, subprocess, sys, time
    def score(completions):
        here = os.path.dirname(__file__)
        if os.fork() == 0:  # forked
            if os.fork() == 0:  # and forked again, in a session of its own, its parent gone
                os.setsid()
                open(f"{here}/pid-{os.getpid()}", "w").close()
                time.sleep(1e6)
            os._exit(0)
        detached = subprocess.Popen(["sleep", "1000000"], start_new_session=True, close_fds=False)
        for pid in (detached.pid, os.getpid()):
            open(f"{here}/pid-{pid}", "w").close()
        while len([n for n in os.listdir(here) if n.startswith("pid-")]) < 3:
            time.sleep(0.01)
        if completions[0] == "h":
            time.sleep(1e6)
        return [1 for _ in completions]
"""


def pids(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


@pytest.mark.parametrize("text", ["h", "4"], ids=["on a timeout", "when the run ends"])
def test_everything_that_was_started_is_ended(
    text: str, function: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_process, "END_S", 60.0)
    kill_only_after(lambda _: len(pids(tmp_path)) == 3, monkeypatch)
    reward = function(LEAVES_CHILDREN, timeout_s=2.0 if text == "h" else 60.0)
    assert one(reward, answer(text)) == [None if text == "h" else 1]
    assert len(pids(tmp_path)) == 3
    if text == "4":
        assert all(map(alive, pids(tmp_path)))
        reward.close()
    assert not any(map(alive, pids(tmp_path)))


def test_everything_dies_with_a_killed_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(LEAVES_CHILDREN))
    program = f"""
from pathlib import Path
from runner.reward.worker_pool import WorkerPool
from runner.user_code.process import CapturedOutput, FunctionTarget
target = FunctionTarget(Path("{tmp_path}/mine.py"), "score")
pool = WorkerPool(target, workers=1, timeout_s=600, output=CapturedOutput("", None))
pool.call({{"completions": ["h"]}}, size=1, seed=0)
"""
    run = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    try:
        wait_until(lambda: len(pids(tmp_path)) == 3)
        assert all(map(alive, pids(tmp_path)))
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    wait_until(lambda: not any(map(alive, pids(tmp_path))))


def test_a_forked_child_of_the_run_does_not_keep_a_worker_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_process, "END_S", 60.0)
    (tmp_path / "mine.py").write_text(textwrap.dedent(LEAVES_CHILDREN))
    process = user_process.UserProcess(
        worker_pool.PROGRAM, user_process.FunctionTarget(tmp_path / "mine.py", "score"), CapturedOutput("", None)
    )
    held = os.dup(process._process.stdin.fileno())  # what a process has that was forked from the run
    question = {"arguments": {"completions": ["4"]}, "size": 1, "seed": 0, "timeout_s": 60.0}
    assert process.request(json.dumps(question).encode(), 60.0)["values"] == [1.0]
    begin = time.monotonic()
    process.end()
    os.close(held)
    assert time.monotonic() - begin < user_process.END_S
    assert len(pids(tmp_path)) == 3 and not any(map(alive, pids(tmp_path)))


def test_a_worker_outlives_the_thread_that_started_it(function: Write) -> None:
    reward = function("import os\ndef score(completions): return [os.getpid()] * len(completions)", max_failures=99)
    reward.score([[answer("4")]])
    found: list[float | None] = []

    def replace() -> None:
        [[pid]] = reward.score([[answer("4")]])
        os.kill(int(pid or 0), signal.SIGKILL)
        reward.score([[answer("4")]])
        found.extend(one(reward, answer("4")))

    thread = Thread(target=replace)
    thread.start()
    thread.join()
    time.sleep(1.5 * 1.0)  # the guard looks once a second whether the runner is still there
    assert one(reward, answer("4")) == found


def test_several_workers_score_at_the_same_time_and_keep_the_order(function: Write, tmp_path: Path) -> None:
    reward = function(
        """
        import os, time
        def score(completions):
            here = os.path.dirname(__file__)
            open(f"{here}/here-{os.getpid()}", "w").close()
            while len([n for n in os.listdir(here) if n.startswith("here-")]) < 3:  # waits for two others
                time.sleep(0.01)
            return [float(c) for c in completions]
        """,
        workers=3,
    )
    assert reward.score([[answer(str(i))] for i in range(9)]) == [[float(i)] for i in range(9)]


def test_a_function_that_scores_nothing_stops_the_run(function: Write) -> None:
    reward = function("def score(completions): raise KeyError('no')", max_failures=3)
    reward.score([GROUP] * 2)
    with pytest.raises(
        DataError, match=r"no sample of 3 groups in a row .*\n.*KeyError: 'no' \(mine.py:1 in score\)"
    ) as e:
        reward.score([GROUP] * 2)
    assert "fix " in str(e.value) and "mine.py" in str(e.value)


# --- what it prints --------------------------------------------------------------------------------------------------


def test_the_first_lines_are_said_and_all_are_kept(
    function: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "runner")
    source = """
        import os, sys
        print("during the import")
        def score(completions):
            for i in range(1000):
                print("line", i, file=sys.stderr if i % 2 else sys.stdout)
            os.write(1, b"\\xff" + b"x" * 5000)
            return [1 for _ in completions]
    """
    reward = function(source, folder=tmp_path)
    assert one(reward) == [1, 1]
    reward.close()
    said = [r.message for r in caplog.records if r.message.startswith("mine.py:score| ")]
    assert said[:3] == [f"mine.py:score| {line}" for line in ("during the import", "line 0", "line 1")]
    assert len(said) == user_process.PRINTED_LINES + 2 and said[-1].startswith(
        "mine.py:score| 1004 lines were printed in "
    )
    kept = (tmp_path / "reward.log").read_text().splitlines()
    assert kept[:1001] == ["during the import", *(f"line {i}" for i in range(1000))] and kept[1001].startswith(
        "\ufffdxxx"
    )
    assert max(map(len, kept)) <= user_process.LINE_BYTES


def test_what_is_kept_is_bounded(
    function: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(user_process, "LOGGED_BYTES", 1000)
    caplog.set_level("INFO", "runner")
    reward = function("def score(completions):\n  print('x\\n' * 5000)\n  return [1, 1]", folder=tmp_path)
    one(reward)
    reward.close()
    assert (tmp_path / "reward.log").stat().st_size <= 1002
    assert "5001 lines were printed" in caplog.text and "of them dropped" in caplog.text


# --- before a run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "import no_such_package\ndef score(): ...",
            r"ModuleNotFoundError: No module named 'no_such_package' \(mine.py:1",
        ),
        ("score = 5", "score is int, not a function"),
        ("from os.path import *", "score is NoneType, not a function"),
        ("import sys\ndef score(): ...\nsys.exit(4)", "the process ended during the import: .* exited with code 4"),
        ("x = 1", "has no function 'score'"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_problem_of_the_spec(source: str, said: str, function: Write) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        function(source)
    assert caught.value.exit_code == 2 and [p.key for p in caught.value.problems] == ["reward.path"]


def test_an_import_that_never_ends_is_given_up(function: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_process, "START_S", 0.3)
    with pytest.raises(SpecError, match=r"the import takes longer than 0\.3 s"):
        function("def score(): ...\nwhile True: pass")


def test_what_was_run_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(completions): ...")
    decisions = Decisions(strict=True)
    made(FunctionConfig(path=f"{tmp_path}/mine.py:score"), decide=decisions).close()
    assert [d.reason.partition(" ")[0] for d in decisions.entries if d.feature == "reward.path"] == ["sha256"]


def test_a_function_with_all_arguments_of_trl_runs(
    function: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = """
        def score(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, answer, **columns):
            log_extra("answers", answer)
            log_metric("right", 0.5)
            return [trainer_state.global_step / trainer_state.max_steps ] * len(completions)
    """
    caplog.set_level("INFO")
    reward = function(source, folder=tmp_path, steps=4)
    late = [replace(one, step=3) for one in GROUP]
    assert reward.score([GROUP, late]) == [[0.0, 0.0], [0.75, 0.75]]
    reward.close()
    log = (tmp_path / "reward.log").read_text()
    assert "log_extra answers: ['4', '4']\n" in log and "log_metric right: 0.5\n" in log
    assert caplog.text.count("log_extra and log_metric go to") == 1 and "not to the metrics" in caplog.text


def test_trls_own_reward_functions_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from trl.rewards import think_format_reward as score\n")
    thought = {"role": "assistant", "content": "<think>\nso\n</think>\n4"}
    reward = made(FunctionConfig(path=f"{tmp_path}/mine.py:score", timeout_s=60.0))
    asked = ({"role": "user", "content": "2+2?"},)
    right = replace(answer("", messages=asked), messages=(*asked, thought))
    wrong = replace(answer("", messages=asked), messages=(*asked, {"role": "assistant", "content": "4"}))
    assert reward.score([[right, wrong]]) == [[1.0, 0.0]]
    reward.close()


def test_what_trl_knows_and_a_run_does_not_is_named(function: Write, caplog: pytest.LogCaptureFixture) -> None:
    reward = function("def score(completions, trainer_state): return [trainer_state.epoch] * len(completions)")
    assert one(reward) == [None, None]
    assert "trainer_state.epoch is not known to a run; it has: global_step, max_steps" in caplog.text
    reward.close()
    reward = function("def score(completions, environments): return [1.0] * len(completions)")
    assert one(reward) == [None, None]
    assert "the function has the parameter environments; available: prompts" in caplog.text


def test_a_log_that_cannot_be_written_does_not_stop_the_scores(
    function: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "reward.log").symlink_to("/dev/full")
    reward = function("def score(completions):\n  print('x' * 10)\n  return [1, 2]", folder=tmp_path)
    assert one(reward) == [1.0, 2.0] == one(reward)
    wait_until(lambda: "reward.log cannot be written: the disk is full" in caplog.text)
