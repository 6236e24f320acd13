"""Line: a training script's one object, solo or among others."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from andon.protocol.order import splitmix64
from andon.protocol.records import Key
from andon.protocol.run_settings import DRAINED, RunPlan
from andon_trainer.config import LineConfig
from andon_trainer.core.reports import Digest, LeaveReport
from andon_trainer.data.evaluation import Coverage, share_of_loader
from andon_trainer.data.feed import Feed, LineLoader, ShardFeeder
from andon_trainer.data.feeder import Feeder
from andon_trainer.errors import LineHalted, RunOver
from andon_trainer.gradients.averaging import LineAverager, SoloAverager
from andon_trainer.gradients.broadcast import RunningStatistics
from andon_trainer.gradients.collectives import LinePool, SoloPool
from andon_trainer.gradients.guards import Accumulation
from andon_trainer.gradients.model_layout import ModelPlan, plan_model, warn_of_rounding
from andon_trainer.line.manual import ByHand
from andon_trainer.member import SoloMember
from andon_trainer.membership import Candidate, Membership
from andon_trainer.process.device import describe, pick_device
from andon_trainer.process.exits import watch_exit
from andon_trainer.process.torchrun import locate
from andon_trainer.state.checkpoint_files import Stateful
from andon_trainer.state.checkpoints import Checkpoints
from andon_trainer.state.replica import Replica
from andon_trainer.steps.gates import (
    Audit,
    Trial,
    gate_optimizer,
    gate_scheduler,
    refuse_optimizers,
    refuse_unprepared,
)
from andon_trainer.steps.manual import HandStepper, refuse_shared
from andon_trainer.steps.prepared import Prepared
from andon_trainer.steps.stepper import Stepper
from andon_trainer.telemetry import Telemetry
from andon_trainer.termination import Termination

__all__ = ["Line"]

log = logging.getLogger(__name__)


class Line(ByHand):
    """One worker's end of the line; see docs of `prepare`, `backward` and `epochs`.

    A script with several optimizers, or exchanges of its own, calls `join` in place of `prepare`
    and exchanges by hand; see `ByHand`.

    Without an address (argument, `ANDON_ADDRESS` or torchrun's variables) the worker is solo: no
    service and no threads, and the same results as one worker on a line.
    """

    def __init__(
        self,
        *,
        address: str | None = None,
        run_id: str | None = None,
        seed: int | None = None,
        on_halt: str | None = None,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        """Reads where the line is; opens nothing yet.

        Args:
            address: the coordinator, as host:port.
            run_id: the run to join.
            seed: seeds the order of the samples; the same on all workers.
            on_halt: `raise` LineHalted on a halt, or `wait` for the operator's answer.
            device: `cpu`, `cuda` or `cuda:1`; CUDA is picked where there is one.
            settings: `run_dir`, `checkpoint_every`, `keep_checkpoints`, `resume`,
                `total_steps`, `check_data`; see `LineConfig`.

        Raises:
            ValueError: a value or an environment variable makes no sense; it says which.
        """
        self._config = LineConfig.read(
            address=address,
            run_id=run_id,
            seed=seed,
            on_halt=on_halt,
            device=device,
            **settings,
        )
        self.device = pick_device(self._config.local_rank, self._config.device)
        self._replica = Replica([])
        self._micro_batch_size: int | None = None
        self._feed: Feed | None = None
        self._telemetry: Telemetry | None = None
        self._checkpoints = Checkpoints(self._config, self.device)
        self._plan: RunPlan | None = None
        self.complete = False
        """Whether the run is over: every step that was wanted is committed."""
        self._coverage = Coverage()
        self._left = False
        self._schedulers: list[LRScheduler] = []
        self._begun = False
        """Whether the script has begun to iterate its loader."""
        self._counts_epochs = False
        """Whether `epochs` says when the run is over."""
        self._ended: tuple[Key | None, Digest] | None = None
        """The head and the weights that the loops ended with, once they were compared."""
        self._audit: Audit | None = None
        self._crash: BaseException | None = None
        self._termination = Termination()
        self._exit = watch_exit()
        atexit.register(self._close_at_exit)

    # ------------------------------------------------------------------ preparing

    def prepare(self, *objects: Any, micro_batch_size: int | None = None) -> Any:
        """Joins the line with models, optimizers, schedulers and at most one training loader.

        Models come back as themselves, on `device` and with rank 0's weights; optimizers and
        schedulers as themselves, moving on commits only; the loader as one that yields this
        worker's samples. Without a loader the worker joins at the first use of `shards`.

        Args:
            objects: in any order; they are returned in that order.
            micro_batch_size: the most samples that one forward holds; None: the whole share.

        Returns:
            The objects; the object itself if there is one.

        Raises:
            RuntimeError: this is a second call.
            TypeError: an object is none of these.
            ValueError: an optimizer trains a parameter of no prepared model, or can't work with
                averaged gradients; the remedy is named.
            JoinRefused: the line does not take this worker.
            CheckpointRefused: the checkpoint to go on from is damaged, or does not fit.
            LineLost: no coordinator answers.
        """
        self._require_first()
        self._micro_batch_size = micro_batch_size
        given = Prepared.sort(objects)
        refuse_optimizers(given.models, given.optimizers)
        for model in given.models:
            model.to(self.device)
        self._audit = Audit(given.models, given.optimizers)
        self._replica.modules = given.models
        self._replica.optimizers = given.optimizers
        for index, scheduler in enumerate(given.schedulers):
            self._replica.register(f"scheduler.{index}", scheduler)
        self._checkpoints.begin(self._replica)
        loader: Any = None
        if given.loader is not None:
            feeder = Feeder.from_loader(given.loader, self.seed, micro_batch_size)
            self._join(feeder)
            loader = LineLoader(
                self._epoch, feeder.epoch_size, feeder.batch_size, given.loader.dataset
            )
        for optimizer in given.optimizers:
            gate_optimizer(optimizer, self, self._audit)
        for scheduler in given.schedulers:
            gate_scheduler(scheduler, self)
        self._schedulers = given.schedulers
        refuse_unprepared(given.optimizers, given.schedulers)
        results = tuple(loader if thing is given.loader else thing for thing in objects)
        return results[0] if len(results) == 1 else results

    def register(self, name: str, thing: Stateful) -> None:
        """Makes `thing`'s state part of checkpoints and of what a newcomer receives.

        Raises:
            TypeError: its state can't be kept: what `state_dict()` holds is neither a dense tensor
                nor a number, string, list, tuple or dict.
            ValueError: the name is taken.
        """
        self._replica.register(name, thing)

    def _join(self, feed: Feed) -> None:
        """Takes this worker's place; the loading processes start before any channel exists."""
        feed.open()
        self._feed = feed
        plan = plan_model(self._replica.modules)
        assert self._audit is not None
        self._audit.open(plan)
        looked_at = self._config.check_data and not self._config.on_its_own
        member = self._sit(
            plan,
            self._meant(
                feed.batch_size,
                dataset_size=feed.dataset_size,
                drop_last=feed.drop_last,
                data_digest=feed.digest(self.device) if looked_at else "",
            ),
        )
        averager: SoloAverager | LineAverager
        if isinstance(member, SoloMember):
            averager = SoloAverager(member, plan)
        else:
            statistics = RunningStatistics(self._replica.modules)
            averager = LineAverager(member, plan, self.device, statistics)
        self._stepper = Stepper(
            member, averager, Accumulation(plan), feed, self._replica, self.device
        )

    def _join_by_hand(self, modules: tuple[nn.Module, ...]) -> None:
        """Takes this worker's place; a position of the run's plan is a step."""
        self._require_first()
        refuse_shared(modules)
        for module in modules:
            module.to(self.device)
        self._replica.modules = list(modules)
        self._checkpoints.begin(self._replica)
        plan = plan_model(self._replica.modules)
        member = self._sit(plan, self._meant(1))
        pool: SoloPool | LinePool
        if isinstance(member, SoloMember):
            pool = SoloPool(SoloAverager(member, plan))
        else:
            pool = LinePool(member, plan, self.device)
        self._hand = HandStepper(
            member,
            pool,
            plan,
            self._replica,
            view=lambda: (self.rank, self.world_size),
            between_steps=self._between_steps,
        )

    def _meant(self, global_batch: int, **data: Any) -> RunPlan:
        """What the script means to do; `data` is what is known of its training set."""
        config = self._config
        return RunPlan(
            global_batch=global_batch, seed=config.seed, total_steps=config.total_steps, **data
        )

    def _sit(self, plan: ModelPlan, run: RunPlan) -> SoloMember | Membership:
        config = self._config
        self._checkpoints.check(run)
        self._plan = run
        if config.solo:
            self._member = alone = SoloMember(run, self._checkpoints.origin)
            return alone
        self._config = config = locate(config)
        candidate = Candidate(
            layout=plan.layout,
            plan=run,
            replica=self._replica,
            device=describe(self.device),
            origin=self._checkpoints.origin,
        )
        self._telemetry = Telemetry(config)
        self._replica.mark(plan)
        self._member = member = Membership(config, candidate, self._telemetry)
        self._termination.install(member.ask_to_leave)
        member.join()
        warn_of_rounding(plan.layout)
        return member

    # ------------------------------------------------------------------ the loop

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of `count`, from the line's present one on.

        A script may leave an epoch's batches early (`break`, `islice`): its samples that are left
        are left out, for all workers, as soon as one has left.

        Raises:
            RuntimeError: the script left between `line.backward(loss)` and `optimizer.step()`.
        """
        self._refuse_by_hand("epochs")
        self._counts_epochs = True
        if self._member is None:
            self._require_prepared()
            yield 0  # joins at the first use of `shards`
            self._leave_epoch(self._steps.epoch)
        while not self.complete:
            if self._place.stop_reason or self._place.cursor.epoch >= count:
                self._between_steps(over=True)
                self._compare_ends()
                self.complete = True
                return
            epoch = self._place.cursor.epoch
            yield epoch
            self._leave_epoch(epoch)

    def _leave_epoch(self, epoch: int | None) -> None:
        """Ends the epoch whose loop body is over, if it is still the present one."""
        if not self._place.stop_reason and self._place.cursor.epoch == epoch:
            try:
                self._steps.leave_epoch()
            except RunOver:
                assert self._place.stop_reason  # The loop ends by it.

    def shards(self, samples: int, batch_size: int) -> LineLoader:
        """Shares out the indices of `samples` samples, for scripts without a loader.

        Args:
            samples: positions in an epoch.
            batch_size: samples in one step of the whole line.

        Returns:
            A loader of `Shard`: `indices` (int64, on the CPU), `step`, `epoch`.
        """
        self._refuse_by_hand("shards")
        if self._stepper is None:
            self._require_prepared()
            self._join(
                ShardFeeder(
                    samples,
                    batch_size,
                    seed=self.seed,
                    micro_batch_size=self._micro_batch_size,
                    step=lambda: self.step + 1,
                )
            )
        return LineLoader(self._epoch, samples, batch_size, None)

    def backward(
        self,
        loss: torch.Tensor,
        weight: float | None = None,
        *,
        correct: int | torch.Tensor | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Goes backward; after a step's last micro-batch `p.grad` is the mean over all workers.

        Args:
            loss: the mean loss of this micro-batch's samples, a scalar.
            weight: what the mean was taken over, if not samples: the number of tokens.
            correct: how many of these samples the model got right, for `line.accuracy`; a number,
                or a tensor of one. Give it for every batch on every worker, or for none.
            scaler: the script's GradScaler. Give the loss as it is, not `scaler.scale(loss)`:
                what goes backward is scaled, what is reported is not.

        Raises:
            LineHalted: a value was wrong somewhere; nobody's weights moved.
            RuntimeError: the prepared loader's loop has no batch now.
            ValueError: the loss is no scalar, the weight negative or not finite, or more samples
                are correct than the batch has.
        """
        right = None if correct is None else int(correct)
        self._steps.backward(loss, weight, correct=right, scaler=scaler)

    def stop(self, reason: str) -> None:
        """Ends all workers' loops after the present or next step. Any worker may call it."""
        (self._hand or self._steps).stop_wanted = reason or "the script asked for it"

    def _epoch(self) -> Iterator[Any]:
        if self.complete or self._place.stop_reason:
            why = self._place.stop_reason or "every epoch that line.epochs was asked for is done"
            raise RunOver(
                f"the run is over: {why}. A loop `for epoch in line.epochs(n)` ends by itself",
                self._config.address or "",
                self.step,
            )
        self._warn_of_counting()
        if not self._begun:
            self._begun = True
            refuse_unprepared(self._replica.optimizers, self._schedulers)  # made since `prepare`
        yield from self._steps.batches(self._between_steps)
        if self._place.stop_reason:
            self._compare_ends()

    def _warn_of_counting(self) -> None:
        """Says once that a run which goes on is not told its end by a `range`."""
        endless = self._plan is not None and self._plan.total_steps is None
        if self.step and endless and not self._counts_epochs:
            log.warning(
                "this run goes on at step %d, in epoch %d: `for epoch in range(n)` would train n "
                "epochs more. Write `for epoch in line.epochs(n)`, which begins where the run is",
                self.step,
                self.epoch,
            )
        self._counts_epochs = True  # or it was said

    # ------------------------------------------------------------------ together

    def split(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """This worker's share of what a loader loads, once each over all workers.

        Samples come in the order of the dataset or of the loader's own sampler. A worker that is
        lost meanwhile takes its share with it: `line.mean` says so then. Before its first step a
        worker evaluates all of them.

        Raises:
            TypeError: the dataset has no length and no indices.
        """
        self._place.show("EVALUATING")
        # Until its first round a worker does not know who evaluates beside it: at the start the
        # others may still wait for their weights. A mean of the same number is that number.
        alone = self._place.assigned is None
        rank, workers = (0, 1) if alone else (self.rank, self.world_size)
        self._coverage.shared(workers)
        seed = splitmix64(self.seed) ^ self.step
        return share_of_loader(loader, rank, workers, self.device, seed=seed)

    def mean(self, value: float | torch.Tensor, weight: float = 1.0) -> float:
        """The weighted mean of every worker's `value`, in float64: the same number on all.

        Raises:
            ValueError: the weight is negative or not finite.
            RuntimeError: a step is under way: its workers wait for its averages, not for this.
        """
        if not (weight >= 0 and weight < float("inf")):
            raise ValueError(f"weight must be finite and at least 0, not {weight}")
        steps = self._hand or self._stepper
        if steps is not None and steps.midway:
            raise RuntimeError(
                f"step {self.step + 1} is under way, and line.mean is taken between two steps: "
                "call it once line.committed is true, or outside the loop"
            )
        mean, _, contributors = self._place.scalar_all_reduce(float(value), float(weight))
        self._coverage.check(contributors)
        return mean

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Shows the others what this worker is doing while they wait for it."""
        self._place.show("BUSY", what)
        try:
            yield
        finally:
            self._place.show("IDLE")

    # ------------------------------------------------------------------ the end

    @property
    def trial(self) -> Trial:
        """What the gates ask of the step that is computed; scripts have no use for it."""
        return self._stepper.trial if self._stepper is not None else Trial(0, 0, 0)

    def try_commit(self) -> bool:
        """What the gates of `optimizer.step()` ask; scripts have no use for it."""
        return self._stepper is not None and self._stepper.try_commit()

    def close(self) -> None:
        """Leaves the line and ends the loading processes; called by itself at exit.

        Raises:
            LineHalted: the weights that the workers end with differ.
        """
        atexit.unregister(self._close_at_exit)
        try:
            if isinstance(self._member, Membership) and not self._left and self._ends_well:
                self._compare_ends()
        except BaseException as error:
            self._crash = error
            raise
        finally:
            self._close()

    def _close_at_exit(self) -> None:
        # Of a script by hand nobody knows when its work is done.
        done = self.complete or bool(self.stopped) or self._hand is not None
        self._crash = self._crash or self._exit.failure(done=done)
        if isinstance(self._crash, SystemExit) and self._termination.wanted:
            self._crash = None  # SIGTERM's own exit
        try:
            self.close()
        except LineHalted as halt:
            # An error at exit changes no exit code: this is the last that the process does.
            sys.stdout.flush()
            sys.stderr.write(f"{halt}\n")
            sys.stderr.flush()
            os._exit(halt.exit_code)

    def _compare_ends(self) -> None:
        """Compares the weights that the loops ended with, while the others are still there."""
        member = self._place
        if self._ended is None or self._ended[0] != member.head:
            digest = self._replica.weights()
            member.compare(digest)
            self._ended = member.head, digest

    @property
    def _ends_well(self) -> bool:
        """Whether this worker leaves with the run done, as far as it is concerned."""
        crash, terminated = self._crash, self._termination.wanted and not self.stopped
        return isinstance(crash, RunOver) or (crash is None and not terminated)

    def _close(self) -> None:
        if self._hand is not None and self._crash is None and not self._left:
            self._between_steps()
        if self._audit is not None:
            self._audit.close()
        if self._hand is not None:
            self._hand.close()
        if self._feed is not None:
            self._feed.close()
            self._feed = None
        if isinstance(self._member, Membership) and not self._left:
            self._left = True
            self._member.leave(self._departure(self._member))
        if self._telemetry is not None:
            self._telemetry.close()
        self._termination.remove()

    def _departure(self, member: Membership) -> LeaveReport:
        crash = self._crash
        if crash is None and self._termination.wanted and not member.stop_reason:
            return LeaveReport(reason="INTERRUPTED", message="SIGTERM", final_step=member.step)
        if crash is None or isinstance(crash, RunOver):
            return LeaveReport(
                reason="DRAINED" if member.stop_reason == DRAINED else "COMPLETE",
                final_step=member.step,
                head=member.head,
                digest=self._ended[1] if self._ended else self._replica.weights(),
            )
        reason = "FAILED"
        if isinstance(crash, LineHalted):
            reason = "HALTED"
        elif isinstance(crash, KeyboardInterrupt):
            reason = "INTERRUPTED"
        return LeaveReport(
            reason=reason,
            message=str(crash),
            final_step=member.step,
            error_type=type(crash).__name__,
        )

    def _between_steps(self, *, over: bool = False) -> None:
        """Writes the checkpoint that the last commit made due."""
        assert self._plan is not None
        self._checkpoints.between_steps(self._replica, self._place, self._plan, over=over)

    def _require_first(self) -> None:
        if self._prepared:
            raise RuntimeError(
                "line.prepare or line.join was called already: give it everything in one call"
            )
        self._prepared = True
