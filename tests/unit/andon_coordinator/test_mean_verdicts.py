"""Whether a mean that came was added wrong by a reducer, or nobody can say who is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from andon.protocol.attestations import ElementApart, MeanCheck
from andon.protocol.grains import Node
from andon.protocol.halts import HaltReason
from andon.protocol.records import PositionRange
from andon_coordinator.core.mean_verdicts import judge_means, sums_of
from andon_coordinator.core.verification import in_mean_check

NODES = {Node(0, 2): b"a" * 16, Node(2, 4): b"b" * 16, Node(4, 6): b"c" * 16}
SUMS = sums_of([(PositionRange(at, at + 2),) for at in (0, 2, 4)], [(2, 3), (4, 5), (0, 1)], 6)
RIGHT = MeanCheck(expected=b"m" * 16, came=b"m" * 16, relayed=tuple(NODES.values()))
WRONG = replace(RIGHT, came=b"x" * 16, apart=ElementApart(0, 7, 1.0, 2.0))
ODD = replace(WRONG, expected=b"o" * 16)
CHANGED = replace(WRONG, relayed=(b"a" * 16,) * 3)


def test_a_node_is_relayed_unless_everybody_else_verifies_it() -> None:
    shares = [(PositionRange(0, 2),), (PositionRange(2, 6),)]

    assert [each.node for each in SUMS if each.relayed] == [*NODES]
    assert [each.relayed for each in sums_of(shares, [(2, 3, 4), (0, 1)], 6)] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("checks", "convicts"),
    [
        ([RIGHT] * 3, None),
        ([WRONG] * 3, True),
        ([WRONG, WRONG, CHANGED], True),
        ([WRONG, CHANGED, CHANGED], False),
        ([WRONG, RIGHT, RIGHT], False),
        ([WRONG, WRONG, RIGHT], False),
        ([WRONG, WRONG, ODD], False),
        ([RIGHT, RIGHT, replace(RIGHT, relayed=CHANGED.relayed)], False),
    ],
)
def test_a_reducer_is_convicted_by_two_means_of_the_sums_that_were_attested(
    checks: list[MeanCheck], *, convicts: bool | None
) -> None:
    found = judge_means(dict(enumerate(checks)), SUMS, NODES)

    assert (None if found is None else found.convicts) is convicts
    assert found is None or bool(found.why) is not convicts


@pytest.mark.parametrize(
    "check",
    [
        None,
        replace(RIGHT, relayed=()),
        replace(RIGHT, apart=WRONG.apart),
        replace(WRONG, apart=None),
    ],
)
def test_a_check_that_was_not_asked_for_so_halts_the_line(check: MeanCheck | None) -> None:
    found = in_mean_check(2, check, SUMS)

    assert found is not None
    assert (found.reason, found.worker) == (HaltReason.PROTOCOL_VIOLATION, 2)
    assert in_mean_check(2, RIGHT, SUMS) is in_mean_check(2, check, ()) is None
