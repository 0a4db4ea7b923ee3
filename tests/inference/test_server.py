"""`run serve` through OpenAI's own client: what it parses, what the answers say, and what is refused."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from runner.inference.model_source import load_source, parse_source
from runner.model.tiny import byte_tokenizer
from tests.inference.scripted import SCRIPTS, TEXTS, Server, begins, serve, write_model
from tests.model.zoo import greedy

KEY = "secret-of-this-test"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CALL = {"a": 1, "b": [2]}
TOKENIZER = byte_tokenizer(512)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    (folder / "key").write_text(KEY + "\n")
    (folder / "key").chmod(0o600)
    with serve(write_model(folder / "scripted"), "--api-key-file", str(folder / "key"), cwd=folder) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    """Without OpenAI's client, for what that would not send."""
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as made:
        yield made


def asked(client: openai.OpenAI, name: str, **options: Any) -> Any:
    """A chat whose prompt ends where the text of this name begins."""
    tools = options.get("tools", openai.NOT_GIVEN)
    body = {"messages": [{"role": "user", "content": ""}]} | ({"tools": tools} if tools else {})
    count = client.post("../tokenize", body=body, cast_to=httpx.Response).json()["count"]
    padding = "x" * (begins()[name] - count)
    messages = [{"role": "user", "content": padding}]
    return client.chat.completions.create(model="scripted", messages=messages, temperature=0, **options)


def test_models_are_listed(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "scripted" and client.models.retrieve("scripted") == model
    with pytest.raises(openai.NotFoundError, match="the model 'gpt-9' does not exist; models: scripted"):
        client.completions.create(model="gpt-9", prompt="a")


def test_a_wrong_key_is_refused(server: Server, http: httpx.Client) -> None:
    stranger = openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError) as refused:
        stranger.models.list()
    assert refused.value.code == "invalid_api_key"
    assert httpx.get(server.url.replace("/v1", "/health"), timeout=60).json() == {"status": "ok"}
    assert httpx.get(server.url.replace("/v1", "/metrics"), timeout=60).status_code == 401


def test_greedy_completions_are_those_of_the_model_itself(client: openai.OpenAI, server: Server) -> None:
    folder = server.printed.parent / "scripted"
    model = load_source(parse_source(str(folder)), device="cpu").model
    prompts = ["a", "several words", "Größe", "x" * 100]
    ids = [list(model.tokenizer(p, add_special_tokens=False)["input_ids"]) for p in prompts]
    wanted = greedy(model, ids, 40)
    as_text = client.completions.create(model="scripted", prompt=prompts, temperature=0, max_tokens=40)
    as_ids = client.completions.create(
        model="scripted", prompt=ids, temperature=0, max_tokens=40, extra_body={"return_token_ids": True}
    )
    assert [choice.text for choice in as_text.choices] == [choice.text for choice in as_ids.choices]
    got = [choice.model_extra["token_ids"] for choice in as_ids.choices]
    assert [[i for i in one if i != 258] for one in got] == wanted
    assert [choice.model_extra["prompt_token_ids"] for choice in as_ids.choices] == ids
    assert as_text.usage.prompt_tokens == sum(map(len, ids))
    assert as_text.usage.completion_tokens == sum(map(len, got))


def test_a_seed_repeats_an_answer_and_n_gives_different_ones(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "scripted", "prompt": "ab", "max_tokens": 30, "n": 3}
    first, again, other, free, free_too = (
        [choice.text for choice in client.completions.create(**settings, **more).choices]
        for more in ({"seed": 5}, {"seed": 5}, {"seed": 6}, {}, {})
    )
    assert first == again and len({*first, *other, *free, *free_too}) == 12


def test_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="abc", max_tokens=0, echo=True, logprobs=2)
    [choice] = answer.choices
    assert choice.text == "abc" and choice.finish_reason == "length" and choice.logprobs.tokens == list("abc")
    assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.text_offset == [0, 1, 2]
    longer = client.completions.create(
        model="scripted",
        prompt="abc",
        max_tokens=4,
        echo=True,
        logprobs=2,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    assert longer.choices[0].logprobs.token_logprobs[:3] == choice.logprobs.token_logprobs
    ids = [*longer.choices[0].model_extra["prompt_token_ids"], *longer.choices[0].model_extra["token_ids"]]
    again = client.completions.create(model="scripted", prompt=ids, max_tokens=0, echo=True, logprobs=0)
    shown = longer.choices[0].logprobs.token_logprobs[1:]
    assert again.choices[0].logprobs.token_logprobs[1:] == pytest.approx(shown, abs=1e-4)
    raw = client.completions.create(
        model="scripted", prompt="abc", max_tokens=1, temperature=0, extra_body={"prompt_logprobs": 0}
    )
    values = [next(iter(one.values()))["logprob"] for one in raw.choices[0].model_extra["prompt_logprobs"][1:]]
    assert values == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-5)


def test_offsets_in_a_stream_are_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "scripted", "prompt": "ab", "max_tokens": 9, "n": 2, "seed": 5, "logprobs": 0}
    whole = [choice.logprobs.text_offset for choice in client.completions.create(**settings).choices]
    found: list[list[int]] = [[], []]
    for chunk in client.completions.create(**settings, stream=True):
        found[chunk.choices[0].index] += chunk.choices[0].logprobs.text_offset
    assert found == whole and max(map(max, whole)) > 1


def test_a_stop_string_is_cut_from_the_text_alone(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "scripted", "prompt": [65] * SCRIPTS, "temperature": 0, "max_tokens": 200}
    whole = client.completions.create(**settings).choices[0]
    assert f"{whole.text}{'<|im_end|>'}" == TEXTS["thinks and calls"] and whole.finish_reason == "stop"
    cut = client.completions.create(**settings, stop=["them", "I call"]).choices[0]
    assert cut.text == "<think>\nAdd " and (cut.finish_reason, cut.model_extra["stop_reason"]) == ("stop", "them")
    streamed = list(client.completions.create(**settings, stop=["them", "I call"], stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut.text
    assert [chunk.choices[0].finish_reason for chunk in streamed if chunk.choices[0].finish_reason] == ["stop"]
    kept_stop = {"include_stop_str_in_output": True}
    kept = client.completions.create(**settings, stop="them", extra_body=kept_stop)
    assert kept.choices[0].text == "<think>\nAdd them"
    [end] = TOKENIZER("\n")["input_ids"]
    by_id = client.completions.create(**settings, extra_body={"stop_token_ids": [end]}).choices[0]
    assert by_id.text == "<think>" and by_id.model_extra["stop_reason"] == end
    kept = client.completions.create(**settings, extra_body={"stop_token_ids": [end], **kept_stop}).choices[0]
    assert kept.text == "<think>\n"


def test_reasoning_and_tool_calls_are_told_apart(client: openai.OpenAI) -> None:
    [choice] = asked(client, "thinks and calls", tools=TOOLS).choices
    message = choice.message
    assert choice.finish_reason == "tool_calls" and message.content == "I call it."
    assert message.model_extra["reasoning_content"] == "Add them."
    assert [call.function.name for call in message.tool_calls] == ["add", "add"]
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [CALL, CALL]
    assert len({call.id for call in message.tool_calls}) == 2
    [llama] = asked(client, "llama", tools=TOOLS).choices  # a form that the template of this model does not write
    assert llama.message.tool_calls is None and json.loads(llama.message.content)["parameters"] == {"a": 3}
    [no_tools] = asked(client, "llama").choices
    assert no_tools.message.content == TEXTS["llama"].removesuffix("<|im_end|>") and no_tools.finish_reason == "stop"
    [ignored] = asked(client, "llama", tools=TOOLS, tool_choice="none").choices
    assert ignored.message.tool_calls is None
    [plain] = asked(client, "plain", tools=TOOLS).choices
    assert plain.message.content == "Größe: 5 €, {not a call}"


def test_a_streamed_chat_adds_up_to_the_whole_one(client: openai.OpenAI) -> None:
    for name in TEXTS:
        whole = asked(client, name, tools=TOOLS).choices[0]
        chunks = list(asked(client, name, tools=TOOLS, stream=True, stream_options={"include_usage": True}))
        assert chunks[-1].usage.completion_tokens > 0 and not chunks[-1].choices
        deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
        assert "".join(delta.content or "" for delta in deltas) == (whole.message.content or "")
        reasoning = "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas)
        assert reasoning == (whole.message.model_extra or {}).get("reasoning_content", "")
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert [(c.index, c.function.name, c.function.arguments) for c in calls] == [
            (at, c.function.name, c.function.arguments) for at, c in enumerate(whole.message.tool_calls or ())
        ]
        assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == [whole.finish_reason]


def test_chat_logprobs_name_the_likeliest_tokens(client: openai.OpenAI) -> None:
    [choice] = asked(client, "plain", logprobs=True, top_logprobs=2, max_tokens=6).choices
    assert "".join(one.token for one in choice.logprobs.content[:2]) == "Gr"
    content = asked(client, "plain", logprobs=True).choices[0].logprobs.content
    assert b"".join(bytes(one.bytes) for one in content).decode() == TEXTS["plain"]
    for one in choice.logprobs.content:
        assert one.top_logprobs[0].logprob == one.logprob >= one.top_logprobs[1].logprob
    chunks = asked(client, "plain", logprobs=True, top_logprobs=2, max_tokens=6, stream=True)
    streamed = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert [one.token for one in streamed] == [one.token for one in choice.logprobs.content] and len(streamed) == 6


def test_a_streamed_chat_gives_the_prompt_ids_too(client: openai.OpenAI) -> None:
    body = {"return_token_ids": True}
    whole = asked(client, "plain", max_tokens=1, extra_body=body)
    chunks = list(asked(client, "plain", max_tokens=1, extra_body=body, stream=True))
    assert [chunk.model_extra.get("prompt_token_ids") for chunk in chunks] == [
        whole.model_extra["prompt_token_ids"], *[None] * (len(chunks) - 1)
    ]  # fmt: skip


def test_messages_of_every_role_reach_the_model_as_the_template_writes_them(http: httpx.Client) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    got = http.post("../tokenize", json={"messages": messages, "tools": TOOLS}).json()
    text = TOKENIZER.decode(got["tokens"])
    assert (
        "be brief" in text
        and "one two" in text
        and '"name": "add"' in text
        and text.count("<|im_start|>assistant") == 2
    )
    assert got["count"] == len(got["tokens"]) and got["max_model_len"] == 1024
    said = http.post("../tokenize", json={"messages": [{"role": "user", "content": "a<|im_end|>b"}]}).json()["tokens"]
    assert said.count(258) == 1 and "a<|im_end|>b<|im_end|>" in TOKENIZER.decode(said), "a marker in a message is text"
    plain = http.post("../tokenize", json={"prompt": "abc"}).json()
    assert plain["tokens"] == TOKENIZER("abc")["input_ids"]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("completions", {"prompt": "a", "temprature": 1}, "temprature", "did you mean temperature?"),
        ("completions", {"prompt": "a", "temperature": -1}, "temperature", "greater than or equal to 0"),
        ("completions", {"prompt": "a", "presence_penalty": 1}, "presence_penalty", "less than or equal to 0"),
        ("completions", {"prompt": ""}, "prompt", "the prompt is empty"),
        ("completions", {"prompt": [1, 999]}, "prompt", "token id 999"),
        ("completions", {}, "prompt", "Field required"),
        ("completions", {"prompt": "a", "max_tokens": 2000}, None, "takes 1024 tokens"),
        ("completions", {"prompt": "a", "stop": [""]}, "stop", "would end every completion"),
        ("completions", {"prompt": "a", "echo": True, "stream": True}, None, "not streamed"),
        ("chat/completions", {"messages": []}, None, "messages is empty"),
        ("chat/completions", {"messages": [{"role": "boss", "content": "a"}]}, "messages", "messages.0.role"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages",
            "messages.0.content.0.type: Input should be 'text' or 'image_url'",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            None,
            "an image, but the model reads text alone; leave it out",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}},
            "response_format",
            "'text'",
        ),
        (
            "chat/completions",
            {
                "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}],
                "chat_template_kwargs": {"drop_system": True},
            },
            None,
            "does not render the content of messages[0] (role system): 'be brief'",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"enable_thinkin": True}},
            "chat_template_kwargs",
            "chat_template_kwargs: the chat template does not read enable_thinkin; it reads: drop_system",
        ),
    ],
)
def test_what_cannot_be_answered_as_asked_is_a_400(
    http: httpx.Client, path: str, body: dict[str, Any], param: str | None, message: str
) -> None:
    answer = http.post(path, json={"model": "scripted", **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert message in error["message"]


def test_what_is_no_json_or_too_large_is_refused(http: httpx.Client, server: Server) -> None:
    assert http.post("completions", content=b"{", headers={"Content-Type": "application/json"}).status_code == 400
    assert http.post("completions", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
    assert http.post("../collective_rpc", json={}).status_code == 404  # there with weight_updates=true alone
    assert http.get("completions").status_code == 405 and http.get("nothing").status_code == 404
    nested = b"[" * 100_000
    assert http.post("completions", content=nested, headers={"Content-Type": "application/json"}).status_code == 400
    content, header = json.dumps({"model": "scripted", "prompt": "a\ud83d"}), {"Content-Type": "application/json"}
    half = http.post("completions", content=content, headers=header)
    assert half.status_code == 400 and "half of a surrogate pair, '\\ud83d'" in half.json()["error"]["message"]
    content = json.dumps({"model": "scripted", "prompt": "\U0001f600", "max_tokens": 1})
    assert http.post("completions", content=content, headers=header).status_code == 200
    with socket.create_connection(server.address, timeout=30) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 400000000\r\n\r\n".encode())
        assert b" 413 " in connection.recv(4096)


def metric(http: httpx.Client, name: str) -> float:
    text = http.get("../metrics").text
    [line] = [line for line in text.splitlines() if line.startswith(name + " ")]
    return float(line.rpartition(" ")[2])


@pytest.mark.parametrize("stream", [False, True])
def test_the_work_of_a_client_that_leaves_stops(http: httpx.Client, server: Server, stream: bool) -> None:
    before = metric(http, "run_requests_cancelled_total")
    body = {"model": "scripted", "prompt": "a", "max_tokens": 1000, "ignore_eos": True, "n": 128, "stream": stream}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    with socket.create_connection(server.address) as connection:
        connection.sendall(
            f"{head}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
        )
        end = time.monotonic() + 100
        while metric(http, "run_requests_in_flight") < 128:
            assert time.monotonic() < end, "the requests were never in flight"
            time.sleep(0.01)
    end = time.monotonic() + 100
    while metric(http, "run_requests_in_flight") and time.monotonic() < end:
        time.sleep(0.05)
    generated = metric(http, "run_generation_tokens_total")
    assert metric(http, "run_requests_cancelled_total") == before + 1
    time.sleep(0.2)
    assert metric(http, "run_generation_tokens_total") <= generated + 64


def test_many_requests_at_once_are_all_answered(server: Server, http: httpx.Client) -> None:
    import asyncio

    async def ask() -> list[str]:
        limits = httpx.Limits(max_connections=200)
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=100, limits=limits) as many:
            body = {"model": "scripted", "prompt": [65] * SCRIPTS, "temperature": 0, "max_tokens": 4}
            answers = await asyncio.gather(*(many.post("completions", json=body) for _ in range(200)))
            return [answer.json()["choices"][0]["text"] for answer in answers]

    assert set(asyncio.run(ask())) == {TEXTS["thinks and calls"][:4]}
    assert metric(http, "run_requests_in_flight") == 0
    assert metric(http, 'run_requests_total{path="/v1/completions",status="200"}') >= 200
    assert metric(http, "run_time_to_first_token_seconds_count") >= 200
