"""Preemption notices: what is one, and what is not."""

from __future__ import annotations

import pytest

from andon_trainer.config import LineConfig


@pytest.mark.parametrize(
    "place",
    [
        "http://ada:secret@169.254.169.254/notice",
        "ftp://169.254.169.254/notice",
        "http:///notice",
        "http://169.254.169.254:port/notice",
        "http://169.254.169.254/a notice\r\nCookie: 1",
    ],
)
def test_a_url_that_can_not_be_asked_as_it_is_is_refused(place: str) -> None:
    with pytest.raises(ValueError, match="preemption_notice must be a file"):
        LineConfig(preemption_notice=place)
