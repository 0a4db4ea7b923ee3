"""What has to be equal for first weights to be the same again."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from runner.model import model_folder
from runner.model.initial_weights import WeightsSource


def test_a_folder_is_its_config_and_on_request_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "b.safetensors").write_bytes(b"b")
    (tmp_path / "a.safetensors").write_bytes(b"a")
    (tmp_path / "README.md").write_text("not part of it")
    files = "".join(f"{n}.safetensors {sha256(n.encode()).hexdigest()}\n" for n in "ab")
    config = f"config.json {sha256(b'{}').hexdigest()}\n"
    found = WeightsSource(folder=tmp_path).identity(weights=True)
    assert found == {k: sha256(v.encode()).hexdigest() for k, v in {"config": config, "weights": files}.items()}
    assert WeightsSource(folder=tmp_path).identity(weights=False) == {"config": found["config"]}


def test_random_weights_in_the_shape_of_a_folder_do_not_read_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert WeightsSource(folder=tmp_path, drawn="from seed 1").identity(weights=True).keys() == {"config", "drawn"}
    assert WeightsSource(commit="c", drawn="from seed 1").identity(weights=True) == {
        "commit": "c",
        "drawn": "from seed 1",
    }


@given(st.lists(st.binary(max_size=4), min_size=1, max_size=3), st.data())
def test_every_byte_counts(contents: list[bytes], data: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{at}" for at in range(len(contents))]
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content)
        before = model_folder.files_digest(files)
        changed = data.draw(st.sampled_from(files))
        changed.write_bytes(changed.read_bytes() + b"x")
        assert model_folder.files_digest(files) != before
