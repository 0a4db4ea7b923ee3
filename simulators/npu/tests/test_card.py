"""The simulated card behind torch_npu's own interface: arithmetic, strictness, memory, random numbers, schemas."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.timeout(600)  # the first test builds the simulator
SCHEMAS = HERE / "npu_schemas.json"


@pytest.fixture(scope="module")
def found(child: Any) -> dict[str, Any]:
    """What card.py finds, in one process; without the queue, a refusal comes from the line that made it."""
    return json.loads(child(HERE / "card.py", TASK_QUEUE_ENABLE="0").splitlines()[-1])


def test_it_is_the_npu_that_was_asked_for(found: dict[str, Any]) -> None:
    seen = found["identity"]
    assert (seen["accelerator"], seen["cards"], seen["name"]) == ("npu", 2, "Ascend910B2")
    assert seen["soc"] == 221, "torch_npu's number of an Ascend910B2"
    assert seen["memory_bytes"] == 1 << 30
    assert seen["found"] and seen["bf16"], "transformers sees an NPU, which has bfloat16"
    said = seen["described"]
    assert (said["device"], said["card"], said["cann"]) == ("npu_sim", "Ascend910B2", "8.5.0")


def test_its_kernels_give_the_processors_bits(found: dict[str, Any]) -> None:
    assert [name for name, equal in found["arithmetic"].items() if not equal] == []
    assert len(found["arithmetic"]) > 20


def test_torch_npus_own_gradients_and_its_choice_of_attention_agree_with_the_processor(found: dict[str, Any]) -> None:
    assert {name: gap for name, gap in found["gradients"].items() if gap > 2e-6} == {}


def test_transformers_own_npu_attention_agrees_with_eager_attention(found: dict[str, Any]) -> None:
    assert found["flash_attention"].keys() == {"whole", "padded"}
    assert max(gap for gaps in found["flash_attention"].values() for gap in gaps) < 1e-6


def test_a_mixture_of_experts_with_every_fused_operator_agrees_with_transformers_own(found: dict[str, Any]) -> None:
    assert max(found["experts"]["gaps"]) < 1e-6
    said = " ".join(found["experts"]["decided"])
    assert all(f"device.fused_ops.{name}: " in said for name in ("rms_norm", "rotary", "grouped_matmul"))


def test_it_is_strict_where_a_card_is(found: dict[str, Any]) -> None:
    seen = found["strictness"]
    assert seen.pop("a number of the host") == "accepted", "as on every accelerator"
    for name in ("sum with the host", "product with the host"):
        assert "Expected all tensors to be on the same device" in seen.pop(name)
    assert "found at least two devices, npu:0 and npu:1" in seen.pop("two cards")
    assert "not on cpu" in seen.pop("operator with the host")
    assert "two devices, npu:0 and npu:1" in seen.pop("operator with another card")
    assert "float16, bfloat16 and float32" in seen.pop("operator in float64")
    assert "above the diagonal" in seen.pop("mask the wrong way round")
    assert "does not know this operator" in seen.pop("an operator that is not simulated")
    assert seen == {}


def test_memory_is_counted_limited_and_given_back_by_the_real_allocator(found: dict[str, Any]) -> None:
    seen = found["memory"]
    assert 4 << 20 <= seen["held"] < (4 << 20) + 1024, "a million float32, and what the allocator rounds up"
    assert 8 << 20 <= seen["peak"] < (8 << 20) + 4096
    said = seen["said"]
    assert said["allocated_bytes"] == seen["held"] and said["peak_bytes"] == seen["peak"]
    assert said["reserved_bytes"] >= seen["peak"]
    assert seen["after"] == 0 and seen["free_is_less"] and seen["statistics"] > 50 and seen["summary"]
    assert seen["error"].startswith("OutOfMemoryError: NPU out of memory")
    assert seen["goes_on"] == 4.0


def test_random_numbers_repeat_from_a_state(found: dict[str, Any]) -> None:
    assert [name for name, good in found["randomness"].items() if not good] == []
    assert len(found["randomness"]) == 5


def test_streams_autocast_pinned_memory_and_a_second_card(found: dict[str, Any]) -> None:
    seen = found["around"]
    assert seen["ms"] and seen["pinned"] and seen["autocast"] == "torch.bfloat16"
    assert seen["other_card"] == ["npu:1", [2.0, 2.0, 2.0]]
    assert seen["deterministic"] == 2, "device.deterministic asks torch for it, as on a card"


def test_the_doctors_trial_finds_both_cards_good(found: dict[str, Any]) -> None:
    tried = [(record["device"], record["what"], record["good"]) for record in found["doctor"]]
    assert tried == [(card, what, True) for card in ("npu:0", "npu:1") for what in ("matmul", "attention")]


def test_the_schemas_are_those_of_the_snapshot(found: dict[str, Any]) -> None:
    assert json.loads(SCHEMAS.read_text()) == found["schemas"], "refresh it: python simulators/npu/tests/snapshot.py"


@pytest.mark.slow
def test_two_ranks_talk_over_hccl_and_train_as_one_copied_or_sharded(child: Any, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(child, HERE / "ranks.py", str(rank), str(tmp_path / "meeting")) for rank in range(2)]
        seen = json.loads(runs[0].result().splitlines()[-1])
        assert runs[1].result() == ""
    assert seen["collectives"] == {
        "sum": [3.0, 3.0],
        "mean": [1.5, 1.5],
        "max": [2.0, 2.0],
        "gathered": [1.0, 1.0, 2.0, 2.0],
        "listed": [1.0, 1.0, 2.0, 2.0],
        "scattered": [3.0],
        "exchanged": [1.0, 2.0],
        "broadcast": [2.0, 2.0],
        "int64": [3],
        "received": [2.0, 2.0],
        "host": [3.0],
    }
    assert seen["cards"] == [[0, 0], [1, 1]], "each rank takes the card of its number"
    assert seen["apart"].keys() == {"copied", "sharded"} and max(seen["apart"].values()) < 1e-5
    wrong = seen["refused"]
    assert "Double" in wrong["float64"] and "HCCL documents" in wrong["float64"]
    assert "Byte" in wrong["uint8"] and "BFloat16" in wrong["bf16 exchanged"]
    assert "contiguous" in wrong["not contiguous"]


@pytest.mark.slow
def test_ranks_without_a_card_and_lists_that_name_too_many_are_refused(child: Any) -> None:
    program = (
        "from npu_simulator.config import NpuSimConfig; c = NpuSimConfig(cards=2, memory_gib=1.0); c.enter()\n"
        "from runner.core.auto_choices import Decisions; from npu_simulator.device import NpuSim\n"
        "from runner.core.errors import EnvironmentProblem\n"
        "try: NpuSim(c, decide=Decisions())\n"
        "except EnvironmentProblem as error: print(error)"
    )
    three = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}
    assert "3 processes on this machine need one card each, but the driver shows 2" in child(program, **three)
    said = child(program, ASCEND_RT_VISIBLE_DEVICES="0,1,5")
    assert "ASCEND_RT_VISIBLE_DEVICES=0,1,5 lists 3 devices, but the driver shows 2" in said
    assert "unset ASCEND_RT_VISIBLE_DEVICES" in said
