"""Every state of small worlds of sessions; and the search finds each rule that is taken out."""

from __future__ import annotations

import pytest

from andon.protocol.records import Key
from andon_coordinator.core.chain import Keys
from andon_coordinator.core.events import SessionSaved
from andon_coordinator.core.session_ends import Ending
from andon_coordinator.core.session_roster import Attended, Session
from andon_coordinator.core.sessions import SessionsCore
from search.sessions import Forbidden, MakeCore, World, search

pytestmark = pytest.mark.timeout(600)  # Work that takes seconds, on a busy machine minutes.

WORLDS = {
    "a kill and a fault": World(crashes=0, restarts=0),
    "a crash of the coordinator": World(kills=0, faults=0),
    "a kill and a restart": World(faults=0, crashes=0, attempts=3),
    "a fault and a restart": World(kills=0, crashes=0, attempts=3),
}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
def test_a_session_has_one_end_and_one_key_in_every_state(world: World) -> None:
    assert search(world) > 100


class FormsAtOnce(SessionsCore):
    """Names a key before the session is durable."""

    def _form(self) -> None:
        super()._form()
        if self._forming is not None:
            self._saved(SessionSaved(self._forming[0]))


class EndsTwice(SessionsCore):
    """Goes on with a session that is over."""

    def _end(self, session: Session, ending: Ending) -> None:
        streams = dict(self._streams)
        super()._end(session, ending)
        self.live, self._streams = session, streams


class ForgetsTheOthers(SessionsCore):
    """Tells only the first rank of the end."""

    def _end(self, session: Session, ending: Ending) -> None:
        for rank in list(session.present)[1:]:
            self._streams.pop(rank.stream, None)
        super()._end(session, ending)


class KeepsTheDead(SessionsCore):
    """Forms a session of a rank that went away while it was saved."""

    def _forget(self, rank: Attended) -> None:
        forming, self._forming = self._forming, None
        super()._forget(rank)
        self._forming = forming


class SameKey(Keys):
    """Draws one key again and again."""

    def draw(self) -> Key:
        """The same one."""
        return Key(self.term, 1)


def _mutant(kind: type[SessionsCore]) -> MakeCore:
    return lambda term, formed: kind(keys=Keys(term, lambda: 0), formed=formed)


def _same_key(term: int, formed: int) -> SessionsCore:
    return SessionsCore(keys=SameKey(term, lambda: 0), formed=formed)


def _same_term(_term: int, formed: int) -> SessionsCore:
    return SessionsCore(keys=Keys(1, lambda: 0), formed=formed)


def _crash(make: MakeCore) -> World:
    return World(make=make, kills=0, faults=0, restarts=0)


def _faults(make: MakeCore) -> World:
    return World(make=make, crashes=0, restarts=0, attempts=3)


MUTANTS = {
    "formed before it is durable": (_crash(_mutant(FormsAtOnce)), "before it is durable"),
    "two verdicts": (_faults(_mutant(EndsTwice)), "two ends"),
    "some are not told": (_faults(_mutant(ForgetsTheOthers)), "was not told"),
    "a key is used twice": (
        World(make=_same_key, kills=0, faults=0, crashes=0, restarts=2),
        "is drawn after",
    ),
    "a restart is no next term": (_crash(_same_term), "is drawn after"),
    "the dead are kept": (_faults(_mutant(KeepsTheDead)), "."),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_search_finds(name: str) -> None:
    world, sign = MUTANTS[name]

    with pytest.raises((Forbidden, KeyError), match=sign):
        search(world)
