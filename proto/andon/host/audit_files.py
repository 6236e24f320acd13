"""Audit files: what `andon audit` asks of the script that it starts, and what that answers.

Theory of operation. The script runs alone in a process of its own. `ANDON_AUDIT` names the order: a
file of JSON, one value a line. Its first line says which run is audited and where to begin; each
other one is a record of the line, in order, with what the script needs of it. The script's `Line`
takes the steps that the records say, and appends what it finds to the report: a line for each step,
and one for the weights after it. What was found is compared where the journal is.

Both files lie in the auditor's own folder. Floating-point numbers are written such that reading
them gives the same bits.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from andon.host.private_files import open_private
from andon.protocol.records import Cursor, Key, PositionRange, RecordKind
from andon.protocol.run_settings import RunPlan

__all__ = [
    "AuditAnswer",
    "AuditOrder",
    "AuditRecord",
    "AuditReport",
    "WeightApart",
    "read_order",
    "write_order",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditAnswer:
    """The line's answer of a scalar all-reduce; scripts decide by it."""

    sequence: int
    """Counts from 0 after each move of the weights."""
    value: float = 0.0
    weight: float = 0.0
    contributors: int = 0
    data: tuple[bytes, ...] = ()
    left_out: bool = False
    """Whether the journal has not kept it, nor those after it at this head."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> AuditAnswer:
        """Reads what the journal, or an order, has of it."""
        if "data" not in fields:
            return cls(sequence=fields["sequence"], left_out=True)
        data = tuple(base64.b64decode(each, validate=True) for each in fields["data"])
        return cls(**{**fields, "data": data})

    def to_json(self) -> dict[str, Any]:
        """The inverse of `from_json`."""
        if self.left_out:
            return {"sequence": self.sequence}
        return {
            "sequence": self.sequence,
            "value": self.value,
            "weight": self.weight,
            "contributors": self.contributors,
            "data": [base64.b64encode(each).decode() for each in self.data],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """A record of the line, as far as a script's steps depend on it."""

    key: Key
    kind: RecordKind
    step: int
    cursor: Cursor
    """Once it is applied."""
    epoch: int = 0
    batch: PositionRange = field(default_factory=lambda: PositionRange(0, 0))
    """What a STEP took."""
    overflow: bool = False
    gradient_scale: float = 1.0
    """What the averaged gradients were multiplied with."""
    weights: bool = False
    """Whether the journal knows the weights after it, so that a digest of them is wanted."""
    attests: bool = False
    """Whether the journal knows the sums of its grains."""
    checkpoint: str = ""
    """The folder of a checkpoint of the run with the weights after it; empty: there is none."""
    answers: tuple[AuditAnswer, ...] = ()
    """Of scalar all-reduces between this step and the next; of a step's last record only."""

    def to_json(self) -> dict[str, Any]:
        """Its fields as values of JSON."""
        return {
            "key": [self.key.term, self.key.round],
            "kind": self.kind.name,
            "step": self.step,
            "cursor": [self.cursor.epoch, self.cursor.position],
            "batch": [self.epoch, self.batch.start, self.batch.stop],
            "overflow": self.overflow,
            "gradient_scale": self.gradient_scale,
            "weights": self.weights,
            "attests": self.attests,
            "checkpoint": self.checkpoint,
            "answers": [each.to_json() for each in self.answers],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> AuditRecord:
        """The inverse of `to_json`."""
        epoch, start, stop = fields["batch"]
        return cls(
            key=Key(*fields["key"]),
            kind=RecordKind[fields["kind"]],
            step=fields["step"],
            cursor=Cursor(*fields["cursor"]),
            epoch=epoch,
            batch=PositionRange(start, stop),
            overflow=fields["overflow"],
            gradient_scale=fields["gradient_scale"],
            weights=fields["weights"],
            attests=fields["attests"],
            checkpoint=fields["checkpoint"],
            answers=tuple(map(AuditAnswer.from_json, fields["answers"])),
        )


@dataclass(frozen=True, slots=True)
class WeightApart:
    """An element of a parameter that is another one in the run's checkpoint."""

    parameter: str
    element: tuple[int, ...]
    """Its index, one number a dimension."""
    there: str
    """In the checkpoint, as text."""
    here: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOrder:
    """What is audited, and from where."""

    run_id: str
    plan: RunPlan
    layout: str
    """The layout's digest, hexadecimal; empty: not known."""
    origin: AuditRecord
    """The record with whose weights the audit begins."""
    last_step: int
    """The audit is over after it."""
    report: Path
    """Where to append what was found."""

    def to_json(self) -> dict[str, Any]:
        """Its fields as values of JSON."""
        return {
            "run_id": self.run_id,
            "plan": self.plan.to_json(),
            "layout": self.layout,
            "origin": self.origin.to_json(),
            "last_step": self.last_step,
            "report": str(self.report),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> AuditOrder:
        """The inverse of `to_json`."""
        return cls(
            run_id=fields["run_id"],
            plan=RunPlan.from_json(fields["plan"]),
            layout=fields["layout"],
            origin=AuditRecord.from_json(fields["origin"]),
            last_step=fields["last_step"],
            report=Path(fields["report"]),
        )


def write_order(path: Path, order: AuditOrder, records: Iterable[AuditRecord]) -> None:
    """Writes an order; `records` are those after its origin, up to its last step.

    Raises:
        OSError: it can't be written.
    """
    with open(path, "w", encoding="utf-8", opener=open_private) as file:
        file.write(json.dumps(order.to_json()) + "\n")
        file.writelines(json.dumps(each.to_json()) + "\n" for each in records)


def read_order(path: Path) -> tuple[AuditOrder, Iterator[AuditRecord]]:
    """An order, and its records, which are read as far as they are asked for.

    Raises:
        ValueError: it is no order.
        OSError: it can't be read.
    """
    try:
        with path.open(encoding="utf-8") as file:
            order = AuditOrder.from_json(json.loads(file.readline()))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no order of `andon audit` ({error!r:.200})") from error
    return order, _records(path)


def _records(path: Path) -> Iterator[AuditRecord]:
    with path.open(encoding="utf-8") as file:
        for line in itertools.islice(file, 1, None):
            yield AuditRecord.from_json(json.loads(line))


class AuditReport:
    """What a script appends while it is audited; each line is there at once."""

    def __init__(self, path: Path) -> None:
        """Writes nothing yet."""
        self._path = path

    def say(self, what: str, **fields: Any) -> None:
        """Appends a line: `began`, `step`, `weights`, `evaluation`, `left` or `over`.

        Raises:
            OSError: it can't be written.
        """
        with open(self._path, "a", encoding="utf-8", opener=open_private) as file:
            file.write(json.dumps({"what": what, **fields}) + "\n")
