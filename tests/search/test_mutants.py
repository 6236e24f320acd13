"""The search finds the consequence of each rule that is taken out, so it is worth something.

`pytest -s` prints each way to it, move by move.
"""

from __future__ import annotations

import sys

import pytest

from search.grain_mutants import GRAIN_MUTANTS
from search.learning_mutants import LEARNING_MUTANTS
from search.mutants import MUTANTS, Mutant
from search.overlap_mutants import OVERLAP_MUTANTS
from search.quorum_mutants import QUORUM_MUTANTS
from search.search import search
from search.transcript import transcript
from search.world import World

pytestmark = pytest.mark.timeout(600)  # Work that takes seconds, on a busy machine minutes.


@pytest.mark.parametrize(
    "mutant",
    MUTANTS + OVERLAP_MUTANTS + LEARNING_MUTANTS + GRAIN_MUTANTS + QUORUM_MUTANTS,
    ids=lambda mutant: mutant.name,
)
def test_the_search_finds(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    world = World(mutant.bounds)

    report = search(world)

    if mutant.sign:
        assert report.found is not None
        assert mutant.sign in report.found.message
        way = report.found.way
    else:
        assert report.stuck
        way = report.stuck[0]
    sys.stdout.write(f"\n{mutant.name}: {report.states} states, {len(way)} moves\n")
    sys.stdout.write(transcript(world, way) + "\n")
