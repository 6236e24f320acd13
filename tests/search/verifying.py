"""Wrong arithmetic: a report on its way says something else than its worker should have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from andon.protocol.attestations import DIGEST_BYTES, ElementApart
from andon_coordinator.core import events as on
from andon_coordinator.core.events import Ready
from search.numbers import Stream
from search.state import Draft, Label, State
from search.weights import WRONG_DIGEST
from search.world import World

__all__ = ["computes_wrong", "relays_wrong"]

_OTHER_MEAN = b"another mean".ljust(DIGEST_BYTES, b"\0")


def computes_wrong(world: World, state: State, slot: int) -> Iterator[tuple[Label, State]]:
    """A worker has computed one of the grains wrong that it attests: its own, or another's."""
    for at, stream, ready in _queued(world, state, slot):
        for number, each in enumerate(ready.attested):
            if len(each.node) > 1 or each.digest.startswith(WRONG_DIGEST):
                continue
            wrong = (WRONG_DIGEST + bytes([slot])).ljust(DIGEST_BYTES, b"\0")
            attested = list(ready.attested)
            attested[number] = replace(each, digest=wrong, components=each.components[::-1])
            draft = Draft.of(state)
            _put(world, draft, at, stream, replace(ready, attested=tuple(attested)))
            yield ("computes wrong", slot, number), draft.state()


def relays_wrong(world: World, state: State, slot: int) -> Iterator[tuple[Label, State]]:
    """A sum that is relayed comes otherwise than it was sent: to one worker, or to all of them.

    That changes the mean that a worker makes of it, unless what it hashed was changed alone.
    """
    for at, stream, ready in _queued(world, state, slot):
        check = ready.mean_check
        for number in range(0 if check is None else len(check.relayed)):
            for moved in (False, True):
                draft = Draft.of(state)
                _put(world, draft, at, stream, _heard(ready, number, moved=moved))
                _note(world, draft, slot, ready)
                yield ("relays wrong", slot, number, moved), draft.state()
            to_all = None if slot else _to_all(world, state, number)
            if to_all is not None:
                yield ("relays wrong to all", number), to_all.state()


def _to_all(world: World, state: State, number: int) -> Draft | None:
    """The sum comes to all workers otherwise; None: not all of their reports are on their way."""
    draft, keys = Draft.of(state), set()
    for slot in range(world.bounds.workers):
        found = next(_queued(world, state, slot), None)
        if found is None or found[2].mean_check is None:
            return None
        at, stream, ready = found
        if number >= len(found[2].mean_check.relayed):
            return None
        keys.add(ready.key)
        _put(world, draft, at, stream, _heard(ready, number, moved=True))
        _note(world, draft, slot, ready)
    return draft if len(keys) == 1 else None


def _heard(ready: Ready, number: int, *, moved: bool) -> Ready:
    check = ready.mean_check
    assert check is not None
    relayed = list(check.relayed)
    relayed[number] = WRONG_DIGEST.ljust(DIGEST_BYTES, b"\0")
    check = replace(check, relayed=tuple(relayed))
    if moved:
        check = replace(check, expected=_OTHER_MEAN, apart=ElementApart(0, 0, 0.5, 0.25))
    return replace(ready, mean_check=check)


def _note(world: World, draft: Draft, slot: int, ready: Ready) -> None:
    world.turn(
        draft, slot, ("hears otherwise",), lambda worker, _out: worker.hears_otherwise(ready.key)
    )


def _queued(world: World, state: State, slot: int) -> Iterator[tuple[int, Stream, Ready]]:
    """A worker's reports that are on their way: where in its queue, and its stream."""
    stream = world.worker(state, slot).stream
    if stream is None:
        return
    for at, part in enumerate(dict(state.ups).get(stream, ())):
        said = world.parts.objects[part]
        if isinstance(said, on.WorkerReady):
            yield at, stream, said.ready


def _put(world: World, draft: Draft, at: int, stream: Stream, ready: Ready) -> None:
    """Puts another report in the place of one that is on its way."""
    queue = draft.ups[stream]
    told = world.numbered(on.WorkerReady(stream, ready))
    draft.ups[stream] = (*queue[:at], told, *queue[at + 1 :])
