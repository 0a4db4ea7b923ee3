"""Free ports, on machines with many or few ephemeral ports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ports


@pytest.mark.parametrize(("given", "highest"), [("32768\t60999\n", 32_767), ("1024\t65535\n", 65_535)])
def test_a_free_port_is_below_the_ephemeral_ones_if_there_are_any(
    given: str, highest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "RANGE", tmp_path / "range")
    (tmp_path / "range").write_text(given)
    found = {ports.free_port() for _ in range(50)}
    assert len(found) == 50 and min(found) >= ports.LOWEST and max(found) <= highest
