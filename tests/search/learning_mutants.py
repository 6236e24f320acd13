"""Mutants of learning: each rule that keeps a learner from harm, taken out at every end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from andon.protocol.records import Record
from andon_coordinator.core import events, learning, line
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.state import CoreState
from andon_reducer.core.listeners import Listeners
from andon_trainer.core import attending
from andon_trainer.core.events import Dismissed
from andon_trainer.core.worker_state import WorkerState
from search.mutants import Mutant, Patch, Right, complete_round, mutants_of, wrap
from search.numbers import Weights
from search.state import FOR_GOOD, Bounds
from search.weights import Library
from search.worker import Worker

__all__ = ["LEARNING_MUTANTS"]

LEARNING_MUTANTS: list[Mutant] = []
_mutant = mutants_of(LEARNING_MUTANTS)


_LEARNER = Bounds(faults=0, expect=1, learns=True)
"""Worker 0 begins alone, so worker 1 learns whenever it comes."""


@_mutant(_LEARNER, "is not ready", line._OF_LEARNERS, events.WorkerReady)
def _a_learner_is_counted_ready(
    right: Right, core: CoreState, member: LineMember, event: events.WorkerReady
) -> None:
    """What a learner reports completes the round that it attends."""
    right(core, member, event)
    complete_round(core, event.ready)


@_mutant(_LEARNER, "arrive as those of", Worker, "transferred")
def _a_snapshot_is_cut_late(
    right: Right, worker: Worker, donor: Weights | None, scheduled: int, library: Library, out: Any
) -> None:
    """A donor sends what it has when it sends, and not what it had when it was asked."""
    if donor is not None and worker.transfer is not None and worker.transfer.beside_training:
        donor = Weights(max(each for each, head in enumerate(library._heads) if head is not None))
    right(worker, donor, scheduled, library, out)


@_mutant(_LEARNER, "averages of")
def _a_learner_applies_a_record_before_it_has_the_averages(patch: Patch) -> None:
    """Rule 7: a learner takes each record as soon as it hears of it."""

    def applies(right: Right, state: WorkerState, record: Record) -> Any:
        return record.parent == state.head or right(state, record)

    patch.setattr(attending, "_has_come", lambda *_: True)
    wrap(patch, WorkerState, "_applies", applies)


_ENDING = replace(_LEARNER, ends=True)
"""The line ends the run, perhaps while the state is on its way."""


@_mutant(_ENDING, "", attending.Attending, "keeps")
def _the_end_waits_for_a_state(right: Right, learns: attending.Attending, event: Any) -> bool:
    """A worker that was told of the last step makes it up before it ends, with a state or not."""
    if learns.ends_run and isinstance(event, Dismissed) and event.stop_reason:
        learns.dismissed = event
        return True
    return bool(right(learns, event))


_ALONE = replace(_ENDING, faults=1, kinds=frozenset({FOR_GOOD}))
"""The worker that it learns from dies, and none comes in its place."""


@_mutant(_ALONE, "", learning, "release_if_short")
def _the_state_of_a_learner_that_has_not_reported_it_is_lost(*_: Any) -> bool:
    """A line whose head nobody holds asks nobody who may have got it."""
    return False


@_mutant(_LEARNER, "", Listeners, "send")
def _a_listener_hears_nothing(right: Right, *_: Any) -> tuple[int, ...]:
    """The reducer forgets those that only listen."""
    return ()


@_mutant(_LEARNER, "", learning, "record_announced")
def _a_learner_hears_of_no_record(right: Right, *_: Any) -> None:
    """A learner is told of rounds, and not of what became of them."""
