"""Keepalive: both ends' pings fit each other, whatever the lease."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # compiled
from hypothesis import given
from hypothesis import strategies as st

from andon.host.keepalive import MIN_PING_S, Keepalive, Options, RingKeepalive
from andon.protocol.run_settings import Liveness
from andon_coordinator.app import server_options
from andon_reducer.transport.registration import CLIENT

leases = st.floats(0.1, 3600)


def number(options: Options, name: str) -> float:
    return dict(options)[f"grpc.{name}_ms"] / 1000


@given(leases)
def test_a_client_that_answers_no_ping_is_lost_after_a_lease(lease_s: float) -> None:
    options = server_options(Liveness(lease_s=lease_s))

    assert number(options, "keepalive_time") + number(
        options, "http2.ping_timeout"
    ) == pytest.approx(lease_s, abs=0.003)
    assert number(options, "keepalive_timeout") == number(options, "http2.ping_timeout")


@given(leases)
def test_no_client_of_ours_pings_more_often_than_a_server_allows(lease_s: float) -> None:
    pair = Keepalive.of(Liveness(lease_s=lease_s))

    allowed_s = number(pair.server_options(), "http2.min_ping_interval_without_data")
    for client in (pair, Keepalive(), CLIENT):
        assert number(client.client_options(), "keepalive_time") >= MIN_PING_S
    assert 2 * allowed_s == pair.least_s == MIN_PING_S


def test_a_server_allows_pings_without_calls_and_clients_do_without() -> None:
    pair = Keepalive()

    assert dict(pair.server_options())["grpc.keepalive_permit_without_calls"] == 1
    assert dict(pair.client_options())["grpc.keepalive_permit_without_calls"] == 0


@pytest.mark.parametrize("client_ping_s", [0.0, -1.0, 9.0])
def test_a_client_that_would_be_sent_away_can_not_be_made(client_ping_s: float) -> None:
    with pytest.raises(ValueError, match="ping"):
        Keepalive(client_ping_s=client_ping_s)


def test_a_ring_gives_up_a_link_later_than_the_coordinator_a_worker() -> None:
    for lease_s in (0.1, 3.0, 60.0):
        options = RingKeepalive.of(lease_s).client_options()
        assert number(options, "keepalive_time") >= max(3 * lease_s, MIN_PING_S) - 0.001


def test_grpc_knows_every_option_by_its_name() -> None:
    known = Path(cygrpc.__file__).read_bytes()
    pair, ring = Keepalive(), RingKeepalive(10.0)

    for options in (
        pair.server_options(),
        pair.client_options(),
        ring.server_options(),
        ring.client_options(),
    ):
        for name, _ in options:
            assert b"%s\0" % name.encode() in known, name
