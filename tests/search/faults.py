"""Faults: everything that may go wrong next. A world allows a limited number of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

from andon.protocol.records import Key
from andon_coordinator.core import events as on
from search import coordinator, reducer
from search.messages import Lost, Out
from search.moves import end_transfer, lose_transfer, perish
from search.numbers import Serial, Stream
from search.state import FOR_GOOD, NOTICE, RELAYED, WRONG_ARITHMETIC, Draft, Label, State
from search.verifying import computes_wrong, relays_wrong
from search.worker import Place
from search.world import World

__all__ = ["faults"]

_MADE_UP = 2**40
"""Rounds and samples, beyond all that a search ever counts."""
_NEVER = 2**32 - 2 << 32
"""A term that no coordinator ever has."""


def faults(world: World, state: State) -> Iterator[tuple[Label, State]]:
    """Every state that one more fault leads to; none if the limit is reached."""
    if not state.faults:
        return
    state = state._replace(faults=state.faults - 1)
    kinds = world.bounds.kinds
    for slot in range(world.bounds.workers):
        for kind, fault in _OF_A_WORKER.items():
            if kind in kinds:
                yield from fault(world, state, slot)
    for kind, alone in _OF_OTHERS.items():
        if kind in kinds:
            yield from alone(world, state)


def _crash(world: World, state: State, slot: int) -> Iterator[tuple[Label, State]]:
    """A process dies; a fresh one starts in its slot, and joins whenever it does."""
    worker = world.worker(state, slot)
    sent = len(dict(state.ups).get(worker.stream, ())) if worker.stream is not None else 0
    chunks = len(dict(state.data_ups).get(worker.data, ())) if worker.data is not None else 0
    for arrived in range(sent + 1):
        for data in range(chunks + 1):
            draft = Draft.of(state)
            perish(world, draft, slot, arrived, data)
            yield ("crash", slot, arrived, data), draft.state()
    checkpoint = world.checkpoint(state)
    if checkpoint is not None:  # It comes back with that. All that it sent last is lost.
        draft = Draft.of(state)
        perish(world, draft, slot, 0, 0, checkpoint)
        yield ("crash", slot, "with a checkpoint"), draft.state()


def _for_good(world: World, state: State, slot: int) -> Iterator[tuple[Label, State]]:
    """A process that has made a step dies with all that it sent last, and none comes instead."""
    worker = world.worker(state, slot)
    if worker.place is Place.GONE or not worker.state.step:
        return
    draft = Draft.of(state)
    perish(world, draft, slot, 0, 0)
    joins = world.worker(draft, slot).stream
    assert joins is not None
    del draft.ups[joins]
    world.turn(draft, slot, ("for good",), lambda w, _o: w.perishes())
    yield ("for good", slot), draft.state()


def _break(world: World, state: State, slot: int) -> Iterator[tuple[Label, State]]:
    """A control stream breaks. A worker that does not wait may find some messages of it later."""
    worker = world.worker(state, slot)
    if worker.stream is None or world.over(state.downs[slot]) or worker.place is Place.GONE:
        return
    sent = len(dict(state.ups).get(worker.stream, ()))
    for arrived in range(sent + 1):
        for kept in range(len(state.downs[slot]) + 1 if worker.busy else 1):
            draft = Draft.of(state)
            world.end_control(draft, slot, arrived, gone=False)
            world.lose_control(draft, slot, kept)
            yield ("break", slot, arrived, kept), draft.state()


def _lease(world: World, state: State, slot: int) -> Iterator[tuple[Label, State]]:
    """The coordinator hears nothing of a worker for a lease, and closes its stream."""
    member = world.core(state).members.get(slot)
    if member is None or member.stream is None:
        return
    draft = Draft.of(state)
    world.tell(draft, ("fire", "lease", slot))
    yield ("lease", slot), draft.state()


def _stopped(world: World, state: State, slot: int) -> Iterator[tuple[Label, State]]:
    """A worker's process is seen to be stopped; it may go on at any time.

    What follows is what follows if it is suspected, rightly or not.
    """
    member = world.core(state).members.get(slot)
    if member is None or member.stream is None:
        return
    draft = Draft.of(state)
    world.tell(draft, world.numbered(on.WorkerStopped(Stream(member.stream), 0.0)))
    if draft.coordinator != state.coordinator:
        yield ("stopped", slot), draft.state()


def _data(world: World, state: State, slot: int) -> Iterator[tuple[Label, State]]:
    """A data stream breaks; both ends learn of it."""
    worker = world.worker(state, slot)
    if worker.data is None or world.over(state.data_downs[slot]):
        return
    for arrived in range(len(dict(state.data_ups)[worker.data]) + 1):
        draft = Draft.of(state)
        world.end_data(draft, slot, arrived)
        draft.data_downs[slot] = (world.numbered(Lost()),)
        yield ("data", slot, arrived), draft.state()


def _transfer(world: World, state: State, slot: int) -> Iterator[tuple[Label, State]]:
    """A worker's call that moves state breaks, and with it the other's."""
    if world.worker(state, slot).transfer is None:
        return
    draft = Draft.of(state)
    lose_transfer(world, draft, slot)
    end_transfer(world, draft, slot, None)
    yield ("transfer breaks", slot), draft.state()


def _defect(world: World, state: State, slot: int) -> Iterator[tuple[Label, State]]:
    """A worker finds a non-finite value in the round that it computes."""
    worker = world.worker(state, slot)
    computes = worker.place in (Place.AHEAD, Place.AVERAGES)
    if not computes or not worker.waits or worker.exchanging is None:
        return
    assert worker.stream is not None
    seen = on.Fault(kind=on.FaultKind.NON_FINITE_GRADIENT, key=worker.exchanging, value="nan")
    draft = Draft.of(state)
    world.act_out(draft, slot, (on.FaultReported(worker.stream, seen),))
    yield ("defect", slot), draft.state()


def _nan(world: World, state: State, slot: int) -> Iterator[tuple[Label, State]]:
    """A worker finds a non-finite value in what it computes, and goes no further."""
    worker = world.worker(state, slot)
    if worker.place not in (Place.COMPUTES, Place.AHEAD) or not worker.waits:
        return
    draft = Draft.of(state)
    out = world.turn(draft, slot, ("refuses",), lambda w, o: w.refuses(o))
    world.act_out(draft, slot, out)
    yield ("nan", slot), draft.state()


def _leaves(world: World, state: State, slot: int) -> Iterator[tuple[Label, State]]:
    """A script leaves its epoch, between two rounds or in the middle of a window."""
    worker = world.worker(state, slot)
    if worker.place not in (Place.WORK, Place.COMPUTES, Place.AHEAD) or not worker.waits:
        return
    draft = Draft.of(state)
    out = world.turn(draft, slot, ("leaves",), lambda w, o: w.leaves_epoch(o))
    world.act_out(draft, slot, out)
    yield ("leaves", slot), draft.state()


def _anew(world: World, state: State, slot: int) -> Iterator[tuple[Label, State]]:
    """A script raises in the middle of a step, catches that, and begins its loop again."""
    worker = world.worker(state, slot)
    if worker.place not in (Place.AHEAD, Place.AVERAGES) or not worker.waits:
        return
    draft = Draft.of(state)
    out = world.turn(draft, slot, ("anew",), lambda w, o: w.begins_anew(o))
    world.act_out(draft, slot, out)
    yield ("begins anew", slot), draft.state()


def _notice(world: World, state: State, slot: int) -> Iterator[tuple[Label, State]]:
    """A worker says that its machine is about to go, at any moment."""
    worker = world.worker(state, slot)
    if worker.stream is None or worker.joining or worker.place is Place.GONE:
        return
    draft = Draft.of(state)
    world.act_out(draft, slot, (on.NoticeGiven(worker.stream, "a test"),))
    yield ("notice", slot), draft.state()


def _number(world: World, state: State, slot: int) -> Iterator[tuple[Label, State]]:
    """A worker sends a number that no worker can have, at any moment."""
    worker = world.worker(state, slot)
    if worker.stream is None or worker.joining or worker.place is Place.GONE:
        return
    key, kind = worker.exchanging, on.FaultKind.STALE_ROUND
    drawn, never = Key(world.core(state).keys.term, _MADE_UP), Key(_NEVER, _MADE_UP)
    told: list[Out] = [
        on.FaultReported(worker.stream, on.Fault(kind=kind, key=key, greatest=drawn))
    ]
    if key is not None:
        told.append(on.FaultReported(worker.stream, on.Fault(kind=kind, key=key, greatest=never)))
        ready = on.Ready(
            key=key, loss_sum=0.0, weight=1.0, samples=_MADE_UP, total_weight=1.0, world_size=1
        )
        told.append(on.WorkerReady(worker.stream, ready))
    for number, each in enumerate(told):
        draft = Draft.of(state)
        world.act_out(draft, slot, (each,))
        yield ("number", slot, number), draft.state()


def _cord(world: World, state: State) -> Iterator[tuple[Label, State]]:
    """A person halts the line."""
    draft = Draft.of(state)
    world.tell(draft, world.numbered(on.CordPulled("a test")))
    if draft.coordinator != state.coordinator:
        yield ("cord",), draft.state()


def _reducer(world: World, state: State) -> Iterator[tuple[Label, State]]:
    """The reducer dies and comes back without any contributions."""
    if not state.data_ups and all(
        world.worker(state, slot).transfer is None for slot in range(world.bounds.workers)
    ):
        return
    draft = Draft.of(state)
    draft.reducer = world.parts.number(reducer.start())
    draft.data_ups.clear()
    for slot in range(world.bounds.workers):
        worker = world.worker(state, slot)
        if worker.data is not None and not world.over(state.data_downs[slot]):
            draft.data_downs[slot] = (world.numbered(Lost()),)
        if worker.transfer is not None:
            end_transfer(world, draft, slot, None)
    yield ("reducer",), draft.state()


def _kept(world: World, state: State) -> Iterator[tuple[Label, State]]:
    """The coordinator dies, with some of what was pending written, and comes back."""
    journal = world.journal(state)
    for written in range(len(journal.pending) + 1):
        if written:
            journal, _ = journal.written()
        yield ("coordinator", "kept", written), _restarted(world, state, journal)


def _lost(world: World, state: State) -> Iterator[tuple[Label, State]]:
    """The coordinator and its journal are lost; another starts without."""
    yield ("coordinator", "lost"), _restarted(world, state, coordinator.Journal())


def _cut(world: World, state: State) -> Iterator[tuple[Label, State]]:
    """The coordinator's machine loses power, and the journal its last record."""
    journal = world.journal(state)
    if journal.records:
        yield ("coordinator", "cut"), _restarted(world, state, journal.cut())


def _power(world: World, state: State) -> Iterator[tuple[Label, State]]:
    """The coordinator's machine loses power, and with it some workers, or all of them.

    Each of them comes back with the last checkpoint, or finds none.
    """
    journal, checkpoint = world.journal(state), world.checkpoint(state)
    journals = [journal]
    while journals[-1].pending:
        journals.append(journals[-1].written()[0])
    if journal.records:
        journals.append(journal.cut())
    fates = ("lives", "fresh") if checkpoint is None else ("lives", "fresh", "loads")
    for number, kept in enumerate(journals):
        for each in product(fates, repeat=world.bounds.workers):
            if set(each) == {"lives"}:
                continue  # That is another fault.
            draft = Draft.of(_restarted(world, state, kept))
            for slot, fate in enumerate(each):
                if fate != "lives":
                    worker = world.worker(draft, slot)
                    world.end_data(draft, slot, 0)
                    lose_transfer(world, draft, slot)
                    loaded = checkpoint if fate == "loads" else None
                    world.spawn(draft, slot, Serial(worker.numbers), loaded)
            yield ("power", number, *each), draft.state()


def _restarted(world: World, state: State, journal: coordinator.Journal) -> State:
    """A coordinator in a new term: its clock is past every counter that was ever used."""
    now = coordinator.term((world.core(state).keys.term >> 32) + 1)
    journal = replace(journal, pending=(), term=now)
    draft = Draft.of(state)
    for slot in range(world.bounds.workers):
        if world.worker(state, slot).place is not Place.GONE:
            worker = world.worker(state, slot)
            kept = len(draft.downs[slot]) if worker.busy else 0
            world.lose_control(draft, slot, kept)
    draft.ups.clear()
    draft.journal = world.parts.number(journal)
    line = coordinator.start(world.settings, journal, now, world.plan)
    draft.coordinator = world.parts.number(line)
    return draft.state()


_OF_A_WORKER: dict[str, Callable[[World, State, int], Iterator[tuple[Label, State]]]] = {
    "crash": _crash,
    FOR_GOOD: _for_good,
    "break": _break,
    "lease": _lease,
    "stopped": _stopped,
    "data": _data,
    "transfer": _transfer,
    "defect": _defect,
    "nan": _nan,
    "anew": _anew,
    "number": _number,
    "leaves": _leaves,
    NOTICE: _notice,
    WRONG_ARITHMETIC: computes_wrong,
    RELAYED: relays_wrong,
}

_OF_OTHERS: dict[str, Callable[[World, State], Iterator[tuple[Label, State]]]] = {
    "cord": _cord,
    "reducer": _reducer,
    "kept": _kept,
    "lost": _lost,
    "cut": _cut,
    "power": _power,
}
