"""Wrong arithmetic: a report on its way has another digest than what its worker should have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from andon.protocol.attestations import DIGEST_BYTES
from andon_coordinator.core import events as on
from search.state import Draft, Label, State
from search.weights import WRONG_DIGEST
from search.world import World

__all__ = ["computes_wrong"]


def computes_wrong(world: World, state: State, slot: int) -> Iterator[tuple[Label, State]]:
    """A worker has computed one of the grains wrong that it attests: its own, or another's."""
    stream = world.worker(state, slot).stream
    queue = dict(state.ups).get(stream, ()) if stream is not None else ()
    for at, part in enumerate(queue):
        said = world.parts.objects[part]
        if not isinstance(said, on.WorkerReady):
            continue
        for number, each in enumerate(said.ready.attested):
            if len(each.node) > 1 or each.digest.startswith(WRONG_DIGEST):
                continue
            wrong = (WRONG_DIGEST + bytes([slot])).ljust(DIGEST_BYTES, b"\0")
            attested = list(said.ready.attested)
            attested[number] = replace(each, digest=wrong, components=each.components[::-1])
            ready = replace(said.ready, attested=tuple(attested))
            draft = Draft.of(state)
            assert stream is not None
            told = world.numbered(on.WorkerReady(said.stream, ready))
            draft.ups[stream] = (*queue[:at], told, *queue[at + 1 :])
            yield ("computes wrong", slot, number), draft.state()
