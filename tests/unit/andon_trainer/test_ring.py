"""Where a worker of a ring listens."""

from __future__ import annotations

import pytest

from andon_trainer.config import LineConfig
from andon_trainer.exchange.ring.exchange import place_of


@pytest.mark.parametrize(
    ("bind", "expected"),
    [
        ("", ("127.0.0.1", 0, "127.0.0.1")),
        ("0.0.0.0", ("0.0.0.0", 0, "127.0.0.1")),
        ("10.1.2.3:900", ("10.1.2.3", 900, "10.1.2.3")),
        ("[::1]:7", ("::1", 7, "::1")),
    ],
)
def test_a_worker_listens_where_the_line_is_reached_or_where_it_is_told(
    bind: str, expected: tuple[str, int, str]
) -> None:
    place = place_of(bind, "127.0.0.1:7070", 3.0)

    assert (place.bind, place.port, place.advertised) == expected


def test_a_worker_listens_on_loopback_if_no_way_leads_to_the_coordinator() -> None:
    assert place_of("", "no-port", 3.0).bind == "127.0.0.1"


@pytest.mark.parametrize("bind", ["host:port", "x/y", "host:70000"])
def test_a_place_that_is_none_is_refused_by_name(bind: str) -> None:
    with pytest.raises(ValueError, match="ANDON_RING_BIND"):
        LineConfig.read({"ANDON_RING_BIND": bind})


def test_only_a_worker_that_joins_no_ring_lacks_the_capability() -> None:
    assert "ring.v1" in LineConfig.read({}).capabilities
    assert "ring.v1" not in LineConfig.read({"ANDON_RING_BIND": "off"}).capabilities
