"""Whose weights are not those of the others, in a round with workers that have just learnt."""

from __future__ import annotations

import pytest

from andon.protocol.records import Key, PositionRange
from andon.protocol.rounds import RoundTerms
from andon_coordinator.core.agreement import apart
from andon_coordinator.core.events import Ready
from andon_coordinator.core.round import StepRound

HEAD, KEY = Key(7, 1), Key(7, 2)


def complete(digests: str) -> StepRound:
    """A round whose workers report these digests, one letter each; large ones hash their base."""
    roster = tuple(range(len(digests)))
    terms = RoundTerms(
        key=KEY, parent=HEAD, step=2, attempt=0, epoch=0, batch=PositionRange(0, 4), roster=roster
    )
    round_ = StepRound(terms=terms, streams=roster, shares=((),) * len(roster), opened_at=0.0)
    for worker, letter in enumerate(digests):
        ready = Ready(
            key=KEY,
            loss_sum=1.0,
            weight=1.0,
            samples=1,
            total_weight=float(len(digests)),
            world_size=len(digests),
            digest=letter.encode().replace(b"-", b""),
            digest_head=HEAD,
            digest_base_hashed=letter.isupper(),
        )
        round_.take(worker, ready)
    return round_


@pytest.mark.parametrize(
    ("digests", "learnt", "odd"),
    [
        ("aab", {2}, [2]),
        ("abb", {1, 2}, [1, 2]),
        ("aaa", {2}, []),
        ("abb", {2}, []),  # Those that did not learn differ, too.
        ("ab", {0, 1}, []),  # Nobody is there to go by.
        ("aB", {1}, []),  # Of two kinds, which can't be compared.
        ("aABAb", {2, 4}, [2, 4]),
        ("-b", {1}, []),
    ],
)
def test_only_workers_that_have_just_learnt_are_told_apart_from_others_that_agree(
    digests: str, learnt: set[int], odd: list[int]
) -> None:
    assert sorted(apart(complete(digests), learnt)) == odd
