"""Transcripts: a path of the search, move by move."""

from __future__ import annotations

from collections.abc import Sequence

from andon.protocol.records import Record
from andon_coordinator.core.events import JoinRequest
from search.faults import faults
from search.moves import moves
from search.state import Label, State
from search.weights import Wrong
from search.world import World

__all__ = ["transcript"]


def transcript(world: World, way: Sequence[Label]) -> str:
    """What happened, one line for each move, with the state of every party after it."""
    state = world.first()
    lines = [_standing(world, state)]
    for label in way:
        state = _follow(world, state, label)
        lines += [f"> {told(world, label)}", f"    {_standing(world, state)}"]
    return "\n".join(lines)


def told(world: World, label: Label) -> str:
    """One move in words."""
    match label:
        case ("hear", int() as stream, int() as message):
            return f"the coordinator hears on stream {stream}: {_message(world, message)}"
        case ("reduce", int() as stream, int() as message):
            return f"the reducer takes from stream {stream}: {_message(world, message)}"
        case ("joined", slot, int() as message):
            return f"worker {slot} hears: {_message(world, message)}"
        case ("take", slot, int() as message, *rest):
            return f"worker {slot} takes ({', '.join(map(str, rest))}): {_message(world, message)}"
        case _:
            return " ".join(map(str, label))


def _follow(world: World, state: State, label: Label) -> State:
    for after in (moves(world, state), faults(world, state)):
        try:
            for each, new in after:
                if each == label:
                    return new
        except Wrong:
            continue
    raise AssertionError(f"{label} can't happen here")


def _message(world: World, number: int) -> str:
    part = world.parts.objects[number]
    text = type(part).__name__
    for name in ("head", "key", "record", "transfer_id", "sends", "halt", "request", "in_sync"):
        value = getattr(part, name, None)
        if isinstance(value, Record):
            value = f"{value.kind.name} {value.key}"
        if name == "request" and isinstance(value, JoinRequest):
            value = f"head {value.head} held {value.held_key}"
        if value is not None:
            text += f" {name}={value}"
    for name in ("fault", "ready"):
        if hasattr(part, name):
            inner = getattr(part, name)
            text += f" {getattr(inner, 'kind', '')} {inner.key}"
    return text


def _standing(world: World, state: State) -> str:
    core = world.core(state)
    open_ = core.round.key if core.round is not None else None
    parts = [f"line {core.line_state.name} head={core.chain.head} round={open_}"]
    for slot in range(world.bounds.workers):
        worker = world.worker(state, slot)
        worker_state = worker.state
        where = worker.place.name + (" joining" if worker.joining else "")
        where += f" transfer {worker.transfer.transfer_id}" if worker.transfer else ""
        where += " halted" if worker_state.halt else ""
        parts.append(f"w{slot} {where} head={worker_state.head} held={worker_state.held_key}")
    return " | ".join(parts)
