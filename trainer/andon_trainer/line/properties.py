"""The view: what a script can read off its `Line` at any time."""

from __future__ import annotations

from pathlib import Path

from andon_trainer.config import LineConfig
from andon_trainer.member import Member
from andon_trainer.state.checkpoints import Checkpoints
from andon_trainer.steps.manual import HandStepper
from andon_trainer.steps.stepper import Stepper

__all__ = ["LineView"]


class LineView:
    """Where this worker and its line stand; `Line` is what moves them."""

    complete: bool
    """Whether the run is over: every step that was wanted is committed."""
    _config: LineConfig
    _checkpoints: Checkpoints
    _prepared: bool = False
    _member: Member | None = None
    _stepper: Stepper | None = None
    _hand: HandStepper | None = None

    @property
    def rank(self) -> int:
        """This worker's rank on the line; it can change between steps."""
        assigned = self._member.assigned if self._member else None
        return assigned.rank if assigned else self._config.launch_slot or 0

    @property
    def world_size(self) -> int:
        """Workers in the present round; it can change between steps."""
        assigned = self._member.assigned if self._member else None
        return assigned.world_size if assigned else self._config.launch_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0; it may move to another worker."""
        return self.rank == 0

    @property
    def step(self) -> int:
        """Steps committed."""
        return self._member.step if self._member else 0

    @property
    def epoch(self) -> int:
        """The present epoch, from 0."""
        return self._member.cursor.epoch if self._member else 0

    @property
    def seed(self) -> int:
        """Seeds the order of the samples; the same on all workers."""
        return self._config.seed

    @property
    def loss(self) -> float | None:
        """The last committed step's loss over all workers; None before the first, and by hand."""
        commit = self._stepper.last_commit if self._stepper else None
        return commit.loss if commit else None

    @property
    def accuracy(self) -> float | None:
        """How many samples of the last committed step the models got right, from 0 to 1.

        None before the first step, by hand, and unless every worker gives `correct` to
        `line.backward` for every batch.
        """
        commit = self._stepper.last_commit if self._stepper else None
        return commit.accuracy if commit else None

    @property
    def committed(self) -> bool:
        """Whether the last `optimizer.step()`, or `should_commit()`, was a commit."""
        steps = self._hand or self._stepper
        return steps is not None and steps.committed

    @property
    def stopped(self) -> str:
        """Why all loops end; empty while they go on."""
        return self._member.stop_reason if self._member else ""

    @property
    def run_dir(self) -> Path | None:
        """Where the run keeps its files; None if nowhere."""
        return self._config.run_dir

    @property
    def last_checkpoint(self) -> Path | None:
        """The folder of the checkpoint that this worker wrote last."""
        return self._checkpoints.last

    @property
    def _place(self) -> Member:
        if self._member is None:
            self._require_prepared()
            raise RuntimeError("this worker joins at the first use of line.shards")
        return self._member

    @property
    def _steps(self) -> Stepper:
        self._refuse_by_hand("backward")
        if self._stepper is None:
            self._require_prepared()
            raise RuntimeError("this worker joins at the first use of line.shards")
        return self._stepper

    def _require_prepared(self) -> None:
        if not self._prepared:
            raise RuntimeError(
                "call line.prepare(model, optimizer, ..., loader) first, or line.join(model, ...)"
            )

    def _refuse_by_hand(self, what: str) -> None:
        if self._hand is not None:
            raise RuntimeError(
                f"line.{what} belongs to line.prepare, and this script called line.join: write "
                "loss.backward(), line.all_reduce_gradients(model), and optimizer.step() if "
                "line.should_commit()"
            )
