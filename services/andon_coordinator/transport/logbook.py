"""The logbook: what the journal has for people and for audits: scalars, run events, answers.

After a restart two decisions depend on it: which checkpoints a line may go back to, and who follows
because it was slow. A journal that an older program wrote may lack these tables; then there are no
scalars, and run events are those that halts, answers and departures tell.
"""

from __future__ import annotations

import base64
import json
import math
import sqlite3
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from andon.protocol.halts import HaltAnswer
from andon.protocol.slowness import CodeLine, ProcessFacts, Slowness, SlowPhase, ThreadStack
from andon_coordinator.core.checkpoints import REMEMBERED
from andon_coordinator.core.effects import SaveEviction, SaveScalars, SaveSteered
from andon_coordinator.core.events import Checkpoint
from andon_coordinator.core.machine_time import TOKENS, MachineTime, Price
from andon_coordinator.core.run_events import AGAIN, RunEvent, RunEventKind
from andon_coordinator.core.settings import JournalledCheckpoint
from andon_coordinator.transport.rows import DROPPED, LAST_RECORD, LOST, has_table, walk_back
from andon_coordinator.transport.schema import compact_json, evidence_of, key_of, u64_of, u64_text

__all__ = [
    "LoggedScalar",
    "checkpoints",
    "evicted",
    "forget_scalars_after",
    "logged",
    "machine_time",
    "next_event_id",
    "notices",
    "price",
    "run_events",
    "save_eviction",
    "save_price",
    "save_run_event",
    "save_scalars",
    "save_slowness",
    "save_steered",
    "scalar_curve",
    "scalar_names",
    "scalars",
    "slownesses",
    "tokens",
]

_NAMES = """
WITH RECURSIVE names (name) AS (
    SELECT min(name) FROM scalars
    UNION ALL
    SELECT (SELECT min(name) FROM scalars WHERE name > names.name) FROM names
    WHERE names.name IS NOT NULL
)
SELECT name FROM names WHERE name IS NOT NULL
"""
"""Each name is found by one look into the index. DISTINCT would read all scalars of a long run."""

_OLDER = """
SELECT record, at, 'halt' AS what, evidence, NULL AS worker, NULL AS reason, NULL AS message,
    step FROM halts
UNION ALL
SELECT answers.record, answers.at, 'answer', NULL, answers.worker, answer, operator,
    coalesce(halts.step, 0) FROM answers LEFT JOIN halts ON halts.id = answers.halt
UNION ALL
SELECT record, at, 'departure', NULL, worker, reason, message, step FROM departures
ORDER BY record, at
"""
"""What tables that older journals have, too, tell of events."""


@dataclass(frozen=True, slots=True)
class LoggedScalar:
    """A number that a worker's script logged when `step` steps were committed; it may be NaN."""

    name: str
    step: int
    worker: int
    value: float
    at_unix_s: float


# -------------------------------------------------------------------------------- writing


def save_scalars(database: sqlite3.Connection, effect: SaveScalars, at_unix_s: float) -> None:
    """Saves what a worker logged. What it sends again, because no answer came, changes nothing."""
    database.executemany(
        "INSERT OR REPLACE INTO scalars VALUES (?, ?, ?, ?, ?)",
        [
            # Explicit: SQLite would store NaN as NULL anyway.
            (
                each.name,
                each.step,
                effect.worker,
                None if math.isnan(each.value) else each.value,
                at_unix_s,
            )
            for each in effect.scalars
        ],
    )


def forget_scalars_after(database: sqlite3.Connection, step: int) -> None:
    """Removes the scalars of steps that were rolled back: a curve is of the line's own history."""
    database.execute("DELETE FROM scalars WHERE step > ?", (step,))


def tokens(database: sqlite3.Connection, after: int = -1) -> float:
    """How many tokens scripts logged in the steps after one, all workers together."""
    found = database.execute(
        "SELECT coalesce(sum(value), 0.0) FROM scalars WHERE name = ? AND step > ? AND value > 0 "
        "AND value < 9e999",
        (TOKENS, after),
    ).fetchone()
    return float(found[0])


def logged(database: sqlite3.Connection) -> dict[int, tuple[int, float]]:
    """By worker, the last step at which its script logged tokens, and how many."""
    found = database.execute(
        "SELECT worker, max(step), value FROM scalars WHERE name = ? GROUP BY worker", (TOKENS,)
    )
    return {worker: (step, value or 0.0) for worker, step, value in found}


def save_run_event(database: sqlite3.Connection, event: RunEvent) -> None:
    """Saves a run event."""
    database.execute(
        f"INSERT INTO run_events VALUES (?, ?, ?, ?, ?, {LAST_RECORD}, ?)",
        (event.id, event.kind.value, event.worker, event.step, event.text, event.at_unix_s),
    )


def save_slowness(database: sqlite3.Connection, slow: Slowness) -> None:
    """Saves why a worker was slow."""
    facts = {
        "guilty": None if slow.guilty is None else asdict(slow.guilty),
        "stacks": [asdict(each) for each in slow.stacks],
        "process": None if slow.facts is None else asdict(slow.facts),
    }
    database.execute(
        f"INSERT INTO slowness VALUES (?, ?, ?, ?, ?, ?, {LAST_RECORD}, ?)",
        (
            slow.worker,
            slow.step,
            slow.phase.name,
            slow.late_s,
            slow.text,
            compact_json(facts),
            slow.at_unix_s,
        ),
    )


def save_steered(database: sqlite3.Connection, effect: SaveSteered, at_unix_s: float) -> None:
    """Saves the answer of a scalar all-reduce; one that was given again replaces it."""
    answer = effect.answer
    fields: dict[str, Any] = {
        "value": answer.value,
        "weight": answer.weight,
        "contributors": answer.contributors,
        "data": [base64.b64encode(each).decode() for each in answer.data],
    }
    database.execute(
        f"INSERT OR REPLACE INTO steered VALUES (?, ?, ?, {LAST_RECORD}, ?)",
        (
            effect.step,
            answer.sequence,
            None if effect.left_out else compact_json(fields),
            at_unix_s,
        ),
    )


def next_event_id(database: sqlite3.Connection) -> int:
    """One above the ids of all run events; the first one is 1."""
    greatest: int = database.execute("SELECT coalesce(max(id), 0) FROM run_events").fetchone()[0]
    return greatest + 1


# -------------------------------------------------------------------------------- reading


def scalar_names(database: sqlite3.Connection) -> list[str]:
    """The names of all scalars, sorted."""
    if not has_table(database, "scalars"):
        return []
    return [name for (name,) in database.execute(_NAMES)]


def scalars(database: sqlite3.Connection, wanted: str | None = None) -> list[LoggedScalar]:
    """All scalars, or those of one name, by name, step and worker."""
    if not has_table(database, "scalars"):
        return []
    found = database.execute(
        "SELECT name, step, worker, value, at FROM scalars"
        + (" WHERE name = ?" if wanted is not None else "")
        + " ORDER BY name, step, worker",
        () if wanted is None else (wanted,),
    )
    return [
        LoggedScalar(name, step, worker, _number(value), at)
        for name, step, worker, value, at in found
    ]


def scalar_curve(database: sqlite3.Connection, name: str) -> list[tuple[int, float]]:
    """Each step at which a scalar was logged, and its mean over the workers that logged it.

    The mean is NaN if one of them is.
    """
    if not has_table(database, "scalars"):
        return []
    found = database.execute(
        "SELECT step, CASE WHEN count(value) = count(*) THEN avg(value) END FROM scalars"
        " WHERE name = ? GROUP BY step ORDER BY step",
        (name,),
    )
    return [(step, _number(value)) for step, value in found]


def run_events(database: sqlite3.Connection) -> list[RunEvent]:
    """Everything that happened, in order."""
    if not has_table(database, "run_events"):
        return _numbered(list(_older(database, None)))
    rows = database.execute("SELECT * FROM run_events ORDER BY id").fetchall()
    first = (rows[0]["record"], rows[0]["at"]) if rows else None
    noted = [
        RunEvent(
            id=row["id"],
            kind=RunEventKind(row["kind"]),
            worker=row["worker"],
            step=row["step"],
            text=row["text"],
            at_unix_s=row["at"],
        )
        for row in rows
    ]
    return _numbered(list(_older(database, first))) + noted


def checkpoints(database: sqlite3.Connection) -> tuple[JournalledCheckpoint, ...]:
    """The last checkpoints of the line's history, by rising steps."""
    if not has_table(database, "run_events"):
        return ()
    noted = database.execute(
        "SELECT id, worker, step, text, record FROM run_events WHERE kind = ? "
        "ORDER BY id DESC LIMIT ?",
        (RunEventKind.CHECKPOINT.value, REMEMBERED),
    ).fetchall()
    least = min((each["step"] for each in noted), default=0)
    records: dict[int, list[sqlite3.Row]] = {}
    for row in walk_back(database, "id, key, parent, step") if noted else ():
        if row["step"] < least:
            break
        records.setdefault(row["step"], []).append(row)
    found: dict[int, JournalledCheckpoint] = {}
    for event, worker, step, folder, last in noted:
        # Those that were there when it was reported. After a MARK nobody knows of which of the two
        # it is. Without one it is of steps that were given up.
        then = [row for row in records.get(step, ()) if row["id"] <= last]
        if len(then) == 1:
            checkpoint = Checkpoint(step, folder, key_of(then[0]["key"]))
            joined = _joined_before(database, worker, event)
            found.setdefault(step, JournalledCheckpoint(worker, joined, checkpoint))
    return tuple(found[step] for step in sorted(found))


def _joined_before(database: sqlite3.Connection, worker: int, event: int) -> str:
    """What is noted of a worker's last join before an event; empty: nothing."""
    row = database.execute(
        "SELECT text FROM run_events WHERE kind = ? AND worker = ? AND id < ? "
        "ORDER BY id DESC LIMIT 1",
        (RunEventKind.JOINED.value, worker, event),
    ).fetchone()
    return "" if row is None else str(row["text"]).removeprefix(AGAIN)


def notices(database: sqlite3.Connection) -> dict[int, str]:
    """By worker, why its machine was about to go; only those whose last process gave notice."""
    if not has_table(database, "run_events"):
        return {}
    found: dict[int, str] = {}
    kinds = (RunEventKind.JOINED.value, RunEventKind.NOTICE.value)
    for worker, kind, text in database.execute(
        "SELECT worker, kind, text FROM run_events WHERE kind IN (?, ?) ORDER BY id", kinds
    ):
        if kind == RunEventKind.NOTICE.value:
            found[worker] = text
        elif not text.startswith(AGAIN):
            found.pop(worker, None)  # A new process has the slot.
    return found


def machine_time(database: sqlite3.Connection) -> MachineTime:
    """How long workers' machines were on the line, by everything that happened."""
    time = MachineTime()
    before: dict[int, float] = {}
    if has_table(database, "run_events"):
        rows = database.execute(
            "SELECT run_events.id, records.at FROM run_events JOIN records"
            " ON records.id = run_events.record WHERE run_events.kind = 'started'"
        )
        before = dict(map(tuple, rows))
    for event in run_events(database):
        # The service before wrote its last record then.
        time.saw(before.get(event.id, 0.0))
        time.happened(event)
    last = database.execute("SELECT at FROM records ORDER BY id DESC LIMIT 1").fetchone()
    time.saw(last[0] if last else 0.0)
    return time


def save_eviction(database: sqlite3.Connection, effect: SaveEviction, at_unix_s: float) -> None:
    """Saves that a slow process follows, or no longer."""
    database.execute(
        f"INSERT INTO evictions VALUES (?, ?, ?, {LAST_RECORD}, ?)",
        (u64_text(effect.incarnation), effect.why, effect.stand, at_unix_s),
    )


def evicted(database: sqlite3.Connection, since: int) -> tuple[dict[int, str], int]:
    """Why processes follow, by incarnation, and how many are in sync without them.

    Args:
        database: the journal.
        since: the record with which a person last resumed the run; what was before is over.
    """
    found: dict[int, str] = {}
    stand = 0
    for incarnation, why, stand in database.execute(  # noqa: B007  # the last one counts
        "SELECT incarnation, why, stand FROM evictions WHERE record >= ? ORDER BY rowid", (since,)
    ):
        found[u64_of(incarnation)] = why
    return {process: why for process, why in found.items() if why}, stand


def save_price(database: sqlite3.Connection, price: Price, at_unix_s: float) -> None:
    """Saves what people say of the price of machines."""
    row = (price.per_hour, price.currency, at_unix_s)
    database.execute("INSERT INTO costs VALUES (?, ?, ?)", row)


def price(database: sqlite3.Connection) -> Price | None:
    """What people last said of the price of machines; None: nothing."""
    if not has_table(database, "costs"):
        return None
    row = database.execute(
        "SELECT price_per_hour, currency FROM costs ORDER BY rowid DESC LIMIT 1"
    ).fetchone()
    return None if row is None else Price(*row)


def slownesses(database: sqlite3.Connection) -> list[Slowness]:
    """Why workers were slow, in order."""
    if not has_table(database, "slowness"):
        return []
    found = []
    for row in database.execute("SELECT * FROM slowness ORDER BY rowid"):
        facts = json.loads(row["facts"])
        guilty, process = facts["guilty"], facts["process"]
        found.append(
            Slowness(
                worker=row["worker"],
                step=row["step"],
                phase=SlowPhase[row["phase"]],
                late_s=row["late_s"],
                text=row["text"],
                guilty=None if guilty is None else CodeLine(**guilty),
                at_unix_s=row["at"],
                stacks=tuple(
                    ThreadStack(each["thread"], tuple(CodeLine(**line) for line in each["lines"]))
                    for each in facts["stacks"]
                ),
                facts=None if process is None else ProcessFacts(**process),
            )
        )
    return found


def _older(database: sqlite3.Connection, before: tuple[int, float] | None) -> Iterator[RunEvent]:
    """What happened under a program that kept no run events: everything `before` the first one.

    A service of this version begins with the event `started`, and what happens later is noted.
    """
    for row in database.execute(_OLDER):
        if before is not None and (row["record"], row["at"]) >= before:
            break
        match row["what"]:
            case "halt":
                evidence = evidence_of(row["evidence"])
                kind, worker = RunEventKind.HALTED, evidence.worker
                text = f"{evidence.reason.label}: {evidence.message}"
            case "answer":
                kind, worker = RunEventKind.ANSWERED, row["worker"]
                who = f" by {row['message']}" if row["message"] else ""
                text = f"{HaltAnswer[row['reason']].name.lower()}{who}"
            case _:
                kinds = {LOST: RunEventKind.LOST, DROPPED: RunEventKind.DROPPED}
                kind, worker = kinds.get(row["reason"], RunEventKind.LEFT), row["worker"]
                why = str(row["reason"]).lower()
                text = f"{why}: {row['message']}" if row["message"] else why
        yield RunEvent(
            id=0, kind=kind, worker=worker, step=row["step"], text=text, at_unix_s=row["at"]
        )


def _numbered(older: list[RunEvent]) -> list[RunEvent]:
    """Gives ids below 0, which rise to -1."""
    return [replace(event, id=number - len(older)) for number, event in enumerate(older)]


def _number(stored: float | None) -> float:
    return math.nan if stored is None else stored
