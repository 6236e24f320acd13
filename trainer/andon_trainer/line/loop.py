"""The training loop: the calls of `Line` for a script that prepared, from epochs to stop."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from andon.protocol.order import splitmix64
from andon_trainer.data.evaluation import EvaluationShare
from andon_trainer.data.feed import Feeder, ShardFeeder, whole_epoch
from andon_trainer.data.loader import LineLoader, move_to
from andon_trainer.errors import RunOver
from andon_trainer.line.properties import LineProperties
from andon_trainer.model.graph import Graph
from andon_trainer.script.gates import refuse_unprepared
from andon_trainer.script.loss_terms import is_divided
from andon_trainer.script.script_checks import warn_of_wrappers

__all__ = ["TrainingLoop"]

log = logging.getLogger(__name__)


class TrainingLoop(LineProperties):
    """What `Line` offers to a loop over a prepared loader, or over `shards`."""

    _micro_batch_size: int | None = None
    _schedulers: list[LRScheduler]
    _accumulating = 0
    """The number of batches that the script accumulates in this loop body; 0: it does not."""
    _warned_of_division = False
    _iterated = False
    """Whether the script has begun to iterate its loader."""
    _knows_its_end = False
    """Whether `epochs` ends the script's loop, or a warning was logged that nothing does."""
    _begun_epoch: int | None = None
    """The epoch that `epochs` yielded last."""
    _batches_are_plain = False
    """Whether the loader was iterated last after the end of the run."""

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the epochs that are left of `count`, from the line's current one on.

        A resumed run begins in its checkpoint's epoch. The loop also ends when the run stops
        (`line.stopped`). A script may leave an epoch's batches early (`break`, `islice`): the rest
        of the epoch is then skipped on all workers.

        Args:
            count: number of epochs in the whole run.

        Yields:
            The epoch's number, from 0.

        Raises:
            RuntimeError: the script left an epoch between `line.backward(loss)` and
                `optimizer.step()`, or called `join`.
            LineHalted: the line stopped, or the workers' final weights differ.
        """
        self._refuse_manual("epochs")
        self._knows_its_end = True
        # A second loop, as after some layers were unfrozen, goes on where the first one ended.
        self.complete = self.complete and (bool(self.stopped) or self.epoch >= count)
        if self._worker.member is None:
            self._require_prepared()
            # The worker joins in this epoch's body, when it calls `shards`. Whether a line that it
            # will join is further, nobody knows before.
            origin = self._worker.checkpoints.origin
            self._begun_epoch = 0 if origin is None else origin.cursor.epoch
            if self._begun_epoch >= count:
                self.complete = True
                return
            yield self._begun_epoch
            self._leave_epoch()
        while not self.complete:
            self._catch_up()
            here = self._member.position
            if here.stop_reason or here.cursor.epoch >= count:
                # The checkpoint first: comparing waits for workers that may still train.
                self._worker.between_steps(over=True)
                self._worker.compare_ends()
                self.complete = True
                self._warn_of_left_over()
                return
            # The loader may go on to a later one in this body, if the line has done without this
            # worker for a while: then that is the epoch to leave.
            self._begun_epoch = self._steps.epoch = here.cursor.epoch
            yield self._begun_epoch
            self._leave_epoch()

    def _leave_epoch(self) -> None:
        """Ends the epoch whose loop body is over, unless the line has gone on from it already."""
        here = self._member.position
        if not here.stop_reason and here.cursor.epoch == self._steps.epoch:
            # If the run is over, `epochs` sees it and ends the loop.
            with self._ending_in_epochs():
                self._steps.leave_epoch()

    def _catch_up(self) -> None:
        """Gets the state of a line that went on without this worker, before an epoch is begun."""
        with self._ending_in_epochs():
            self._member.catch_up()

    @contextmanager
    def _ending_in_epochs(self) -> Iterator[None]:
        """Around a wait of `epochs`, which sees by itself that the run is over."""
        try:
            yield
        except RunOver:
            assert self._member.position.stop_reason

    @property
    def reshaped(self) -> bool:
        """Whether state that the last loop body left does not belong to this batch's samples.

        It is False only if the last loop body was for the step before, and had the same rows of its
        batch. So it is True in the first loop body; where this worker's share changed, since a
        worker was lost or came, or shares follow speed; in a step that is tried again, and for a
        short last batch and the one after it. With micro-batches, local steps or windows of several
        batches it is always True: the loop body before had other rows.

        A script that carries hidden state from batch to batch drops it then:

        ```python
        for x, y in loader:
            if line.reshaped:
                state = None
            scores, state = model(x, state)
        ```
        """
        return self._batches_are_plain or self._stepper is None or self._stepper.rows.changed

    def shards(self, samples: int, batch_size: int) -> LineLoader:
        """Yields indices of samples, for scripts without a DataLoader.

        ```python
        for shard in line.shards(len(labels), batch_size=32):
            line.backward(loss_of(model(features[shard.indices]), labels[shard.indices]))
            optimizer.step()
        ```

        Args:
            samples: number of samples in an epoch.
            batch_size: samples in one step, over all workers.

        Returns:
            An iterable of `Shard`, for one epoch each time that it is iterated.

        Raises:
            ValueError: a number is below 1, or another one than at the first call.
            RuntimeError: `prepare` was not called, or `join` was.
            JoinRefused, CheckpointRefused, LineLost: as from `prepare`.
        """
        self._refuse_manual("shards")
        feeder = ShardFeeder(
            samples,
            batch_size,
            seed=self.seed,
            micro_batch_size=self._micro_batch_size,
            step=lambda: self.step + 1,
        )
        if self._stepper is None:
            self._require_prepared()
            self._join(feeder)
            if self._begun_epoch not in (None, self.epoch):
                log.warning(
                    "this worker joins in epoch %d, and the loop body of epoch %d has begun: use "
                    "shard.epoch or line.epoch in it. The next one is of the right epoch",
                    self.epoch,
                    self._begun_epoch,
                )
        agreed = self._feeder
        if isinstance(agreed, ShardFeeder) and not self._why_over:
            _refuse_other_shards((samples, batch_size), (agreed.epoch_size, agreed.batch_size))
        return self._loader_of(feeder, batch_size, None)

    def _loader_of(
        self, feeder: Feeder, batch_size: int | None, given: DataLoader[Any] | None
    ) -> LineLoader:
        """What the script iterates in place of its own loader."""

        def loop_bodies() -> int:
            if self._why_over:
                return feeder.loop_bodies(self._last_epoch, 0, 1)
            workers = self.world_size
            # Before the first round the rank is the launcher's, which may count other hosts too.
            return feeder.loop_bodies(self.epoch, min(self.rank, workers - 1), workers)

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
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Runs backward; after a step's last micro-batch `p.grad` is the mean over all workers.

        Call it once for each batch of the prepared loader; add up several losses. Until the last
        micro-batch of the step `p.grad` is None; after it, clip, log or unscale gradients as usual.
        With a prepared GradScaler the loss is scaled, whether or not `scaler.scale(loss)` was;
        `line.loss` is not.

        ```python
        line.backward(loss)                     # a mean over samples
        line.backward(loss, weight=n_tokens)    # a mean over tokens
        line.backward(loss + 0.1 * auxiliary)   # several losses of one batch
        ```

        Args:
            loss: mean loss of this micro-batch; a scalar.
            weight: number of terms that `loss` is the mean of; None: the number of samples.
            correct: number of these samples that the model got right, for `line.accuracy`. Pass it
                for every batch on every worker, or for none.
            scaler: was the script's GradScaler; give it to `line.prepare`.
            retain_graph: whether the script may use the loss's graph again.
            create_graph: whether gradients get graphs of their own, such as `x.grad` of an input.
                Those of parameters do not: they are means over all workers.

        Raises:
            TypeError: `scaler` was passed.
            LineHalted: a loss or gradient was not finite on some worker; no weights moved.
            RuntimeError: the prepared loader has yielded no batch for this call.
            RunOver: the batch is from after the end of the run, when loaders are plain ones.
            ValueError: the loss is no scalar, only a part of it is scaled, the weight is negative
                or not finite, or `correct` is more than the batch's samples.
        """
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
                self._worker.config.address or "",
                self.step,
                exit_code=1,
            )
        graph = Graph(retain_graph, create_graph)
        self._steps.backward(loss, weight, correct=correct, graph=graph)

    @contextmanager
    def accumulate(self, every: int) -> Iterator[None]:
        """Around the loop body: adds up the gradients of `every` batches for one optimizer step.

        Each batch is exchanged and committed as ever. Its mean over all workers is added up, and
        the weights move with every `every`-th batch, or the last one of an epoch, by the mean over
        all of them. In between `p.grad` is None after `backward`, and `zero_grad`, clipping,
        `optimizer.step()` and a prepared scheduler do nothing. Call them in each body, and do not
        divide the loss.

        ```python
        for x, y in loader:
            with line.accumulate(4):
                optimizer.zero_grad()
                line.backward(F.cross_entropy(model(x), y))
                optimizer.step()
        ```

        `line.step` counts every batch; `line.committed` is true where the weights moved. The sum
        is in checkpoints and goes to new workers. If the memory of one forward is all that you are
        short of, `prepare(..., micro_batch_size=n)` exchanges once a step and not once a batch.

        Args:
            every: number of batches; 1 changes nothing.

        Raises:
            ValueError: `every` is below 1.
            RuntimeError: `every` changed in the middle of an accumulation, the line makes local
                steps, or the script called `join`.
        """
        self._refuse_manual("accumulate")
        with self._steps.accumulate(every):
            self._accumulating = every
            try:
                yield
            finally:
                self._accumulating = 0

    def stop(self, reason: str) -> None:
        """Ends the run: all workers' loops end after the same step, the current or the next one.

        Any worker may call it. On a line with `--may-stop operators` none may: then it has no
        effect, and the worker's log says so.

        Args:
            reason: becomes `line.stopped` on all workers.
        """
        self._want_stop(reason)

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
        assert self._stepper is not None
        plain: Iterator[Any]
        if given is not None and self._closed:
            plain = iter(given)  # The feeder's loading processes ended with the line.
        else:
            self._stepper.pause()
            plain = self._all_of(feeder, given)
        for batch in plain:
            yield move_to(self.device, batch)

    def _all_of(self, feeder: Feeder, given: DataLoader[Any] | None) -> Iterator[Any]:
        if given is not None:
            try:
                feeder.refuse_other_length()
            except ValueError:
                # Nobody has to agree on a length any more, and the feeder knows the old one.
                return self._splitting.split(
                    given, EvaluationShare(0, 1), seed=splitmix64(self.seed)
                )[1]
        return whole_epoch(feeder, self._last_epoch)

    @property
    def _last_epoch(self) -> int:
        """The epoch that the script trained on last."""
        epoch = self._stepper.epoch if self._stepper is not None else None
        return max(0, self.epoch - 1) if epoch is None else epoch

    @property
    def _why_over(self) -> str:
        """Why no step follows any more; empty if one may."""
        if self.stopped:
            return self.stopped
        return "every epoch that line.epochs was asked for is done" if self.complete else ""

    def _epoch(self) -> Iterator[Any]:
        """The rest of the current epoch's batches."""
        self._warn_of_range()
        if not self._iterated:
            self._iterated = True
            # Again, for schedulers that the script made after `prepare`.
            optimizers = self._worker.replica.optimizers
            self._undo.append(refuse_unprepared(optimizers, self._schedulers))
            warn_of_wrappers(optimizers)
        yield from self._steps.batches(self._worker.between_steps)
        if self._member.position.stop_reason:
            self._worker.compare_ends()

    def _warn_of_left_over(self) -> None:
        left = self._stepper.left_over if self._stepper is not None else 0
        if left:
            log.warning(
                "the run ended in the middle of an accumulation: the gradients of its last %d "
                "batches moved no weights. A run that is resumed goes on with them",
                left,
            )

    def _warn_of_range(self) -> None:
        """Warns once that `for epoch in range(n)` trains a resumed run for too long."""
        if self.step and self._worker.endless and not self._knows_its_end:
            log.warning(
                "this run was resumed at step %d, in epoch %d: `for epoch in range(n)` trains n "
                "more epochs. Write `for epoch in line.epochs(n)`, which begins where the run is",
                self.step,
                self.epoch,
            )
        self._knows_its_end = True

    def _join(self, feeder: Feeder) -> None:
        raise NotImplementedError


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
