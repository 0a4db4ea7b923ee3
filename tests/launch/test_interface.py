"""Where other machines find this one: the interface that has its address, on the way to them."""

from __future__ import annotations

import pytest

from runner.launch.machines import address_towards, interface_of, met_at


def test_loopback_is_found_and_a_strange_address_is_not() -> None:
    assert interface_of("127.0.0.1") == "lo" and met_at("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    assert interface_of("192.0.2.1") is None and met_at("") == {}


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1"), ("no.such.host.invalid", "")])
def test_the_way_to_a_host_begins_at_an_address_of_this_machine(host: str, address: str) -> None:
    assert address_towards(host) == address
