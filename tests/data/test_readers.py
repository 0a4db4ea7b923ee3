"""Files are read strictly, and every fault names file, line and what was expected."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.core.errors import DataError
from runner.data import readers
from runner.data.config import FileConfig
from runner.data.files import FileList, find_files, read_file
from runner.data.readers import Problems, Row, SourceLocation


def read(path: Path) -> tuple[list[Row], str]:
    """The rows, and the error's text or nothing."""
    problems = Problems("data.path", str(path))
    rows = list(read_file(path, problems))
    return rows, str(problems.error()) if problems.count else ""


GOOD = b'{"text": "a"}\n'

FAULTS = [
    ("a.jsonl", b"", "a.jsonl: the file is empty"),
    ("a.jsonl", b"\n  \n", "a.jsonl: only blank lines; expected at least one row"),
    ("a.jsonl", GOOD + b'{"text": b}\n', "a.jsonl:2: broken JSON at column 10"),
    ("a.jsonl", GOOD * 560 + b'{"text"\n' + GOOD, "a.jsonl:561: broken JSON at column 8"),
    ("a.jsonl", GOOD + b'{"text": "b', "a.jsonl:2: broken JSON at column 10: Unterminated string"),
    ("a.jsonl", GOOD + b'{"text": "b', "the last line has no newline: the file may be incomplete"),
    ("a.jsonl", GOOD + b"[1]\n", "a.jsonl:2: expected an object with columns, {...}, found a list"),
    ("a.jsonl", GOOD + b"null\n", "a.jsonl:2: expected an object with columns, {...}, found null"),
    ("a.jsonl", GOOD + b'{"text": ' + b"[" * 500 + b"]" * 500 + b"}\n", "a.jsonl:2: nested too deeply"),
    ("a.jsonl", GOOD + b'{"text": NaN}\n', "a.jsonl:2: NaN is not JSON"),
    ("a.jsonl", GOOD + b'{"text": -Infinity}\n', "a.jsonl:2: -Infinity is not JSON"),
    ("a.jsonl", b'{"text": "a", "text": "b"}\n', "a.jsonl:1: the key 'text' appears twice in one object"),
    ("a.jsonl", b'{"m": [{"k": 1, "k": 1}]}\n', "a.jsonl:1: the key 'k' appears twice"),
    ("a.jsonl", GOOD + b'{"text": "\xff"}\n', "a.jsonl:2: not UTF-8 at byte offset 24 (0xff)"),
    ("a.jsonl", b"\xef\xbb\xbf" + b'{"text": "\xff"}\n', "a.jsonl:1: not UTF-8 at byte offset 13 (0xff)"),
    (
        "a.jsonl",
        '{"text": "a"}\n'.encode("utf-16"),
        "a.jsonl:1: not UTF-8 at byte offset 0 (0xff); save the file as UTF-8",
    ),
    ("a.jsonl", b'{"text": "\\ud83d"}\n', "a.jsonl:1: half a surrogate pair"),
    ("a.jsonl", b"[" * 200_000 + b"\n", "a.jsonl:1: objects are nested too deeply"),
    ("a.json", b'{"text": "a"}', "a.json:1: expected a list of objects"),
    ("a.json", b"  \n []", "a.json: the list is empty"),
    ("a.json", b'[{"text": "a"},\n {"text" "b"}]', "a.json:2: broken JSON at column 10"),
    ("a.json", b'[{"text": "a"},\n\n 3]', "a.json:3: expected an object with columns, {...}, found a number"),
    ("a.json", b'[{"text": "a"}\n', "a.json:2: broken JSON: the file ends where , or ] must follow"),
    ("a.json", b'[{"text": "a"},\n]', "a.json:2: broken JSON"),
    ("a.json", b'[{"text": "a"}]\nx', "a.json:2: broken JSON: more text after the list"),
    ("a.json", b'[{"text": "a"},\n{"text": ' + b"[" * 500 + b"]" * 500 + b"}]", "a.json:2: nested too deeply"),
    ("a.json", b'[{"text": "a"},\n{"text": NaN}]', "a.json:2: NaN is not JSON"),
    ("a.csv", b"text\n", "a.csv: a header and no rows"),
    ("a.csv", b"text,text\na,b\n", "a.csv:1: column names in the header are empty or repeated: ['text']"),
    ("a.csv", b'prompt,completion\n"a\nb",c\nd\n', "a.csv:4: 1 fields; expected 2"),
    ("a.csv", b'text\na\n"b\n', "a.csv:3: broken CSV in the row that starts here"),
    ("a.csv", b"text\na\nb\xe9\n", "a.csv:3: not UTF-8 at byte offset 8 (0xe9)"),
    ("a.parquet", b"PAR1 no PAR1", "a.parquet: broken Parquet after row 0"),
]


@pytest.mark.parametrize(("name", "content", "expected"), FAULTS)
def test_a_fault_names_file_line_and_what_was_expected(
    tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert expected in read(tmp_path / name)[1]


def test_ten_problems_are_shown_and_all_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"".join(b" " * n + b"{\n" for n in range(25)))
    message = read(tmp_path / "a.jsonl")[1]
    assert "25 problems (the first 10)" in message
    assert message.count("broken JSON at column") == 10


def test_rows_between_faults_are_still_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"{\n" + GOOD)
    rows, message = read(tmp_path / "a.jsonl")
    assert [row.place.number for row in rows] == [1, 3]
    assert "a.jsonl:2:" in message


def test_a_row_of_many_megabytes_is_refused_and_the_next_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 2**20
    monkeypatch.setattr(readers.read_lines, "__defaults__", (limit,))
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "' + b"x" * limit + b'"}\n' + GOOD)
    rows, message = read(tmp_path / "a.jsonl")
    assert "a.jsonl:1: a row of more than 1 MiB" in message
    assert [(row.place.number, row.value) for row in rows] == [(2, {"text": "a"})]


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_bom_line_ends_and_blank_lines_are_accepted(tmp_path: Path, start: bytes, end: bytes, last: bool) -> None:
    body = end.join([b'{"text": "a"}', b"", b'{"text": "b"}']) + (end if last else b"")
    (tmp_path / "a.jsonl").write_bytes(start + body)
    rows, message = read(tmp_path / "a.jsonl")
    assert message == ""
    assert [(row.place.number, row.value["text"]) for row in rows] == [(1, "a"), (3, "b")]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(st.lists(TEXTS, min_size=1, max_size=8), st.booleans(), st.booleans())
def test_text_comes_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], ascii_only: bool, pretty: bool
) -> None:
    folder = tmp_path_factory.mktemp("round")
    rows: list[dict[str, Any]] = [{"text": text} for text in texts]
    (folder / "a.jsonl").write_text("".join(json.dumps(r, ensure_ascii=ascii_only) + "\n" for r in rows), "utf-8")
    (folder / "b.json").write_text(json.dumps(rows, ensure_ascii=ascii_only, indent=2 if pretty else None), "utf-8")
    pq.write_table(pa.Table.from_pylist(rows), folder / "d.parquet")
    for name in ("a.jsonl", "b.json", "d.parquet"):
        found, message = read(folder / name)
        assert message == ""
        assert [row.value for row in found] == rows


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), min_size=1, max_size=8))
def test_csv_comes_back_as_text_at_the_line_where_it_begins(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerows([["text"], *([t] for t in texts)])
    found, message = read(path)
    assert message == ""
    assert [row.value["text"] for row in found] == texts
    raw = path.read_bytes().split(b"\n")
    assert all(raw[row.place.number - 1].startswith(b'"') for row in found)


def test_nothing_that_looks_like_a_number_or_a_date_is_coerced(tmp_path: Path) -> None:
    values = ["0", "007", "2024-01-01", "1e5", "true", "null"]
    (tmp_path / "a.csv").write_text("text\n" + "\n".join(values) + "\n")
    assert [row.value["text"] for row in read(tmp_path / "a.csv")[0]] == values


def test_a_long_csv_field_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\n" + "x" * 200_000 + "\n")
    assert len(read(tmp_path / "a.csv")[0][0].value["text"]) == 200_000


def test_keys_that_parquet_filled_with_null_are_taken_out(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "c"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    [row] = read(tmp_path / "a.parquet")[0]
    assert row.value == rows[0]
    assert str(row.place).endswith("a.parquet: row 1")


def test_a_folder_gives_its_files_in_order_and_names_the_others(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "sub/c.csv", "README.md", ".hidden.jsonl", ".git/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_files(str(tmp_path))
    assert [f.relative_to(tmp_path).as_posix() for f in found.files] == ["a.jsonl", "b.jsonl", "sub/c.csv"]
    assert found.ignored == ("README.md",)


def test_a_folder_with_a_split_train_leaves_out_the_other_splits_and_says_so(tmp_path: Path) -> None:
    names = ("data/train-00000.jsonl", "data/test-00000.jsonl", "dev/a.jsonl", "latest.jsonl", "dataset_info.json")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(GOOD)
    found = find_files(str(tmp_path))
    assert [file.name for file in found.files] == ["train-00000.jsonl", "latest.jsonl"]
    option = f"data.eval_path={tmp_path}/data/test-00000.jsonl"
    test = f"test-00000.jsonl of another split than train ({option} evaluates on it)"
    assert found.ignored[0] == "dataset_info.json" and found.ignored[1] == test and len(found.ignored) == 3
    (tmp_path / "data/train-00000.jsonl").unlink()
    assert len(find_files(str(tmp_path)).files) == 3


def test_a_path_where_nothing_is_says_what_is_near(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(GOOD)
    (tmp_path / "notes.pdf").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no such file or folder; did you mean .*train\.jsonl\?"):
        find_files(str(tmp_path / "trian.jsonl"))
    for path, hint in (
        (str(tmp_path / "*.jsonl"), "patterns are not expanded: type the folder"),
        ("https://example.org/a.jsonl", "only files on this machine are read"),
        ("openai/gsm8k", "a data set of the hub is data=hub data.path=openai/gsm8k"),
    ):
        with pytest.raises(DataError, match=rf"no such file or folder; {hint}"):
            find_files(path)
    with pytest.raises(DataError, match=r"unsupported file type; expected \.jsonl"):
        find_files(str(tmp_path / "notes.pdf"))
    with pytest.raises(DataError, match="the folder has no data file"):
        find_files(str(tmp_path / "empty"))


def test_preflight_finds_faults_without_heavy_imports(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD + b'{"txt": "b"}\n')
    program = (
        "import sys\n"
        "from runner.data.config import FileConfig\n"
        "from runner.core.errors import DataError\n"
        "try:\n"
        "    FileConfig(path=sys.argv[1]).preflight('sft')\n"
        "except DataError as error:\n"
        "    print(error)\n"
        "print({'torch', 'transformers', 'datasets', 'numpy', 'pyarrow'} & set(sys.modules))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "a.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert "a.jsonl:2: no column text; expected text as at" in done.stdout
    assert done.stdout.endswith("set()\n")


def test_preflight_also_looks_at_the_held_out_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "b.jsonl").write_bytes(b"")
    FileConfig(path=str(tmp_path / "a.jsonl")).preflight("sft")
    with pytest.raises(DataError, match=r"(?s)^data\.eval_path=.*b\.jsonl: the file is empty"):
        FileConfig(path=str(tmp_path / "a.jsonl"), eval_path=str(tmp_path / "b.jsonl")).preflight("sft")


def test_tabs_text_and_gzip_are_read_as_strictly(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('prompt\tcompletion\n"a\tb"\tc, d\n')
    assert [row.value for row in read(tmp_path / "a.tsv")[0]] == [{"prompt": "a\tb", "completion": "c, d"}]
    (tmp_path / "a.txt").write_text("one\n\n  two \r\n")
    rows, _ = read(tmp_path / "a.txt")
    assert [(row.place.number, row.value) for row in rows] == [(1, {"text": "one"}), (3, {"text": "  two "})]
    for name, content in (
        ("b.jsonl", GOOD),
        ("b.json", b'[{"text": "a"}]'),
        ("b.csv", b"text\na\n"),
        ("b.txt", b"a\n"),
    ):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
        assert [row.value for row in read(tmp_path / f"{name}.gz")[0]] == [{"text": "a"}]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl.gz", gzip.compress(GOOD * 9, mtime=0)[:-9], "cannot be read: Compressed file ended"),
        ("a.jsonl.gz", GOOD, "cannot be read: Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(GOOD + b'{"text"\n', mtime=0), "a.jsonl.gz:2: broken JSON at column 8"),
        ("a.txt", b"\n", "only blank lines"),
        ("a.tsv", b'text\na\n"b\n', "a.tsv:3: broken TSV in the row that starts here"),
        ("a.arrow", b"no arrow at all", "broken Arrow after row 0"),
    ],
)
def test_a_fault_in_other_kinds_of_files_is_named(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert expected in read(tmp_path / name)[1]


def test_text_files_beside_data_files_are_notes(tmp_path: Path) -> None:
    (tmp_path / "LICENSE.txt").write_text("free")
    assert [file.name for file in find_files(str(tmp_path)).files] == ["LICENSE.txt"]
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    assert find_files(str(tmp_path)) == FileList((tmp_path / "a.jsonl",), ("LICENSE.txt",))


def test_saved_data_sets_of_datasets_are_read_with_their_objects(tmp_path: Path) -> None:
    """Objects of differing keys are kept by `datasets` as JSON text, in its Arrow files and in its Parquet files."""
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 1}], "id": 1},
        {"messages": [{"role": "user", "content": "c"}, {"role": "tool", "content": "d", "x": {"y": ["z"]}}], "id": 2},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    program = (
        "import sys, datasets\n"
        "root = sys.argv[1]\n"
        "options = {'data_files': root + '/rows.jsonl', 'cache_dir': root + '/cache'}\n"
        "table = datasets.load_dataset('json', split='train', **options)\n"
        "table.save_to_disk(root + '/one', num_shards=2)\n"
        "table.to_parquet(root + '/rows.parquet')\n"
        "plain = datasets.Dataset.from_list(table.to_list())\n"
        "datasets.DatasetDict(train=plain, test=plain).save_to_disk(root + '/splits')\n"
        "datasets.DatasetDict(a=plain, b=plain).save_to_disk(root + '/unnamed')\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, capture_output=True)

    def values(path: Path) -> list[Any]:
        return [row.value for file in find_files(str(path)).files for row in read(file)[0]]

    assert values(tmp_path / "one") == values(tmp_path / "rows.parquet") == values(tmp_path / "splits") == rows
    assert len(find_files(str(tmp_path / "one")).files) == 2
    [other] = find_files(str(tmp_path / "splits")).ignored
    assert other == f"split test (data.path={tmp_path / 'splits' / 'test'} reads it)"
    with pytest.raises(DataError, match=r"with splits a, b; type one: data\.path=.*unnamed/a"):
        find_files(str(tmp_path / "unnamed"))
    (tmp_path / "one" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match="the saved data set lacks data-00001-of-00002"):
        find_files(str(tmp_path / "one"))


def test_an_arrow_file_may_be_a_stream_or_a_file(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"]})
    for open_writer in (pa.ipc.new_stream, pa.ipc.new_file):
        with open_writer(str(tmp_path / "a.arrow"), table.schema) as writer:
            writer.write_table(table)
        assert [row.value for row in read(tmp_path / "a.arrow")[0]] == table.to_pylist()


def test_equal_problems_of_many_rows_are_one_line_with_their_numbers() -> None:
    problems, more = Problems("data.path", "a.jsonl"), Problems("data.path", "a.jsonl")
    for number in (2, 3, 4, 9):
        problems.add_fault(SourceLocation("a.jsonl", number), "no column text", "type this")
    more.add_fault(SourceLocation("a.jsonl", 11), "no column text")
    more.add_fault(SourceLocation("b", 1, "row"), "empty")
    more.add_fault(SourceLocation("b", 2, "row"), "empty")
    problems.extend(more)
    assert str(problems.error()).splitlines() == [
        "data.path=a.jsonl: 7 problems",
        "  a.jsonl:2-4, 9, 11: no column text",
        "  b: rows 1-2: empty",
        "  type this",
    ]
    for number in range(100, 200, 2):
        problems.add_fault(SourceLocation("a.jsonl", number), "no column text")
    assert ", 128 and 35 more: no column text" in str(problems.error())
    for number in range(30):
        problems.add_fault(SourceLocation("a.jsonl", number), f"{number} tokens")
    assert "87 problems (the first 65)\n" in str(problems.error())
