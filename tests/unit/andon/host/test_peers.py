"""Peers: who counts as one, and how many places each may have."""

from __future__ import annotations

import pytest

from andon.host.peers import Places, peer_of


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("fd00::1", "fd00::2", True),
        ("fd00::1", "fd00:0:0:1::1", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("nobody", "nobody", True),
    ],
)
def test_a_peer_is_an_address_or_a_network_of_ipv6(one: str, other: str, *, same: bool) -> None:
    assert (peer_of(one) == peer_of(other)) is same


def test_no_host_takes_the_places_of_the_others() -> None:
    places = Places(4, 2)

    taken = [places.take(host) for host in ("10.0.0.1", "10.0.0.1", "10.0.0.1", "10.0.0.2")]

    assert taken == [True, True, False, True]
    places.leave("10.0.0.1")
    assert places.take("10.0.0.1")
    assert places.take("10.0.0.3")
    assert not places.take("10.0.0.4"), "all four are taken"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_this_host_may_have_all_places(host: str) -> None:
    places = Places(3, 1)

    assert [places.take(host) for _ in range(4)] == [True, True, True, False]
