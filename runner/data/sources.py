"""The user's files as sources of rows, and their check before anything heavy is loaded: no torch, no tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from runner.data.examples import held_out_reading
from runner.data.formats import FormatCheck
from runner.data.readers import FileList, find_files, read_file
from runner.data.rows import Problems, Row
from runner.spec.base import ItemKind

PREFLIGHT_ROWS = 10_000  # of each file: all of a small one, and a fraction of a second of a large one


@dataclass(frozen=True)
class FileSource:
    """A file or a folder of files, in the order of their names."""

    name: str
    list: FileList
    key: str = "data.path"

    def digest(self) -> str:
        """sha256 over the names and bytes of all files."""
        total = hashlib.sha256()
        for file in self.list.files:
            with file.open("rb") as handle:
                total.update(f"{file.name}:{hashlib.file_digest(handle, 'sha256').hexdigest()}\n".encode())
        return total.hexdigest()

    def rows(self, problems: Problems, most: int | None = None) -> Iterator[Row]:
        """The rows of every file, of each the first `most`."""
        for file in self.list.files:
            yield from islice(read_file(file, problems), most)


def find_sources(paths: Sequence[str], eval_path: str | None) -> tuple[list[FileSource], FileSource | None]:
    """(training sources, held-out source). Raises DataError for a path where no data file is."""
    training = [FileSource(path, find_files(path)) for path in paths]
    if eval_path is None:
        return training, None
    return training, FileSource(eval_path, find_files(eval_path, "data.eval_path"), "data.eval_path")


def validate(
    paths: Sequence[str], eval_path: str | None, kind: ItemKind, columns: Mapping[str, str] | None = None
) -> None:
    """Check that the files exist and that their first 10,000 rows are sound; imports neither torch nor a tokenizer.

    Raises DataError with everything wrong with the first faulty source. `build` checks the remaining rows.
    """
    training, held_out = find_sources(paths, eval_path)
    readings = [(source, kind) for source in training]
    for source, reading in [*readings, *([(held_out, held_out_reading(kind))] if held_out else [])]:
        problems = Problems(source.key, source.name)
        for _ in FormatCheck(problems, reading, columns).examples(source.rows(problems, PREFLIGHT_ROWS)):
            pass
        problems.raise_if_any()
