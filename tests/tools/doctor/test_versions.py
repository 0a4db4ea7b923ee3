"""The table of versions: whole, in agreement with itself, and what the docs and constraints files say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from packaging.version import Version

from runner.sampler.vllm.versions import NEWEST, OLDEST
from runner.tools.doctor.versions import (
    CANN,
    NEWEST_VLLM,
    OLDEST_TORCH,
    OLDEST_VLLM,
    PYTHON,
    SAFE_VLLM,
    SETS,
    cann_for,
    release,
    same_version,
    set_of_vllm_ascend,
    torch_npu_for,
    vllm_for,
)

ROOT = Path(__file__).resolve().parents[3]


def test_docs_and_constraints_are_what_the_table_says() -> None:
    spec = importlib.util.spec_from_file_location("make_versions", ROOT / "docs" / "make_versions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = {path: path.read_text(encoding="utf-8") for path in (ROOT / "constraints").glob("npu-*.txt")}
    written[module.PAGE] = module.PAGE.read_text(encoding="utf-8")
    assert written == module.files(), "run: make generate"


@pytest.mark.parametrize("one", SETS, ids=lambda one: one.name)
def test_a_set_agrees_with_the_rules(one) -> None:
    assert release(one.torch_npu) == release(one.torch)
    if one.cann:
        assert any(same_version(one.cann, cann) for cann in cann_for(one.torch_npu)), "the two tables contradict"
    if one.vllm_ascend:
        assert release(one.vllm_ascend) == release(one.vllm)
        assert set_of_vllm_ascend(one.vllm_ascend) is one
    assert one.torch_npu in PYTHON or release(one.torch_npu).rpartition(".")[0] in PYTHON


def test_the_line_of_the_guides_is_there() -> None:
    guides = next(one for one in SETS if one.name == "guides")
    assert guides.pins() == {"torch": "2.7.1", "torch_npu": "2.7.1", "vllm": "0.11.0", "vllm-ascend": "0.11.0rc3"}
    assert guides.cann == "8.3.RC1" and not guides.usable
    [beside] = [one for one in SETS if one.cann == guides.cann and one.usable]
    assert beside.torch == guides.torch, "a job beside the guides' server has its torch"


def test_the_first_torch_npu_of_a_cann_is_of_the_oldest_torch_that_this_project_takes_if_it_has_one() -> None:
    for cann, built in CANN.items():
        usable = [npu for npu in built if Version(npu) >= OLDEST_TORCH]
        assert not usable or built[0] in usable, cann


def test_spellings() -> None:
    assert (
        same_version("8.3.RC1", "8.3.rc1") and same_version("2.10", "2.10.0") and same_version("2.13.0+cpu", "2.13.0")
    )
    assert (
        not same_version("2.10.0", "2.10.0.post4")
        and not same_version("9.0.T521", "9.0.0")
        and same_version("9.0.T521", "9.0.t521")
    )
    assert (release("2.10.0.post4"), release("2.13.0+cpu"), release("0.11.0rc3")) == ("2.10.0", "2.13.0", "0.11.0")
    assert (cann_for("2.13.0"), torch_npu_for("7.0.0")) == ([], ()), "unknown is unknown"
    assert set_of_vllm_ascend("0.23.0.post1").name == "vllm-ascend-0.23"


def test_the_doctor_and_the_sampler_know_the_same_vllm() -> None:
    assert (OLDEST_VLLM, NEWEST_VLLM) == (OLDEST, NEWEST) and SAFE_VLLM < OLDEST_VLLM
    assert vllm_for("2.13.0+cpu") == "0.32.0" and vllm_for("2.12.0") is None
