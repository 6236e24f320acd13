"""The session of a `Line`: what its parts share, its worker and the script's objects."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LRScheduler

from andon_trainer.data.evaluation import Splitting
from andon_trainer.data.feed import Feeder
from andon_trainer.errors import ANOTHER_RUN
from andon_trainer.line.worker import Worker
from andon_trainer.place.member import RunMember, WorkerMember
from andon_trainer.schedules.loop_steps import LoopSteps
from andon_trainer.schedules.manual import ManualStepper
from andon_trainer.schedules.stepper import StepperGate
from andon_trainer.script.gates import Audit
from andon_trainer.script.scaling import ScalerGate

__all__ = ["LineSession"]


class LineSession:
    """One `Line` from its beginning to its end. Used by one thread.

    A script either prepares, and then has a `stepper`, or joins by hand, and then has `manual`.
    """

    def __init__(self, worker: Worker) -> None:
        """Nothing is prepared yet."""
        self.worker = worker
        self.prepared = False
        """Whether `prepare` or `join` was called."""
        self.complete = False
        """Whether every wanted step is committed."""
        self.closed = False
        self.stepper: LoopSteps | None = None
        """The step, in a script that prepared; None before it joined."""
        self.manual: ManualStepper | None = None
        """The step, in a script with manual steps."""
        self.micro_batch_size: int | None = None
        self.grain = 0
        """Positions of a grain, if the line is to have equal bits; else 0."""
        self.feeder: Feeder | None = None
        """Where the loop's samples come from."""
        self.scaling: ScalerGate | None = None
        self.schedulers: list[LRScheduler] = []
        """Those that were prepared."""
        self.audit: Audit | None = None
        """Watches over what moves the prepared models."""
        self.gate = StepperGate()
        self.splitting = Splitting(worker.device)
        """Divides the loaders of evaluations."""
        self.undo: list[Callable[[], None]] = []
        """Undoes, last first, what was done to the script's objects."""

    @property
    def device(self) -> torch.device:
        """What this worker computes on."""
        return self.worker.device

    @property
    def rank(self) -> int:
        """See `Line.rank`."""
        assigned, host = self.worker.assigned, self.worker.host
        if assigned is None:
            return self.worker.config.launch_slot or 0
        return assigned.rank if host is None else assigned.rank * host.size + host.rank

    @property
    def world_size(self) -> int:
        """See `Line.world_size`."""
        assigned, host = self.worker.assigned, self.worker.host
        if assigned is None:
            return self.worker.config.launch_size
        return assigned.world_size if host is None else assigned.world_size * host.size

    @property
    def alone(self) -> bool:
        """Whether nobody else takes averages of this worker's round."""
        assigned = self.worker.assigned
        return self.world_size == 1 and (assigned is None or assigned.alone)

    @property
    def step(self) -> int:
        """Number of committed steps."""
        return self.worker.member.position.step if self.worker.member else 0

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self.worker.member.position.cursor.epoch if self.worker.member else 0

    @property
    def stopped(self) -> str:
        """Why the run ends; empty while it goes on."""
        return self.worker.member.position.stop_reason if self.worker.member else ""

    @property
    def steps(self) -> ManualStepper | LoopSteps | None:
        """The script's steps, of either kind; None before it has joined."""
        return self.manual or self.stepper

    # ------------------------------------------------------------------ what a call needs

    @property
    def member(self) -> RunMember:
        """This worker's membership; raises RuntimeError before it has joined."""
        if self.worker.member is None:
            raise self._not_joined()
        return self.worker.member

    @property
    def whole(self) -> WorkerMember:
        """The same, of the process that acts for its whole worker; nobody else asks for it."""
        assert self.worker.whole is not None
        return self.worker.whole

    @property
    def loop_steps(self) -> LoopSteps:
        """The current step of a script that prepared; raises RuntimeError in any other."""
        if self.closed:
            raise RuntimeError(
                "this Line is closed: make a new one, line = Line(), and call line.prepare again"
            )
        self.refuse_by_hand("backward")
        if self.stepper is None:
            raise self._not_joined()
        return self.stepper

    @property
    def by_hand(self) -> ManualStepper:
        """The current step of a script with manual steps; raises RuntimeError in any other."""
        if self.manual is None:
            raise RuntimeError(
                "this script did not join for manual steps: call line.join(model, ...) instead of "
                "line.prepare(...), whose loop exchanges gradients by itself"
            )
        return self.manual

    def require_first(self) -> None:
        """Raises RuntimeError if the script has prepared or joined before."""
        if self.prepared:
            raise RuntimeError(
                "line.prepare or line.join was called already: give it everything in one call; in "
                "a notebook make a new Line in the cell that prepares. For another run "
                f"{ANOTHER_RUN}"
            )

    def require_prepared(self) -> None:
        """Raises RuntimeError if the script has neither prepared nor joined."""
        if not self.prepared:
            raise self._not_joined()

    def require_between_steps(self, what: str) -> None:
        """Raises RuntimeError if a step is under way: `what` is called between two."""
        if self.steps is not None and self.steps.midway:
            raise RuntimeError(
                f"step {self.step + 1} is under way, and line.{what} is taken between two steps: "
                "call it once line.committed is true, or outside the loop"
            )

    def refuse_by_hand(self, what: str) -> None:
        """Raises RuntimeError if the script called `join`: `what` belongs to `prepare`."""
        if self.manual is not None:
            raise RuntimeError(
                f"line.{what} belongs to line.prepare, and this script called line.join: write "
                "loss.backward(), line.all_reduce_gradients(model), and optimizer.step() if "
                "line.should_commit()"
            )

    def _not_joined(self) -> RuntimeError:
        if not self.prepared:
            return RuntimeError(
                "call line.prepare(model, optimizer, ..., loader) first, or line.join(model, ...)"
            )
        return RuntimeError(
            "line.prepare was given no DataLoader, so this worker has not joined yet. Give it the "
            "loader of the training set, line.prepare(model, optimizer, loader), or iterate `for "
            "shard in line.shards(samples, batch_size):`, which yields indices; a loop without a "
            "data set joins by hand, line.join(model), as docs/guide/several-models.md shows"
        )

    def want_stop(self, reason: str) -> None:
        """Ends the run with the current step, or the next one if none is under way."""
        (self.manual or self.loop_steps).stop_wanted = reason or "the script asked for it"
