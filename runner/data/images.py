"""The images of a row, in every form that data has them, as parts of its messages.

    content parts   {type: image_url, image_url: {url: data:…}}   {type: image, image | path | url | base64 | bytes: …}
    columns         images or image: paths, data URLs, bytes, {bytes, path} (Parquet of `datasets`), one or a list
                    placed by {type: image} or <image> in the texts, else before the first user message

Afterwards each is {type: image, image: PATH or bytes}. Paths are of files in the folder of the data or data.media_root.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runner.core.columns import json_type_name
from runner.core.errors import DataError
from runner.core.untrusted_text import shorten
from runner.data.control_tokens import Segment
from runner.data.examples import RowError, is_messages
from runner.data.readers import Row
from runner.interfaces.media import ImageReader

MARK = "<image>"
COLUMNS = ("images", "image")
CONVERSATIONS = ("messages", "prompt", "completion", "chosen", "rejected")
KINDS = ("image", "image_url", "input_image")
KEYS = ("image", "image_url", "path", "url", "base64", "bytes")
OTHER_MEDIA = ("video", "videos", "audio", "audios")


def _images(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return [part for part in content if _is_image(part)] if isinstance(content, list) else []


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and (
        part.get("type") in KINDS or ("image" in part and not part.keys() & {"type", "text"})
    )


def place_images(row: Row, chat: bool, media_root: str | None) -> Row:
    """The row with its images as parts of messages, and without the columns of images. Raises RowError.

    chat: whether its prompt and answers are to be messages, which text becomes here
    """
    if found := [name for name in OTHER_MEDIA if row.value.get(name)]:
        keep = f"data.rename_columns={{{found[0]}: unused_{found[0]}}}"
        raise RowError(f"column {found[0]}: video and sound cannot be trained on; to leave it out, type '{keep}'")
    listed = [one for name in COLUMNS if row.value.get(name) for one in _as_list(row.value[name])]
    conversations = {name: row.value[name] for name in CONVERSATIONS if name in row.value}
    has_none = not listed and not any(_images(m) for v in conversations.values() if is_messages(v) for m in v)
    if has_none and not (chat and any(name in row.value for name in COLUMNS)):
        return row
    if not chat:
        raise RowError("images beside plain text; give the first row a column images too, an empty list if it has none")
    sources = [_source(one, _folder(row, media_root)) for one in listed]
    messages = {name: _as_messages(name, value) for name, value in conversations.items()}
    asked = [message for some in messages.values() for message in some if message.get("role") == "user"]
    if has_none and any(map(_num_places, asked)):
        raise RowError(f"a message has {MARK}, but the row has no image; add the image, or leave the mark out")
    if listed and not any(_num_places(m) for some in messages.values() for m in some):
        messages = _put_first(messages, len(sources))
    prompt = _Placing(sources, row, media_root)
    placed = {"prompt": prompt.place(messages["prompt"])} if "prompt" in messages else {}
    ends = [prompt.used]
    for name in messages.keys() - {"prompt"}:
        answer = _Placing(sources, row, media_root, prompt.used)
        placed[name] = answer.place(messages[name])
        ends.append(answer.used)
    if max(ends) < len(sources):
        raise RowError(f"{len(sources)} images, but places for {max(ends)}; write {MARK} where an image belongs")
    rest = {name: value for name, value in row.value.items() if name not in COLUMNS}
    return Row(row.place, {**rest, **placed})


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _as_messages(column: str, value: Any) -> list[dict[str, Any]]:
    """A conversation; text is a message of the user in `prompt`, of the assistant elsewhere."""
    if isinstance(value, str) and column != "messages":
        return [{"role": "user" if column == "prompt" else "assistant", "content": value}]
    if not is_messages(value):
        raise RowError(f"column {column}: expected a list of messages, found {json_type_name(value)}")
    return list(value)


def _num_places(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    texts = [content] if isinstance(content, str) else [str(p.get("text", "")) for p in content or () if _is_text(p)]
    return len(_images(message)) + sum(text.count(MARK) for text in texts)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text"


def _put_first(messages: Mapping[str, list[dict[str, Any]]], count: int) -> dict[str, list[dict[str, Any]]]:
    """Messages with `count` places before the text of the user's first message."""
    found = {}
    for name, some in messages.items():
        at = next((i for i, message in enumerate(some) if message.get("role") == "user"), None)
        found[name] = list(some)
        if at is not None and isinstance(some[at].get("content"), str):
            found[name][at] = {**some[at], "content": MARK * count + str(some[at]["content"])}
    return found


@dataclass(slots=True)
class _Placing:
    """Puts a row's images where its messages have places for them, from the number `used` on."""

    sources: Sequence[str | bytes]
    row: Row
    media_root: str | None
    used: int = field(default=0)

    def place(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [self._message(message) for message in messages]

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if not (isinstance(content, list) or (isinstance(content, str) and self.sources and MARK in content)):
            return dict(message)
        parts = [part for one in _as_list(content) for part in self._parts(one)]
        if message.get("role") == "assistant" and any(_is_image(part) for part in parts):
            raise RowError("an image in an assistant turn; the model writes text alone")
        return {**message, "content": parts}

    def _parts(self, part: Any) -> Iterator[Any]:
        text = part if isinstance(part, str) else part.get("text") if _is_text(part) else None
        if isinstance(text, str) and self.sources and MARK in text:
            for at, piece in enumerate(text.split(MARK)):
                if at:
                    yield {"type": "image", "image": self._next()}
                if piece:
                    yield {"type": "text", "text": piece}
        elif _is_image(part):
            given = next((part[key] for key in KEYS if part.get(key) is not None), None)
            is_base64 = given is not None and given is part.get("base64")
            folder = _folder(self.row, self.media_root)
            own = None if given is None else _decode_base64(given) if is_base64 else _source(given, folder)
            yield {"type": "image", "image": self._next() if own is None else own}
        else:
            yield {"type": "text", "text": part} if isinstance(part, str) else part

    def _next(self) -> str | bytes:
        if self.used >= len(self.sources):
            count = len(self.sources)
            raise RowError(f"more places for images than the {count} of the column images; expected one of each")
        self.used += 1
        return self.sources[self.used - 1]


def _folder(row: Row, media_root: str | None) -> Path | None:
    """The folder that paths are relative to, and must be in; None for rows that are not of a file."""
    if media_root is not None:
        return Path(media_root)
    file = Path(row.place.source)
    return file.parent if file.is_file() else None


def _source(value: Any, folder: Path | None) -> str | bytes:
    """A path or the encoded content of an image. Raises RowError."""
    if isinstance(value, dict):
        value = next((value[key] for key in ("bytes", "path", "url") if value.get(key) is not None), value)
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise RowError(f"an image: expected a path, a data URL or bytes, found {json_type_name(value)}")
    scheme, colon, rest = value.partition(":")
    if scheme == "data" and colon:
        return _decode_base64(rest.partition(",")[2])
    if colon and rest.startswith("//"):
        save = f"curl -o images/1.png {value}" if scheme.startswith("http") else "the path without file://"
        raise RowError(
            f"the image {shorten(value, 80)} is not fetched; save it beside the data, e.g. {save}, and write its path"
        )
    if len(value) > 1000:
        return _decode_base64(value)
    return _inside(value, folder)


def _inside(value: str, folder: Path | None) -> str:
    if folder is None:
        raise RowError(f"the image {value}: a path needs a folder; type data.media_root=FOLDER")
    root, path = folder.resolve(), (folder / value).resolve()
    if not path.is_relative_to(root):
        raise RowError(f"the image {value} is outside of {folder}; type data.media_root=FOLDER, with a folder it is in")
    if not path.is_file():
        raise RowError(f"the image {value}: no such file in {folder}; data.media_root=FOLDER names another folder")
    return str(path)


def _decode_base64(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise RowError(f"an image: not base64 ({error}); expected a path, a data URL or base64") from error


def insert_images(
    segments: Sequence[Segment], reader: ImageReader | None, images: Sequence[str | bytes]
) -> list[Segment]:
    """Segments with what the image processor writes in place of the template's placeholders.

    Raises DataError for an image that cannot be read.
    """
    if reader is None or not images:
        return list(segments)
    rest, found = iter(images), list[Segment]()
    for segment in segments:
        first, *others = [segment.text] if segment.literal else segment.text.split(reader.placeholder)
        entries, texts = list[tuple[int, int]](), [first]
        for text in others:
            source = next(rest)
            try:
                entry, made = reader.add(source, several=len(images) > 1)
            except DataError as error:
                raise DataError(f"{source}: {error}" if isinstance(source, str) else str(error)) from error
            entries.append((entry.id, made.count))
            texts += [made.text, text]
        found.append(replace(segment, text="".join(texts), images=tuple(entries)))
    return found
