"""Moves: what may happen next without a fault: messages arrive, deadlines pass, people answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from andon.protocol.halts import HaltAnswer
from andon_coordinator.core import events as on
from andon_trainer.core.events import ControlLost, Dismissed, TransferAsked
from andon_trainer.core.worker_state import RoundPhase
from search import coordinator
from search.messages import Accepted, Checkpoint, CloseStream, Out, Refused, Released
from search.numbers import Serial, Stream
from search.state import Draft, Label, State
from search.weights import Wrong
from search.worker import Given, Place, Worker
from search.world import World

__all__ = ["end_transfer", "lose_transfer", "moves", "perish"]

_SHORT = frozenset({"grace", "back-off", "window"})
_LONG = frozenset({"transfer", "listens", "recalled"})


def moves(world: World, state: State) -> Iterator[tuple[Label, State]]:
    """Every state that can follow without a fault.

    The longest waits end only where nothing else can happen.
    """
    quiet = True
    for label, after in _prompt(world, state):
        quiet = False
        yield label, after
    if quiet:
        yield from _deadlines(world, state, _LONG)
        for slot in range(world.bounds.workers):
            yield from _patience(world, state, slot)
            yield from _asks_on(world, state, slot)


def _prompt(world: World, state: State) -> Iterator[tuple[Label, State]]:
    for stream, queue in state.ups:
        if queue:
            yield ("hear", int(stream), queue[0]), _hear(world, state, stream)
    for stream, queue in state.data_ups:
        if queue:
            yield ("reduce", int(stream), queue[0]), _reduce(world, state, stream)
    for slot in range(world.bounds.workers):
        yield from _worker(world, state, slot)
        yield from _computes(world, state, slot)
    if world.journal(state).pending:
        draft = Draft.of(state)
        world.write(draft)
        yield ("write",), draft.state()
    yield from _deadlines(world, state, _SHORT)
    yield from _answers(world, state)


def _deadlines(world: World, state: State, which: frozenset[str]) -> Iterator[tuple[Label, State]]:
    for timer in coordinator.timers(world.line(state)):
        if timer[0] in which:
            draft = Draft.of(state)
            world.tell(draft, ("fire", *timer))
            yield ("time", *timer), draft.state()


def _hear(world: World, state: State, stream: Stream) -> State:
    """The coordinator takes the first message of a stream."""
    draft = Draft.of(state)
    event, draft.ups[stream] = draft.ups[stream][0], draft.ups[stream][1:]
    if isinstance(world.parts.objects[event], on.WorkerStreamEnded):
        del draft.ups[stream]
    world.tell(draft, event)
    return draft.state()


def _reduce(world: World, state: State, stream: Stream) -> State:
    """The reducer does."""
    draft = Draft.of(state)
    message, draft.data_ups[stream] = draft.data_ups[stream][0], draft.data_ups[stream][1:]
    if world.over((message,)):
        del draft.data_ups[stream]
    world.reduce(draft, stream, message)
    return draft.state()


def _answers(world: World, state: State) -> Iterator[tuple[Label, State]]:
    """A person answers a halt."""
    core = world.core(state)
    if core.halt is None or not core.halt_announced or core.pending_record is not None:
        return
    for answer in (HaltAnswer.RETRY, HaltAnswer.SKIP):
        draft = Draft.of(state)
        world.tell(draft, world.numbered(on.HaltCleared(core.halt.id, answer)))
        if draft.coordinator != state.coordinator:
            yield ("answer", answer.name), draft.state()


# ---------------------------------------------------------------------- workers


def _worker(world: World, state: State, slot: int) -> Iterator[tuple[Label, State]]:
    worker = world.worker(state, slot)
    if worker.place is Place.GONE:
        return
    if worker.joining:
        if state.downs[slot]:
            yield _joined(world, state, slot)
    elif worker.transfer is not None:
        yield from _transfer(world, state, slot, worker.transfer)
    elif worker.looks:
        if state.downs[slot] and isinstance(world.parts.objects[state.downs[slot][0]], Released):
            yield ("goes", slot), _gone(world, state, slot)
        elif state.downs[slot]:
            yield from _take(world, state, slot, "downs")
        if state.data_downs[slot]:
            yield from _take(world, state, slot, "data_downs")


def _gone(world: World, state: State, slot: int) -> State:
    """A worker that was sent away ends, and another machine takes its slot."""
    draft, worker = Draft.of(state), world.worker(state, slot)
    assert worker.stream is not None
    perish(world, draft, slot, len(dict(state.ups).get(worker.stream, ())), None)
    return draft.state()


def perish(
    world: World,
    draft: Draft,
    slot: int,
    arrived: int,
    data: int | None,
    checkpoint: Checkpoint | None = None,
) -> None:
    """A process ends once so much of what it sent has arrived, and a fresh one is in its slot."""
    numbers = Serial(world.worker(draft, slot).numbers)
    world.end_control(draft, slot, arrived, gone=True)
    world.end_data(draft, slot, data)
    lose_transfer(world, draft, slot)
    world.spawn(draft, slot, numbers, checkpoint)


def lose_transfer(world: World, draft: Draft, slot: int) -> None:
    """The other end of a worker's transfer, if it is there, learns that this one is gone."""
    worker = world.worker(draft, slot)
    mine = {each.asked.transfer_id for each in worker.giving}
    if worker.transfer is not None:
        mine.add(worker.transfer.transfer_id)
    for other in range(world.bounds.workers):
        theirs = world.worker(draft, other).transfer
        if theirs is not None and other != slot and theirs.transfer_id in mine:
            end_transfer(world, draft, other, None)


def _computes(world: World, state: State, slot: int) -> Iterator[tuple[Label, State]]:
    """A worker has computed what it was dealt, before or after it hears anything else."""
    worker = world.worker(state, slot)
    if worker.place in (Place.COMPUTES, Place.AHEAD) and worker.waits:
        draft, ahead = Draft.of(state), worker.place is Place.AHEAD
        out = world.turn(
            draft, slot, ("computes",), lambda w, o: w.computes_ahead(o) if ahead else w.computed(o)
        )
        world.act_out(draft, slot, out)
        yield ("computes", slot), draft.state()
        if worker.state.phase is RoundPhase.LATE:
            draft = Draft.of(state)
            out = world.turn(draft, slot, ("makes up",), lambda w, o: w.makes_up(o))
            world.act_out(draft, slot, out)
            if draft.workers[slot] != state.workers[slot]:
                yield ("makes up", slot), draft.state()


def _asks_on(world: World, state: State, slot: int) -> Iterator[tuple[Label, State]]:
    """A script that has done enough steps asks for work once more if somebody needs it."""
    worker = world.worker(state, slot)
    if worker.place is Place.ENOUGH and worker.waits and _is_needed(world, state, worker):
        draft = Draft.of(state)
        out = world.turn(draft, slot, ("asks",), lambda w, o: w.asks_on(o))
        world.act_out(draft, slot, out)
        yield ("asks", slot), draft.state()


def _is_needed(world: World, state: State, worker: Worker) -> bool:
    """Whether a worker that has done enough is behind, or could give another its state now."""
    core = world.core(state)
    if worker.state.head != core.chain.head:
        return True
    if any(each.learning and not each.learning.follows for each in core.members.learners()):
        return True  # Its state is cut when all ask for work.
    behind = core.members.behind(core.chain.head)
    pauses = [slot for slot, each in core.transfers.setbacks.items() if each.not_before > 0]
    return any(each.accepts_state and each.worker not in pauses for each in behind)


def _joined(world: World, state: State, slot: int) -> tuple[Label, State]:
    """A joining worker gets its answer, or loses its stream before that."""
    draft = Draft.of(state)
    message, draft.downs[slot] = draft.downs[slot][0], draft.downs[slot][1:]
    answer = world.parts.objects[message]

    def act(worker: Worker, out: list[Out]) -> object:
        match answer:
            case Accepted():
                note = worker.accepted(answer, out)
                worker.settle(out)
                return note
            case Refused() if world.bounds.ends and answer.reason != "SLOT":
                worker.take(answer, world.library, out)
                return None
            case Refused() if answer.reason != "SLOT":
                raise Wrong(f"worker {slot} is refused: {answer.reason}")
            case Refused() | ControlLost():
                worker.join_failed(out)
                return None
            case _:
                raise Wrong(f"worker {slot} hears {type(answer).__name__} before JoinAccepted")

    out = world.turn(draft, slot, ("joined", message), act)
    world.act_out(draft, slot, out)
    return ("joined", slot, message), draft.state()


def _take(world: World, state: State, slot: int, source: str) -> Iterator[tuple[Label, State]]:
    """A worker takes an event, and goes on until it waits again.

    If it closes its stream then, any first part of what it had sent still arrives.
    """
    before = Draft.of(state)
    queues: list[tuple[int, ...]] = getattr(before, source)
    message, queues[slot] = queues[slot][0], queues[slot][1:]
    event = world.parts.objects[message]
    out = world.turn(before, slot, ("take", message), lambda w, o: w.take(event, world.library, o))
    worker = world.worker(state, slot)
    closes = any(isinstance(each, CloseStream) for each in out)
    assert worker.stream is not None
    sent = len(before.ups.get(worker.stream, ())) if closes else 0
    for arrived in range(sent + 1):
        draft = Draft.of(before.state())
        world.act_out(draft, slot, out, arrived)
        yield ("take", slot, message, arrived), draft.state()


def _transfer(
    world: World, state: State, slot: int, asked: TransferAsked
) -> Iterator[tuple[Label, State]]:
    """State arrives whole, once both ends are there; a lost control stream ends the wait."""
    ends = state.downs[slot] and world.over(state.downs[slot]) and not world.bounds.patient
    if ends or (not asked.sends and _is_dismissed(world, state, slot)):
        draft = Draft.of(state)
        end_transfer(world, draft, slot, None)
        yield ("gives up", slot), draft.state()
    if asked.sends:
        return
    for donor in range(world.bounds.workers):
        for given in world.worker(state, donor).giving:
            if given.asked.transfer_id == asked.transfer_id:
                draft = Draft.of(state)
                _receive(world, draft, slot, given)
                memo = ("gave", given.asked.transfer_id)
                world.turn(draft, donor, memo, lambda w, _o, it=given: w.gave(it))
                yield ("snapshot", donor, slot), draft.state()
        other = world.worker(state, donor).transfer
        if other is None or not other.sends or other.transfer_id != asked.transfer_id:
            continue
        draft = Draft.of(state)
        end_transfer(world, draft, slot, world.worker(state, donor))
        end_transfer(world, draft, donor, world.worker(state, donor))
        yield ("transfer", donor, slot), draft.state()


def _is_dismissed(world: World, state: State, slot: int) -> bool:
    """Whether a worker is sent away: nobody else sends it a state."""
    return any(isinstance(world.parts.objects[each], Dismissed) for each in state.downs[slot])


def _patience(world: World, state: State, slot: int) -> Iterator[tuple[Label, State]]:
    """One end of a transfer, left alone, gives up."""
    if world.worker(state, slot).transfer is None or world.bounds.patient:
        return
    draft = Draft.of(state)
    end_transfer(world, draft, slot, None)
    yield ("patience", slot), draft.state()


def _receive(world: World, draft: Draft, slot: int, given: Given) -> None:
    """A learner has the state that another worker cut before."""
    memo = "learnt", int(given.weights), given.scheduled

    def act(worker: Worker, out: list[Out]) -> None:
        worker.transferred(given.weights, given.scheduled, world.library, out)

    world.act_out(draft, slot, world.turn(draft, slot, memo, act))


def end_transfer(world: World, draft: Draft, slot: int, donor: Worker | None) -> None:
    """A transfer is over at one of its ends, with the donor's state or without."""
    if donor is not None and (donor.local.change or donor.local.left_over):
        raise Wrong(f"state is sent with {list(donor.local.change)} in it, which no record has")
    weights = donor.weights if donor is not None else None
    scheduled = donor.scheduled if donor is not None else 0
    memo: tuple[Any, ...] = (
        "transferred",
        None if weights is None else int(weights),
        scheduled,
    )

    def act(worker: Worker, out: list[Out]) -> None:
        worker.transferred(weights, scheduled, world.library, out)

    world.act_out(draft, slot, world.turn(draft, slot, memo, act))
