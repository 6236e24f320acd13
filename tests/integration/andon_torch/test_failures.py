"""A rank dies, freezes, fails or leaves: every other one raises, and names it."""

from __future__ import annotations

import pytest

from integration.andon_torch.forked import LEASE_S
from integration.andon_torch.rig import Outcome, run_all

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

CASES = {
    ("kill", "all_reduce"): "is gone: its connection ended",
    ("kill", "send"): "is gone: its connection ended",
    ("kill", "backward"): "is gone: its connection ended",
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
    specs = [
        {
            "scenario": "trouble",
            "ranks": 3,
            "backend": "andon",
            "arguments": {"act": act, "place": place},
        }
        for act, place in CASES
    ]
    return dict(zip(CASES, run_all(*specs), strict=True))


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
        if "at" in (began := culprit.get("result", {})):
            assert result["at"] - began["at"] < LEASE_S + 1 + MARGIN_S
    # What was killed while it was stopped, or by itself, says nothing.
    assert culprit["exit"] == (-9 if act in ("kill", "stop") else 0)
