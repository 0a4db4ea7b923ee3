"""Rows with images: every form gives the same ids, and what is wrong with an image is said with its row."""

from __future__ import annotations

import base64
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from runner.core.auto_choices import Decisions
from runner.core.errors import DataError
from runner.core.media import MEDIA_ID
from runner.data.tokenization import _with_locations
from runner.interfaces.media import images_of
from runner.model import hf
from runner.model.config import HfConfig
from tests.data.conftest import chat
from tests.data.test_file import data, said
from tests.model.vision_zoo import write_folder

Row = dict[str, Any]
ANSWER = {"role": "assistant", "content": "two"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder("qwen2_5_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture
def reading(folder: Path, tmp_path: Path) -> Iterator[Any]:
    """The tokenizer of an image-text model."""
    config = HfConfig(path=str(folder))
    tokenizer = hf.tokenizer(config)
    tokenizer.image_reader = hf.image_reader(config, tokenizer)
    tokenizer.image_reader.keep_in(tmp_path / "kept")
    return tokenizer


@pytest.fixture
def pictures(tmp_path: Path) -> dict[str, bytes]:
    """Two files, and their contents."""
    found, draw = {}, np.random.default_rng(0)
    for name, size in (("a.png", (16, 20, 3)), ("b.jpg", (24, 32, 3))):
        Image.fromarray(draw.integers(0, 256, size, dtype=np.uint8)).save(tmp_path / name)
        found[name] = (tmp_path / name).read_bytes()
    return found


def url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def asked(*parts: Any) -> list[Row]:
    return [{"role": "user", "content": list(parts)}, ANSWER]


def forms(a: bytes, b: bytes) -> dict[str, Row]:
    text = {"type": "text", "text": "compare"}
    marked = {"messages": chat("<image><image>compare", "two")}
    return {
        "marks and paths": marked | {"images": ["a.png", "b.jpg"]},
        "no marks": {"messages": chat("compare", "two"), "images": ["a.png", "b.jpg"]},
        "data URLs in a column": marked | {"images": [url(a), url(b)]},
        "OpenAI": {
            "messages": asked(
                {"type": "image_url", "image_url": {"url": url(a)}},
                {"type": "image_url", "image_url": {"url": url(b)}},
                text,
            )
        },
        "paths in parts": {
            "messages": asked({"type": "image", "image": "a.png"}, {"type": "image", "path": "b.jpg"}, text)
        },
        "base64 in parts": {
            "messages": asked(
                {"type": "image", "base64": base64.b64encode(a).decode()},
                {"type": "image", "image": {"path": "b.jpg"}},
                text,
            )
        },
        "places in parts": {
            "messages": asked({"type": "image"}, {"type": "image"}, text),
            "images": ["a.png", "b.jpg"],
        },
        "ShareGPT": {
            "conversations": [
                {"from": "human", "value": "<image><image>compare"},
                {"from": "gpt", "value": "two"},
            ],
            "images": ["a.png", "b.jpg"],
        },
        "query": {"query": "<image><image>compare", "response": "two", "images": ["a.png", "b.jpg"]},
        "prompt in words": {"prompt": "<image><image>compare", "completion": "two", "images": ["a.png", "b.jpg"]},
    }


def ids(reading: Any, tmp_path: Path, path: Path | str, **options: Any) -> tuple[int, ...]:
    [item] = data(reading, tmp_path, path=str(path), **options).take(0, 1)
    return tuple(item.ids)


def test_every_form_gives_the_same_ids(reading: Any, pictures: dict[str, bytes], tmp_path: Path) -> None:
    found = {}
    for name, row in forms(*pictures.values()).items():
        (tmp_path / "row.jsonl").write_text(json.dumps(row) + "\n")
        found[name] = ids(reading, tmp_path, tmp_path / "row.jsonl")
    parquet = {"messages": [chat("<image><image>compare", "two")]}
    parquet["images"] = [[{"bytes": content, "path": name} for name, content in pictures.items()]]
    pq.write_table(pa.table(parquet), tmp_path / "row.parquet")
    found["Parquet of datasets"] = ids(reading, tmp_path, tmp_path / "row.parquet")
    assert len(set(found.values())) == 1, found
    assert len({one for one in found["OpenAI"] if one >= MEDIA_ID}) == 2


def test_messages_without_an_image_stay_as_they_are(reading: Any) -> None:
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    reader = images_of(reading)
    assert reader is not None and _with_locations(call, reader) == call


def test_pairs_and_prompts_have_images(reading: Any, pictures: dict[str, bytes], tmp_path: Path, jsonl: Any) -> None:
    row = {"prompt": "<image>what", "chosen": "a", "rejected": "b", "images": "a.png"}
    [pair] = data(reading, tmp_path, path=jsonl([row]), kind="pairs").take(0, 1)
    assert any(one >= MEDIA_ID for one in pair.prompt) and pair.chosen != pair.rejected
    row = {"prompt": [{"role": "user", "content": "<image>what"}], "images": ["a.png"], "answer": "x"}
    [prompt] = data(reading, tmp_path, path=jsonl([row]), kind="prompts").take(0, 1)
    assert prompt.columns == {"answer": "x"} and any(one >= MEDIA_ID for one in prompt.ids)
    assert prompt.messages[0]["content"][0] == {"type": "image", "image": str((tmp_path / "a.png").resolve())}
    assert "what" in prompt.text


def write_bad_files(tmp_path: Path, a: bytes) -> dict[str, str]:
    """File → what is said of it."""
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "cut.png").write_bytes(a[: len(a) // 2])
    (tmp_path / "text.png").write_text("no image")
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "film.gif", save_all=True, append_images=frames[1:])
    Image.new("L", (9000, 9000)).save(tmp_path / "huge.png")
    Image.new("RGB", (1, 1)).resize((1, 900)).save(tmp_path / "narrow.png")
    return {
        "empty.png": "the image is empty (0 bytes)",
        "cut.png": "the image is damaged",
        "text.png": "not an image; expected one of PNG, JPEG",
        "film.gif": "the image has 2 frames; expected one",
        "huge.png": "the image has 9000 x 9000 pixels; at most 50 million",
        "narrow.png": "1 x 900 pixels: absolute aspect ratio must be smaller than 200",
    }


def test_each_faulty_image_is_an_error_of_its_row(
    reading: Any, pictures: dict[str, bytes], tmp_path: Path, jsonl: Any
) -> None:
    wanted = write_bad_files(tmp_path, pictures["a.png"])
    (tmp_path / "link.png").symlink_to("/etc/hostname")
    wanted |= {
        "none.png": "no such file in",
        "/etc/hostname": "is outside of",
        "link.png": "is outside of",
        "../x.png": "is outside of",
        "http://host/a.png": "is not fetched; save it beside the data, e.g. curl -o images/1.png http://host/a.png",
        "file:///a.png": "is not fetched",
    }
    rows = [{"messages": chat("<image>", "a"), "images": [name]} for name in wanted]
    for number, (row, text) in enumerate(zip(rows, wanted.values(), strict=True)):
        lines = [{"messages": chat("a", "b")}] * (number + 1)
        path = jsonl([*lines, row])
        with pytest.raises(DataError) as error:
            data(reading, tmp_path, path=path)
        assert f"1 problem\n  {path}:{number + 2}: " in str(error.value) and text in str(error.value)


def test_all_faulty_images_are_said_at_once_each_with_its_line(
    reading: Any, pictures: dict[str, bytes], tmp_path: Path, jsonl: Any
) -> None:
    wanted = write_bad_files(tmp_path, pictures["a.png"])
    path = jsonl([{"messages": chat("<image>", "a"), "images": [name]} for name in wanted])
    with pytest.raises(DataError) as error:
        data(reading, tmp_path, path=path)
    assert error.value.exit_code == 3 and f"{len(wanted)} problems" in str(error.value)
    for number, text in enumerate(wanted.values(), 1):
        assert re.search(f"{re.escape(str(path))}:{number}: .*{re.escape(text)}", str(error.value)), text


def test_one_pixel_and_another_ending_are_images(
    reading: Any, pictures: dict[str, bytes], tmp_path: Path, jsonl: Any
) -> None:
    Image.new("RGB", (1, 1), "red").save(tmp_path / "dot.png")
    (tmp_path / "photo.txt").write_bytes(pictures["b.jpg"])
    row = {"messages": chat("<image><image>", "a"), "images": ["dot.png", "photo.txt"]}
    assert len({one for one in ids(reading, tmp_path, jsonl([row])) if one >= MEDIA_ID}) == 2


@pytest.mark.parametrize("mode", ["CMYK", "L", "I;16", "RGBA", "P", "1"])
def test_modes_of_pixels_become_rgb(mode: str, reading: Any, tmp_path: Path, jsonl: Any) -> None:
    from runner.core.images import decode_image

    gray = np.tile(np.linspace(0, 65535, 16), (16, 1)).astype(np.uint16)
    image = Image.fromarray(gray) if mode == "I;16" else Image.new("RGBA", (16, 16), (255, 0, 0, 0)).convert(mode)
    content = io.BytesIO()
    image.save(content, "TIFF" if mode == "CMYK" else "PNG")
    found = decode_image(content.getvalue())
    assert (found.mode, found.size) == ("RGB", (16, 16))
    if mode == "I;16":  # not cut off at 255
        assert np.allclose(np.asarray(found)[0, :, 0], gray[0] / 257, atol=1)
    if mode == "RGBA":  # what is transparent is white
        assert found.getpixel((3, 3)) == (255, 255, 255)


def test_a_camera_that_was_turned_is_turned_back() -> None:
    from runner.core.images import decode_image

    image, exif, content = Image.new("RGB", (20, 10)), Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    image.save(content, "JPEG", exif=exif)
    assert decode_image(content.getvalue()).size == (10, 20)


def test_the_root_of_media(reading: Any, pictures: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    path = tmp_path / "rows" / "row.jsonl"
    path.write_text(json.dumps({"messages": chat("<image>", "a"), "images": ["a.png"]}) + "\n")
    assert any(one >= MEDIA_ID for one in ids(reading, tmp_path, path, media_root=str(tmp_path)))


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": chat("a", "b"), "videos": ["a.mp4"]}, "column videos: video and sound cannot be trained on"),
        ({"messages": chat("<audio>", "b"), "audio": {"path": "a.wav"}}, "column audio: video and sound cannot be"),
        ({"messages": asked({"type": "video", "video": "a.mp4"})}, "expected parts of type text or image, found video"),
        ({"messages": asked({"type": "input_audio", "input_audio": {"data": ""}})}, "or image, found input_audio"),
        ({"messages": asked({"type": "text", "text": "a", "audio": "a.wav"})}, "expected parts of type text or image"),
    ],
)
def test_video_and_sound_are_an_error_of_their_row(
    row: Row, text: str, reading: Any, tmp_path: Path, jsonl: Any
) -> None:
    with pytest.raises(DataError, match=text):
        data(reading, tmp_path, path=jsonl([row]))


def test_kept_images_that_no_job_has_used_for_long_are_removed(
    reading: Any, pictures: dict[str, bytes], tmp_path: Path
) -> None:
    reader, kept = reading.image_reader, tmp_path / "kept"
    old, new = [reader.add(content, several=False)[0] for content in pictures.values()]
    for entry in (old, new):
        os.utime(entry.path, ns=(0, entry.mtime_ns))
    reader.read(new.id)
    assert reader.keep_in(kept) == 1 and [str(path) for path in kept.iterdir()] == [new.path]
    assert Path(new.path).stat().st_mtime_ns == new.mtime_ns, "or its rows would be tokenized again"


def test_a_place_for_an_image_that_is_missing_is_an_error(
    reading: Any, pictures: dict[str, bytes], tmp_path: Path, jsonl: Any
) -> None:
    rows = [{"messages": chat("<image>what", "a"), "images": images} for images in (["a.png"], [])]
    with pytest.raises(DataError, match=r"rows\.jsonl:2: a message has <image>, but the row has no image"):
        data(reading, tmp_path, path=jsonl(rows))
    rows = [{"messages": chat("what", "<image>"), "images": []}]
    assert len(data(reading, tmp_path, path=jsonl(rows))) == 1


def test_a_model_of_text_says_what_to_type(
    tokenizer: Any, pictures: dict[str, bytes], tmp_path: Path, jsonl: Any
) -> None:
    path = jsonl([{"messages": chat("<image>", "a"), "images": ["a.png"]}])
    with pytest.raises(DataError, match=r"an image, but the model reads text alone\n  choose an image-text model"):
        data(tokenizer, tmp_path, path=path)


def test_a_changed_image_is_tokenized_again(
    reading: Any, pictures: dict[str, bytes], tmp_path: Path, jsonl: Any, folder: Path
) -> None:
    path = jsonl([{"messages": chat("<image>", "a"), "images": ["a.png"]}])
    first, again, changed = Decisions(), Decisions(), Decisions()
    before = data(reading, tmp_path, first, path=path)
    assert data(reading, tmp_path, again, path=path).fingerprint == before.fingerprint
    Image.new("RGB", (20, 16), "red").save(tmp_path / "a.png")
    after = data(reading, tmp_path, changed, path=path)
    assert not said(again, "data.cache") and "a.png has changed" in said(changed, "data.cache")[0]
    assert after.fingerprint != before.fingerprint


@pytest.mark.parametrize("kind", ["sft", "pairs", "prompts"])
def test_the_cache_of_equal_rows_in_another_folder_is_not_used(
    kind: Any, reading: Any, pictures: dict[str, bytes], tmp_path: Path
) -> None:
    question = {"prompt": "<image>what", "images": ["0.png"]}
    rest = {"sft": {"completion": "a"}, "pairs": {"chosen": "a", "rejected": "b"}, "prompts": {"answer": "a"}}
    found = []
    for folder, content in zip(("v1", "v2"), pictures.values(), strict=True):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0.png").write_bytes(content)
        (tmp_path / folder / "train.jsonl").write_text(json.dumps(question | rest[kind]) + "\n")
        path = str(tmp_path / folder / "train.jsonl")
        found.append(data(reading, tmp_path, path=path, eval_path=path, kind=kind))
        tables = (*found[-1].tables, *found[-1].evaluation.tables)
        assert {image.path for table in tables for image in table.images} == {str(tmp_path / folder / "0.png")}
    assert found[0].fingerprint != found[1].fingerprint


def test_holdout_is_the_same_in_another_folder(reading: Any, pictures: dict[str, bytes], tmp_path: Path) -> None:
    held_out = []
    for folder in ("v1", "v2", "v3"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0.png").write_bytes(pictures["a.png"])
        rows = [{"prompt": f"<image>q{i}", "completion": "a", "images": ["0.png"]} for i in range(8)]
        path = tmp_path / folder / "train.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = data(reading, tmp_path, path=str(path), holdout=0.3)
        held_out.append([question.item.ids for question in found.held_out_questions()])
    assert held_out[0] == held_out[1] == held_out[2]


@pytest.mark.parametrize(("rule", "most"), [("truncate_left", 22), ("truncate_right", 22), ("skip", 40)])
def test_truncation_goes_through_no_image(
    rule: str, most: int, reading: Any, pictures: dict[str, bytes], tmp_path: Path, jsonl: Any
) -> None:
    rows = [{"messages": chat("<image>", "answer"), "images": ["b.jpg"]}, {"messages": chat("a", "b")}]
    found = data(reading, tmp_path, path=jsonl(rows), truncation=rule, max_length=most)
    for item in found.take(0, len(found)):
        assert len(item.ids) <= most and not any(one >= MEDIA_ID for one in item.ids)
