"""What is shown when a run begins."""

from __future__ import annotations

import socket

import pytest

from andon_cli.follower import join_hint


@pytest.mark.parametrize(
    ("bind", "host"), [("0.0.0.0", socket.gethostname()), ("10.0.0.7", "10.0.0.7")]
)
def test_a_line_that_other_hosts_reach_says_how_they_join(bind: str, host: str) -> None:
    hint = join_hint(bind, "127.0.0.1:7070")

    assert hint == f"other hosts join with: andon run --join {host}:7070 SCRIPT"


@pytest.mark.parametrize("bind", ["127.0.0.1", "localhost", "::1"])
def test_a_line_on_loopback_says_nothing_of_other_hosts(bind: str) -> None:
    assert join_hint(bind, "127.0.0.1:7070") == ""
