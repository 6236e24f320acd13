"""The training loop of a script that prepared: its epochs, its batches, its backwards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from andon.protocol.order import splitmix64
from andon_trainer.data.evaluation import EvaluationShare
from andon_trainer.data.feed import Feeder, ShardFeeder, whole_epoch
from andon_trainer.data.loader import LineLoader, move_to
from andon_trainer.errors import RunOver
from andon_trainer.line.joining import join_with
from andon_trainer.line.session import LineSession
from andon_trainer.model.graph import Graph
from andon_trainer.script.gates import refuse_unprepared
from andon_trainer.script.loss_terms import is_divided
from andon_trainer.script.script_checks import warn_of_wrappers

__all__ = ["TrainingLoop"]

log = logging.getLogger(__name__)


class TrainingLoop:
    """A loop over a prepared loader, or over `shards`."""

    def __init__(self, session: LineSession) -> None:
        """The script has not begun to loop."""
        self._session = session
        self._accumulating = 0
        """The number of batches that the script accumulates in this loop body; 0: it does not."""
        self._warned_of_division = False
        self._iterated = False
        """Whether the script has begun to iterate its loader."""
        self._knows_its_end = False
        """Whether `epochs` ends the script's loop, or a warning was logged that nothing does."""
        self._begun_epoch: int | None = None
        """The epoch that `epochs` yielded last."""
        self._batches_are_plain = False
        """Whether the loader was iterated last after the end of the run."""

    def epochs(self, count: int) -> Iterator[int]:
        """See `Line.epochs`."""
        session = self._session
        session.refuse_by_hand("epochs")
        self._knows_its_end = True
        # A second loop, as after some layers were unfrozen, goes on where the first one ended.
        session.complete = session.complete and (bool(session.stopped) or session.epoch >= count)
        if session.worker.member is None:
            session.require_prepared()
            # The worker joins in this epoch's body, when it calls `shards`. Whether a line that it
            # will join is further, nobody knows before.
            origin = session.worker.checkpoints.origin
            self._begun_epoch = 0 if origin is None else origin.cursor.epoch
            if self._begun_epoch >= count:
                session.complete = True
                return
            yield self._begun_epoch
            self._leave_epoch()
        while not session.complete:
            self._catch_up()
            here = session.member.position
            if here.stop_reason or here.cursor.epoch >= count:
                # The checkpoint first: comparing waits for workers that may still train.
                session.worker.between_steps(over=True)
                self._compare_ends()
                session.complete = True
                self._warn_of_left_over()
                return
            # The loader may go on to a later one in this body, if the line has done without this
            # worker for a while: then that is the epoch to leave.
            self._begun_epoch = here.cursor.epoch
            session.loop_steps.begin_epoch(here.cursor.epoch)
            yield self._begun_epoch
            self._leave_epoch()

    def _leave_epoch(self) -> None:
        """Ends the epoch whose loop body is over, unless the line has gone on from it already."""
        session = self._session
        here = session.member.position
        if not here.stop_reason and here.cursor.epoch == session.loop_steps.epoch:
            # If the run is over, `epochs` sees it and ends the loop.
            with self._ending_in_epochs():
                session.loop_steps.leave_epoch()

    def _catch_up(self) -> None:
        """Gets the state of a line that went on without this worker, before an epoch is begun."""
        with self._ending_in_epochs():
            self._session.member.catch_up()

    @contextmanager
    def _ending_in_epochs(self) -> Iterator[None]:
        """Around a wait of `epochs`, which sees by itself that the run is over."""
        try:
            yield
        except RunOver:
            assert self._session.member.position.stop_reason

    @property
    def reshaped(self) -> bool:
        """See `Line.reshaped`."""
        return (
            self._batches_are_plain
            or self._session.stepper is None
            or self._session.stepper.rows.changed
        )

    def shards(self, samples: int, batch_size: int) -> LineLoader:
        """See `Line.shards`."""
        session = self._session
        session.refuse_by_hand("shards")
        feeder = ShardFeeder(
            samples,
            batch_size,
            seed=session.worker.config.seed,
            micro_batch_size=session.micro_batch_size,
            step=lambda: session.step + 1,
            grain=session.grain,
        )
        if session.stepper is None:
            session.require_prepared()
            join_with(session, feeder)
            if self._begun_epoch not in (None, session.epoch):
                log.warning(
                    "this worker joins in epoch %d, and the loop body of epoch %d has begun: use "
                    "shard.epoch or line.epoch in it. The next one is of the right epoch",
                    session.epoch,
                    self._begun_epoch,
                )
        agreed = session.feeder
        if isinstance(agreed, ShardFeeder) and not self._why_over:
            _refuse_other_shards((samples, batch_size), (agreed.epoch_size, agreed.batch_size))
        return self.loader_of(feeder, batch_size, None)

    def loader_of(
        self, feeder: Feeder, batch_size: int | None, given: DataLoader[Any] | None
    ) -> LineLoader:
        """What the script iterates in place of its own loader."""
        session = self._session

        def loop_bodies() -> int:
            if self._why_over:
                return feeder.loop_bodies(self._last_epoch, 0, 1)
            workers = session.world_size
            # Before the first round the rank is the launcher's, which may count other hosts too.
            return feeder.loop_bodies(session.epoch, min(session.rank, workers - 1), workers)

        size = feeder.epoch_size
        return LineLoader(
            lambda: self._batches(feeder, given),
            loop_bodies,
            steps=None if size is None else -(-size // feeder.batch_size),
            batch_size=batch_size,
            given=given,
        )

    def backward(
        self,
        loss: torch.Tensor,
        weight: float | None = None,
        *,
        correct: int | torch.Tensor | None = None,
        scaler: object = None,
        graph: Graph,
    ) -> None:
        """See `Line.backward`."""
        session = self._session
        if scaler is not None:
            raise TypeError(
                "line.backward takes no scaler any more: pass it with the optimizer, "
                "line.prepare(model, optimizer, scaler, loader), and write line.backward(loss)"
            )
        every = self._accumulating
        if every > 1 and not self._warned_of_division and is_divided(loss, every):
            self._warned_of_division = True
            log.warning(
                "the loss is divided by %d inside line.accumulate(%d), which takes the mean "
                "itself: gradients are %d times too small. Leave the division out",
                every,
                every,
                every,
            )
        if self._batches_are_plain:
            raise RunOver(
                f"the run is over: {self._why_over}. The prepared loader now gives the whole data "
                "set to each worker, which trains nothing. A training loop `for epoch in "
                "line.epochs(n)` ends by itself; to evaluate leave line.backward out, or share the "
                "samples out: line.split(loader)",
                session.worker.config.address or "",
                session.step,
                exit_code=1,
            )
        session.loop_steps.backward(loss, weight, correct=correct, graph=graph)

    @contextmanager
    def accumulate(self, every: int) -> Iterator[None]:
        """See `Line.accumulate`."""
        self._session.refuse_by_hand("accumulate")
        with self._session.loop_steps.accumulate(every):
            self._accumulating = every
            try:
                yield
            finally:
                self._accumulating = 0

    def _batches(self, feeder: Feeder, given: DataLoader[Any] | None) -> Iterator[Any]:
        """What a prepared loader yields: this worker's batches, and after the end plain ones."""
        self._batches_are_plain = bool(self._why_over)
        if not self._batches_are_plain:
            return self._epoch()
        return self._after_the_end(feeder, given)

    def _after_the_end(self, feeder: Feeder, given: DataLoader[Any] | None) -> Iterator[Any]:
        """The whole data set, as one process alone would load it; no step is begun.

        The order is that of the last epoch, the same on every worker: what a script computes of it
        on each worker (BatchNorm's statistics) is the same too.
        """
        session = self._session
        assert session.stepper is not None
        plain: Iterator[Any]
        if given is not None and session.closed:
            plain = iter(given)  # The feeder's loading processes ended with the line.
        else:
            session.stepper.pause()
            plain = self._all_of(feeder, given)
        for batch in plain:
            yield move_to(session.device, batch)

    def _all_of(self, feeder: Feeder, given: DataLoader[Any] | None) -> Iterator[Any]:
        if given is not None:
            try:
                feeder.refuse_other_length()
            except ValueError:
                # Nobody has to agree on a length any more, and the feeder knows the old one.
                return self._session.splitting.split(
                    given, EvaluationShare(0, 1), seed=splitmix64(self._session.worker.config.seed)
                )[1]
        return whole_epoch(feeder, self._last_epoch)

    @property
    def _last_epoch(self) -> int:
        """The epoch that the script trained on last."""
        session = self._session
        epoch = session.stepper.epoch if session.stepper is not None else None
        return max(0, session.epoch - 1) if epoch is None else epoch

    @property
    def _why_over(self) -> str:
        """Why no step follows any more; empty if one may."""
        session = self._session
        if session.stopped:
            return session.stopped
        return "every epoch that line.epochs was asked for is done" if session.complete else ""

    def _epoch(self) -> Iterator[Any]:
        """The rest of the current epoch's batches."""
        session = self._session
        self._warn_of_range()
        if not self._iterated:
            self._iterated = True
            # Again, for schedulers that the script made after `prepare`.
            optimizers = session.worker.replica.optimizers
            session.undo.append(refuse_unprepared(optimizers, session.schedulers))
            warn_of_wrappers(optimizers)
        yield from session.loop_steps.batches(session.worker.between_steps)
        if session.member.position.stop_reason:
            self._compare_ends()

    def _compare_ends(self) -> None:
        """Ends with the line's weights, whatever this worker has beyond them, and compares them."""
        if self._session.stepper is not None:
            self._session.stepper.pause()
        self._session.worker.compare_ends()

    def _warn_of_left_over(self) -> None:
        left = self._session.stepper.left_over if self._session.stepper is not None else 0
        if left:
            log.warning(
                "the run ended in the middle of an accumulation: the gradients of its last %d "
                "batches moved no weights. A run that is resumed goes on with them",
                left,
            )

    def _warn_of_range(self) -> None:
        """Warns once that `for epoch in range(n)` trains a resumed run for too long."""
        session = self._session
        if session.step and session.worker.endless and not self._knows_its_end:
            log.warning(
                "this run was resumed at step %d, in epoch %d: `for epoch in range(n)` trains n "
                "more epochs. Write `for epoch in line.epochs(n)`, which begins where the run is",
                session.step,
                session.epoch,
            )
        self._knows_its_end = True


def _refuse_other_shards(now: tuple[int, int], before: tuple[int, int]) -> None:
    """Raises ValueError if `line.shards` is given other numbers than those of the run."""
    if now != before:
        raise ValueError(
            f"line.shards({now[0]}, batch_size={now[1]}), and it was ({before[0]}, "
            f"batch_size={before[1]}) before: workers agree on the length of an epoch and on the "
            "batch when they join. For data that grows or shrinks give line.prepare a DataLoader "
            "of an IterableDataset without __len__, whose epoch ends where it ends; to evaluate "
            "call line.split(loader)"
        )
