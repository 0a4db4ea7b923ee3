"""A Ray cluster that is not there is found out in seconds, before anything else is done; Ray is not needed for that."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from runner.cli.job_builder import compose_job
from runner.core.errors import EnvironmentProblem
from runner.launch import local
from runner.launch.ray import driver_connection
from runner.launch.ray.driver_connection import check_reachable
from tests.ports import free_port


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An address of this machine at which nobody listens; no cluster is on record."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return f"127.0.0.1:{free_port()}"


def test_auto_is_what_ray_takes_it_for(free: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_reachable("auto")  # nothing is on record: Ray looks around
    record = tmp_path / "ray" / "ray_current_cluster"
    record.parent.mkdir()
    record.write_text(f"{free}\n")
    with pytest.raises(EnvironmentProblem, match=rf"auto \({free}, from {record}\): no server listens there"):
        check_reachable("auto")
    monkeypatch.setenv("RAY_ADDRESS", free)
    with pytest.raises(EnvironmentProblem, match=rf"auto \({free}, from RAY_ADDRESS\)"):
        check_reachable("auto")


def test_who_listens_is_let_be(free: str) -> None:
    with socket.create_server(("127.0.0.1", int(free.rpartition(":")[2]))):
        check_reachable(free)
    with pytest.raises(EnvironmentProblem, match=f"Ray at {free}: no server listens there"):
        check_reachable(free)


def test_a_job_is_refused_before_a_recipe_is_run_for_it(
    free: str, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = compose_job(["+recipe=grpo_demo", "launch=ray", f"launch.address={free}", "device=cpu"]).spec
    with monkeypatch.context() as without:
        without.setattr(driver_connection.importlib.util, "find_spec", lambda name: None if name == "ray" else object())
        with pytest.raises(EnvironmentProblem, match=r"launch=ray needs the package ray\n  pip install"):
            local.prepare_spec(spec)
    monkeypatch.setattr(driver_connection.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(driver_connection, "CONNECT_TIMEOUT_S", 250.0)
    begin = time.monotonic()
    with pytest.raises(EnvironmentProblem, match="no server listens"):
        local.prepare_spec(spec)
    assert time.monotonic() - begin < 200
    assert not (workdir / "outputs").exists()
