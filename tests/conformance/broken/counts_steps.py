"""A worker at the line's step counts as in sync, whatever its head."""

from __future__ import annotations

from dataclasses import replace

from andon_coordinator.core import line
from andon_coordinator.core.events import WorkerJoined
from andon_coordinator.core.state import CoreState
from conformance.breaking import serve_with

joined = line._OF_OTHERS[WorkerJoined]


def at_step(core: CoreState, event: WorkerJoined) -> None:
    request, head = event.request, core.chain.head
    if request.head is not None and head is not None and request.step == core.chain.step:
        event = replace(event, request=replace(request, head=head))
    joined(core, event)


if __name__ == "__main__":
    line._OF_OTHERS[WorkerJoined] = at_step
    serve_with()
