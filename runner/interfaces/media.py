"""Images of a model: the reader that data, models and commands share, and its records."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from runner.core.media import MEDIA_ID

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ImageEntry:
    """An image that occurs in rows.

    id: what stands for it in token ids (see `runner.core.media`); path: of its file; size, mtime_ns: of that file when
    it was read; several: whether its row has others; count: how many image tokens stand for it
    """

    id: int
    path: str
    size: int
    mtime_ns: int
    several: bool
    count: int


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """What a model takes of an image.

    text: what replaces the placeholder in a rendered conversation; count: how many image tokens it contains; values:
    arguments of the model's forward, whose first dimension is over images or patches
    """

    text: str
    count: int
    values: Mapping[str, Tensor]


class ImageTokenizer(Protocol):
    """Turns the images of conversations into token ids."""

    @property
    def placeholder(self) -> str: ...  # the placeholder that a chat template writes

    @property
    def token_id(self) -> int: ...  # which stands for the places of an image in `ProcessedImage.text`

    # an image by its path or its encoded content, which is kept; raises DataError
    def add(self, source: str | bytes, *, several: bool) -> tuple[ImageEntry, ProcessedImage]: ...


class ImageReader(ImageTokenizer, Protocol):
    """The images of a job or a server, by their ids."""

    @property
    def how(self) -> str: ...  # all that results depend on beside the images; empty without an image processor

    @property
    def is_used(self) -> bool: ...  # whether there is any image

    def some_ids(self, most: int) -> list[int]: ...  # of any images that rows have

    def location(self, source: str | bytes) -> str: ...  # the path of an image, or a data URL of content without a file

    # keep contents in files from now on; returns how many files it removed as they were not used for KEEP_DAYS
    def keep_in(self, folder: Path) -> int: ...

    def register(self, entries: Iterable[ImageEntry]) -> None: ...  # that another process has added

    def entries(self, ids: Iterable[int]) -> list[ImageEntry]: ...  # of the images in token ids, each once

    def locations(self, ids: Iterable[int]) -> list[str]: ...  # of the images in token ids, each once

    def count(self, id: int) -> int: ...  # of the tokens that stand for an image

    def save(self, folder: Path) -> None: ...  # the settings of the image processor, if there is one

    def __contains__(self, id: int) -> bool: ...  # whether the image can be read

    def image_bytes(self, id: int) -> bytes: ...  # raises DataError for a file that is not what it was

    def read(self, id: int) -> ProcessedImage: ...  # raises as `image_bytes`

    # the oldest contents in memory above MAX_IMAGES_BYTES, but for `used` images
    def forget(self, used: Collection[int]) -> None: ...


def images_of(tokenizer: Any) -> ImageReader | None:
    """The image reader that belongs to a tokenizer; None for a model of text alone."""
    found: ImageReader | None = getattr(tokenizer, "image_reader", None)
    return found


def vocabulary_ids(ids: Iterable[int], reader: ImageTokenizer | None) -> list[int]:
    """`ids` with an image's token in the places of images."""
    return [reader.token_id if reader and one >= MEDIA_ID else one for one in ids]


def sample_images(tokenizer: Any, prompt: Sequence[int]) -> dict[str, list[str]]:
    """The images of a prompt for a record of samples: paths and data URLs; empty where there are none."""
    reader = images_of(tokenizer)
    found = reader.locations(prompt) if reader else []
    return {"images": found} if found else {}


def fill_in_images(ids: Sequence[int], images: Sequence[tuple[int, int]], token_id: int) -> list[int]:
    """`ids` with media ids in the places of images. images: (id, number of places) of each, in order.

    Raises ValueError if the numbers do not agree.
    """
    places = [at for at, one in enumerate(ids) if one == token_id]
    wanted = [one for one, count in images for _ in range(count)]
    if len(places) != len(wanted):
        raise ValueError(f"the images take {len(wanted)} tokens, but the text has places for {len(places)}")
    found = list(ids)
    for at, one in zip(places, wanted, strict=True):
        found[at] = one
    return found
