"""Where other machines find this one: the interface that has its address, on the way to them."""

from __future__ import annotations

import pytest

from runner.launch.multi_node import address_towards, gloo_interface, interface_of


def test_loopback_is_found_and_a_strange_address_is_not() -> None:
    assert interface_of("127.0.0.1") == "lo" and gloo_interface("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    assert interface_of("192.0.2.1") is None and gloo_interface("") == {}


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1"), ("no.such.host.invalid", "")])
def test_the_way_to_a_host_begins_at_an_address_of_this_machine(host: str, address: str) -> None:
    assert address_towards(host) == address
