"""environment=agent: programs with OpenAI's own client, whose calls become rows of the ids that the policy sampled."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import psutil
import pytest

from runner.algorithm.experience_state import decode_experience, encode_experience
from runner.algorithm.rollouts import (
    Experience,
    Group,
    RolloutCollector,
    RolloutSample,
)
from runner.build.environments import EnvironmentBuilder, build_extend
from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem
from runner.core.subprocess import ChildProcess
from runner.distributed.work_partition import SINGLE_PROCESS
from runner.environment.config import AgentEnvironmentConfig
from runner.inference.agent_session import AgentSession
from runner.interfaces import Prompt, Request, Rollout
from runner.model.tiny import byte_tokenizer
from tests.environment.test_function import Seen, demo

TOKENIZER = byte_tokenizer(4096)
END = TOKENIZER.eos_token_id
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


class Policy:
    """A sampler that answers by the text of the prompt, with log-probabilities that never repeat."""

    temperature, max_new_tokens = 1.0, 512

    def __init__(self, speak: Callable[[str], str], max_model_len: int | None = None) -> None:
        self.speak, self.max_model_len = speak, max_model_len
        self.log: list[tuple[Request, Rollout]] = []
        self.waves: list[int] = []
        self._numbers = count(1)

    def sample(self, requests: list[Request]) -> list[Rollout]:
        self.waves.append(len(requests))
        return [self._rollout(request) for request in requests]

    def _rollout(self, request: Request) -> Rollout:
        text = self.speak(TOKENIZER.decode(request.prompt))
        ids = (*TOKENIZER(text, add_special_tokens=False)["input_ids"], END)[: request.max_new_tokens]
        logprobs = tuple(-next(self._numbers) / 1024 for _ in ids)
        rollout = Rollout(ids, logprobs, logprobs, 3, "stop" if ids[-1] == END else "length")
        self.log.append((request, rollout))
        return rollout


def check_rows(policy: Policy, groups: list[Group], unread: str | None = None) -> list[list[RolloutSample]]:
    """The oracle: each sampled token is trained on once, after exactly the ids that it was sampled after.

    Returns the rows of each episode. unread: a text in the prompts of turns that nobody read, which are not trained on
    """
    trained = dict[float, tuple[Any, ...]]()
    episodes = [list(sample.rows) for group in groups for sample in group.samples]
    for group in groups:
        for row in (row for sample in group.samples for row in sample.rows):
            assert len(row.ids) == len(row.mask) == len(row.logprobs) and (row.version == 3 or not row.ids)
            for at, mine in enumerate(row.mask):
                assert (row.logprobs[at] != 0) == bool(mine) and row.logprobs[at] not in trained
                if mine:
                    trained[row.logprobs[at]] = ((*group.prompt.ids, *row.ids[:at]), row.ids[at])
    for request, rollout in policy.log:
        if unread is not None and unread in TOKENIZER.decode(request.prompt):
            assert not trained.keys() & set(rollout.logprobs)
            continue
        for at, logprob in enumerate(rollout.logprobs):
            assert trained.pop(logprob) == ((*request.prompt, *rollout.ids[:at]), rollout.ids[at])
    assert not trained
    return episodes


Program = Callable[[dict[str, Any]], Any]
Play = Callable[..., tuple[list[Group], Policy, Seen]]


class Server:
    """A server that plays an episode for each request, in a thread."""

    def __init__(self) -> None:
        self.program: Program = lambda task: None
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                task = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                content = json.dumps(server.program(task)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    """Plays episodes of a program: a function, which a server calls, or the source of a file, which is executed."""
    builders, server = list[EnvironmentBuilder](), Server()

    def run(
        program: Program | str, speak: Callable[[str], str], size: int = 1, prompts: int = 1, room: int | None = None,
        **options: Any,
    ) -> tuple[list[Group], Policy, Seen]:  # fmt: skip
        if isinstance(program, str):
            (tmp_path / "my_agent.py").write_text(program)
            config = AgentEnvironmentConfig(command=f"{sys.executable} {tmp_path}/my_agent.py", **options)
        else:
            server.program, config = program, AgentEnvironmentConfig(command=server.url, **options)
        spec = demo().model_copy(update={"environment": config})
        builders.append(EnvironmentBuilder(TOKENIZER, Decisions(), tmp_path))
        environments = builders[-1].build(spec, SINGLE_PROCESS, tmp_path / "journal")
        policy, reward = Policy(speak, room), Seen()
        extend = build_extend(spec, TOKENIZER, environments, Decisions())
        collector = RolloutCollector(policy, reward, TOKENIZER, 0, size, environments, extend)
        messages = ({"role": "user", "content": "hello"},)
        asked = [Prompt((1, 2), "hello", messages, {"answer": str(at)}) for at in range(prompts)]
        return collector.collect_groups(asked, 0, 0), policy, reward

    run.builders = builders  # type: ignore[attr-defined]
    yield run
    for one in builders:
        one.close()
    server.close()


def client_of(task: dict[str, Any]) -> openai.OpenAI:
    return openai.OpenAI(base_url=task["base_url"], api_key=task["api_key"], max_retries=0)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ask(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(model="any", messages=messages, **options)


COMMAND = """
import json, os, sys
from openai import OpenAI
task, client = json.load(sys.stdin), OpenAI()
messages = task["prompt"]
for turn in range(3):
    said = client.chat.completions.create(model="gpt-5", messages=messages).choices[0].message
    messages += [said, {"role": "user", "content": f"and {turn}?"}]
print("thinking…", file=sys.stderr)
print("some text")
print(json.dumps({"reward": len(said.content), "answer": task["columns"]["answer"]}))
"""


def test_an_unmodified_program_is_one_row_of_its_turns(play: Play, tmp_path: Path) -> None:
    groups, policy, seen = play(COMMAND, lambda text: f"turn {text.count('assistant')}", prompts=2)
    episodes = check_rows(policy, groups)
    assert [len(rows) for rows in episodes] == [1, 1] and groups[0].samples[0].text == "turn 3"
    [row] = episodes[0]
    text = TOKENIZER.decode([*groups[0].prompt.ids, *row.ids])
    assert text == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nturn 1<|im_end|>\n"
        "<|im_start|>user\nand 0?<|im_end|>\n<|im_start|>assistant\nturn 2<|im_end|>\n"
        "<|im_start|>user\nand 1?<|im_end|>\n<|im_start|>assistant\nturn 3<|im_end|>"
    )
    assert row.counts == {"turns": 3, "rows": 1, "unmatched_histories": 0, "unread_turns": 0}
    first, second = seen.completions
    assert first.environment is not None and first.environment.score == 6.0
    assert second.environment is not None and second.environment.state == {"answer": "1"}
    assert first.messages is not None and [m["content"] for m in first.messages[1::2]] == ["turn 1", "turn 2", "turn 3"]
    printed = sorted((tmp_path / "environment.log").read_text().splitlines())
    assert printed == ["some text", "some text", "thinking…", "thinking…"]  # and no result


def test_history_that_is_rewritten_starts_a_new_row(play: Play) -> None:
    def program(task: dict[str, Any]) -> float:
        with client_of(task) as client:
            first = ask(client, [user("a")]).choices[0].message.content
            ask(client, [user("a"), {"role": "assistant", "content": first}, user("b")])  # continues
            ask(client, [user("a"), {"role": "assistant", "content": first}, user("c")])  # branches
            ask(client, [user("a"), {"role": "assistant", "content": first.upper()}, user("b")])  # edited
            ask(client, [user("a"), user("b")])  # truncated
            ask(client, [user("a")])  # sent again
        return 1.0

    [group], policy, _ = play(program, lambda text: "said")
    [rows] = check_rows(policy, [group])
    assert group.samples[0].counts == {"turns": 6, "rows": 5, "unmatched_histories": 1, "unread_turns": 0}
    texts = [TOKENIZER.decode([i for i, mine in zip(row.ids, row.mask, strict=True) if mine]) for row in rows]
    assert sorted(texts) == ["said<|im_end|>"] * 4 + ["said<|im_end|>said<|im_end|>"]
    [line] = decode_experience(encode_experience(Experience(0, (group,), 1))).groups
    assert line.samples == group.samples
    assert group.outcomes[0].length == sum(len(rollout.ids) for _, rollout in policy.log)


def test_an_episode_with_a_truncated_turn_is_truncated(play: Play) -> None:
    def program(task: dict[str, Any]) -> float:
        with client_of(task) as client:
            finishes = [ask(client, [user("a")], max_tokens=most).choices[0].finish_reason for most in (2, 99)]
        assert finishes == ["length", "stop"]
        return 1.0

    [group], policy, _ = play(program, lambda text: "said")
    check_rows(policy, [group])
    assert [one.finish for one in group.outcomes] == ["length"]


def test_what_a_client_makes_of_an_answer_is_still_that_answer(play: Play) -> None:
    """Tool calls as objects, with arguments that are written anew; null and missing content; streams."""
    lines = iter([CALL, CALL + CALL, "<think>\nhm\n</think>\n\ndone", "end"])

    def program(task: dict[str, Any]) -> dict[str, Any]:
        messages: list[Any] = [user("a")]
        with client_of(task) as client:
            said = ask(client, messages, tools=TOOLS).choices[0].message
            messages += [said, {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "1"}]
            said = ask(client, messages, tools=TOOLS).choices[0].message
            calls = [
                {"id": c.id, "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
                for c in said.tool_calls
            ]
            messages.append({"role": "assistant", "tool_calls": calls})
            messages += [{"role": "tool", "tool_call_id": c["id"], "content": "2"} for c in calls]
            text, thought = "", ""
            for chunk in ask(client, messages, tools=TOOLS, stream=True):
                delta = chunk.choices[0].delta
                text, thought = text + (delta.content or ""), thought + getattr(delta, "reasoning_content", "")
            messages.append({"role": "assistant", "content": text, "reasoning_content": thought})
            ask(client, [*messages, user("b")], tools=TOOLS)
        return {"text": text, "thought": thought}

    [group], policy, seen = play(program, lambda text: next(lines))
    [[row]] = check_rows(policy, [group])
    assert row.counts == {"turns": 4, "rows": 1, "unmatched_histories": 0, "unread_turns": 0}
    [completion] = seen.completions
    assert completion.environment is not None and completion.environment.state == {"text": "done", "thought": "hm"}
    assert [m["role"] for m in row.history] == ["assistant", "tool", "assistant", "tool", "tool", "assistant", "user"]


def test_later_turns_have_the_variables_of_the_template_that_a_program_sets(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = "{{- '<|im_start|>assistant\\n' }}{% if enable_thinking is false %}{{- 'No thoughts: ' }}{% endif %}"
    source = str(TOKENIZER.chat_template)
    head, tail = source.rsplit("{{- '<|im_start|>assistant\\n' }}", 1)
    monkeypatch.setattr(TOKENIZER, "chat_template", head + opening + tail)

    def program(task: dict[str, Any]) -> None:
        options = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
        with client_of(task) as client:
            said = ask(client, [user("a")], **options).choices[0].message
            ask(client, [user("a"), said, user("b")], **options)

    [group], policy, _ = play(program, lambda text: "said")
    check_rows(policy, [group])
    assert [TOKENIZER.decode(one.prompt).count("No thoughts: ") for one, _ in policy.log] == [1, 2]
    assert group.samples[0].counts == {"turns": 2, "rows": 1, "unmatched_histories": 0, "unread_turns": 0}


def test_reasoning_that_a_client_drops_is_a_rewritten_history(play: Play) -> None:
    def program(task: dict[str, Any]) -> None:
        with client_of(task) as client:
            said = ask(client, [user("a")]).choices[0].message.content
            ask(client, [user("a"), {"role": "assistant", "content": said}, user("b")])

    [group], policy, _ = play(program, lambda text: "<think>hm</think>done")
    check_rows(policy, [group])
    assert group.samples[0].counts == {"turns": 2, "rows": 2, "unmatched_histories": 1, "unread_turns": 0}


def test_parallel_branches_of_async_clients_in_several_sessions(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.algorithm.program_episodes.GATHER_S", 30.0)  # a busy machine starts them one by one

    async def talk(task: dict[str, Any]) -> float:
        async with openai.AsyncOpenAI(base_url=task["base_url"], api_key="EMPTY", max_retries=0) as client:

            async def branch(start: list[Any], number: int) -> str:
                messages = list(start)
                for turn in range(2):
                    stream = await client.chat.completions.create(
                        model="any", messages=[*messages, user(f"{number}.{turn}")], stream=True
                    )
                    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                    messages += [user(f"{number}.{turn}"), {"role": "assistant", "content": text}]
                return str(messages[-1]["content"])

            first = await client.chat.completions.create(model="any", messages=[user("a")], n=2)
            start = [user("a"), {"role": "assistant", "content": first.choices[0].message.content}]
            ends = await asyncio.gather(*(branch(start, number) for number in range(4)))
        return float(len(ends))

    groups, policy, _ = play(lambda task: asyncio.run(talk(task)), lambda text: f"{len(text)}", size=3, prompts=2)
    episodes = check_rows(policy, groups)
    assert len(episodes) == 6 and max(policy.waves) >= 6
    for rows in episodes:
        # the two choices have the same ids, so that either of their rows can continue
        assert rows[-1].counts == {"turns": 10, "rows": 4, "unmatched_histories": 0, "unread_turns": 0}
        assert sorted(len(row.history) for row in rows) == [2, 2, 4, 4]


def test_a_stream_that_is_aborted_leaves_right_rows(play: Play) -> None:
    """The program goes on from the part that it has read: text of its own, a new row. What nobody read is no turn."""
    asked = threading.Event()

    def program(task: dict[str, Any]) -> None:
        with client_of(task) as client:
            stream = ask(client, [user("a")], stream=True)
            part = next(text for chunk in stream if (text := chunk.choices[0].delta.content))
            stream.close()
            ask(client, [user("a"), {"role": "assistant", "content": part}, user("b")])
            url, body = urlsplit(task["base_url"]), json.dumps({"model": "any", "messages": [user("late")]})
            leaving = HTTPConnection(url.netloc)
            leaving.request("POST", f"{url.path}/chat/completions", body, {"Content-Type": "application/json"})
            assert asked.wait(60)
            leaving.close()  # while the policy writes
            ask(client, [user("a")])

    def speak(text: str) -> str:
        if "late" in text:
            asked.set()
            [environments] = play.builders[-1].built  # type: ignore[attr-defined]
            [session], end = environments.sessions.values(), time.monotonic() + 60
            while any(one.is_taken for one in session.waiting.calls) and time.monotonic() < end:
                time.sleep(0.01)  # until its end is noticed
        return "a longer text"

    [group], policy, _ = play(program, speak)
    [rows] = check_rows(policy, [group], unread="late")
    counts = {"turns": 3, "rows": 3, "unmatched_histories": 1, "unread_turns": 1}
    assert group.samples[0].counts == counts and len(rows) == 3 and len(policy.log) == 4


def test_what_the_policy_cannot_answer_is_refused(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    def program(task: dict[str, Any]) -> dict[str, str]:
        found = {}
        with client_of(task) as client:
            assert [model.id for model in client.models.list()] == ["policy"]
            assert ask(client, [user("a")], max_tokens=3, temperature=0.2).choices[0].finish_reason == "length"
            for name, messages, options in (
                ("stop", [user("a")], {"stop": ["x"]}),
                ("room", [user("a" * 500)], {}),
                ("turns", [user("b")], {}),
            ):
                try:
                    ask(client, messages, **options)
                except openai.BadRequestError as error:
                    found[name] = error.message
        return found

    [group], policy, seen = play(program, lambda text: "a longer text", max_turns=2, room=300)
    check_rows(policy, [group])
    state = seen.completions[0].environment.state  # type: ignore[union-attr]
    assert "stop is set by the training job" in state["stop"]
    assert "leaves no room for an answer" in state["room"] and "environment.max_turns" in state["turns"]
    assert "a program sets temperature" in caplog.text and group.samples[0].finish == "length"


FAILING = {
    "raises": ("raise RuntimeError('broken')", "it exited with code 1"),
    "hangs": ("import time; time.sleep(60)", "timeout"),
    "is killed": ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    "kills its guard": ("import os, time; os.kill(os.getppid(), 9); time.sleep(60)", "killed by SIGKILL"),
    "gives a long result": ("print('{\"reward\": 1, \"more\": \"' + 'x' * (1 << 20) + '\"}'); exit()", "wrong result"),
    "gives no number": ('print(\'{"reward": "much"}\'); exit()', "wrong result"),
}


@pytest.mark.parametrize("way", FAILING)
def test_a_program_that_fails_leaves_its_episode_out(
    way: str, play: Play, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one goes on; what the failed one has started ends with it."""
    line, kind = FAILING[way]
    check, started = AgentSession.check, tmp_path / "my_agent.py.pid"

    def hasten(session: AgentSession) -> None:
        """Leave a program that hangs little time, and the other one, on a busy machine, all of it."""
        if way == "hangs" and session.number == 1 and started.exists() and started.read_text():
            session._config = session._config.model_copy(update={"timeout_s": 0.1})
        check(session)

    monkeypatch.setattr(AgentSession, "check", hasten)
    source = f"""
import json, os, subprocess, sys, urllib.request
task = json.load(sys.stdin)
body = json.dumps({{"model": "any", "messages": task["prompt"]}}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, {{"Content-Type": "application/json"}})).read()
if task["columns"]["answer"] == "1":
    open(__file__ + ".pid", "w").write(str(subprocess.Popen(["sleep", "300"], start_new_session=True).pid))
    {line}
print(0.5)
"""
    groups, policy, seen = play(source, lambda text: "hi", prompts=2, timeout_s=60.0)
    check_rows(policy, groups)
    good, bad = (group.samples[0] for group in groups)
    assert (good.finish, good.reward, bad.finish, bad.reward) == ("stop", 1.0, "failed", None)
    assert seen.completions[0].environment.score == 0.5  # type: ignore[union-attr]
    for one in play.builders:  # type: ignore[attr-defined]
        one.close()
    assert f"1 of 2 episodes were left out: 1 × {kind}" in caplog.text
    pid, end = int(started.read_text()), time.monotonic() + 60
    while psutil.pid_exists(pid) and time.monotonic() < end and way != "kills its guard":
        time.sleep(0.05)
    assert not psutil.pid_exists(pid) or way == "kills its guard"


def test_a_result_that_is_printed_between_poll_and_exit_check_is_read(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine: the poll times out, and then the process has ended."""
    is_running = ChildProcess.is_running

    def after_a_pause(process: ChildProcess) -> bool:
        if process.returncode is None:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return is_running(process)

    monkeypatch.setattr(ChildProcess, "is_running", after_a_pause)
    source = COMMAND.replace("range(3)", "range(1)") + "\nimport time; time.sleep(0.5); print(0.25)"
    _, _, seen = play(source, lambda text: "hi", timeout_s=60.0)
    assert [one.environment.score for one in seen.completions] == [0.25]  # type: ignore[union-attr]


def test_the_timeout_excludes_the_time_in_the_queue(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = AgentSession.__init__

    def waited(session: AgentSession, *given: Any) -> None:
        begin(session, *given)
        session._since -= 3600  # until one of environment.workers was free

    monkeypatch.setattr(AgentSession, "__init__", waited)
    [group], _, _ = play(COMMAND, lambda text: "hi", timeout_s=60.0)
    assert group.samples[0].finish == "stop"


def test_a_program_that_was_left_out_stays_left_out(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    """Where a step is repeated it is not started, although it would not fail now."""
    fails = [True]

    def program(task: dict[str, Any]) -> float:
        with client_of(task) as client:
            ask(client, [user(task["columns"]["answer"])])
        return float("nan") if fails[0] and task["columns"]["answer"] == "1" else 1.0

    first, _, _ = play(program, lambda text: "hi", prompts=3)
    fails[0] = False
    again, policy, _ = play(program, lambda text: "hi", prompts=3)
    for groups in (first, again):
        assert [group.samples[0].finish for group in groups] == ["stop", "failed", "stop"]
    assert "1 episodes are left out, as before the run was resumed" in caplog.text
    assert len(policy.log) == 2 and not any("user\n1" in TOKENIZER.decode(one.prompt) for one, _ in policy.log)
    check_rows(policy, again)


def test_programs_that_all_fail_end_the_run(play: Play) -> None:
    with pytest.raises(EnvironmentProblem, match=r"(?s)2 episodes in a row failed.*without a call of the policy"):
        play("print(1)", lambda text: "hi", size=2, max_failures=2)
