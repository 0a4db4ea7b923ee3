"""npu-smi's outputs of five products, read by header."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner.device.ascend import generation, soc_name
from runner.device.npu_smi import NpuChip, parse_info, parse_mapping, parse_records, parse_topology

FIXTURES = Path(__file__).with_name("fixtures")


def text(name: str, command: str = "info") -> str:
    return (FIXTURES / name / "npu-smi" / f"{command}.txt").read_text()


def test_a2_has_one_chip_per_card() -> None:
    info = parse_info(text("a2"))
    assert (info.version, len(info.chips), info.processes) == ("25.3.rc1", 4, ())
    assert info.chips[2] == NpuChip(
        card=2,
        chip=0,
        name="910B3",
        health="OK",
        bus="0000:C2:00.0",
        power_w=90.7,
        temperature_c=39,
        utilization_percent=0,
        memory_used_mb=3003,
        memory_total_mb=65536,
    )


def test_a3_has_two_chips_per_card_and_the_second_no_power() -> None:
    info = parse_info(text("a3"))
    assert [(c.card, c.chip, c.physical) for c in info.chips] == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]
    assert [c.power_w for c in info.chips] == [171.2, None, 165.5, None]
    assert info.chips[0].memory_used_mb == 41022, "a slash without a blank before it"
    assert [(p.card, p.chip, p.pid, p.name, p.memory_mb) for p in info.processes] == [
        (0, 0, 40112, "python", 37811),
        (0, 1, 40113, "", 37790),
    ]


def test_310p_has_no_hbm_and_says_no_power() -> None:
    info = parse_info(text("310p"))
    assert [(c.card, c.chip, c.physical, c.power_w) for c in info.chips] == [(4, 0, 0, None), (4, 1, 1, None)]
    assert [(c.memory_used_mb, c.memory_total_mb) for c in info.chips] == [(1511, 44280), (1498, 43693)]


def test_the_first_generation_has_both_memories() -> None:
    chips = parse_info(text("first")).chips
    assert [(c.name, c.memory_used_mb, c.memory_total_mb) for c in chips] == [("910B", 1, 32768)] * 2


def test_950_has_cells_of_its_own() -> None:
    info = parse_info(text("950"))
    assert [(c.card, c.chip, c.name, c.utilization_percent) for c in info.chips] == [
        (0, 0, "Ascend950PR", 3),
        (1, 0, "Ascend950PR", 0),
    ]
    assert info.chips[0].memory_total_mb == 131072
    assert [(p.card, p.pid, p.name, p.memory_mb) for p in info.processes] == [(0, 5120, "pytest", 301)]


@pytest.mark.parametrize("name", ["a2", "a3", "310p", "first", "950"])
def test_other_widths_of_columns_change_nothing(name: str) -> None:
    wide = re.sub(r"(?<=\S) {2,}(?=\S)", lambda gap: gap.group() + "     ", text(name))
    narrow = "\n".join(re.sub(r" {2,}", "  ", line) for line in text(name).splitlines())
    assert parse_info(wide) == parse_info(narrow) == parse_info(text(name))


def test_a_failure_is_an_error_with_its_number() -> None:
    with pytest.raises(ValueError, match="-8005"):
        parse_info(text("unreachable"))


@pytest.mark.parametrize("other", ["", "no such thing", "| a | b |\n| c | d |"])
def test_another_text_is_an_error(other: str) -> None:
    for parse in (parse_info, parse_mapping, parse_topology):
        with pytest.raises(ValueError, match="npu-smi info"):
            parse(other)


def test_the_mapping_leaves_out_management_units() -> None:
    assert [(p.card, p.chip, p.logical, p.physical) for p in parse_mapping(text("a3", "info_-m"))] == [
        (0, 0, 0, 0),
        (0, 1, 1, 1),
        (1, 0, 2, 2),
        (1, 1, 3, 3),
    ]
    assert [(p.card, p.logical, p.name) for p in parse_mapping(text("950", "info_-m"))] == [
        (0, 0, "Ascend950PR"),
        (1, 1, "Ascend950PR"),
    ]
    assert {p.name for p in parse_mapping(text("a2", "info_-m"))} == {"Ascend 910B3"}


@pytest.mark.parametrize("name", ["a2", "a3"])
def test_the_topology_is_a_whole_matrix(name: str) -> None:
    links = parse_topology(text(name, "info_-t_topo"))
    assert len(links) == 12 and all(links[a, b] == links[b, a] for a, b in links)
    expected = {"a2": {"HCCS"}, "a3": {"SIO", "HCCS_SW"}}
    assert set(links.values()) == expected[name], "CPU affinity and the legend are no links"


def test_records() -> None:
    records = parse_records(text("a2", "info_-l"))
    assert [record.get("npu id") for record in records] == ["0", "1", "2", "3"]
    assert records[0]["total count"] == "4"


@pytest.mark.parametrize(
    ("name", "command", "soc", "kind"),
    [
        ("a2", "info_-t_board_-i_0_-c_0", "Ascend910B3", "A2"),
        ("a3", "info_-t_board_-i_0_-c_0", "Ascend910_9392", "A3"),
        ("310p", "info_-t_board_-i_4_-c_0", "Ascend310P3", "310P"),
        ("first", "info_-t_board_-i_0_-c_0", "Ascend910B", "first"),
        ("950", "info_-t_board_-i_0", "Ascend950PR_9579", "950"),
    ],
)
def test_the_name_of_the_soc(name: str, command: str, soc: str, kind: str) -> None:
    [record] = parse_records(text(name, command))
    assert soc_name(record) == soc and generation(soc) == kind


@pytest.mark.parametrize(
    ("kind", "names"),
    {
        "A2": ["910b1", "910B2", "910b2c", "910B3", "910b4", "910b4-1", "Ascend 910B3"],
        "A3": ["Ascend910", "9391", "9381", "9372", "9392", "9382", "9362", "ascend910_9363", "910c"],
        "first": ["910B", "910A", "Ascend910ProB", "Ascend910PremiumA"],
        "310P": ["310p1", "310P3", "Ascend310P5", "310p7"],
        "310B": ["Ascend310B4"],
        "950": ["Ascend950PR", "Ascend950DT_9579"],
        "unknown": ["", "H100", "920"],
    }.items(),
)
def test_generations(kind: str, names: list[str]) -> None:
    assert {name: generation(name) for name in names} == dict.fromkeys(names, kind)
