"""Places: each worker has its own, and gets them back."""

from __future__ import annotations

import pytest

from andon.protocol.reasons import Reason
from andon_reducer.transport.places import Places
from andon_reducer.transport.status import Refused


def test_a_worker_beyond_its_places_is_refused_and_others_are_not() -> None:
    places = Places(1, "streams")

    with places.taken("run", 0):
        with (
            pytest.raises(Refused, match="worker 0 has 1 streams") as caught,
            places.taken("run", 0),
        ):
            pass
        with places.taken("run", 1), places.taken("other", 0):
            pass

    assert caught.value.refusal.reason is Reason.TOO_MANY_STREAMS


def test_a_place_is_given_back() -> None:
    places = Places(1, "streams")

    for _ in range(3):
        with places.taken("run", 0):
            pass
