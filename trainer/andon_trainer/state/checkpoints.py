"""A run's checkpoints: when one is written, which are kept, and what a run resumes from.

Theory of operation. The line names one worker as its writer, and that worker cuts a snapshot of its
state between two steps. This works like a barrier: no round opens before every worker in sync has
asked for work, and the writer asks only after the cut. Meanwhile all workers in sync hold the
weights of the same record. So what is cut is every worker's state, at one commit.

A thread writes it while training goes on, and only what is whole on disk counts: the line is told
of it then, and older ones may go. At most one is written at a time. If the next one is due before,
the writer waits: a run whose disk is too slow trains more slowly, but never loses more than it was
asked to risk. What fails on the thread halts the line at the next chance, between two steps, and
after the answer the checkpoint is written in the script's thread, of the step that the worker is at
then. So is the last one of a run, since nobody trains any more.

Older checkpoints are removed only once a step was committed on top of the newest one: until then
nobody knows whether training can go on from it. A halted line commits nothing, so nothing is
removed while it is halted.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from andon.host.manifest import (
    CheckpointFacts,
    checkpoint_folder,
    checkpoints_in,
    newest_whole,
    step_of,
)
from andon.host.priority import give_way
from andon.host.trace import Track
from andon.protocol.arithmetic import Arithmetic, ArithmeticRule, difference, remedy
from andon.protocol.records import Key
from andon.protocol.run_settings import RunPlan
from andon_trainer.config import LineConfig
from andon_trainer.core.reports import WrittenCheckpoint
from andon_trainer.errors import CheckpointRefused
from andon_trainer.place.member import WorkerMember
from andon_trainer.place.position import Position
from andon_trainer.state import rng
from andon_trainer.state.checkpoint_files import remove_checkpoint
from andon_trainer.state.file_work import NICENESS, FileWork
from andon_trainer.state.replica import CheckpointCut, Replica

__all__ = ["WorkerCheckpoints"]

log = logging.getLogger(__name__)

_TOTALS = ("total_steps", "total_epochs")
_LARGE_BYTES = 16 * 2**20
"""A checkpoint below this is written in a moment, and need not give way to training."""


@dataclass(slots=True)
class _Writing:
    """A checkpoint that is being written beside training."""

    step: int
    folder: Path
    head: Key
    cut: CheckpointCut
    began: float = 0.0
    ended: float = 0.0
    whole: bool = False
    """Whether it is on disk."""
    counts: bool = True
    """Whether the line still has its step."""


class WorkerCheckpoints:
    """A run's checkpoints, as one worker reads and writes them. Used by one thread."""

    def __init__(
        self, config: LineConfig, device: torch.device, work: FileWork | None = None
    ) -> None:
        """Reads and writes no file yet; `work` is what writes beside training."""
        self._config = config
        # `andon run` has looked before this process began to load its libraries.
        self._was_there = config.resume is not None and (config.andon_run or config.resume.exists())
        """Whether the checkpoint to resume from was there when this process began."""
        self._device = device
        self._began: dict[str, str] = {}
        """Digests of the random generators when this worker began."""
        self._generators: dict[str, Any] = {}
        """States of random generators that are still to be restored."""
        self._alike: set[str] = set()
        """Names of generators that began here as they did where the checkpoint was written."""
        self._requested = False
        """Whether SIGUSR1 asked for a checkpoint."""
        self._best: int | None = None
        """The step of the checkpoint to keep as the best."""
        self._wanted: int | None = None
        """The step of one that is to be written as the best."""
        self._previous: Callable[[int, FrameType | None], Any] | int | None = None
        """What SIGUSR1 did before this worker listened for it."""
        self._written = 0
        """The step of the last checkpoint that this worker wrote or resumed from."""
        self._unproven: int | None = None
        """The step of a checkpoint on top of which nothing was committed yet."""
        self._at: Key | None = None
        """The last commit after which a checkpoint could have been written."""
        self._work = work or FileWork()
        self._writing: _Writing | None = None
        self._arithmetic: Arithmetic = ()
        """What decides the bits of this worker's results, if the same ones are wanted."""
        self._has_room = False
        """Whether memory was got for copies, ahead of the first one."""
        self._failed = False
        """Whether one could not be written, so that one is written in the script's thread."""
        self._torn = False
        """Whether the script wrote weights beside a copy: from then on all is copied at once."""
        self._warned_of_pace = False
        self.origin: CheckpointFacts | None = None
        """The facts of the checkpoint that this worker resumed from."""
        self.written: list[Path] = []
        """The folders of the checkpoints that this worker wrote, in order."""

    @property
    def last(self) -> Path | None:
        """The folder of the last checkpoint that this worker wrote."""
        return self.written[-1] if self.written else None

    def begin(self, replica: Replica) -> None:
        """Loads the checkpoint that the run resumes from, if any, and listens for SIGUSR1.

        Raises:
            CheckpointRefused: it is damaged, or of other models or optimizers.
        """
        began = rng.digests(rng.capture(self._device))
        self._began = began
        if self._config.run_dir is not None:
            self._listen()
        folder = self._config.resume
        if folder is None:
            return
        self.origin, states = self._load(replica, folder)
        self._written = self.origin.step
        self._generators = dict(states["now"])
        self._alike = {name for name in began if states["began"].get(name) == began[name]}

    def _load(self, replica: Replica, folder: Path) -> tuple[CheckpointFacts, dict[str, Any]]:
        """Loads this checkpoint, or the newest one where the line has removed this one by now.

        The others train on while this process starts, and a newer checkpoint pushes an old one out.
        """
        config = self._config
        while True:
            try:
                return replica.load(folder)
            except CheckpointRefused:
                # A folder is renamed before its files go: while it is there, nobody has removed it.
                if config.solo or config.run_dir is None or not self._was_there or folder.exists():
                    raise
                newest = newest_whole(config.run_dir)
                if newest is None:
                    raise
                log.info("%s has made room for newer ones: loading %s", folder, newest)
                folder = newest

    def restore(self, replica: Replica, folder: Path, head: Key) -> None:
        """Loads a checkpoint that the line goes back to, and removes later ones.

        Random generators go on as they are.

        Raises:
            CheckpointRefused: it is missing, damaged, or of another record, models or optimizers.
        """
        self._work.wait()  # What is being written would be torn.
        facts, _ = replica.load(folder, head)
        self._written = facts.step
        run_dir = self._config.run_dir
        # Later ones are of a history that is no more: `latest` must not find them.
        for later in () if run_dir is None else checkpoints_in(run_dir):
            if step_of(later) > facts.step and step_of(later) != self._best:
                remove_checkpoint(later)

    def check(self, plan: RunPlan) -> None:
        """Refuses a script that describes another run than its checkpoint; its length may differ.

        Raises:
            CheckpointRefused: the batch, the samples, their number or the seed differs.
        """
        if self.origin is None:
            return
        for name in RunPlan.__dataclass_fields__:
            mine, theirs = getattr(plan, name), getattr(self.origin.plan, name)
            if name == "data_digest" and mine and theirs and mine != theirs:
                raise CheckpointRefused(
                    f"the checkpoint {self._config.resume} is of a run with other samples, though "
                    "with the same number of them: seed what splits, shuffles or makes the "
                    "training set, as in random_split(data, lengths, "
                    "torch.Generator().manual_seed(0)); set ANDON_CHECK_DATA=0 if they are meant "
                    "to differ"
                )
            if name not in (*_TOTALS, "data_digest") and mine != theirs:
                raise CheckpointRefused(
                    f"the checkpoint {self._config.resume} is of a run whose {name} is {theirs}, "
                    f"and the script's is {mine}: positions would not mean the same samples. Use "
                    f"{theirs} again, or start a new run without --resume"
                )

    def takes_up(self, arithmetic: Arithmetic) -> None:
        """Notes what decides the bits of this worker's results, and compares it.

        Args:
            arithmetic: what it states; empty: nobody wants the same bits.

        Raises:
            CheckpointRefused: the checkpoint is of another arithmetic, and one is required.
        """
        self._arithmetic = arithmetic
        if self.origin is None or not (arithmetic and self.origin.arithmetic):
            return
        found = difference(arithmetic, self.origin.arithmetic)
        if found is None:
            return
        name, mine, theirs = found
        text = (
            f"the checkpoint {self._config.resume} was computed with {name} {theirs}, and this "
            f"process computes with {name} {mine}, so the run may go on with other bits"
        )
        if self._config.arithmetic == ArithmeticRule.REQUIRE.value:
            raise CheckpointRefused(
                f"{text}: {remedy(name, theirs)}, or set ANDON_ARITHMETIC=tell (--arithmetic tell)"
            )
        log.warning("%s", text)

    def restore_generators(self, worker: int | None) -> None:
        """Has the random generators go on from the checkpoint; once, before the first step.

        Not in `begin`: numbers drawn between loading and the first step (an evaluation, a model's
        weights) are no part of the checkpoint's history.
        """
        if not self._generators:
            return
        states, self._generators = self._generators, {}
        # See `rng`: slot 0, or a worker that is alone, continues rank 0's numbers. The others take
        # over only generators that all workers had seeded alike. Without a launcher's slot the line
        # chooses it, so it is known only now.
        given = self._config.launch_slot
        if worker if given is None else given:
            states = {name: state for name, state in states.items() if name in self._alike}
        rng.restore(states, self._device)

    def between_steps(
        self, replica: Replica, member: WorkerMember, plan: RunPlan, *, over: bool = False
    ) -> None:
        """Writes a checkpoint if one is due; call it after a step, before the next is asked for.

        Args:
            replica: the state to write.
            member: this worker's membership, which says whether it is the writer.
            plan: the run's.
            over: whether the script wants no further step.

        Raises:
            LineHalted: a checkpoint could not be written, and this worker raises.
        """
        if self._config.run_dir is None:
            return
        ends = over or bool(member.position.stop_reason)
        if ends and self._work.busy:
            member.talk.show("BUSY", "writing a checkpoint")
            self._work.wait()
            member.talk.show("IDLE")
        self._collect(member)
        here, assigned = member.position, member.position.assigned
        if assigned is None or not _is_at_commit(here):
            return
        self._at = here.head
        if assigned.writes_checkpoint and self._is_due(member, ends=ends):
            self._wait_for_the_last(member)
            if ends or self._failed:
                self._write(replica, member, plan)
            else:
                self._begin(replica, member, plan)
        if not self._work.busy or self._taken == here.step:
            self._requested = False  # Else it is answered by the first one after this.
        if not (self._work.busy or ends):
            self._use_the_time(replica, member)

    def _is_due(self, member: WorkerMember, *, ends: bool) -> bool:
        """Whether the last commit is to have a checkpoint, and has none."""
        here, writing = member.position, self._writing
        assert here.assigned is not None
        every, step = self._config.checkpoint_every, here.step
        if self._written > step:
            self._written = 0  # The line went back: what was written then is of no use any more.
        if writing is not None and writing.step > step:
            writing.counts = False
        if step in (self._written, self._taken):
            return False
        # The line knows the newest checkpoint of any worker. If the writer died before its own was
        # written, the next writer makes up for it here, at a step that is no multiple of `every`.
        last = max(self._written, self._taken, here.assigned.checkpoint_step)
        passed = every and step // every > last // every
        # The last step always gets one, so that a run that ended can be resumed from its end.
        due = passed or self._failed or self._wanted == step or (every and ends)
        # A signal names no step: it may wait until the one before is written.
        return bool(due or (self._requested and not self._work.busy))

    @property
    def _taken(self) -> int:
        """The step whose checkpoint is being written; 0: none is, or it does not count."""
        writing = self._writing
        return writing.step if writing is not None and writing.counts else 0

    def _wait_for_the_last(self, member: WorkerMember) -> None:
        """Waits until nothing is being written any more."""
        if not self._work.busy:
            return
        if self._taken and not self._warned_of_pace:
            self._warned_of_pace = True
            log.warning(
                "a checkpoint is due at step %d, and that of step %d is still being written: "
                "training waits for it. Write fewer (--checkpoint-every N), or to a quicker disk",
                member.position.step,
                self._taken,
            )
        member.talk.show("BUSY", "writing a checkpoint")
        self._work.wait()
        self._collect(member)
        member.talk.show("IDLE")

    def _facts(self, member: WorkerMember, plan: RunPlan, digest: str) -> CheckpointFacts:
        here = member.position
        assert here.head is not None
        return CheckpointFacts(
            head=here.head,
            step=here.step,
            cursor=here.cursor,
            digest=digest,
            plan=plan,
            pacing=here.pacing,
            arithmetic=self._arithmetic,
        )

    def _folder(self, step: int) -> Path:
        assert self._config.run_dir is not None
        return checkpoint_folder(self._config.run_dir, step)

    # ------------------------------------------------------------------ beside training

    def _begin(self, replica: Replica, member: WorkerMember, plan: RunPlan) -> None:
        """Cuts the state of the last commit, and has it written beside training."""
        began, step = time.perf_counter(), member.position.step
        folder = self._folder(step)
        generators = {"now": rng.capture(self._device), "began": self._began}
        try:
            # Of a step that is to be kept as the best no later one could take the place.
            at_once = self._torn or self._wanted == step
            facts = self._facts(member, plan, "")
            cut = replica.cut(folder, facts, generators, at_once=at_once)
        except (OSError, TypeError, ValueError) as error:
            if self._halt(member, error, folder):
                self._write(replica, member, plan)
            return
        writing = self._writing = _Writing(step, folder, facts.head, cut, began)
        rotate = self._rotation(step)

        def copied() -> None:
            # From here on no optimizer waits for this thread.
            if cut.snapshot.large_bytes >= _LARGE_BYTES:
                give_way(NICENESS)
            rotate()

        def work() -> None:
            writing.whole = cut.write(copied)
            writing.ended = time.perf_counter()

        self._work.begin(work)
        member.talk.writes(step)
        if member.timeline is not None:
            member.timeline.span("cut a checkpoint", began)

    def _collect(self, member: WorkerMember) -> None:
        """Takes note of what was done beside training, if that is over."""
        if self._work.busy:
            return
        failure, writing = self._work.take_failure(), self._writing
        if writing is None:
            if failure is not None:
                raise failure
            return
        self._writing = None
        writing.cut.snapshot.close()
        member.talk.writes(0)
        if failure is not None:
            if not isinstance(failure, OSError | TypeError | ValueError):
                raise failure
            self._failed = True
            self._halt(member, failure, writing.folder)
        elif not writing.whole:
            self._torn = self._requested = True
            log.info(
                "the weights were written beside the optimizers while a checkpoint of step %d was "
                "copied: it is taken again, and from now on copied at once",
                writing.step,
            )
        elif writing.counts and writing.step <= member.position.step:
            if member.timeline is not None:
                span = ("checkpoint", writing.began, writing.ended)
                member.timeline.span_on(Track.FILES, *span)
            self._wrote(member, writing.step, writing.folder, writing.head)

    def _use_the_time(self, replica: Replica, member: WorkerMember) -> None:
        """Removes older checkpoints, or gets memory for the first one, beside training."""
        every, here = self._config.checkpoint_every, member.position
        assert here.assigned is not None
        if self._unproven is not None and here.step > self._unproven:
            self._work.begin(self._rotation(here.step))
        elif here.assigned.writes_checkpoint and here.step % max(every, 1) * 2 > every:
            # In the second half of the way to it: until then the memory is of no use.
            if not self._has_room and (size := replica.large_bytes()):
                pinned = self._device.type == "cuda"
                self._work.begin(replica.rooms.getting(size, pinned=pinned))
            self._has_room = True

    def settle(self, replica: Replica, member: WorkerMember, plan: RunPlan) -> None:
        """Waits for what is being written, before a worker says that its work is done.

        Raises:
            LineHalted: it could not be written, and this worker raises.
        """
        if self._work.busy:
            member.talk.show("BUSY", "writing a checkpoint")
            self._work.wait()
        self._collect(member)
        if self._failed:
            self.between_steps(replica, member, plan)

    def keep(self, replica: Replica, member: WorkerMember, plan: RunPlan, *, paused: bool) -> None:
        """Writes a checkpoint of the head, whose state nobody else on the line holds.

        As one of the last acts of a worker whose machine goes: what fails is logged.

        Args:
            replica: the state to write.
            member: this worker's membership.
            plan: the run's.
            paused: the models hold the line's weights. Else the script may have a commit's mean,
                and not have moved its weights by it: then nothing is written.
        """
        here = member.position
        settled = paused or here.assigned is None or self._at == here.head
        if self._config.run_dir is None or here.head is None or not settled:
            log.warning("step %d is in no checkpoint, and nobody else holds it", here.step)
            return
        try:
            self.end(member)
            if self._written == here.step:
                return
            folder = self._folder(here.step)
            facts = self._facts(member, plan, replica.digest().hex())
            generators = {"now": rng.capture(self._device), "began": self._began}
            replica.save(folder, facts, generators)
            self._note(member, here.step, folder, facts.head)
        except (OSError, TypeError, ValueError) as error:
            log.error(  # noqa: TRY400  # the error says what a person needs
                "step %d, which nobody else holds, could not be written: %s", here.step, error
            )
        else:
            log.info("wrote step %d to %s, since nobody else holds it", here.step, folder)

    def end(self, member: WorkerMember) -> None:
        """Waits for what is being written, as one of the last acts of a worker that leaves.

        Nobody can be halted any more: what fails is logged.
        """
        try:
            self._work.wait()
        except KeyboardInterrupt:
            log.warning("interrupted: the checkpoint that was being written is given up")
            return
        failure, writing, self._writing = self._work.take_failure(), self._writing, None
        if writing is None:
            return
        writing.cut.snapshot.close()
        try:
            if failure is not None:
                raise failure
            if writing.whole and writing.counts:
                self._note(member, writing.step, writing.folder, writing.head)
                self._name_best(writing.folder, writing.step)
        except (OSError, TypeError, ValueError) as error:
            log.error(_not_written(writing.folder, error))  # noqa: TRY400  # it says all

    # ------------------------------------------------------------------ in the script's thread

    def _write(self, replica: Replica, member: WorkerMember, plan: RunPlan) -> None:
        """Writes the checkpoint of the last commit; while that fails the line is halted.

        If the run is over meanwhile, it is given up.
        """
        here = member.position
        member.talk.show("BUSY", "writing a checkpoint")
        began, folder = time.perf_counter(), self._folder(here.step)
        self._rotation(here.step)()
        facts = self._facts(member, plan, replica.digest().hex())
        generators = {"now": rng.capture(self._device), "began": self._began}
        while True:
            try:
                replica.save(folder, facts, generators)
            except (OSError, TypeError, ValueError) as error:
                if not self._halt(member, error, folder):
                    return
            else:
                break
        self._failed = False
        self._wrote(member, here.step, folder, facts.head)
        if member.timeline is not None:
            member.timeline.span("checkpoint", began)
        member.talk.show("IDLE")

    def _halt(self, member: WorkerMember, error: Exception, folder: Path) -> bool:
        """Halts the line for a checkpoint; returns once an operator has answered.

        After a TypeError or ValueError too: `register` checked the state, and it has something in
        it now that can't be kept.

        Returns:
            False: the run is over, and nobody will answer.
        """
        text = str(error)
        if isinstance(error, OSError):
            text = error.strerror or text
        answered = member.stop_line("CHECKPOINT", f"{text} ({folder})")
        if not answered:
            log.error("%s, and the run is over", _not_written(folder, error))
        return answered

    def _wrote(self, member: WorkerMember, step: int, folder: Path, head: Key) -> None:
        """A checkpoint is on disk: tells the line, and names it if it is the best one."""
        self._note(member, step, folder, head)
        while True:
            try:
                self._name_best(folder, step)
            except OSError as error:
                if not self._halt(member, error, folder):
                    return
            else:
                break

    def _note(self, member: WorkerMember, step: int, folder: Path, head: Key) -> None:
        self.written.append(folder)
        self._written = self._unproven = step
        member.talk.wrote(WrittenCheckpoint(step, str(folder), head))

    def _rotation(self, step: int) -> Callable[[], None]:
        """What removes older checkpoints, if a step was committed on top of the newest."""
        newest, run_dir = self._unproven, self._config.run_dir
        assert run_dir is not None
        if newest is None or step <= newest:
            return lambda: None
        self._unproven = None
        return lambda: self._rotate(run_dir, newest)

    def _rotate(self, run_dir: Path, newest: int) -> None:
        """Removes all but the last few checkpoints up to step `newest`.

        Those of later steps stay: they belong to a history that was rolled back.
        """
        kept = [folder for folder in checkpoints_in(run_dir) if step_of(folder) <= newest]
        for folder in kept[self._config.keep_checkpoints :]:
            if step_of(folder) != self._best:
                remove_checkpoint(folder)

    def keep_best(self, step: int) -> None:
        """Has the checkpoint of this step written, and kept until there is a better one.

        Its folder is what `checkpoints/best` leads to. A run without a folder keeps none.
        """
        run_dir, self._best = self._config.run_dir, step
        if run_dir is None or self._config.audit is not None:
            return
        if step == self._written:  # By this worker, before it was known to be the best.
            self._name_best(checkpoint_folder(run_dir, step), step)
        elif self._writing is None or self._writing.step != step:
            self._wanted = step

    def _name_best(self, folder: Path, step: int) -> None:
        """Makes the link `best` lead to the folder, if it is that of the best step."""
        if step != self._best:
            return
        link = folder.with_name("best")
        new = folder.with_name("best.new")
        new.unlink(missing_ok=True)
        new.symlink_to(folder.name)
        new.replace(link)  # At once: whoever follows the link finds the old one or the new one.

    def _listen(self) -> None:
        """Writes a checkpoint at the next step on SIGUSR1, unless the script uses that signal."""
        if threading.current_thread() is not threading.main_thread():
            return  # Python sets signal handlers in the main thread only.
        if signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, signal.SIG_IGN):
            self._previous = signal.signal(signal.SIGUSR1, self._request)

    def close(self) -> None:
        """Stops listening for SIGUSR1; a second call does nothing."""
        if self._previous is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGUSR1) == self._request:
            signal.signal(signal.SIGUSR1, self._previous)
        self._previous = None

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        self._requested = True


def _is_at_commit(here: Position) -> bool:
    """Whether a worker had part in the last commit, and has computed no more than that."""
    assigned = here.assigned
    return assigned is not None and assigned.key == here.head and assigned.ahead_batch is None


def _not_written(folder: Path, error: Exception) -> str:
    return f"the checkpoint {folder} could not be written: {error}"
