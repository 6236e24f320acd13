"""A rank dies, freezes, fails or leaves: every other one raises, and names it.

The output of each test says how long after the fault that was; benchmarks/peer_faults.py measures.
"""

from __future__ import annotations

import sys

import pytest

from integration.andon_torch.rank_scripts import COLLECTIVES
from integration.andon_torch.rig import LEASE_S, Outcome, in_trouble

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

GONE = "is gone: its connection ended"
CASES = {
    **{("kill", place): GONE for place in (*COLLECTIVES, "send", "backward")},
    ("stop", "all_reduce"): "was not heard",
    ("raise", "backward"): "failed: KeyError: 'a mistake in the script'",
    ("end", "all_reduce"): "has ended its part while it is needed",
    ("end", "send"): "has ended its part while it is needed",
    ("halt", "backward"): "pulled the cord: enough",
    ("kill the service", "send"): "the coordinator at",  # The last: it serves all of them.
}
"""What the culprit does, in which call, and what the others are told."""
MARGIN_S = 20.0
"""How late a busy machine may be."""


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], list[Outcome]]:
    """What became of the ranks in each case."""
    return in_trouble(CASES)


@pytest.mark.parametrize(("act", "place"), CASES)
def test_every_other_rank_raises_and_names_the_culprit(
    outcomes: dict[tuple[str, str], list[Outcome]], act: str, place: str
) -> None:
    first, culprit, last = outcomes[act, place]

    for other in (first, last):
        result = other.get("result", other)
        assert CASES[act, place] in result["error"], result
        if act not in ("halt", "kill the service"):
            assert "rank 1 on " in result["error"]
        assert result["type"] == ("RuntimeError" if place == "backward" else "SessionEnded")
        sys.stdout.write(f"{act} in {place}: raised after {result['seconds']:.3f} s\n")
        assert result["seconds"] < (LEASE_S if act == "stop" else 0) + 1 + MARGIN_S
    # What was killed while it was stopped, or by itself, says nothing.
    assert culprit["exit"] == (-9 if act in ("kill", "stop") else 0)
