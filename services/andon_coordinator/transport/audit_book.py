"""The audit book: what a journal has for a program that recomputes the run's steps.

Beside the records that is what steered the scripts (`steered`), which weights were compared
(`weights`, and the digests with which workers left), and what workers attested (`attested`).
Journals of lines without grains, and those that an older program wrote, lack some of these tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from andon.protocol.layout import Layout
from andon.protocol.records import Key, Record, RecordKind
from andon_coordinator.core.events import LeaveReason
from andon_coordinator.transport import rows
from andon_coordinator.transport.reader import JournalEntry, entry_of
from andon_coordinator.transport.schema import key_of, layout_of
from andon_coordinator.transport.step_reader import StepReader

__all__ = ["AttestedNode", "AttestedStep", "AuditBook", "ComparedWeights"]

_LEFT_WELL = [reason.name for reason in LeaveReason if reason.in_order]


@dataclass(frozen=True, slots=True)
class AttestedNode:
    """What a worker said that it has computed for some grains of a step."""

    first: int
    grains: int
    worker: int
    digest: str
    """Of their sum, hexadecimal."""
    samples: str
    """Of what a single grain was computed from, likewise."""
    components: bytes | None = None
    """The hash of each of the sum's components, in the layout's order; None: not known."""


@dataclass(frozen=True, slots=True)
class AttestedStep:
    """What workers attested of a step that was verified before its commit."""

    nodes: tuple[AttestedNode, ...]
    """Single grains first."""
    averages: str
    """The digest of the averages, hexadecimal; empty: not known."""


@dataclass(frozen=True, slots=True)
class ComparedWeights:
    """The digest of the line's weights at one head, which several workers gave alike."""

    sha256: str
    """Hexadecimal."""
    base_hashed: bool | None = None
    """Whether it has hashes of frozen parameters in their place; None: not known."""
    prefixes: bytes = field(default=b"", repr=False)
    """Its running value after each component of the layout; empty: not known."""


class AuditBook(StepReader):
    """A run's journal, open for an audit."""

    def forward(self, after: Key | None) -> Iterator[JournalEntry]:
        """The line's history after a record, first to last, without contributions.

        None: from its first record on.
        """
        row = None if after is None else rows.find(self._database, after)
        first = 0 if row is None else row["id"]
        for each in self._database.execute(
            f"SELECT * FROM records WHERE id > ?{self._in_history()} ORDER BY id", (first,)
        ):
            yield entry_of(each, ())

    def record(self, key: Key) -> Record | None:
        """A record by its key; None if there is none."""
        row = rows.find(self._database, key)
        return None if row is None else rows.record_of(row)

    def answers(self, step: int) -> list[dict[str, Any]]:
        """The answers of scalar all-reduces between a step and the next one, by sequence.

        One that was left out has no `data`, and none follows it.
        """
        if not rows.has_table(self._database, "steered"):
            return []
        found: dict[int, dict[str, Any]] = {}
        for sequence, answer in self._database.execute(
            f"SELECT sequence, answer FROM steered WHERE step = ?{self._in_history('record')}"
            " ORDER BY sequence, record",
            (step,),
        ):
            kept = {} if answer is None else json.loads(answer)
            found[sequence] = {"sequence": sequence, **kept}
        return list(found.values())

    def weights(self) -> dict[int, ComparedWeights]:
        """The line's weights after a step, by step, as far as workers compared them."""
        found: dict[int, ComparedWeights] = {}
        kept = self._in_history("record")
        # Only as the last weights of workers that left: what kind of digest that is, is not kept.
        marks = ", ".join("?" * len(_LEFT_WELL))
        for step, digest in self._database.execute(
            "SELECT departures.step, digest FROM departures JOIN records ON record = records.id "
            f"WHERE digest <> '' AND departures.step = records.step AND reason IN ({marks}){kept}",
            _LEFT_WELL,
        ):
            found[step] = ComparedWeights(digest)
        if rows.has_table(self._database, "weights"):
            prefixes = self._column("weights", "prefixes")
            for step, digest, base_hashed, parts in self._database.execute(
                f"SELECT step, sha256, base_hashed, {prefixes} FROM weights WHERE 1{kept}"
                " ORDER BY rowid"
            ):
                found[step] = ComparedWeights(digest, bool(base_hashed), parts or b"")
        return found

    def attested_keys(self) -> frozenset[Key]:
        """The records of steps that were verified."""
        if not rows.has_table(self._database, "attested"):
            return frozenset()
        return frozenset(
            key_of(key)
            for (key,) in self._database.execute(
                "SELECT key FROM records WHERE id IN (SELECT record FROM attested)"
            )
        )

    def attested(self, key: Key) -> AttestedStep | None:
        """What workers attested of a step; None if it was not verified."""
        row = rows.find(self._database, key)
        if row is None or not rows.has_table(self._database, "attested"):
            return None
        nodes = tuple(
            AttestedNode(*each)
            for each in self._database.execute(
                "SELECT first, grains, worker, digest, samples, "
                f"{self._column('attested', 'components')} FROM attested WHERE record = ?"
                " ORDER BY grains, first, worker",
                (row["id"],),
            )
        )
        averages = self._database.execute(
            "SELECT digest FROM averages WHERE record = ?", (row["id"],)
        ).fetchone()
        return AttestedStep(nodes, averages[0] if averages else "") if nodes else None

    def layout(self) -> Layout | None:
        """The model's parameters, in their order; None if the journal does not know them."""
        text = self._database.execute("SELECT layout FROM run").fetchone()[0]
        return None if text is None else layout_of(text)

    def _column(self, table: str, name: str) -> str:
        """A column that journals of an older program lack; for them NULL."""
        return name if rows.has_column(self._database, table, name) else "NULL"

    def resumed_at(self, after: int, up_to: int) -> list[int]:
        """The steps in a range at which the line went back, or scripts began anew."""
        return [
            step
            for (step,) in self._database.execute(
                "SELECT step FROM records WHERE kind = ? AND halt IS NULL AND step > ? AND step < ?"
                f"{self._in_history()} ORDER BY id",
                (RecordKind.MARK.name, after, up_to),
            )
        ]
