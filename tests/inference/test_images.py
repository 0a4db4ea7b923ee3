"""Images of requests: `run serve`, `run infer`, a chat, `run eval` and transformers answer alike."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from PIL import Image

from runner.core.auto_choices import Decisions
from runner.core.errors import DataError
from runner.core.media import MEDIA_ID
from runner.data.chat import Renderer
from runner.data.examples import user_message
from runner.environment.config import AgentEnvironmentConfig
from runner.inference.agent_session import AgentSession, NoEngine, SampledChat, ServedPolicy, Waiting
from runner.inference.engine import GenerationRequest, SamplingParams
from runner.inference.engine_process import EngineHost, EngineInfo, EngineSettings
from runner.inference.generate import Conversation
from runner.inference.model_source import load_source, parse_source
from runner.inference.openai_requests import BadRequest, ChatBody, parse_body
from runner.inference.torch_engine import TorchEngine
from runner.interfaces import Rollout
from tests import command
from tests.data.test_images import url
from tests.inference.scripted import serve
from tests.model.test_media import own_inputs, own_logprobs
from tests.model.vision_zoo import IMAGE, write_folder

SETTINGS = SamplingParams(0.0, 1.0, max_new_tokens=8, seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder("qwen2_5_vl", tmp_path_factory.mktemp("model") / "vl")


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    draw = np.random.default_rng(0)
    for number in range(2):
        pixels = draw.integers(0, 256, (24, 40 + 8 * number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    return [tmp_path / f"{number}.png" for number in range(2)]


def data_url(path: Path) -> str:
    return url(path.read_bytes())


def body(url: str, **more: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what"}]
    messages = [{"role": "user", "content": parts}]
    return {"model": "vl", "messages": messages, "temperature": 0, "max_tokens": 8, "return_token_ids": True, **more}


def transformers_answer(folder: Path, picture: Path) -> tuple[list[int], list[int], str]:
    """The prompt's ids, with the image's token; those of the answer, and its text."""
    loaded = load_source(parse_source(str(folder)), device="cpu")
    prompt = Renderer(loaded.tokenizer).render_prompt([user_message("what", [picture])])
    ids = Renderer(loaded.tokenizer).control.ids_of(prompt, begins_row=True)
    model: Any = loaded.model
    inputs = own_inputs(model, ids, [0, "what"], [str(picture)])
    with torch.no_grad(), model._own_attention():
        made = model.causal.generate(**inputs, do_sample=False, max_new_tokens=8, pad_token_id=256)
    answer = made[0, len(ids) :].tolist()
    text = loaded.tokenizer.decode([one for one in answer if one != 258])
    return inputs["input_ids"][0].tolist(), answer, text


def chat_answer(folder: Path, picture: Path) -> str:
    loaded = load_source(parse_source(str(folder)), device="cpu")
    engine = TorchEngine(loaded.model, decide=Decisions(), max_num_seqs=1)
    chat = Conversation(engine, Renderer(loaded.tokenizer), SETTINGS, images=[])
    chat.images.append(picture)
    return "".join(piece for _, piece in chat.answer("what"))


def streamed_text(client: httpx.Client, content: dict[str, Any]) -> Iterator[str]:
    with client.stream("POST", "/chat/completions", json={**content, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    yield choice["delta"].get("content", "")


@pytest.mark.slow
def test_server_infer_chat_evaluator_and_transformers_answer_alike(
    folder: Path, pictures: list[Path], tmp_path: Path
) -> None:
    [path, other], cwd = pictures, tmp_path
    prompt, answer, text = transformers_answer(folder, path)
    assert prompt.count(IMAGE) > 1 and text.strip()
    assert transformers_answer(folder, other)[1] != answer
    with serve(folder, cwd=cwd) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        got = client.post("/chat/completions", json=body(data_url(path))).json()
        assert got["choices"][0]["token_ids"] == answer and got["prompt_token_ids"] == prompt
        assert got["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(answer),
            "total_tokens": len(prompt) + len(answer),
        }
        said = got["choices"][0]["message"]["content"]
        with openai.OpenAI(base_url=server.url, api_key="none") as official:
            sent = {name: value for name, value in body(data_url(path)).items() if name != "return_token_ids"}
            [choice] = official.chat.completions.create(**sent).choices
            assert choice.message.content == said
        assert "".join(streamed_text(client, body(data_url(path)))) == said
        assert (
            client.post("../tokenize", json={"messages": body(data_url(path))["messages"]}).json()["tokens"] == prompt
        )
        again = [client.post("/chat/completions", json=body(data_url(one))).json() for one in (other, path)]
        assert [one["choices"][0]["token_ids"] == answer for one in again] == [False, True]
        (cwd / "huge.png").write_bytes(b"")
        Image.new("L", (9000, 9000)).save(cwd / "huge.png")
        for url, wanted in (
            ("https://host/a.png", "images are not fetched, so send the file itself"),
            (f"file://{path}", "images are not fetched"),
            (data_url(cwd / "huge.png"), "9000 x 9000 pixels; at most 50 million"),
            ("data:image/png;base64,AAAA", "not an image; expected one of PNG, JPEG"),
        ):
            refused = client.post("/chat/completions", json=body(url))
            assert refused.status_code == 400 and wanted in refused.json()["error"]["message"], refused.text
            assert "leave it out" not in refused.text
        id = MEDIA_ID + 1
        refused = client.post("/completions", json={"model": "vl", "prompt": [3, id], "max_tokens": 2})
        assert refused.status_code == 400 and f"the token id {id}" in refused.text
    assert said == text and chat_answer(folder, path) == text
    words = ("infer", str(folder), "--image", str(path), "what", "--max-new-tokens", "8")
    assert text.rstrip() in command.run(*words, cwd=cwd)
    assert "no prompt: type one" in command.run(*words[:4], "device=cpu", cwd=cwd, code=2)
    row = {"prompt": "<image>what", "answer": text[:2] + "x", "images": [path.name]}
    (cwd / "rows.jsonl").write_text(json.dumps(row) + "\n")
    data = f"{{data: {{name: file, path: {cwd}/rows.jsonl}}, max_new_tokens: 8}}"
    command.run("eval", str(folder), f"+evaluation.sets.mine={data}", cwd=cwd)
    [folder_of_results] = (cwd / "outputs/eval").glob("2*")
    [sample] = map(json.loads, (folder_of_results / "samples.jsonl").read_text().splitlines())
    assert sample["answer"] == text
    values = json.loads((folder_of_results / "results.json").read_text())["sets"]["mine"]["values"]["vl"]
    assert values["loss"] == pytest.approx(expected_loss(folder, path, row["answer"]), rel=1e-5)


def expected_loss(folder: Path, picture: Path, answer: str) -> float:
    """Of the answer's tokens and the end token, by transformers' forward."""
    loaded: Any = load_source(parse_source(str(folder)), device="cpu")
    messages = [user_message("what", [picture]), {"role": "assistant", "content": answer}]
    renderer = Renderer(loaded.tokenizer)
    [row] = renderer.render(messages)
    parts = [(part, len(renderer.control.ids_of([part]))) for part in row]
    ids = renderer.control.ids_of(row, begins_row=True)
    trained = [part.is_trained for part, count in parts for _ in range(count)]
    logprobs = own_logprobs(loaded.model, own_inputs(loaded.model, ids, [0, "what"], [str(picture)]))
    return -float(logprobs[torch.tensor(trained)].detach().mean())


def test_a_text_is_scored_alike_after_a_row_with_an_image(
    folder: Path, pictures: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers keeps the rotary shift of the last image, and adds it to positions behind a cache."""
    monkeypatch.setattr("runner.inference.torch_engine.SCORE_TOKENS", 4)
    loaded = load_source(parse_source(str(folder)), device="cpu")
    engine, text = TorchEngine(loaded.model, decide=Decisions()), [*range(1, 20)]
    before = engine.score(text, 0)
    image, made = loaded.tokenizer.image_reader.add(pictures[0].read_bytes(), several=False)
    engine.score([3, *[image.id] * made.count, 4], 0)
    assert engine.score(text, 0) == before


def test_images_that_no_request_needs_are_forgotten(
    folder: Path, pictures: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_source(parse_source(str(folder)), device="cpu")
    host = EngineHost(loaded.model, EngineSettings(source=str(folder)), {})
    reader = loaded.tokenizer.image_reader
    monkeypatch.setattr("runner.model.image_reader.MAX_IMAGES_BYTES", 0)
    first, second = (host._add_image(base64.b64encode(path.read_bytes()).decode(), False) for path in pictures)
    assert first[0] not in reader and second[0] in reader
    prompt = (3, *[second[0]] * second[2], 4)
    host.engine.submit(GenerationRequest("a", prompt, SETTINGS))
    host._add_image(base64.b64encode(pictures[0].read_bytes()).decode(), False)
    assert second[0] in reader, "a request waits for it"
    while not host.engine.is_idle:
        host.engine.step()
    host._add_image(base64.b64encode(pictures[0].read_bytes()).decode(), False)
    assert second[0] not in reader
    with pytest.raises(DataError, match=f"the token id {second[0]}"):
        host.engine.submit(GenerationRequest("b", prompt, SETTINGS))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url"}, "messages.0.content.0: a part of type image_url has the fields type and image_url"),
        ({"type": "text", "image_url": {"url": "data:"}}, "content.0.image_url.url: expected a data URL"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,="}}, "not base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,", "detail": "low"}}, "detail"),
        ({"type": "video_url"}, "content.0.type"),
    ],
)
def test_a_faulty_part_is_refused_with_its_place(part: dict[str, Any], message: str) -> None:
    content = json.dumps({"model": "m", "messages": [{"role": "user", "content": [part]}]}).encode()
    with pytest.raises(BadRequest) as error:
        parse_body(ChatBody, content).conversation()
    assert message in str(error.value) and error.value.param == "messages"


def test_an_image_in_a_later_turn_of_a_program_reaches_the_policy(folder: Path, pictures: list[Path]) -> None:
    """Its request is rendered as a whole, in a row of its own."""
    tokenizer = load_source(parse_source(str(folder)), device="cpu").tokenizer
    limits: dict[str, Any] = {"vocab_size": 2**31, "length_limit": None, "step": None, "chat_date": None}
    info, engine = EngineInfo(name="policy", adapters=(), stop_token_ids=(258,), **limits), NoEngine()
    served = ServedPolicy(info, tokenizer, engine, renderer=Renderer(tokenizer))  # type: ignore[arg-type]
    session = AgentSession(0, served, AgentEnvironmentConfig(command="x"), Waiting({0}))
    first, second = (body(data_url(picture)) for picture in pictures)
    for one in (first, second):
        del one["temperature"]
    asked = ChatBody(**first)
    prompt, _ = session.prepare_calls(asked)
    ids = tokenizer("two<|im_end|>")["input_ids"]
    rollouts = [Rollout(ids, [-1.0] * len(ids), None, 0, "stop")]
    content = asyncio.run(SampledChat(served, asked, prompt, rollouts).whole())
    session.record(asked, prompt, rollouts, content)
    said = {"role": "assistant", "content": content["choices"][0]["message"]["content"]}
    text, image = (
        [*first["messages"], said, *more] for more in ([{"role": "user", "content": "b"}], second["messages"])
    )
    (shorter, [near]), (longer, [far]) = (
        session.prepare_calls(ChatBody(**first | {"messages": m})) for m in (text, image)
    )
    images = [len({one for one in found.ids if one >= MEDIA_ID}) for found in (prompt, shorter, longer)]
    assert images == [1, 1, 2] and (near.is_unmatched, far.is_unmatched) == (False, True)
