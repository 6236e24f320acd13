"""The past: what a journal holds of its run, for a coordinator that goes on from there.

It only reads. What people ask of a journal is read in `reader`, without a coordinator.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path

from andon.protocol.halts import HaltAnswer
from andon.protocol.limits import COUNT_LIMIT
from andon.protocol.records import Key, Record, RecordKind
from andon.protocol.run_settings import RunPlan
from andon_coordinator.core.detectors import WINDOW, is_spike
from andon_coordinator.core.events import Undone
from andon_coordinator.core.machine_time import CostMeter, Counted
from andon_coordinator.core.settings import History
from andon_coordinator.core.step_results import StepResult
from andon_coordinator.transport import logbook, proofs, rows
from andon_coordinator.transport.damage import JournalError
from andon_coordinator.transport.schema import (
    evidence_of,
    key_blob,
    layout_of,
    plan_of,
    u64_of,
    u64_text,
)

__all__ = ["Counts", "Past", "recorded_plan"]


@dataclass(frozen=True, slots=True)
class Counts:
    """How much a journal holds."""

    steps: int
    samples: int
    halts: dict[str, int]
    """By the name of the reason."""
    answers: dict[str, int]
    """By the name of the answer."""
    departures: dict[str, int]
    """By the name of the reason, `rows.LOST` or `rows.DROPPED`."""
    sessions: dict[str, int]
    """By the name of their cause; those that ended in order by an empty one."""


def recorded_plan(journal: Path, text: str) -> RunPlan:
    """The plan of a run as its journal has it.

    Raises:
        JournalError: it is of a later version of this program, or damaged.
    """
    try:
        return plan_of(text)
    except (TypeError, ValueError) as error:
        raise JournalError(f"the journal {journal} can't be read: {error}") from error


class Past:
    """What an open journal has. Used by the thread of its `JournalStore`."""

    def __init__(self, database: sqlite3.Connection, path: Path) -> None:
        """Reads nothing yet; `path` is the database's, for messages."""
        self._database = database
        self._path = path

    def next_event_id(self) -> int:
        """One above the ids of all run events."""
        return logbook.next_event_id(self._database)

    def meter(self) -> CostMeter:
        """What the run has taken so far, as a coordinator goes on from it."""
        time = logbook.machine_time(self._database)
        (samples,) = self._database.execute("SELECT samples FROM totals").fetchone()
        if rows.rolled_back(self._database):
            samples = sum(each["samples"] or 0 for each in self._samples_back())
        counted = Counted(samples, logbook.tokens(self._database), logbook.logged(self._database))
        return CostMeter(time, counted, logbook.price(self._database))

    def undone_by(self, mark: Record) -> Undone:
        """What the steps have that a record rolls back, which is not saved yet."""
        parent = None if mark.parent is None else key_blob(mark.parent)
        gone = takewhile(lambda row: parent is None or row["key"] > parent, self._samples_back())
        samples = sum(each["samples"] or 0 for each in gone)
        return Undone(mark.step, samples, logbook.tokens(self._database, mark.step))

    def _samples_back(self) -> Iterator[sqlite3.Row]:
        return rows.walk_back(self._database, "key, parent, samples")

    def gaps(self) -> tuple[int, int]:
        """How many records lack their parent, and the step of the last of them; (0, 0) if none."""
        return rows.gaps(self._database)

    def history(self) -> History:
        """What the core must know of what was before."""
        one = self._database.execute
        greatest = one("SELECT max(term) FROM terms").fetchone()[0]
        last = one("SELECT * FROM records ORDER BY id DESC").fetchone()
        head = None if last is None else rows.record_of(last)
        halt = one(
            "SELECT evidence, record,"
            " (SELECT answer FROM answers WHERE halt = id ORDER BY rowid DESC) AS answer"
            # Halts of sessions hold nobody back, and are never answered.
            " FROM halts WHERE id NOT IN (SELECT halt FROM sessions WHERE halt IS NOT NULL)"
            " ORDER BY rowid DESC"
        ).fetchone()
        latest = None if halt is None else evidence_of(halt["evidence"])
        # A line that wrote a record after a halt had an answer to it, even if the answer itself was
        # not written.
        is_open = (
            halt is not None
            and not halt["answer"]
            and halt["record"] == rows.last_record(self._database)
        )
        # Older versions accepted any id that a worker reported. Those beyond the limit are left
        # out: above the greatest possible id there is no next one.
        next_halt = one(
            "SELECT max(coalesce((SELECT max(id) FROM halts WHERE id < :bound), ''),"
            " coalesce((SELECT max(halt) FROM answers WHERE halt < :bound), ''))",
            {"bound": u64_text(COUNT_LIMIT)},
        ).fetchone()[0]
        plan, layout = one("SELECT plan, layout FROM run").fetchone()
        run_end = rows.run_end(self._database)
        arithmetics = rows.arithmetics(self._database)
        evicted, stand = logbook.evicted(self._database, rows.resumed(self._database))
        pacing = one("SELECT state FROM pacing").fetchone()
        compared = one("SELECT state FROM spike_state").fetchone()
        retried = halt is not None and halt["answer"] == HaltAnswer.RETRY.name
        accepted = latest.step if latest is not None and retried and is_spike(latest) else None
        return History(
            head=head,
            result=self._result(last) if head and head.kind is RecordKind.STEP else None,
            greatest_term=0 if greatest is None else u64_of(greatest),
            halt=latest if is_open else None,
            next_halt_id=u64_of(next_halt) + 1 if next_halt else 1,
            plan=None if plan is None else recorded_plan(self._path, plan),
            layout=None if layout is None else layout_of(layout),
            dropped=run_end.dropped,
            barred=rows.barred(self._database),
            evicted=evicted,
            stand=stand,
            revoked=rows.revoked(self._database),
            last_roster=run_end.roster,
            departed=run_end.departed,
            pacing=b"" if pacing is None else bytes(pacing[0]),
            abandoned=rows.abandoned(self._database),
            recent=self._recent(),
            accepted_step=accepted,
            arithmetic=arithmetics[0].items if arithmetics else None,
            arithmetics={each.worker: each.items for each in arithmetics},
            scalar_names=frozenset(logbook.scalar_names(self._database)),
            sessions=one("SELECT count(*) FROM sessions").fetchone()[0],
            verified=proofs.verified_totals(self._database),
            spikes=rows.spikes(self._database),
            comparison=b"" if compared is None else bytes(compared[0]),
            checkpoints=logbook.checkpoints(self._database),
        )

    def history_at(self, key: Key) -> History:
        """What the core must know to continue from the record `key`, whatever came after it.

        A record newer than all that the journal has is known only to the workers that bring it: the
        journal is of another machine, or lost its end in a power failure. Then nothing is rolled
        back here, and the line takes over what the workers report (rule 9).

        Raises:
            JournalError: the record is of another history, or was rolled back itself.
        """
        history = self.history()
        if history.head is None or key > history.head.key:
            return history
        found = self.find(key)
        if found is None:
            raise JournalError(
                f"the journal has no record {key}: the checkpoint is of another run, or its "
                "journal was replaced"
            )
        if key not in self.ancestry():
            raise JournalError(
                f"record {key} was rolled back when the run was resumed earlier: choose a "
                "checkpoint of the line's present history"
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
            # It is of a later record. What is usual is learnt again.
            comparison=b"",
        )

    def find(self, key: Key) -> tuple[Record, StepResult | None] | None:
        """A record by its key, with its result if it is a STEP; None if there is none."""
        row = rows.find(self._database, key)
        if row is None:
            return None
        record = rows.record_of(row)
        return record, self._result(row) if record.kind is RecordKind.STEP else None

    def ancestry(self) -> Iterator[Key]:
        """The keys of the line's history, newest first."""
        return rows.ancestry(self._database)

    def find_ancestor(self, heads: Collection[Key]) -> Record | None:
        """The newest of these records in the line's history; None: none of them is in it."""
        wanted = {key_blob(head) for head in heads}
        oldest = min(wanted)
        for row in rows.walk_back(self._database):
            if row["key"] in wanted:
                return rows.record_of(row)
            if row["key"] < oldest:
                break
        return None

    def _recent(self) -> tuple[StepResult, ...]:
        steps = (
            row for row in rows.walk_back(self._database) if row["kind"] == RecordKind.STEP.name
        )
        return tuple(rows.result_of(row, ()) for row in islice(steps, WINDOW))[::-1]

    def _result(self, row: sqlite3.Row) -> StepResult:
        parts = self._database.execute(
            "SELECT * FROM contributions WHERE record = ? ORDER BY rank", (row["id"],)
        )
        start = row["batch_start"]
        return rows.result_of(row, tuple(rows.contribution_of(part, start) for part in parts))

    def counts(self) -> Counts:
        """How much the journal holds, including records that were rolled back."""
        one = self._database.execute
        steps, samples = one("SELECT steps, samples FROM totals").fetchone()

        def by(column: str, table: str) -> dict[str, int]:
            return dict(map(tuple, one(f"SELECT {column}, count(*) FROM {table} GROUP BY 1")))

        return Counts(
            steps,
            samples,
            halts=by("reason", "halts"),
            answers=by("answer", "answers"),
            departures=by("reason", "departures"),
            sessions=by("coalesce(cause, '')", "sessions WHERE over_at IS NOT NULL"),
        )
