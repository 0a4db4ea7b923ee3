"""What layers recompute, and compiled layers, in pieces and in slices against the single process."""

from __future__ import annotations

from typing import Any

import pytest

from runner.core.auto_choices import Decisions
from runner.model import checkpointing_and_compile
from tests.parallelism import test_fsdp as pieces
from tests.parallelism import test_tensor_parallel as slices

SLOW = pytest.mark.slow
WAYS = ["selective", pytest.param(2, marks=SLOW)]
BOTH = pytest.mark.parametrize("adapter", [pytest.param(False, marks=SLOW), True], ids=["full", "lora"])


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("way", WAYS)
def test_in_pieces(way: int | str, adapter: bool) -> None:
    pieces.compare((1, 2), lambda: pieces.made("qwen3", adapter, gradient_checkpointing=way))


@SLOW
@BOTH
@pytest.mark.parametrize("way", WAYS)
def test_in_slices(way: int | str, adapter: bool) -> None:
    slices.compare((1, 1, 2), lambda: slices.made("qwen3", adapter, gradient_checkpointing=way))


@SLOW
def test_in_slices_of_pieces() -> None:
    slices.compare((1, 2, 2), lambda: slices.made("qwen3", True, gradient_checkpointing="selective"))


@SLOW
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # see test_compiled
@pytest.mark.parametrize("way", [False, True, "selective"])
def test_compiled_layers_in_pieces(way: bool | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced without a break and differentiated on each rank; two ranks that also write code take minutes."""
    monkeypatch.setattr(
        checkpointing_and_compile, "OPTIONS", {"dynamic": True, "backend": "aot_eager", "fullgraph": True}
    )
    monkeypatch.setattr(pieces, "sharded", _compiled(pieces.sharded))
    monkeypatch.setattr("tests.parallelism.forked.TIMEOUT_S", 800.0)
    pieces.compare((1, 2), lambda: pieces.made("qwen3", True, gradient_checkpointing=way))


def _compiled(sharded: Any) -> Any:
    def then(*arguments: Any) -> Any:
        model = sharded(*arguments)
        model.compile(Decisions(strict=True))
        assert model._compiled is not None
        return model

    return then
