"""Jitter: its bounds, and whose random numbers it takes."""

from __future__ import annotations

import random

from andon.host.jitter import jittered


def test_a_wait_is_jittered_and_the_scripts_generator_stays_where_it_is() -> None:
    before = random.getstate()

    waits = {jittered(2.0) for _ in range(20)}

    assert len(waits) > 1
    assert all(1.0 <= each <= 3.0 for each in waits)
    assert random.getstate() == before
