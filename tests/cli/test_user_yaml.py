"""What users write in YAML means what YAML 1.2 says: no time of day is a number, no word is true or false."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.cli.job_builder import compose_job
from runner.cli.user_yaml import load_yaml
from runner.core.errors import SpecError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[(word, word) for word in ("8:00:00", "08:00:00", "1:30.5", "on", "Off", "yes", "No", "y")],
        *[(word, word) for word in ("010", "007", "0o17", "0b1", "1_000", "2026-01-02")],
        *[("1e-4", 1e-4), ("1E5", 1e5), (".5", 0.5), ("12.", 12.0), ("-1", -1), ("+3", 3), ("0", 0), ("0x1F", 31)],
        *[
            ("true", True),
            ("FALSE", False),
            ("null", None),
            ("~", None),
            ("", None),
            ("'8'", "8"),
            (".inf", float("inf")),
        ],
    ],
)
def test_a_plain_value_is_that_of_yaml_1_2(text: str, value: Any) -> None:
    found = load_yaml(f"key: {text}\nlist: [{text or '~'}]")
    assert found["key"] == value == found["list"][0] and type(found["key"]) is type(value)


def test_an_empty_file_has_no_options_and_other_content_is_refused() -> None:
    assert load_yaml("# nothing\n") == {}
    with pytest.raises(ValueError, match=r"expected options, e\.g\. steps: 100; got 'steps'"):
        load_yaml("steps")
    with pytest.raises(yaml.YAMLError, match="duplicate key a"):
        load_yaml("a: 1\na: 2")


def test_recipes_and_specs_are_read_so(workdir: Path) -> None:
    (workdir / "night.yaml").write_text(
        "defaults:\n  - sft_demo\n  - override /launch: slurm\nlaunch: {time: 8:00:00}\nname: on\n"
    )
    job = compose_job(["+recipe=night.yaml"])
    assert job.spec.launch.time == "8:00:00" and job.spec.name == "on"  # type: ignore[attr-defined]
    (workdir / "wrong.yaml").write_text("defaults: [sft_demo]\nstrict: no\nsteps: 010\n")
    with pytest.raises(SpecError) as caught:
        compose_job(["+recipe=wrong.yaml"])
    assert {p.key: p.message for p in caught.value.problems} == {
        "steps": "expected an integer at least 1, got '010'",
        "strict": "expected true or false, got 'no'",
    }
