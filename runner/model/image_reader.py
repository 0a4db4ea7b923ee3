"""The images of a job or a server: kept as files, known by their ids, processed when they are needed."""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from runner.core.errors import DataError, EnvironmentProblem
from runner.core.fsync_io import atomic_write
from runner.core.images import MAX_IMAGE_BYTES, decode_image
from runner.core.media import MEDIA_ID, media_id
from runner.interfaces.media import ImageEntry, ProcessedImage
from runner.model.image_processor import ImageProcessor

MAX_IMAGES_BYTES = 2**30  # of contents in memory that no request needs
KEEP_DAYS = 30  # that a kept file stays after its last use


class FileImageReader:
    """See `ImageReader`. load: makes the image processor when the first image comes, and can be pickled.

    folder: where given contents are kept; None = in memory
    """

    def __init__(self, load: Callable[[], ImageProcessor], folder: Path | None = None) -> None:
        self._load, self._folder = load, folder
        self._entries: dict[int, ImageEntry] = {}
        self._contents: dict[int, bytes] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._load, self._folder)

    def __deepcopy__(self, memo: object) -> FileImageReader:
        """Itself: copies of a tokenizer read the same images."""
        return self

    @cached_property
    def _processor(self) -> ImageProcessor:
        return self._load()

    @property
    def placeholder(self) -> str:
        """See `ImageReader`."""
        return self._processor.placeholder

    @property
    def token_id(self) -> int:
        """See `ImageReader`."""
        return self._processor.token_id

    @property
    def how(self) -> str:
        """See `ImageReader`."""
        try:
            return self._processor.how
        except EnvironmentProblem:  # which a job without images never needs
            return ""

    @property
    def is_used(self) -> bool:
        """See `ImageReader`."""
        return bool(self._entries)

    def some_ids(self, most: int) -> list[int]:
        """See `ImageReader`; of single images, as rows to try them have one each."""
        return [one for one, entry in self._entries.items() if not entry.several][:most]

    def add(self, source: str | bytes, *, several: bool) -> tuple[ImageEntry, ProcessedImage]:
        """See `ImageReader`."""
        content = source if isinstance(source, bytes) else _read(source)
        made = self._processor.process(decode_image(content), several=several)
        one = media_id(content, self._processor.variant(several=several))
        entry = ImageEntry(one, "", len(content), 0, several, made.count)
        if self._folder is None and isinstance(source, bytes):
            self._contents[one] = self._contents.pop(one, content)  # the newest is last
        else:
            path = Path(source) if isinstance(source, str) else self._keep(content)
            entry = replace(entry, path=str(path), mtime_ns=path.stat().st_mtime_ns)
        self._entries[one] = entry
        return entry, made

    def _keep(self, content: bytes) -> Path:
        """The file of an image that came without one."""
        assert self._folder is not None
        path = self._folder / hashlib.sha256(content).hexdigest()
        if path.exists():
            _mark_used(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, content)
        return path

    def location(self, source: str | bytes) -> str:
        """See `ImageReader`."""
        if isinstance(source, str):
            return source
        if self._folder is not None:
            return str(self._keep(source))
        return f"data:image/*;base64,{base64.b64encode(source).decode()}"

    def locations(self, ids: Iterable[int]) -> list[str]:
        """See `ImageReader`."""
        return [entry.path or self.location(self._contents[entry.id]) for entry in self.entries(ids)]

    def count(self, id: int) -> int:
        """See `ImageReader`."""
        return self._entries[id].count

    def save(self, folder: Path) -> None:
        """See `ImageReader`."""
        if self.how:
            self._processor.save(folder)

    def register(self, entries: Iterable[ImageEntry]) -> None:
        """See `ImageReader`."""
        self._entries.update((entry.id, entry) for entry in entries)

    def entries(self, ids: Iterable[int]) -> list[ImageEntry]:
        """See `ImageReader`."""
        return [self._entries[one] for one in dict.fromkeys(ids) if one >= MEDIA_ID]

    def __contains__(self, id: int) -> bool:
        """See `ImageReader`."""
        return id in self._entries

    def keep_in(self, folder: Path) -> int:
        """See `ImageReader`."""
        self._folder, oldest = folder, (datetime.now(UTC) - timedelta(days=KEEP_DAYS)).timestamp()
        old = [path for path in folder.iterdir() if path.stat().st_atime < oldest] if folder.exists() else []
        for path in old:
            path.unlink(missing_ok=True)
        return len(old)

    def forget(self, used: Collection[int]) -> None:
        """See `ImageReader`."""
        held = sum(map(len, self._contents.values()))
        for one in [one for one in self._contents if one not in used]:
            if held <= MAX_IMAGES_BYTES:
                return
            held -= len(self._contents.pop(one))
            del self._entries[one]

    def image_bytes(self, id: int) -> bytes:
        """See `ImageReader`."""
        entry = self._entries[id]
        content = self._contents[id] if id in self._contents else _read(entry.path)
        if self._folder is not None and Path(entry.path).parent == self._folder:
            _mark_used(Path(entry.path))
        if media_id(content, self._processor.variant(several=entry.several)) != id:
            raise DataError(f"{entry.path} has changed since the data was tokenized; start a new run")
        return content

    def read(self, id: int) -> ProcessedImage:
        """See `ImageReader`."""
        return self._processor.process(decode_image(self.image_bytes(id)), several=self._entries[id].several)


def _mark_used(path: Path) -> None:
    """Set the time of access, which not every file system keeps; the time of change stays."""
    with suppress(FileNotFoundError):  # another process may have removed it
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
