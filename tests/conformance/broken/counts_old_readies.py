"""A StepReady counts for the current round, whatever its key."""

from __future__ import annotations

from dataclasses import replace

from andon_coordinator.core import line
from andon_coordinator.core.events import WorkerReady
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.state import CoreState
from conformance.breaking import serve_with

ready = line._OF_WORKERS[WorkerReady]


def any_key(core: CoreState, member: LineMember, event: WorkerReady) -> None:
    if core.round is not None:
        event = replace(event, ready=replace(event.ready, key=core.round.key))
    ready(core, member, event)


if __name__ == "__main__":
    line._OF_WORKERS[WorkerReady] = any_key
    serve_with()
