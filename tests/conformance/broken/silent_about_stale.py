"""Drops a message with an older key silently."""

from __future__ import annotations

from andon.protocol.messages import StaleRound
from andon.protocol.records import Key
from andon_reducer.core.effects import Effect, SendNotice
from andon_reducer.core.round import ReducerRound
from andon_reducer.core.run import Run
from andon_reducer.core.stream import StreamState
from conformance.breaking import serve_with

enter = Run._enter


def quietly(run: Run, stream: StreamState, key: Key, effects: list[Effect]) -> ReducerRound | None:
    entered = enter(run, stream, key, effects)
    effects[:] = [each for each in effects if not _tells(each)]
    return entered


def _tells(effect: Effect) -> bool:
    return isinstance(effect, SendNotice) and isinstance(effect.notice, StaleRound)


if __name__ == "__main__":
    serve_with((Run, "_enter", quietly))
