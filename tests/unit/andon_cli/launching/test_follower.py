"""What is shown when a run begins."""

from __future__ import annotations

import pytest

from andon_cli.launching.follower import join_hint


@pytest.mark.parametrize("advertised", ["alpha:7070", "10.0.0.7:7070", "[fe80::1]:7070"])
def test_a_line_that_other_hosts_reach_says_how_they_join(advertised: str) -> None:
    hint = join_hint(advertised)

    assert hint == f"other hosts join with: andon run --join {advertised} SCRIPT"


@pytest.mark.parametrize("advertised", ["127.0.0.1:7070", "localhost:7070", "[::1]:7070", ""])
def test_a_line_on_loopback_says_nothing_of_other_hosts(advertised: str) -> None:
    assert join_hint(advertised) == ""
