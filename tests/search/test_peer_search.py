"""Every order of events in small groups, and what is found once a rule is taken out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from andon.protocol.peer_calls import CallKind
from andon_trainer.core import collectives
from search.peer_mutants import PEER_MUTANTS, PeerMutant
from search.peer_world import PeerWorld, Story, small_limits, stories_of, walks_of

_STATES = int(os.environ.get("ANDON_SEARCH_STATES", "1500"))

pytestmark = pytest.mark.timeout(600 + _STATES // 50)

SUM, BROADCAST, GATHER = CallKind.ALL_REDUCE, CallKind.BROADCAST, CallKind.GATHER
BARRIER, SEND = CallKind.BARRIER, CallKind.SEND


def same(name: str, ranks: int, *stories: Story) -> PeerWorld:
    return PeerWorld(name, (stories,) * ranks)


WORLDS = [
    same("a small sum in place", 2, Story(SUM, 1, in_place=True)),
    same("a sum in stages and pieces", 2, Story(SUM, 5, in_place=True)),
    same("three ranks", 3, Story(SUM, 1)),
    same("small ones behind each other", 2, Story(SUM, 1), Story(SUM, 2), Story(BARRIER)),
    same("broadcasts run ahead", 2, *[Story(BROADCAST, 1)] * 4),
    same("different roots", 3, Story(GATHER, 1, root=2), Story(BROADCAST, 3, root=1)),
    PeerWorld("ranks leave in order", ((Story(SUM, 1), Story(BROADCAST, 1)),) * 2, leaves=True),
    PeerWorld(
        "calls differ",
        ((Story(SUM, 1), Story(SUM, 2)), (Story(SUM, 1), Story(SUM, 3))),
        differs=True,
    ),
    PeerWorld(
        "types differ",
        ((Story(SUM, 1), Story(SUM, 1)), (Story(SUM, 1), Story(SUM, 1, dtype="int32"))),
        differs=True,
    ),
    PeerWorld(
        "roots differ, and nobody takes anything",
        (
            (Story(BROADCAST, 1, root=0), Story(SUM, 1)),
            (Story(BROADCAST, 1, root=1), Story(SUM, 1)),
        ),
        differs=True,
    ),
    PeerWorld(
        "one rank's call needs nobody",
        ((Story(SUM, 1), Story(SUM, 1)), (Story(GATHER, 0), Story(SUM, 1))),
        differs=True,
    ),
    PeerWorld(
        "sends of two ranks, received from any",
        (
            (Story(SEND, 1, peer=2),),
            (Story(SEND, 1, peer=2),),
            (Story(SEND, 1, receives=True), Story(SEND, 1, receives=True)),
        ),
    ),
    PeerWorld(
        "sends with tags, large and small",
        (
            (Story(SEND, 3, peer=1, tag=1), Story(SEND, 1, peer=1)),
            (
                Story(SEND, 1, peer=0, receives=True),
                Story(SEND, 3, peer=0, tag=1, receives=True),
            ),
        ),
    ),
    PeerWorld(
        "sends run ahead",
        ((Story(SEND, 1, peer=1),) * 4, (Story(SEND, 1, peer=0, receives=True),) * 4),
    ),
    PeerWorld(
        "one rank leaves, and is needed",
        ((Story(SUM, 1), Story(SUM, 1)), (Story(SUM, 1),)),
        leaves=True,
        left_behind=True,
    ),
]


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        small_limits(patch)
        yield
    collectives.plan_of.cache_clear()


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_no_order_of_events_leads_to_a_wrong_state(world: PeerWorld) -> None:
    near, far = stories_of(world, _STATES // 10), walks_of(world, _STATES // 20)

    sys.stdout.write(f"\n{world.name}: {near.states} states, {far.ends} ways\n")
    for report in (near, far):
        assert not report.wrong, (report.wrong, report.way)
    assert far.ends


@pytest.mark.parametrize("mutant", PEER_MUTANTS, ids=lambda mutant: mutant.name)
def test_the_search_finds(mutant: PeerMutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    world = next(each for each in WORLDS if each.name == mutant.world)

    report = walks_of(world, 3000)

    sys.stdout.write(f"\n{mutant.name}: {len(report.way)} moves: {report.wrong}\n")
    assert report.wrong
    assert mutant.sign in report.wrong
