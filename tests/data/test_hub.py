"""Hub data sets, without a hub: from the cache of `datasets`, and what is said when there is none."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from PIL import Image

from runner.core.auto_choices import Decisions
from runner.core.errors import DataError, EnvironmentProblem
from runner.data.config import HubConfig, ModelScopeConfig
from runner.data.hub import HubSource, load_split
from runner.data.prepare import build
from runner.data.readers import Problems
from tests.data.conftest import chat


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data set `someone/talks` as `datasets` keeps it after a download."""
    folder = tmp_path / "hub" / "someone___talks" / "default" / "0.0.0" / ("0" * 40)
    rows = [{"messages": chat(f"q{i}", f"a{i}")} for i in range(6)]
    splits = {}
    for split in ("train", "test"):
        source = tmp_path / f"{split}.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        table = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(tmp_path / "work"))
        folder.mkdir(parents=True, exist_ok=True)
        Path(table.cache_files[0]["filename"]).rename(folder / f"talks-{split}.arrow")
        splits[split] = datasets.SplitInfo(split, num_bytes=1, num_examples=len(rows), dataset_name="talks")
    info = datasets.DatasetInfo(
        features=table.features,
        splits=datasets.SplitDict(splits),
        builder_name="json",
        dataset_name="talks",
        config_name="default",
    )
    info.write_to_directory(str(folder))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))


@pytest.mark.usefixtures("cached")
def test_a_data_set_of_the_hub_becomes_items(tokenizer: Any, tmp_path: Path) -> None:
    config = HubConfig(path="someone/talks", eval_split="test", shuffle=False)
    decide = Decisions()
    data = build(config, tokenizer=tokenizer, seed=0, decide=decide, cache_dir=tmp_path / "cache", kind="sft")
    expected = tokenizer.apply_chat_template(chat("q0", "a0"), tokenize=False)
    assert tokenizer.decode(data.take(0, 1)[0].ids) == expected
    assert [q.answer for q in data.held_out_questions()] == [f"a{i}" for i in range(6)]
    assert any("data.path=someone/talks[train]: 6 items" in d.reason for d in decide.entries)


def source(rows: list[dict[str, Any]]) -> HubSource:
    return HubSource("someone/talks[train]", datasets.Dataset.from_list(rows))


def test_rows_have_no_filled_in_nulls_and_a_place() -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "x"}]
    [row] = source([{"messages": talk}]).rows(Problems("data.path", "x"))
    assert row.value == {"messages": talk}
    assert str(row.place) == "someone/talks[train]: row 1"


def test_a_stream_that_is_cut_off_says_where_and_what_to_do() -> None:
    def read() -> Any:
        yield {"text": "a"}
        raise ConnectionError("reset by peer")

    rows = HubSource("someone/talks[train]", datasets.IterableDataset.from_generator(read)).rows(Problems("x", "x"))
    assert next(rows).value == {"text": "a"}
    with pytest.raises(EnvironmentProblem, match=r"talks\[train\]: cannot be read after row 1: .*reset(.|\n)*resume"):
        next(rows)


def test_an_empty_split_is_a_problem() -> None:
    problems = Problems("data.path", "x")
    assert list(source([]).rows(problems)) == []
    assert "no rows" in str(problems.error())


def test_the_digest_follows_the_rows() -> None:
    digests = [source(rows).digest() for rows in ([{"text": "a"}], [{"text": "b"}], [{"text": "a"}])]
    assert digests[0] == digests[2] != digests[1]


def test_a_hub_out_of_reach_says_so_and_what_to_do() -> None:
    config = HubConfig(path="no-such-owner/no-such-data")
    with pytest.raises(EnvironmentProblem, match=r"the hub cannot be reached(?s:.)*data=file data\.path="):
        load_split(config, "no-such-owner/no-such-data", "train")


def test_a_local_path_is_sent_to_data_file(tmp_path: Path) -> None:
    config = HubConfig(path=str(tmp_path))
    with pytest.raises(DataError, match="read it with: data=file"):
        load_split(config, str(tmp_path), "train")


@pytest.mark.usefixtures("cached")
def test_a_split_that_is_not_there_is_named() -> None:
    with pytest.raises(DataError, match=r"someone/talks: cannot be loaded \(subset None, split nope"):
        load_split(HubConfig(path="someone/talks"), "someone/talks", "nope")


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    """A module in place of modelscope, whose download is `folder`; None = the package is not installed."""
    module = None if folder is None else SimpleNamespace(dataset_snapshot_download=lambda path, revision: str(folder))
    monkeypatch.setitem(sys.modules, "modelscope", module)


def test_a_data_set_of_modelscope_is_read_from_its_download(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talks").mkdir()
    for split in ("train", "test"):
        rows = [{"messages": chat(f"{split} {i}", f"a{i}")} for i in range(3)]
        (tmp_path / "talks" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stand_in(monkeypatch, tmp_path / "talks")
    monkeypatch.setattr("runner.data.hub.site_fault", lambda *given: None)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "work")
    config = ModelScopeConfig(path="someone/talks", eval_split="test", shuffle=False)
    options: dict[str, Any] = {"tokenizer": tokenizer, "seed": 0, "decide": Decisions(), "kind": "sft"}
    data = build(config, cache_dir=tmp_path / "cache", **options)
    assert "train 0" in tokenizer.decode(data.take(0, 1)[0].ids) and len(data) == 3
    assert len(data.held_out_questions()) == 3
    stream = build(
        config.model_copy(update={"streaming": True, "max_length": 99}), cache_dir=tmp_path / "cache", **options
    )
    assert stream.take(0, 3) == data.take(0, 3)


@pytest.mark.parametrize("streaming", [False, True])
def test_images_of_features_stay_encoded(streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(content, "PNG")
    image, encoded = datasets.Image(), {"bytes": content.getvalue()}
    parts = datasets.List({"type": datasets.Value("string"), "image": image})
    features = {"image": image, "images": datasets.List(image), "parts": parts, "texts": [datasets.Value("string")]}
    row = {"image": encoded, "images": [encoded] * 2, "parts": [{"type": "image", "image": encoded}], "texts": ["a"]}
    table = datasets.Dataset.from_list([row], features=datasets.Features(features))
    (tmp_path / "pictures").mkdir()
    table.to_parquet(str(tmp_path / "pictures" / "train.parquet"))
    stand_in(monkeypatch, tmp_path / "pictures")
    monkeypatch.setattr("runner.data.hub.site_fault", lambda *given: None)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "work")
    source = load_split(ModelScopeConfig(path="someone/pictures"), "someone/pictures", "train", streaming=streaming)
    assert [found.value for found in source.rows(Problems("data.path", "x"))] == [row]


def test_modelscope_out_of_reach_or_not_installed_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelScopeConfig(path="someone/talks")
    stand_in(monkeypatch, None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'posttrain-run\[modelscope\]'"):
        load_split(config, "someone/talks", "train")
    stand_in(monkeypatch, tmp_path)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    begin = time.monotonic()
    with pytest.raises(
        EnvironmentProblem, match=r"127\.0\.0\.1:9 cannot be reached(?s:.*)modelscope download --dataset"
    ):
        load_split(config, "someone/talks", "train")
    assert time.monotonic() - begin < 20
