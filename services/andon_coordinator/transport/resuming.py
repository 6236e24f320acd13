"""Resuming: where a run that was interrupted goes on, by what its journal holds (rule 12)."""

from __future__ import annotations

from dataclasses import replace

from andon.protocol.records import Key
from andon_coordinator.core.settings import History
from andon_coordinator.transport.store import JournalError, Store

__all__ = ["history_at"]


def history_at(store: Store, key: Key) -> History:
    """What the line must know to go on from the record `key`, whatever came after it.

    A record newer than all that the journal has is only known to the workers that bring it (the
    journal is of another machine, or lost its end with the power): the line takes over what they
    report (rule 9), and nothing is rolled back here.

    Raises:
        JournalError: the record is of another history, or was rolled back itself.
    """
    history = store.history()
    if history.head is None or key > history.head.key:
        return history
    found = store.find(key)
    if found is None:
        raise JournalError(
            f"the journal has no record {key}: the checkpoint is of another run, or its journal "
            "was replaced"
        )
    if key not in store.ancestry():
        raise JournalError(
            f"record {key} was rolled back when the run was resumed earlier: choose a checkpoint "
            "of the line's present history"
        )
    record, result = found
    return replace(
        history,
        head=record,
        result=result,
        roll_back=True,
        abandoned=history.head.key,
        last_roster=(),
        departed={},
    )
