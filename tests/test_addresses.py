"""Which addresses a URL that comes from data may lead to, registry row by registry row, and that names are vetted too."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from outbox.http import Address, Deadline, Network, TransportFailed, is_public, parse_origin, permitting

PUBLIC = [
    "1.1.1.1", "8.8.8.8", "100.63.255.255", "100.128.0.1", "172.15.255.255", "172.32.0.1", "192.0.1.1", "198.17.0.1",
    "198.20.0.1", "223.255.255.255", "2606:4700::1111", "2a00::1", "2001:4860:4860::8888", "::ffff:8.8.8.8",
    "64:ff9b::808:808", "2002:808:808::1", "2a00::5efe:808:808",
]  # fmt: skip
FORBIDDEN = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.255.0.1",
    "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.0.170", "192.0.2.1", "192.88.99.1",
    "192.168.0.1", "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255",
    "240.0.0.1", "255.255.255.255",
    "::", "::1", "::7f00:1", "::808:808", "fe80::1", "fe80::1%1", "fec0::1", "fc00::1", "fd12::1", "ff02::1", "100::1",
    "2001::1", "2001:2::1", "2001:10::1", "2001:20::1", "2001:db8::1", "3fff::1", "5f00::1", "64:ff9b:1::808:808",
    "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1",
    "2002:7f00:1::1", "2002:a00:1::1", "2002:a9fe:a9fe::", "2a00::5efe:a00:1", "2a00::200:5efe:7f00:1",
    "::ffff:0:7f00:1", "4000::1",
]  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", FORBIDDEN)
def test_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


def test_never_more_than_python_itself_lets_through() -> None:
    """But for what leads elsewhere, where its word is about the wrapping."""
    for address in map(ipaddress.ip_address, FORBIDDEN + PUBLIC):
        if is_public(address) and ":" not in str(address):
            assert address.is_global


def resolving(*answers: Sequence[str]) -> Any:
    """A name server that says one thing after another."""
    left = list(answers)

    def resolve(host: str, port: int, seconds: float) -> Sequence[Address]:
        found = left.pop(0) if len(left) > 1 else left[0]
        return [Address(socket.AF_INET, (address, port)) for address in found]

    return resolve


def test_a_name_is_connected_to_where_it_was_vetted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that says something else the second time is not asked a second time."""
    asked: list[str] = []

    def connect(address: Address, seconds: float) -> Any:
        asked.append(address.sockaddr[0])
        raise ConnectionRefusedError

    monkeypatch.setattr("outbox.http._connect_one", connect)
    network = Network(permitting(is_public, resolving(["127.0.0.1", "8.8.8.8", "10.0.0.1"], ["127.0.0.1"])))
    with pytest.raises(ConnectionRefusedError):
        network.connect(parse_origin("https://name.test"), Deadline(5))
    assert asked == ["8.8.8.8"]
    with pytest.raises(PermissionError):
        network.connect(parse_origin("https://name.test"), Deadline(5))
    assert asked == ["8.8.8.8"]
    assert TransportFailed(unsent=True, kind="").code == "network.unsent"
