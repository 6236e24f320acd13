"""Checkpoints: which worker writes them, and which one was written last.

One worker writes, and keeps writing for as long as it takes part, so that all checkpoints of a run
are in one place. The first writer is the lowest worker on the service's own host that can write,
because a run is resumed on that host; if there is none, the lowest on any host.

Each assignment says whether the worker is the writer, and which step the last checkpoint has. The
writer takes one after the first step at or past a multiple of `every` that has no checkpoint yet.
It may write it beside the steps that follow, and says so. If it dies before the checkpoint is
whole, the next writer makes up for it.

Workers report their newest checkpoint only. So after a restart the older ones come from the
journal, for a worker that reports one of the same folder on the same host. Its slot says nothing: a
worker on another host may have taken it, with a folder of the same name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from andon.protocol.records import Key
from andon_coordinator.core.effects import Effect, NoteCheckpoint, NoteOverdue, NoteWriter
from andon_coordinator.core.events import Checkpoint, JoinRequest
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.settings import JournalledCheckpoint

__all__ = ["REMEMBERED", "KnownCheckpoint", "RunCheckpoints"]

REMEMBERED = 16
"""So many of the last checkpoints; their writer keeps fewer."""


@dataclass(frozen=True, slots=True)
class KnownCheckpoint:
    """A checkpoint that the line may go back to, and the process that has it."""

    step: int
    folder: str
    head: Key
    process: int
    """The incarnation of the worker that wrote it, or started from it."""
    host: str
    """Where that one ran: others there, with the same folder of checkpoints, can load it, too."""
    keep: int
    """How many of the newest that one keeps."""

    @property
    def place(self) -> str:
        """The folder of all checkpoints that it is in."""
        return _place_of(self.folder)


@dataclass(slots=True, kw_only=True)
class RunCheckpoints:
    """Who writes a run's checkpoints and where, and the last one that was written."""

    service_host: str = ""
    """The host that the service runs on."""
    writer: int | None = None
    incarnation: int | None = None
    """The writer's process."""
    host: str = ""
    place: str = ""
    """The folder of all checkpoints, on that host."""
    every: int = 0
    step: int = 0
    """The step of the last checkpoint; 0 if workers reported none."""
    folder: str = ""
    """The last checkpoint's own folder."""
    known: deque[KnownCheckpoint] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """The last ones whose records are known, by rising steps."""
    journalled: Sequence[JournalledCheckpoint] = ()
    """Those of earlier coordinators; see `History`."""
    begun: int = 0
    """The step of one that the writer is writing, by its own report; 0 if none."""
    overdue: int = 0
    """A step that should have a checkpoint and has none; 0 if none is missing."""
    reported: int = 0
    """The last step that was reported as overdue; each is reported once."""
    searched: bool = False
    """Whether the service has looked into the run's folder; see `FolderSearched`."""
    found: int | None = None
    """The step of the newest whole checkpoint that it found there."""
    damaged: tuple[str, ...] = ()
    """What is wrong with newer ones there."""
    run_dir: str = ""
    """That folder."""

    @property
    def elsewhere(self) -> bool:
        """Whether checkpoints are written on another host than the service's."""
        return bool(self.service_host) and self.host != self.service_host

    def is_due_after(self, step: int) -> bool:
        """Whether the writer takes a checkpoint after `step`, unless it does before."""
        taken = max(self.step, self.begun)
        return self.writer is not None and bool(self.every) and step - step % self.every > taken

    def note_written(
        self,
        worker: int,
        checkpoint: Checkpoint | None,
        line_step: int,
        request: JoinRequest | None = None,
    ) -> list[Effect]:
        """Notes the last checkpoint that a worker wrote, or resumed from, by its own report.

        Args:
            worker: that worker.
            checkpoint: what it reports.
            line_step: the line's.
            request: the worker's Join, if it may be asked to load the checkpoint.
        """
        if checkpoint is not None and request is not None and self.journalled:
            self._take_over(worker, checkpoint, line_step, request)
        # A step beyond the line's was given up, or is made up. Taken over, it would hide every
        # later checkpoint.
        if checkpoint is None or not self.step < checkpoint.step <= line_step:
            return []
        # Rising steps only, so a report that comes late changes nothing.
        self.step, self.folder = checkpoint.step, checkpoint.folder
        if request is not None:
            self._know(checkpoint, request)
        return [NoteCheckpoint(worker, checkpoint.step, checkpoint.folder)]

    def _take_over(
        self, worker: int, reported: Checkpoint, line_step: int, request: JoinRequest
    ) -> None:
        """Takes over what the journal has of a worker's folder, without what it reports now."""
        # The same host and the same folder: what it reports is there, so the older ones are, too.
        place = _place_of(reported.folder)
        theirs = [
            noted
            for noted in self.journalled
            if noted.was_on(request.node_id, worker)
            and _place_of(noted.checkpoint.folder) == place
            and noted.checkpoint.step != reported.step
        ]
        for noted in theirs:
            written = noted.checkpoint
            if self.step < written.step <= line_step:
                self.step, self.folder = written.step, written.folder
                self._know(written, request)
        self.journalled = [each for each in self.journalled if each not in theirs]

    def _know(self, checkpoint: Checkpoint, request: JoinRequest) -> None:
        if checkpoint.head is None or request.checkpoints is None:
            return
        self.known.append(
            KnownCheckpoint(
                checkpoint.step,
                checkpoint.folder,
                checkpoint.head,
                request.incarnation,
                request.node_id,
                request.checkpoints.keep,
            )
        )

    def note_begun(self, worker: int, step: int, line_step: int) -> None:
        """Notes the step of the checkpoint that a worker is writing, by its own report; 0: none."""
        if worker == self.writer:
            # As above: a step beyond the line's would hide every later one.
            self.begun = step if step <= line_step else 0

    def went_back(self, line_step: int) -> None:
        """Forgets what was written after a step that the line went back to.

        A checkpoint of a later step would hide that one is due.
        """
        self.overdue = self.begun = 0
        self.reported = min(self.reported, line_step)
        while self.known and self.known[-1].step > line_step:
            self.known.pop()
        if self.step > line_step:
            last = self.known[-1] if self.known else None
            self.step, self.folder = (0, "") if last is None else (last.step, last.folder)

    def proved_before(
        self, step: int, can_load: Callable[[KnownCheckpoint], bool]
    ) -> KnownCheckpoint | None:
        """The last checkpoint that can be loaded, and after which a step before `step` was made."""
        good = (
            each
            for newer, each in enumerate(reversed(self.known))
            # Those before the last few are removed.
            if each.step + 1 < step and newer < each.keep and can_load(each)
        )
        return next(good, None)

    def choose_writer(self, members: Sequence[LineMember], line_step: int) -> list[Effect]:
        """Sets `writer` to the one of the members that writes if a checkpoint is due.

        `members` are by id, and those that are late are among them: what is due waits for them.
        """
        effects: list[Effect] = []
        able = [each for each in members if each.request.checkpoints is not None]
        # The process is compared, not the slot: a new process in the writer's slot may have
        # another folder.
        if not any(each.request.incarnation == self.incarnation for each in able):
            here = [each for each in able if each.request.node_id == self.service_host]
            effects += self._appoint(next(iter(here or able), None))
        return effects + self._look_for_overdue(line_step)

    def _appoint(self, member: LineMember | None) -> list[Effect]:
        if member is None and self.writer is None:
            return []
        plan = member.request.checkpoints if member is not None else None
        self.writer = member.worker if member is not None else None
        self.incarnation = member.request.incarnation if member is not None else None
        self.host = member.request.node_id if member is not None else ""
        self.begun = 0  # Nobody knows what became of it.
        self.every = plan.every if plan is not None else 0
        self.place = plan.folder if plan is not None else ""
        return [NoteWriter(self.writer, self.host, self.place, self.elsewhere)]

    def _look_for_overdue(self, line_step: int) -> list[Effect]:
        """Reports, once each, a step that should have a checkpoint and has none."""
        due = line_step - line_step % self.every if self.every else 0
        self.overdue = due if due > max(self.step, self.begun) else 0
        if self.overdue <= self.reported:
            return []
        self.reported = self.overdue
        return [NoteOverdue(self.overdue, self.writer, self.step)]


def _place_of(folder: str) -> str:
    """The folder of all checkpoints that a checkpoint's own folder is in."""
    return str(PurePath(folder).parent)
