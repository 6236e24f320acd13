"""Resuming: which checkpoint of a run to go on from, for `andon run --resume` and for a service."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from andon.host.errors import ResumeRefused, UsageError
from andon.host.manifest import (
    CheckpointDamaged,
    CheckpointFacts,
    Manifest,
    checkpoints_in,
    step_of,
)
from andon.protocol.records import Key
from andon_coordinator.transport.damage import JournalError, journal_errors
from andon_coordinator.transport.reader import JournalReader
from andon_server.runs import JOURNAL, RUNS

__all__ = ["Findings", "Resumption", "checkpoints_written", "find_resumption", "search_history"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A run to go on with, and the checkpoint to start from."""

    run_id: str
    run_dir: Path
    checkpoint: Path
    """The checkpoint's folder, absolute."""
    facts: CheckpointFacts


@dataclass(frozen=True, slots=True)
class Findings:
    """What a search of a run's folder found."""

    newest: tuple[Path, CheckpointFacts] | None
    """The newest whole checkpoint; None: there is none."""
    damaged: tuple[str, ...]
    """Newer ones that can't be used, the newest first: which file, and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class _History:
    """The records that count in a run, as its journal has them."""

    run_id: str
    keys: frozenset[Key]
    last: Key | None
    """The newest of them."""

    def has(self, head: Key) -> bool:
        """Whether a checkpoint's record is a part of the line's history.

        It may be missing in the journal. If it is newer than the journal's last record, the journal
        lost its end in a power failure, and the checkpoint is good. If it is older, the run was
        rolled back past it, and the checkpoint is of a history that no longer counts.
        """
        return self.last is None or head in self.keys or head > self.last


def find_resumption(run: str, step: int | None = None) -> Resumption:
    """The newest checkpoint in a run's present history, verified to the last byte.

    Args:
        run: a run id under `runs/`, or a run's folder.
        step: take the checkpoint of this step and no other.

    Raises:
        UsageError: there is no such run.
        ResumeRefused: the run has no such checkpoint, or the checkpoint is damaged.
    """
    run_dir = next((path for path in (Path(run), RUNS / run) if path.is_dir()), None)
    if run_dir is None:
        raise UsageError(f"there is no run {run}: neither a folder nor an id under {RUNS}/ here")
    history = _history_of(run_dir)
    folders = checkpoints_in(run_dir)
    if step is not None:
        folders = [folder for folder in folders if step_of(folder) == step]
    chosen = _newest(folders, history)
    if chosen is None:
        steps = ", ".join(str(step_of(folder)) for folder in checkpoints_in(run_dir)) or "none"
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise ResumeRefused(
            f"{run_dir} has {which} to go on from (there: {steps}): runs write them with "
            "--checkpoint-every N"
        )
    folder, manifest = chosen
    try:
        manifest.verify(folder)
    except CheckpointDamaged as error:
        raise ResumeRefused(str(error)) from error
    return Resumption(
        run_id=history.run_id, run_dir=run_dir, checkpoint=folder.absolute(), facts=manifest.facts
    )


def search_history(run_dir: Path) -> Findings:
    """Looks for the newest whole checkpoint in a run's present history.

    Workers with ANDON_RESUME=latest look for it too, but can't read the journal. One that is
    damaged is left out, and the log says so.

    Raises:
        ResumeRefused: the journal can't be read.
    """
    history = _history_of(run_dir)
    damaged: list[str] = []
    for folder in checkpoints_in(run_dir):
        try:
            manifest = Manifest.read(folder)
            if history.has(manifest.facts.head):
                manifest.verify(folder)
                return Findings((folder, manifest.facts), tuple(damaged))
        except (OSError, CheckpointDamaged) as error:
            log.warning("%s is left out: %s", folder, error)
            damaged.append(_what_is_wrong(folder, error))
    return Findings(None, tuple(damaged))


def _what_is_wrong(folder: Path, error: OSError | CheckpointDamaged) -> str:
    if isinstance(error, CheckpointDamaged):
        return f"{error.file.relative_to(folder.parent)} {error.what}"
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{Path(error.filename).relative_to(folder.parent)} is missing"
    return f"{folder.name} can't be read ({error.strerror})"


def checkpoints_written(run_dir: Path) -> set[tuple[str, int]]:
    """A run's checkpoints by name and time, so that a rewritten one counts as new."""
    found = set()
    for folder in checkpoints_in(run_dir):
        with suppress(FileNotFoundError):  # the writer is deleting old checkpoints
            found.add((folder.name, folder.stat().st_mtime_ns))
    return found


def _newest(folders: Iterable[Path], history: _History) -> tuple[Path, Manifest] | None:
    """The first of `folders` that belongs to the line's history, with its manifest."""
    for folder in folders:
        try:
            manifest = Manifest.read(folder)
        except FileNotFoundError as error:
            raise ResumeRefused(f"{folder} has no state.json: remove that folder") from error
        except CheckpointDamaged as error:
            raise ResumeRefused(str(error)) from error
        if history.has(manifest.facts.head):
            return folder, manifest
    return None


def _history_of(run_dir: Path) -> _History:
    """The history of a run; without records if it has no journal here."""
    journal = run_dir / JOURNAL
    if not journal.exists():
        return _History(run_dir.absolute().name, frozenset(), None)
    try:
        with journal_errors(journal), JournalReader(journal) as reader:
            keys = frozenset(reader.ancestry())
            return _History(reader.run().run_id, keys, max(keys, default=None))
    except JournalError as error:
        raise ResumeRefused(str(error)) from error
