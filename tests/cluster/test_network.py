"""The network card of an address, and what libraries that choose a card themselves are told."""

from __future__ import annotations

import socket

import pytest

from headway.cluster.on_ray import network_interface
from headway.cluster.on_ray.network_interface import card_of, network_environment


def test_the_card_of_an_address_is_found() -> None:
    names = [name for _, name in socket.if_nameindex()]
    assert card_of("127.0.0.1") in names


@pytest.mark.parametrize("address", ["192.0.2.7", "2001:db8::7", "a-name"])
def test_an_address_that_is_no_cards_has_none(address: str) -> None:
    assert card_of(address) is None


def test_a_card_of_ipv6_is_found(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "if_inet6"
    table.write_text("20010db8000000000000000000000007 02 40 00 80     eth3\n")
    monkeypatch.setattr(network_interface, "INTERFACES_V6", table)
    assert card_of("2001:db8::7") == "eth3"


def test_gloo_and_nccl_are_told_the_card_unless_the_user_said_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_interface, "card_of", lambda host: "eth0")
    assert network_environment("10.0.0.2", {}) == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
    assert network_environment("10.0.0.2", {"NCCL_SOCKET_IFNAME": "ib0"}) == {"GLOO_SOCKET_IFNAME": "eth0"}


def test_one_machine_alone_is_left_to_its_own_choice() -> None:
    assert network_environment("127.0.0.1", {}) == network_environment("192.0.2.7", {}) == {}
