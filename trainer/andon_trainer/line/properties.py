"""Properties of `Line`: what a script can read at any time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from andon_trainer.data.evaluation import Splitting
from andon_trainer.data.feed import Feeder
from andon_trainer.line.worker import Worker
from andon_trainer.place.member import RunMember
from andon_trainer.schedules.loop_steps import LoopSteps
from andon_trainer.schedules.manual import ManualStepper
from andon_trainer.script.gates import Audit

__all__ = ["LineProperties"]


class LineProperties:
    """Where this worker and its line stand."""

    device: torch.device
    """The device that this worker computes on."""
    complete: bool
    """Whether the run is over: every wanted step is committed."""
    _worker: Worker
    _closed: bool = False
    """Whether `close` was called."""
    _prepared: bool = False
    """Whether `prepare` or `join` was called."""
    _stepper: LoopSteps | None = None
    """The step, in a script that prepared; None before it joined."""
    _manual: ManualStepper | None = None
    """The step, in a script with manual steps."""
    _undo: list[Callable[[], None]]
    """Undoes, last first, what was done to the script's objects."""
    _end_logs: Callable[[], None]
    """Ends what the library writes of its logs."""
    _splitting: Splitting
    """Divides the loaders of evaluations."""
    _feeder: Feeder | None = None
    """Where the loop's samples come from."""
    _audit: Audit | None = None
    """Watches over what moves the prepared models."""

    @property
    def rank(self) -> int:
        """This worker's rank, from 0; it can change between steps, as workers come and go.

        Before the worker has joined it is the launcher's `RANK`, or 0. In a host whose processes
        average by DistributedDataParallel each process has a rank of its own, and every host must
        have as many processes.
        """
        assigned, host = self._worker.assigned, self._worker.host
        if assigned is None:
            return self._worker.config.launch_slot or 0
        return assigned.rank if host is None else assigned.rank * host.size + host.rank

    @property
    def world_size(self) -> int:
        """Number of workers in the current step; it can change between steps.

        Before the worker has joined it is the launcher's `WORLD_SIZE`, or 1. Processes of a host
        that average by DistributedDataParallel count each.
        """
        assigned, host = self._worker.assigned, self._worker.host
        if assigned is None:
            return self._worker.config.launch_size
        return assigned.world_size if host is None else assigned.world_size * host.size

    @property
    def is_main(self) -> bool:
        """Whether this worker has rank 0; another worker may have it in the next step."""
        return self.rank == 0

    @property
    def step(self) -> int:
        """Number of steps committed so far; a resumed run counts on from its checkpoint."""
        return self._worker.member.position.step if self._worker.member else 0

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._worker.member.position.cursor.epoch if self._worker.member else 0

    @property
    def seed(self) -> int:
        """Seed of the sample order; the same on all workers."""
        return self._worker.config.seed

    @property
    def loss(self) -> float | None:
        """Mean loss of the last committed step over all workers, each counted by its weight.

        None before the first commit, and in a script with manual steps.
        """
        commit = self._stepper.last_commit if self._stepper else None
        return commit.loss if commit else None

    @property
    def accuracy(self) -> float | None:
        """Fraction of the last committed step's samples that the model got right, from 0 to 1.

        None before the first commit, in a script with manual steps, and unless every worker
        passes `correct` to `line.backward` for every batch.
        """
        commit = self._stepper.last_commit if self._stepper else None
        return commit.accuracy if commit else None

    @property
    def overflowed(self) -> bool:
        """Whether the last step was committed and moved no weight, since gradients overflowed.

        It is the same on every worker, and only with a prepared GradScaler ever true.
        """
        steps = self._stepper
        return steps is not None and steps.committed and steps.overflowed

    @property
    def committed(self) -> bool:
        """Whether the last `optimizer.step()`, or `should_commit()`, committed the step."""
        steps = self._manual or self._stepper
        return steps is not None and steps.committed

    @property
    def stopped(self) -> str:
        """Why the run ends, for example `steps` or `drained`; empty while it goes on."""
        return self._worker.member.position.stop_reason if self._worker.member else ""

    @property
    def run_dir(self) -> Path | None:
        """Folder of the run's files; None if the run keeps none."""
        return self._worker.config.run_dir

    @property
    def last_checkpoint(self) -> Path | None:
        """Folder of the last checkpoint that this worker wrote; None if it wrote none."""
        return self._worker.checkpoints.last

    @property
    def _member(self) -> RunMember:
        """This worker's membership; raises RuntimeError before it has joined."""
        if self._worker.member is None:
            raise self._not_joined()
        return self._worker.member

    @property
    def _steps(self) -> LoopSteps:
        """The current step of a script that prepared."""
        if self._closed:
            raise RuntimeError(
                "this Line is closed: make a new one, line = Line(), and call line.prepare again"
            )
        self._refuse_manual("backward")
        if self._stepper is None:
            raise self._not_joined()
        return self._stepper

    def _want_stop(self, reason: str) -> None:
        """Ends the run with the current step, or the next one if none is under way."""
        (self._manual or self._steps).stop_wanted = reason or "the script asked for it"

    def _not_joined(self) -> RuntimeError:
        if not self._prepared:
            return RuntimeError(
                "call line.prepare(model, optimizer, ..., loader) first, or line.join(model, ...)"
            )
        return RuntimeError(
            "line.prepare was given no DataLoader, so this worker has not joined yet. Give it the "
            "loader of the training set, line.prepare(model, optimizer, loader), or iterate `for "
            "shard in line.shards(samples, batch_size):`, which yields indices; a loop without a "
            "data set joins by hand, line.join(model), as docs/guide/several-models.md shows"
        )

    def _require_prepared(self) -> None:
        if not self._prepared:
            raise self._not_joined()

    def _refuse_manual(self, what: str) -> None:
        """Raises RuntimeError if the script called `join`: `what` belongs to `prepare`."""
        if self._manual is not None:
            raise RuntimeError(
                f"line.{what} belongs to line.prepare, and this script called line.join: write "
                "loss.backward(), line.all_reduce_gradients(model), and optimizer.step() if "
                "line.should_commit()"
            )
