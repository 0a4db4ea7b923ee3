"""environment=function: a user's class in processes of its own, whose tools are called as the template writes calls."""

from __future__ import annotations

import json
import resource
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from runner.algorithm.rollouts import Group, RolloutCollector
from runner.build.environments import EnvironmentBuilder, build_extend
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem, SpecError
from runner.data.chat import Renderer
from runner.distributed.work_partition import SINGLE_PROCESS
from runner.environment import calculator
from runner.environment.config import CalculatorConfig, FunctionEnvironmentConfig, McpEnvironmentConfig
from runner.environment.processes import EpisodeProcess
from runner.environment.worker import cut_middle
from runner.interfaces import Completion, Prompt, Request, Rollout
from runner.model.tiny import byte_tokenizer
from runner.reward import function
from runner.reward.code import SANDBOXES, RunResult, sandbox_problem
from runner.reward.config import CodeConfig, EnvironmentRewardConfig
from runner.reward.config import FunctionConfig as RewardFunction
from runner.reward.rules import build_environment
from runner.spec.job import JobSpec
from tests.command import ROOT
from tests.data.test_renderer import tokenizer_of
from tests.ports import free_port

TOKENIZER = byte_tokenizer(4096)
END = TOKENIZER.eos_token_id
SHOP = '''
import asyncio

class Shop:
    def reset(self, prompt, stock=3, **columns):
        self.stock, self.sold, self._secret = stock, [], object()
        return f" ({stock} left)" if stock else None

    def buy(self, name: str, count: int = 1) -> str:
        """Buy things.

        Args:
            name: what
            count: how many
        """
        if count > self.stock:
            raise ValueError("not enough")
        self.stock -= count
        self.sold.append(name)
        return f"{count} x {name}"

    async def price(self, name: str) -> float:
        """The price.

        Args:
            name: what
        """
        await asyncio.sleep(0.01)
        return len(name) / 2

    def score(self):
        return len(self.sold)

    def is_done(self):
        return self.stock == 0
'''


def call(tool: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


class Lines:
    """A sampler that says these lines, turn by turn, to every request, and keeps the prompts."""

    temperature, max_new_tokens = 1.0, 512

    def __init__(self, lines: list[str], max_model_len: int | None = None) -> None:
        self.lines, self.prompts, self.max_model_len = list(lines), list[str](), max_model_len

    def sample(self, requests: list[Request]) -> list[Rollout]:
        self.prompts += [TOKENIZER.decode(request.prompt) for request in requests]
        line = self.lines.pop(0)
        whole = (*TOKENIZER(line, add_special_tokens=False)["input_ids"], END)
        turns = [whole[: request.max_new_tokens] for request in requests]
        ends = ["stop" if ids == whole else "length" for ids in turns]
        return [
            Rollout(ids, (-0.5,) * len(ids), (-0.5,) * len(ids), 0, end) for ids, end in zip(turns, ends, strict=True)
        ]


class Seen:
    """A reward that keeps what it sees."""

    def __init__(self) -> None:
        self.completions: list[Completion] = []

    def score(self, groups: Any) -> list[list[float | None]]:
        self.completions += [one for group in groups for one in group]
        return [[1.0] * len(group) for group in groups]

    def close(self) -> None:
        """Nothing was started."""


@cache
def demo() -> JobSpec:
    return compose_job(["+recipe=grpo_demo"]).spec


Play = Callable[..., tuple[list[Group], Lines, Seen]]


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    """Plays episodes of the source's class with a policy that says the lines."""
    builders: list[EnvironmentBuilder] = []

    def run(
        source: str, lines: list[str], target: str = "Shop", size: int = 1, room: int | None = None,
        columns: tuple[dict[str, Any], ...] = ({},), decide: Decisions | None = None, **options: Any,
    ) -> tuple[list[Group], Lines, Seen]:  # fmt: skip
        (tmp_path / "shop.py").write_text(source)
        config, decide = options.pop("config", None), decide or Decisions()
        config = config or FunctionEnvironmentConfig(
            path=f"{tmp_path}/shop.py:{target}", **{"lockstep": True, "timeout_s": 200.0} | options
        )
        spec = demo().model_copy(update={"environment": config})
        builders.append(EnvironmentBuilder(TOKENIZER, decide, tmp_path))
        environments = builders[-1].build(spec, SINGLE_PROCESS, tmp_path / "journal")
        sampler, reward = Lines(lines, room), Seen()
        extend = build_extend(spec, TOKENIZER, environments, decide)
        collector = RolloutCollector(sampler, reward, TOKENIZER, 0, size, environments, extend)
        messages = ({"role": "user", "content": "buy tea"},)
        ids = TOKENIZER.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        asked = [Prompt(tuple(ids), "buy tea", messages, own) for own in columns]
        return collector.collect_groups(asked, 0, 0), sampler, reward

    run.builders = builders  # type: ignore[attr-defined]
    yield run
    for one in builders:
        one.close()


def set_clock_ahead(monkeypatch: pytest.MonkeyPatch, ahead_s: Callable[[], float]) -> None:
    """Let the clock of environment.max_wait_s be ahead, so that a long limit passes at once when it is to pass."""
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s())
    monkeypatch.setattr("runner.environment.function.time", clock)


def test_methods_are_tools_and_their_results_are_context(play: Play) -> None:
    decide = Decisions()
    turns = [call("price", name="tea") + call("buy", name="tea", count=2), "2 teas"]
    [group], sampler, reward = play(SHOP, turns, size=2, decide=decide)
    first, second = group.samples
    assert first == second and first.text == "2 teas"
    prompt = TOKENIZER.decode(group.prompt.ids)
    assert '"name": "buy", "description": "Buy things."' in prompt and '"required": ["name"]' in prompt
    assert prompt.endswith("<|im_start|>user\nbuy tea (3 left)<|im_end|>\n<|im_start|>assistant\n")
    assert sampler.prompts[2].startswith(f"{prompt}{turns[0]}<|im_end|>\n<|im_start|>tool\n1.5<|im_end|>\n")
    trained = TOKENIZER.decode([i for i, mine in zip(first.ids, first.mask, strict=True) if mine])
    assert trained == f"{turns[0]}<|im_end|>{turns[1]}<|im_end|>"
    asked, price, bought = first.history
    assert [c["function"] for c in asked["tool_calls"]] == [
        {"name": "price", "arguments": {"name": "tea"}},
        {"name": "buy", "arguments": {"name": "tea", "count": 2}},
    ]
    assert (price["content"], bought["content"], bought["name"]) == ("1.5", "2 x tea", "buy")
    assert first.counts == {"turns": 2, "calls": 2, "malformed_calls": 0, "tool_errors": 0}
    [seen, _] = reward.completions
    assert seen.environment is not None and seen.environment.score == 1.0
    assert seen.environment.state == {"stock": 1, "sold": ["tea"]}  # no private attribute
    assert seen.messages is not None and [m["role"] for m in seen.messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert ("tool calls", "hermes") in [(fact["feature"], fact["value"]) for fact in decide.records()["facts"]]


def test_an_episode_ends_where_the_environment_is_done(play: Play) -> None:
    [group], sampler, _ = play(SHOP, [call("buy", name="tea", count=3), "never said"])
    assert group.samples[0].history == () and sampler.lines == ["never said"]


def test_the_calls_of_the_last_turn_are_executed(play: Play) -> None:
    _, _, reward = play(SHOP, [call("buy", name="a"), call("buy", name="b"), "unsaid"], max_turns=2)
    assert reward.completions[0].environment.state["sold"] == ["a", "b"]


@pytest.mark.parametrize(
    ("said", "answer", "counted"),
    [
        (call("buy", name="tea", count=9), "error: not enough", "tool_errors"),
        (call("buy", size=9), "unexpected keyword argument 'size'", "tool_errors"),
        (call("score"), "error: no tool score; tools: buy, price", "tool_errors"),
        ("<tool_call>{oops</tool_call>", "error: the call cannot be read as hermes: ", "malformed_calls"),
        ('<tool_call>{"name": "buy"}</tool_call>', "the arguments are no JSON object", "malformed_calls"),
    ],
)
def test_a_wrong_call_is_answered_and_counted(said: str, answer: str, counted: str, play: Play) -> None:
    [group], _, _ = play(SHOP, [said, "ok"])
    [sample] = group.samples
    assert answer in sample.history[1]["content"] and sample.counts[counted] == 1 and sample.finish == "stop"


def test_columns_reach_reset_and_a_group_begins_with_what_its_episodes_share(play: Play) -> None:
    groups, _, _ = play(SHOP, ["no", "no"], columns=({"stock": 5}, {"stock": 0}))
    assert "(5 left)" in TOKENIZER.decode(groups[0].prompt.ids) and "left" not in TOKENIZER.decode(groups[1].prompt.ids)
    own = SHOP.replace('f" ({stock} left)"', "f\" ({__import__('time').time_ns()} left)\"")  # two episodes differ
    [group], _, _ = play(own, ["no"], size=2)
    first, second = group.samples
    assert first.ids != second.ids and first.mask[0] == second.mask[0] == 0.0
    assert TOKENIZER.decode(group.prompt.ids).rstrip("0123456789").endswith("buy tea (")
    assert TOKENIZER.decode(first.ids).endswith(" left)<|im_end|>\n<|im_start|>assistant\nno<|im_end|>")


def test_a_function_answers_until_it_returns_none(play: Play) -> None:
    source = "async def respond(messages):\n    n = len(messages)\n    return None if n > 3 else f'{n} so far'\n"
    [group], sampler, reward = play(source, ["a", "b", "c"], target="respond")
    assert [m["content"] for m in group.samples[0].history] == ["a", "2 so far"] and sampler.lines == ["c"]
    assert group.samples[0].history[1]["role"] == "user" and reward.completions[0].environment.score is None


def finish(play: Any, caplog: pytest.LogCaptureFixture) -> str:
    """Close what was built; all that was logged."""
    for one in play.builders:
        one.close()
    return caplog.text


FAILING = {
    "raises": ("raise RuntimeError('broken')", "RuntimeError at shop.py:"),
    "hangs": ("import time; time.sleep(600)", "timeout"),
    "dies": ("import os; os._exit(3)", "died"),
    "is killed": ("import os; os.kill(os.getpid(), 9)", "died"),
    "kills its parent": ("import os; os.kill(os.getppid(), 9); import time; time.sleep(600)", "died"),
    "exits": ("raise SystemExit", "died"),
}


@pytest.mark.parametrize("way", FAILING)
def test_an_environment_that_fails_leaves_its_episode_out(
    way: str, play: Play, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other episode of the group goes on; the one that fails has no reward and is counted by kind."""
    line, kind = FAILING[way]
    request, hanging = EpisodeProcess.request, list[EpisodeProcess]()

    def hasten(process: EpisodeProcess, content: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The call that hangs has a small part of its time, and all others, on a busy machine, have all of it."""
        if way == "hangs" and content.get("reset", {}).get("bad"):
            hanging.append(process)
        return request(process, content, timeout_s / 100 if process in hanging and "calls" in content else timeout_s)

    monkeypatch.setattr(EpisodeProcess, "request", hasten)
    source = SHOP.replace("    def is_done(self):\n", f"    def is_done(self):\n        if self.bad: {line}\n")
    source = source.replace("self.sold, ", "self.bad, self.sold, ").replace("= stock, []", "= stock, bad, []")
    source = source.replace("stock=3,", "stock=3, bad=False,")
    begin = time.monotonic()
    groups, _, reward = play(source, [call("buy", name="x"), "end"], timeout_s=60.0, columns=({}, {"bad": True}))
    good, bad = (group.samples[0] for group in groups)
    assert (good.finish, good.reward, good.text) == ("stop", 1.0, "end")
    assert (bad.finish, bad.reward) == ("failed", None) and len(reward.completions) == 1
    assert f"1 of 2 episodes were left out: 1 × {kind}" in finish(play, caplog)
    assert time.monotonic() - begin < 100


def test_what_an_episode_started_ends_with_it(play: Play, tmp_path: Path) -> None:
    """Also in sessions of their own, and as orphans."""
    fork = "from subprocess import Popen as P"
    fork += "; pids = [P(['sleep', '300'], start_new_session=k % 2 > 0).pid for k in range(100)]"
    fork += f"; open('{tmp_path}/pids', 'w').write(str(pids))"
    source = SHOP.replace("    def score(self):\n", f"    def score(self):\n        {fork}\n")
    play(source, ["end"])
    pids = json.loads((tmp_path / "pids").read_text())
    end = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert len(pids) == 100 and not [pid for pid in pids if psutil.pid_exists(pid)]


def test_what_an_environment_prints_and_returns_is_limited(play: Play, tmp_path: Path) -> None:
    source = SHOP.replace(
        'return f"{count} x {name}"', "print('y' * 2_000_000 + '\\\\n'); return 'a' * 3_000_000 + 'b\\ud800'"
    )
    [group], _, _ = play(source, [call("buy", name="x"), "end"], max_tool_output=100)
    said = group.samples[0].history[1]["content"]
    assert said == "a" * 50 + "\n[… 2999902 characters left out …]\n" + "a" * 48 + "b?"
    assert (tmp_path / "environment.log").stat().st_size < 10 << 20


@pytest.mark.parametrize(
    ("value", "said"), [("b'\\xff'", "b'\\xff'"), ("None", "None"), ("object", "<class 'object'>")]
)
def test_a_result_that_is_no_text_is_read_as_its_text(value: str, said: str, play: Play) -> None:
    source = SHOP.replace('return f"{count} x {name}"', f"return {value}")
    [group], _, _ = play(source, [call("buy", name="x"), "end"])
    assert group.samples[0].history[1]["content"] == said and group.samples[0].counts["tool_errors"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_gigabyte_of_output_ends_nothing(play: Play, tmp_path: Path) -> None:
    """It is read and dropped; what is kept of it has a limit, and so has our memory."""
    line = "import os; [os.write(1, b'y' * 1023 + b'\\n') for _ in range(1 << 20)]; return 'z' * (1 << 30)"
    source = SHOP.replace('return f"{count} x {name}"', line)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    [group], _, _ = play(source, [call("buy", name="x"), "end"], max_tool_output=100, timeout_s=500.0)
    assert group.samples[0].finish == "stop" and len(group.samples[0].history[1]["content"]) < 200
    assert (tmp_path / "environment.log").stat().st_size < 10 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_of_64_episodes_one_that_sleeps_costs_its_group_one_sample(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps = f"""        import os, time
        try:
            os.close(os.open("{tmp_path}/first", os.O_CREAT | os.O_EXCL))
            time.sleep(500)
        except FileExistsError:
            pass
"""
    source = SHOP.replace("        if count > self.stock:", sleeps + "        if count > self.stock:")
    (scored := tmp_path / "scored").mkdir()
    source = source.replace("return len(self.sold)", f"import os; open(f'{scored}/{{os.getpid()}}', 'w'); return 0")
    seconds, ticks = [], count()
    (tmp_path / "first").touch()
    for late in (0, 1):  # without one that sleeps, and with one
        begin = time.monotonic()
        options = {"columns": ({},) * 8, "size": 8, "lockstep": False, "max_wait_s": 60.0, "timeout_s": 300.0}
        if late:
            for path in scored.iterdir():
                path.unlink()
            set_clock_ahead(monkeypatch, lambda: 100.0 * next(ticks) if len([*scored.iterdir()]) == 63 else 0.0)
        groups, _, _ = play(source, [call("buy", name="x"), *["end"] * 200], **options)
        seconds.append(time.monotonic() - begin)
        assert sorted(len(group.played_samples) for group in groups) == [8 - late, *[8] * 7]
        (tmp_path / "first").unlink()
    assert seconds[1] < seconds[0] + 200


WAITING = SHOP.replace(
    "    def is_done(self):\n",
    """    def is_done(self):
        import os, time
        while self.waits and not os.path.exists(self.waits):
            time.sleep(0.01)
        if self.makes and len(self.sold) == 2:
            open(self.makes, "w").close()
""",
).replace(
    "stock=3, **columns):\n",
    "stock=3, waits='', makes='', **columns):\n        self.waits, self.makes = waits, makes\n",
)


def test_few_episodes_have_a_process_at_a_time_and_play_as_all_at_once(play: Play, tmp_path: Path) -> None:
    """With one worker four: a group of three."""
    (folder := tmp_path / "processes").mkdir()
    counting = f"""def count(self) -> int:
        'Count processes.'
        import pathlib, psutil, time
        found = range(99)
        while len(found) > self.most:  # those of an earlier group may still be ending
            time.sleep(0.01)
            pids = [int(one.name) for one in pathlib.Path({str(folder)!r}).iterdir()]
            found = [p for p in psutil.process_iter(["status"]) if p.pid in pids and p.info["status"] != "zombie"]
        self.alive = len(found)
        return 0

    async def price"""  # fmt: skip
    source = SHOP.replace("async def price", counting)
    begin = f"import os; open(f'{folder}/{{os.getpid()}}', 'w'); self.most = columns['most']"
    source = source.replace(":\n        self.stock", f":\n        {begin}\n        self.stock", 1)
    few_columns, all_columns = (tuple({"stock": s, "most": most} for s in range(2, 7)) for most in (3, 15))
    turns = [call("count"), call("buy", name="tea"), "end"]
    few, sampler, reward = play(source, turns * 5, columns=few_columns, size=3, workers=1)
    whole, at_once, all_rewards = play(source, turns, columns=all_columns, size=3)
    assert [group.samples for group in few] == [group.samples for group in whole]
    assert sorted(sampler.prompts) == sorted(at_once.prompts) and len(sampler.lines) == 0
    assert max(one.environment.state["alive"] for one in reward.completions) == 3
    assert max(one.environment.state["alive"] for one in all_rewards.completions) == 15


def test_a_slow_tool_holds_no_other_episode(play: Play, tmp_path: Path) -> None:
    """The first tool of one episode waits for the second turn of the other, which would never come in lockstep."""
    flag, buy = str(tmp_path / "flag"), call("buy", name="tea")
    columns = ({"waits": flag}, {"makes": flag})
    groups, sampler, _ = play(WAITING, [buy, buy, "end", "end"], columns=columns, lockstep=False, timeout_s=60.0)
    assert [len(group.samples[0].history) for group in groups] == [2, 4]
    assert len(sampler.prompts) == 5 and not (tmp_path / "journal").exists()


def test_an_episode_that_all_others_wait_for_is_left_out_and_stays_left_out(
    play: Play, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of G-1 goes on; the next attempt does the same, although the tool would be fast then."""
    options = {"columns": ({"waits": str(tmp_path / "flag")}, {}), "lockstep": False}
    options |= {"max_wait_s": 60.0, "timeout_s": 300.0}
    scored, ticks, begin = tmp_path / "scored", count(), time.monotonic()
    source = WAITING.replace("return len(self.sold)", f"open('{scored}', 'w'); return 0")
    with monkeypatch.context() as patched:
        set_clock_ahead(patched, lambda: 100.0 * next(ticks) if scored.exists() else 0.0)
        groups, _, reward = play(source, [call("buy", name="tea"), "end"], **options)
    assert [group.samples[0].finish for group in groups] == ["failed", "stop"] and len(reward.completions) == 1
    assert time.monotonic() - begin < 100 and "1 of 2 episodes were left out: 1 × too slow" in finish(play, caplog)
    (tmp_path / "flag").touch()
    again, sampler, _ = play(source, [call("buy", name="tea"), "end"], **options)
    assert len(sampler.prompts) == 2 and "1 episodes are left out, as before the run was resumed" in caplog.text
    assert again[0].samples[0].finish == "failed" and again[1].samples == groups[1].samples


def test_the_time_of_sampling_is_no_waiting(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another rank was asked for its replies meanwhile, and this one had nothing in step."""
    play(SHOP, ["end"], lockstep=False, max_wait_s=60.0)
    environments = play.builders[-1].built[-1]  # type: ignore[attr-defined]
    messages = ({"role": "user", "content": "buy tea"},)
    batch = environments.start_episodes([Prompt((1,), "buy tea", messages)], [0])
    assert batch.replies(0.02) == []
    set_clock_ahead(monkeypatch, lambda: 100.0)
    batch.submit(0, call("price", name="tea"), False)
    first = batch.replies(0.0)
    [(_, reply)] = first or batch.replies(30.0)
    assert not reply.failure
    batch.close()


def test_secrets_stay_out_of_the_environment(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "canary-7f")
    source = SHOP.replace("return len(self.sold)", "import os; self.all = dict(os.environ); return 0")
    _, _, reward = play(source, ["end"])
    state = reward.completions[0].environment.state
    assert state["all"] and "canary-7f" not in json.dumps(state)


SECRETS = """import os, socket
print(len(os.environ.get("MY_API_KEY", "")))
look = lambda: open(f"/proc/{os.getppid()}/environ").read(1)
for work in (lambda: socket.create_connection(("1.1.1.1", 53), 1), look):
    try: found = work()  # in a namespace the parent is one whose environment is empty
    except OSError: found = None
    print("got" if found else "refused")
"""


NEEDS_SANDBOX = pytest.mark.skipif(
    all(sandbox_problem(run, CodeConfig()) for run in SANDBOXES.values()), reason="no sandbox"
)


@NEEDS_SANDBOX
def test_the_frames_of_the_sandbox_are_not_shown() -> None:
    """Since Python 3.13 they have lines of source."""
    describe = runpy.run_path(str(ROOT / "recipes" / "code_tools.py"))["describe"]
    first, rest = "Traceback (most recent call last):\n", '  File "answer.py", line 2, in f\n    raise E\nE: no\n'
    own = '  File "<string>", line 9, in <module>\n    run("answer.py")\n    ~~~^^^^\n  File "<frozen runpy>", line 2\n'
    assert describe(RunResult(1, "x\n", first + own + rest)) == f"x\n{first}{rest}exit code 1"


def code_tools(folder: Path, timeout_s: float) -> FunctionEnvironmentConfig:
    """environment=code_tools, whose programs have this time."""
    config = compose_job(["+recipe=grpo_demo", "environment=code_tools"]).spec.environment
    assert isinstance(config, FunctionEnvironmentConfig) and config.path == "recipe:code_tools.py:CodeTools"
    source = (ROOT / "recipes" / "code_tools.py").read_text()
    changed = folder / "tools.py"
    changed.write_text(source.replace("CodeConfig()", f"CodeConfig(timeout_s={timeout_s})"))
    options = {"path": f"{changed}:CodeTools", "timeout_s": 250.0, "lockstep": True}
    return config.model_copy(update=options)


@NEEDS_SANDBOX
def test_code_that_hangs_in_the_sandbox_is_a_failed_call(play: Play, tmp_path: Path) -> None:
    lines = [call("python", code="import time; time.sleep(1000)"), "done"]
    [group], _, _ = play("", lines, config=code_tools(tmp_path, 1.0))
    [sample] = group.samples
    [result] = [message["content"] for message in sample.history if message["role"] == "tool"]
    assert result.startswith("error: ended by a limit of the sandbox (1 s)") and sample.counts["tool_errors"] == 1


@NEEDS_SANDBOX
def test_python_and_bash_run_in_the_sandbox(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "canary-7f")
    monkeypatch.setattr(Lines, "max_new_tokens", 2048)
    turn = [
        call("python", code="print(6 * 7)"),
        call("python", code="print('x', end='')\nraise ValueError('no')"),
        call("bash", command="echo $((1 + 2)) > f; cat f | tr 3 4; cat /etc/shadow; exit 3"),
        call("python", code=SECRETS),
        call("python", code="x = bytearray(1 << 32)"),
        call("bash", command="cat f"),
    ]
    lines = ["".join(turn[:4]), "".join(turn[4:]), "done"]
    [group], _, _ = play("", lines, config=code_tools(tmp_path, 60.0))
    [sample] = group.samples
    results = [message["content"] for message in sample.history if message["role"] == "tool"]
    assert results[0] == "42"
    frames = "  File \"answer.py\", line 2, in <module>\n    raise ValueError('no')\n"
    assert (
        results[1].replace("/tmp/", "") == f"x\nTraceback (most recent call last):\n{frames}ValueError: no\nexit code 1"
    )
    assert results[2].startswith("4\n") and results[2].endswith("exit code 3") and "/etc/shadow" in results[2]
    assert results[3] == "0\nrefused\nrefused"
    assert "MemoryError" in results[4] and "No such file" in results[5]
    assert sample.counts.get("tool_errors", 0) == 0


def test_too_many_failures_in_a_row_end_the_run(play: Play) -> None:
    source = SHOP.replace("return len(self.sold)", "raise OSError('no disk')")
    with pytest.raises(EnvironmentProblem, match=r"(?s)2 episodes in a row failed.*OSError: no disk.*fix the env"):
        play(source, ["end"], max_failures=2, size=2)


def test_an_episode_stays_below_its_tokens(play: Play) -> None:
    [group], sampler, _ = play(SHOP, [call("price", name="tea")] * 9, max_episode_tokens=300)
    [sample] = group.samples
    assert sample.finish == "length" and 200 < len(sample.ids) <= 300
    assert sample.counts["turns"] == len(sampler.prompts) == sample.counts["calls"] + 1, "the turn that was cut counts"
    [group], sampler, _ = play(SHOP, ["unsaid"], room=100)  # the schemas alone are longer
    assert sampler.lines == ["unsaid"] and group.samples[0].finish == "length" and not group.samples[0].ids


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class Shop:\n    pass", "Shop has no method reset"),
        (SHOP.replace("name: what", "x: what"), "name"),
        (f"{SHOP}\nraise ValueError('at import')", "at import"),
        ("class Shop(", "syntax error"),
        ("class Shp: ...", "did you mean 'Shp'"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_before_the_model_is_loaded(source: str, said: str, play: Play) -> None:
    with pytest.raises(SpecError, match=rf"environment\.path: .*{said}"):
        play(source, [])


def test_the_middle_of_a_long_text_is_left_out() -> None:
    assert cut_middle("abcdef", 6) == "abcdef"
    assert cut_middle("abcdefgh", 6) == "abc\n[… 2 characters left out …]\nfgh"


CALCULATOR = """
from runner.core.untrusted_text import NotArithmetic, evaluate

def respond(messages):
    text = messages[-1]["content"]
    if not text.startswith("calc "):
        return None
    try:
        return {"role": "tool", "content": str(evaluate(text.removeprefix("calc "))[0])}
    except NotArithmetic as error:
        return {"role": "tool", "content": f"error: {error}"}
"""


def test_the_calculator_as_a_function_is_the_calculator(play: Play) -> None:
    """Its samples are those of environment=calculator, token by token."""
    lines = ["calc 12*(3+4)", "calc 1/0", "calc nonsense", "84"]
    groups, sampler, _ = play(CALCULATOR, lines, target="respond", size=2, max_turns=8)
    made = calculator.build(CalculatorConfig(max_turns=8))
    other, reward = Lines(lines), Seen()
    extend = build_extend(demo(), TOKENIZER, made, Decisions())
    collector = RolloutCollector(other, reward, TOKENIZER, 0, 2, made, extend)
    [prompt] = [group.prompt for group in groups]
    wanted = collector.collect_groups([prompt], 0, 0)
    assert sampler.prompts == other.prompts and len(groups[0].samples[0].history) == 6
    assert [g.samples for g in groups] == [g.samples for g in wanted]


TRL_CLASS = '''
class CounterEnv:
    """TRL's convention: reset(**kwargs), tools, get_reward."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs):
        self.reward, self.target = 0.0, len(kwargs["prompt"][0]["content"])
        return "\\\\nReach the target."

    def increment(self, step: int) -> str:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        if self.reward:
            raise ValueError("Game over.")
        self.reward = float(step)
        return f"counter: {step}"

    def get_reward(self) -> float:
        return self.reward
'''


def test_a_class_of_trl_runs_as_it_is_and_its_reward_function_too(play: Play, tmp_path: Path) -> None:
    lines = [call("increment", step=4), call("increment", step=1), "done"]
    [group], _, seen = play(TRL_CLASS.replace("\\\\n", "\\n"), lines, target="CounterEnv")
    [completion] = seen.completions
    assert completion.environment is not None and completion.environment.score == 4.0
    assert group.samples[0].history[3]["content"] == "error: Game over."
    (tmp_path / "rate.py").write_text(
        "def rate(environments, environment_scores, **kwargs):\n"
        "    return [e.reward + e.target + s for e, s in zip(environments, environment_scores)]\n"
    )
    reward = function.build(RewardFunction(path=f"{tmp_path}/rate.py:rate"), seed=0, decide=Decisions())
    assert reward.score([[completion]]) == [[4.0 + len("buy tea") + 4.0]]
    reward.close()
    assert build_environment(EnvironmentRewardConfig()).score([[completion]]) == [[4.0]]


NAMES = {"Qwen2.5": True, "Qwen3.5": True, "GLM-4.5": True, "gpt-oss": False}


@pytest.mark.parametrize("name", NAMES)
def test_results_continue_a_turn_of_calls_as_the_template_writes_them(name: str) -> None:
    """The ids of an episode are those of the template over the whole conversation."""
    tokenizer = tokenizer_of(name)
    renderer = Renderer(tokenizer)
    calls = [
        {"type": "function", "id": f"c0001000{at}", "function": {"name": "price", "arguments": {"key": word}}}
        for at, word in enumerate(["tea", "cup"] if NAMES[name] else ["tea"])
    ]
    results = [
        {"role": "tool", "name": "price", "tool_call_id": one["id"], "content": f"{at} coins"}
        for at, one in enumerate(calls)
    ]
    before = [{"role": "user", "content": "buy"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    whole = renderer.control.ids_of(renderer.render_prompt([*before, *results]))
    begin = renderer.control.ids_of(renderer.render_prompt(before[:1]))
    [row] = renderer.render(before)
    written = renderer.control.ids_of([s for s in row if s.is_trained])
    prompt = renderer.control.ids_of([s for s in row[: [x.is_trained for x in row].index(True)]])
    assert prompt == begin
    assert [*prompt, *written, *renderer.extend([*prompt, *written], results)] == whole


MCP_SERVER = """
import os, sys, time
from mcp.server import MCPServer

server, stock = MCPServer("shop"), [3]
asked = []

@server.tool()
def score() -> str:
    "Named like a method that an environment may have."
    return "no number"

@server.tool()
def buy(name: str, count: int = 1) -> str:
    "Buy things."
    asked.append(name)
    if len(asked) == 1:
        time.sleep(0.5)
    if count > stock[0]:
        raise ValueError("not enough")
    stock[0] -= count
    return f"{count} x {name}, {stock[0]} left"

@server.tool()
def leave() -> str:
    "End the server."
    os._exit(1)

if sys.argv[1] == "stdio":
    server.run()
else:
    server.run("streamable-http", port=int(sys.argv[1]))
"""


def test_the_tools_of_an_mcp_server_are_called_in_an_episode(play: Play, tmp_path: Path) -> None:
    """A server for each episode: what one buys, the other still has."""
    (tmp_path / "server.py").write_text(MCP_SERVER)
    config = McpEnvironmentConfig(server=f"{sys.executable} {tmp_path}/server.py stdio", lockstep=True, timeout_s=100)
    lines = [call("buy", name="tea", count=2) + call("buy", name="tea", count=2), "done"]
    groups, _, reward = play("", lines, config=config, columns=({}, {}))
    for group in groups:
        [sample] = group.samples
        assert [m["content"] for m in sample.history[1:]] == [
            "2 x tea, 1 left",
            "error: Error executing tool buy",
        ]
        assert sample.counts == {"turns": 2, "calls": 2, "malformed_calls": 0, "tool_errors": 1}
    with pytest.raises(EnvironmentProblem, match=r"(?s)1 episodes? in a row failed.*the MCP server has gone"):
        play("", [call("leave"), "done"], config=config.model_copy(update={"max_failures": 1}))
    prompt = TOKENIZER.decode(groups[0].prompt.ids)
    assert '"name": "buy"' in prompt and '"description": "Buy things."' in prompt
    assert reward.completions[0].environment.score is None


def test_an_mcp_server_with_a_url_is_shared(play: Play, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(MCP_SERVER)
    port = free_port()
    with subprocess.Popen([sys.executable, f"{tmp_path}/server.py", str(port)], stderr=subprocess.DEVNULL) as server:
        try:
            while True:
                assert server.poll() is None
                with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.1)
            config = McpEnvironmentConfig(server=f"http://127.0.0.1:{port}/mcp", lockstep=True, timeout_s=100)
            groups, _, _ = play("", [call("buy", name="tea"), "done"], config=config, columns=({}, {}))
        finally:
            server.kill()
    assert sorted(group.samples[0].history[1]["content"] for group in groups) == [
        "1 x tea, 1 left",
        "1 x tea, 2 left",
    ]


def test_an_mcp_server_that_does_not_start_is_refused(play: Play) -> None:
    with pytest.raises(SpecError, match=r"environment\.server: .*Connection closed; the server printed: nothing"):
        play("", [], config=McpEnvironmentConfig(server=f"{sys.executable} -c 1"))
    with pytest.raises(SpecError, match=r"environment\.server: .*the server printed: ImportError: no module for this"):
        play(
            "",
            [],
            config=McpEnvironmentConfig(server=f"""{sys.executable} -c 'raise ImportError("no module for this")'"""),
        )
    with pytest.raises(SpecError, match=r"environment\.server: program 'no-such' not found"):
        play("", [], config=McpEnvironmentConfig(server="no-such server"))
