"""Which lane stands still, judged by what both ends count; and for how long it is not trusted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from andon.protocol.messages import LaneReport
from andon_trainer.exchange.star.lane_watch import LaneCounts, LaneStillness, LaneTrust, LaneWay

HERE = LaneCounts(sent_bytes=1000, received_bytes=500, reading=True)
"""A worker whose gradients are under way, and who has had half of what the reducer sent."""
UP_IS_STUCK = LaneReport(received_bytes=400, reading=True, sent_bytes=500)
DOWN_IS_STUCK = LaneReport(received_bytes=1000, reading=True, sent_bytes=900)
ENOUGH = 11


def judged(*reports: LaneReport | None, here: LaneCounts = HERE) -> LaneWay | None:
    """What is found after these answers; None is one that did not come."""
    stillness, found = LaneStillness(), None
    for report in reports:
        if report is None:
            stillness.forget()
        else:
            found = found or stillness.judge(here, report, here)
    return found


@pytest.mark.parametrize(
    ("report", "way"), [(UP_IS_STUCK, LaneWay.UP), (DOWN_IS_STUCK, LaneWay.DOWN)]
)
def test_a_lane_that_stood_still_between_eleven_answers_is_given_up(
    report: LaneReport, way: LaneWay
) -> None:
    assert judged(*[report] * (ENOUGH - 1)) is None
    assert judged(*[report] * ENOUGH) is way


def test_a_byte_between_two_answers_begins_the_count_anew() -> None:
    slow = [replace(UP_IS_STUCK, received_bytes=400 + each // 5) for each in range(200)]

    assert judged(*slow) is None


def test_a_receiver_that_holds_back_is_no_fault_of_the_lane() -> None:
    full = replace(UP_IS_STUCK, reading=False)

    assert judged(*[full] * 100) is None
    assert judged(*[UP_IS_STUCK] * 10, full, *[UP_IS_STUCK] * 10) is None
    assert judged(*[DOWN_IS_STUCK] * 100, here=replace(HERE, reading=False)) is None


def test_an_end_that_does_not_answer_begins_the_count_anew() -> None:
    assert judged(*[UP_IS_STUCK] * 10, None, *[UP_IS_STUCK] * 10) is None


def test_lanes_with_nothing_under_way_may_be_still_for_ever() -> None:
    idle = LaneReport(received_bytes=1000, reading=True, sent_bytes=500)

    assert judged(*[idle] * 1000) is None
    # What was begun right now was not under way at the answer before.
    assert judged(*[idle] * 100, *[UP_IS_STUCK] * 10) is None


def test_a_lane_that_opens_and_stands_still_again_is_tried_less_and_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1e6
    monkeypatch.setattr("andon_trainer.exchange.star.lane_watch.time.monotonic", lambda: now)
    trust, pauses = LaneTrust(), []
    for _ in range(8):
        trust.opened()
        trust.stood_still(LaneWay.DOWN, 10.0)
        began = now
        while not trust.may_try:
            now += 30.0
        pauses.append(now - began)

    assert pauses == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert "receives stood still for 10 s" in trust.refused
