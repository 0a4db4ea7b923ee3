from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.core.errors import EnvironmentProblem
from runner.core.rank_info import VARIABLES, RankInfo


def test_a_process_without_the_variables_is_alone() -> None:
    assert RankInfo.from_environment({"HOME": "/root"}) == RankInfo(0, 1, 0, 1)
    assert RankInfo().is_rank0


def test_a_machine_that_is_alone_in_its_batch_job_is_no_rank() -> None:
    assert RankInfo.from_environment({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "here"}) == RankInfo()


@given(st.data())
def test_a_place_is_read_from_the_variables_it_names(data: st.DataObject) -> None:
    local_size = data.draw(st.integers(1, 8))
    nodes = data.draw(st.integers(1, 4))
    node, local_rank = data.draw(st.integers(0, nodes - 1)), data.draw(st.integers(0, local_size - 1))
    place = RankInfo(node * local_size + local_rank, nodes * local_size, local_rank, local_size)
    assert RankInfo.from_environment(place.to_environment()) == place
    assert place.node_rank == node
    assert place.is_rank0 == (place.rank == 0)


@pytest.mark.parametrize("missing", VARIABLES)
def test_some_of_the_variables_are_too_few(missing: str) -> None:
    found = RankInfo(1, 2, 1, 2).to_environment()
    del found[missing]
    with pytest.raises(EnvironmentProblem, match=f"{missing} not: a rank needs all four"):
        RankInfo.from_environment(found)


@pytest.mark.parametrize("numbers", [(2, 2, 0, 1), (-1, 2, 0, 1), (0, 2, 1, 2), (0, 1, 0, 2), (1, 2, 1, 1)])
def test_numbers_that_are_no_place_are_refused(numbers: tuple[int, int, int, int]) -> None:
    with pytest.raises(EnvironmentProblem, match="not a valid rank"):
        RankInfo(*numbers)


def test_a_word_is_no_number() -> None:
    with pytest.raises(EnvironmentProblem, match="expected integers"):
        RankInfo.from_environment(RankInfo(1, 2, 1, 2).to_environment() | {"RANK": "first"})


def test_it_says_where_it_stands() -> None:
    assert str(RankInfo(2, 4, 0, 2)) == "rank 2 of 4"
