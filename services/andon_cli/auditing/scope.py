"""The scope of an audit: which records are recomputed, from where, and what is known of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from andon.host.audit_files import AuditAnswer, AuditRecord
from andon.host.errors import CommandError, ExitCode, UsageError
from andon.host.manifest import CheckpointDamaged, Manifest, checkpoints_in
from andon.protocol.records import Key, RecordKind
from andon.protocol.run_settings import RunPlan
from andon_coordinator.transport.audit_book import AuditBook, ComparedWeights
from andon_coordinator.transport.reader import JournalEntry

__all__ = ["AuditRefused", "Scope", "scope_of"]


_FEW_STEPS = 20
"""Without equal bits rounding grows from step to step, so that little can be said of many."""


class AuditRefused(CommandError):
    """The run can't be audited: not here, not so, or not at all."""

    exit_code = ExitCode.REFUSED


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What an audit recomputes: all steps after `origin`, up to `last`."""

    run_id: str
    plan: RunPlan
    layout: str
    origin: AuditRecord
    """The record with whose weights it begins."""
    last: int
    checkpoint: Path | None = None
    """The checkpoint of the origin; None: the script begins as it did."""
    weights: dict[int, ComparedWeights] = field(default_factory=dict, repr=False)
    """The line's weights after a step, by step, as far as they are known."""
    attested: frozenset[Key] = frozenset()
    """The records of steps that were verified."""
    checkpoints: dict[Key, Path] = field(default_factory=dict, repr=False)
    """The run's checkpoints, by the record whose weights they hold."""
    shortened: bool = False
    """Whether it ends before the run, since nobody said how far to go."""

    @property
    def first(self) -> int:
        """The first step that is recomputed."""
        return self.origin.step + 1

    @property
    def exact(self) -> bool:
        """Whether the run had the same bits whoever computed; else numbers are near each other."""
        return self.plan.grain > 0

    @property
    def known(self) -> list[int]:
        """The steps after which weights can be compared."""
        least = self.first if self.checkpoint is not None else 0
        return sorted(step for step in self.weights if least <= step <= self.last)

    def from_checkpoint(self, book: AuditBook, folder: Path) -> Scope:
        """The rest of it, from a checkpoint on that the audit itself has written."""
        facts = Manifest.read(folder).facts
        origin = _origin(book, facts.head, self.weights)
        return replace(self, origin=origin, checkpoint=folder)

    def records(self, book: AuditBook) -> Iterator[AuditRecord]:
        """The records that are recomputed, in order.

        Raises:
            AuditRefused: the journal lacks some.
        """
        step = self.origin.step
        for entry in book.forward(self.origin.key):
            if entry.record.step > self.last:
                break
            record = self._record(book, entry)
            if record.kind is RecordKind.STEP:
                step += 1
            if record.step != step:
                break
            yield record
        if step != self.last:
            raise AuditRefused(
                f"the journal lacks step {step + 1}: it lost its end, or an older copy was put in "
                "its place. Audit the steps before and after it: --steps"
            )

    def _record(self, book: AuditBook, entry: JournalEntry) -> AuditRecord:
        record, result = entry.record, entry.result
        if result is not None and len(result.batch) > self.plan.global_batch:
            raise AuditRefused(
                f"step {record.step} is a window of several batches (--schedule local or cadence): "
                "such a run can't be recomputed on one machine"
            )
        if result is not None and result.trimmed:
            raise AuditRefused(
                f"step {record.step} has a trimmed mean (--mean trimmed): what it left out depends "
                "on who computed which samples, so it can't be recomputed on one machine. Audit "
                "other steps: --steps"
            )
        if result is None:
            return AuditRecord(
                key=record.key, kind=record.kind, step=record.step, cursor=record.cursor
            )
        return AuditRecord(
            key=record.key,
            kind=record.kind,
            step=record.step,
            cursor=record.cursor,
            epoch=result.epoch,
            batch=result.batch,
            overflow=result.overflow,
            gradient_scale=result.gradient_scale,
            weights=record.step in self.weights,
            attests=record.key in self.attested,
            checkpoint=str(self.checkpoints.get(record.key, "")),
            answers=_answers(book, record.step),
        )


def scope_of(book: AuditBook, run_dir: Path, first: int | None, last: int | None) -> Scope:
    """What there is to recompute of a run.

    Args:
        book: its journal.
        run_dir: its folder, where its checkpoints are.
        first: the first step to recompute; None: the run's first.
        last: the last one; None: the run's last.

    Raises:
        AuditRefused: the run can't be audited.
        UsageError: it has no such steps.
    """
    run, steps = book.run(), book.steps()
    plan = run.plan
    if plan is None or not steps:
        raise AuditRefused(f"run {run.run_id} has no steps")
    shortened = not plan.grain and last is None and steps - (first or 1) >= _FEW_STEPS
    first = first or 1
    last = first + _FEW_STEPS - 1 if shortened else min(last or steps, steps)
    if first > steps:
        raise UsageError(f"--steps begins at step {first}, and the run has {steps} steps")
    history = frozenset(book.ancestry())
    checkpoints = list(_checkpoints(run_dir, history))
    weights: dict[int, ComparedWeights] = {}
    if plan.grain:  # Else the digests of two machines differ in any case.
        weights = {each.facts.step: ComparedWeights(each.facts.digest) for _, each in checkpoints}
        weights |= book.weights()
    before = [(path, each.facts) for path, each in checkpoints if each.facts.step < first]
    checkpoint: Path | None = None
    if before and first > 1:
        checkpoint, facts = max(before, key=lambda each: each[1].step)
        _verify(checkpoint)
        origin = _origin(book, facts.head, weights)
    else:
        origin = _beginning(book, run_dir, weights)
    return Scope(
        run_id=run.run_id,
        plan=plan,
        layout=run.layout_digest or "",
        origin=origin,
        last=last,
        checkpoint=checkpoint,
        weights=weights,
        attested=book.attested_keys() if plan.grain else frozenset(),
        checkpoints={each.facts.head: path for path, each in checkpoints} if plan.grain else {},
        shortened=shortened,
    )


def _beginning(book: AuditBook, run_dir: Path, weights: dict[int, ComparedWeights]) -> AuditRecord:
    entry = next(book.forward(None), None)
    if entry is None or entry.record.step or entry.record.kind is not RecordKind.INITIAL:
        raise AuditRefused(
            f"the journal does not have the run's beginning, and {run_dir} has no checkpoint from "
            "before these steps to begin with"
        )
    return _origin(book, entry.record.key, weights)


def _origin(book: AuditBook, key: Key, weights: dict[int, ComparedWeights]) -> AuditRecord:
    found = book.record(key)
    if found is None:
        raise AuditRefused(f"the journal has no record {key}, with whose weights to begin")
    return AuditRecord(
        key=key,
        kind=found.kind,
        step=found.step,
        cursor=found.cursor,
        weights=found.step in weights,
        answers=_answers(book, found.step),
    )


def _answers(book: AuditBook, step: int) -> tuple[AuditAnswer, ...]:
    return tuple(map(AuditAnswer.from_json, book.answers(step)))


def _checkpoints(run_dir: Path, history: frozenset[Key]) -> Iterator[tuple[Path, Manifest]]:
    """The run's checkpoints that are of its present history."""
    for folder in checkpoints_in(run_dir):
        try:
            manifest = Manifest.read(folder)
        except (FileNotFoundError, CheckpointDamaged):
            continue  # Another one may do; a damaged one says nothing of the run.
        if manifest.facts.head in history:
            yield folder.absolute(), manifest


def _verify(folder: Path) -> None:
    try:
        Manifest.read(folder).verify(folder)
    except CheckpointDamaged as error:
        raise AuditRefused(str(error)) from error
