"""Line: a training script's one object, alone or together with other workers."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from andon.protocol.schedules import (
    BALANCE_CAPABILITY,
    CADENCE_CAPABILITY,
    LOCAL_CAPABILITY,
    OVERLAP_CAPABILITY,
)
from andon_trainer.config import LineConfig
from andon_trainer.data.evaluation import SplitCheck
from andon_trainer.data.feed import Feeder, ShardFeeder
from andon_trainer.data.feeder import LoaderFeeder
from andon_trainer.data.loader import LineLoader
from andon_trainer.errors import LineHalted, RunOver
from andon_trainer.gradients.averaging import LineAverager
from andon_trainer.gradients.changes import ChangeExchange, outer_optimizer
from andon_trainer.gradients.collectives import LineCollectives, SoloCollectives
from andon_trainer.gradients.guards import AccumulatedGradients
from andon_trainer.gradients.model_layout import ModelPlan, plan_model
from andon_trainer.gradients.running_statistics import MeanStatistics
from andon_trainer.gradients.solo_averaging import SoloAverager
from andon_trainer.line.manual import ManualSteps
from andon_trainer.line.together import Together
from andon_trainer.line.worker import Worker
from andon_trainer.member import SoloMember
from andon_trainer.membership import Membership
from andon_trainer.process.device import pick_device
from andon_trainer.state.checkpoint_files import Stateful
from andon_trainer.steps.gates import Audit, gate_optimizer, gate_scheduler, refuse_unprepared
from andon_trainer.steps.local_steps import LocalStepper, OuterStep
from andon_trainer.steps.loop_steps import LoopParts, LoopSteps
from andon_trainer.steps.manual import ManualStepper
from andon_trainer.steps.prepared import Prepared, refuse_optimizers, refuse_shared_parameters
from andon_trainer.steps.stepper import Stepper, StepperGate

__all__ = ["Line"]

log = logging.getLogger(__name__)

_CAPABILITIES = (BALANCE_CAPABILITY, CADENCE_CAPABILITY, LOCAL_CAPABILITY, OVERLAP_CAPABILITY)
"""What a loop over a loader can do. Manual steps can't: the line does not see their samples."""


class Line(ManualSteps, Together):
    """One training script's connection to the line: data, gradients, commits and checkpoints.

    A plain PyTorch loop calls `prepare` once, iterates `epochs` and the prepared loader, and calls
    `line.backward(loss)` instead of `loss.backward()`:

    ```python
    line = Line()
    model, optimizer, loader = line.prepare(model, optimizer, loader)
    for epoch in line.epochs(10):
        for x, y in loader:
            optimizer.zero_grad()
            line.backward(F.cross_entropy(model(x), y))
            optimizer.step()
    ```

    A script with several optimizers, or exchanges of its own, calls `join` instead; see there.

    Without an address (argument, `ANDON_ADDRESS`, or torchrun's variables) the worker is solo: it
    starts no service and no threads, and computes what one worker on a line would.
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
        """Reads the configuration; opens nothing yet. An argument overrides the environment.

        Args:
            address: the coordinator, as host:port.
            run_id: the run to join; empty: the run that is served at `address`.
            seed: seed of the sample order, 64 bits; the same on all workers.
            on_halt: `raise` LineHalted when the line stops, or `wait` for the operator's answer.
            device: `cpu`, `cuda` or `cuda:1`; default: CUDA if there is a GPU, else the CPU.
            settings: other fields of the configuration: `run_dir`, `checkpoint_every` (steps),
                `keep_checkpoints`, `resume` (a checkpoint's folder), `total_steps` (ends the run),
                `check_data`.

        Raises:
            ValueError: a value or an environment variable is invalid; the message names it.
        """
        config = LineConfig.read(
            address=address,
            run_id=run_id,
            seed=seed,
            on_halt=on_halt,
            device=device,
            **settings,
        )
        self.device = pick_device(config.local_rank, config.device)
        self.complete = False
        self._worker = Worker(config, self.device)
        self._micro_batch_size: int | None = None
        self._feeder: Feeder | None = None
        self._gate = StepperGate()
        self._audit: Audit | None = None
        self._schedulers: list[LRScheduler] = []
        self._split_check = SplitCheck()
        self._iterated = False
        """Whether the script has begun to iterate its loader."""
        self._knows_its_end = False
        """Whether `epochs` ends the script's loop, or a warning was logged that nothing does."""
        atexit.register(self._close_at_exit)

    # ------------------------------------------------------------------ preparing

    def prepare(self, *objects: Any, micro_batch_size: int | None = None) -> Any:
        """Joins the line with models, optimizers, schedulers and at most one training loader.

        Models are moved to `line.device` and get rank 0's weights. Optimizers and schedulers stay
        the same objects; their `step()` acts only when the line commits a step. The loader is
        replaced by one that yields this worker's samples. Without a loader the worker joins when
        `line.shards` is first called.

        ```python
        model, optimizer, loader = line.prepare(model, optimizer, loader, micro_batch_size=8)
        ```

        Args:
            objects: in any order. The loader's `batch_size` is that of a whole step, over all
                workers.
            micro_batch_size: the most samples in one forward; the loop body then runs several
                times in a step, and gradients are accumulated. None: all of a worker's share.

        Returns:
            The objects in the same order; the object itself if there is only one.

        Raises:
            RuntimeError: `prepare` or `join` was called before.
            TypeError: an object is none of these, or a model is wrapped in DataParallel or
                DistributedDataParallel.
            ValueError: an optimizer trains a parameter of no prepared model or can't work with
                averaged gradients, or the loader's sampler can't be followed.
            JoinRefused: the line does not accept this worker.
            CheckpointRefused: the run can't be resumed from its checkpoint.
            LineLost: no coordinator answers.
        """
        self._require_first()
        self._micro_batch_size = micro_batch_size
        given = Prepared.sort(objects)
        refuse_optimizers(given.models, given.optimizers)
        # Moved before anything looks at the parameters: `to` may replace them.
        for model in given.models:
            model.to(self.device)
        self._audit = Audit(given.models, given.optimizers)
        replica = self._worker.replica
        replica.modules = given.models
        replica.optimizers = given.optimizers
        for index, scheduler in enumerate(given.schedulers):
            replica.register(f"scheduler.{index}", scheduler)
        self._worker.checkpoints.begin(replica)
        loader: Any = None
        if given.loader is not None:
            feeder = LoaderFeeder.from_loader(given.loader, self.seed, micro_batch_size)
            self._join(feeder)
            loader = LineLoader(
                self._epoch, feeder.epoch_size, feeder.batch_size, given.loader.dataset
            )
        # Gated after joining: loading a checkpoint must not meet the gates.
        for optimizer in given.optimizers:
            gate_optimizer(optimizer, self._gate, self._audit)
        for scheduler in given.schedulers:
            gate_scheduler(scheduler, self._gate)
        self._schedulers = given.schedulers
        refuse_unprepared(given.optimizers, given.schedulers)
        results = tuple(loader if thing is given.loader else thing for thing in objects)
        return results[0] if len(results) == 1 else results

    def register(self, name: str, thing: Stateful) -> None:
        """Adds `thing`'s state to checkpoints and to what a new worker receives.

        Use it for an EMA, a GradScaler, or anything else with `state_dict()` and
        `load_state_dict()`. State that has arrived already is loaded at once.

        Args:
            name: unique; the state is found by it.
            thing: its `state_dict()` holds dense tensors, numbers, strings, lists, tuples and
                dicts.

        Raises:
            TypeError: the state holds something else, which could only be pickled.
            ValueError: the name is taken.
        """
        self._worker.replica.register(name, thing)

    def _join(self, feeder: Feeder) -> None:
        """Joins with a loop over a feeder's samples."""
        # Loading processes are forked before any channel exists: a child that inherits one hangs.
        feeder.open()
        self._feeder = feeder
        worker = self._worker
        plan = plan_model(worker.replica.modules)
        assert self._audit is not None
        self._audit.open(plan)
        compares_data = worker.config.check_data and not worker.config.on_its_own
        run = worker.plan_run(
            feeder.batch_size,
            dataset_size=feeder.dataset_size,
            drop_last=feeder.drop_last,
            data_digest=feeder.digest(self.device) if compares_data else "",
        )
        member = worker.join(plan, run, _CAPABILITIES)
        parts = LoopParts(
            member=member,
            accumulated=AccumulatedGradients(plan),
            feeder=feeder,
            replica=worker.replica,
            device=self.device,
        )
        self._stepper = self._gate.stepper = self._stepper_for(member, plan, parts)

    def _stepper_for(
        self, member: SoloMember | Membership, plan: ModelPlan, parts: LoopParts
    ) -> LoopSteps:
        """The loop of the line's schedule."""
        if isinstance(member, SoloMember):
            return Stepper(parts, SoloAverager(member, plan, self.device))
        if not member.policy.local_steps:
            modules = parts.replica.modules
            return Stepper(parts, LineAverager(member, plan, self.device, modules))
        assert self._audit is not None
        outer = outer_optimizer(plan, member.policy.outer)
        # After joining: a state that came from another worker, or from a checkpoint, waits for it.
        parts.replica.use_outer(outer)
        return LocalStepper(
            parts,
            member,
            ChangeExchange(member, plan, self.device),
            OuterStep(
                optimizer=outer,
                moving=self._audit.moving,
                max_grad_norm=member.policy.max_grad_norm,
            ),
            MeanStatistics(member, plan, parts.replica.modules),
        )

    def _join_for_manual_steps(self, modules: tuple[nn.Module, ...]) -> None:
        self._require_first()
        refuse_shared_parameters(modules)
        for module in modules:
            module.to(self.device)
        worker = self._worker
        worker.replica.modules = list(modules)
        worker.checkpoints.begin(worker.replica)
        plan = plan_model(worker.replica.modules)
        # One position of the run is one step: the line assigns no samples.
        member = worker.join(plan, worker.plan_run(1))
        collectives: SoloCollectives | LineCollectives
        if isinstance(member, SoloMember):
            collectives = SoloCollectives(SoloAverager(member, plan, self.device))
        else:
            collectives = LineCollectives(member, plan, self.device)
        self._manual = ManualStepper(
            member,
            collectives,
            plan,
            worker.replica,
            view=lambda: (self.rank, self.world_size),
            between_steps=worker.between_steps,
        )

    def _require_first(self) -> None:
        if self._prepared:
            raise RuntimeError(
                "line.prepare or line.join was called already: give it everything in one call"
            )
        self._prepared = True

    # ------------------------------------------------------------------ the loop

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
        if self._worker.member is None:
            self._require_prepared()
            yield 0  # The worker joins in this epoch's body, when it calls `shards`.
            self._leave_epoch(self._steps.epoch)
        while not self.complete:
            if self._member.stop_reason or self._member.cursor.epoch >= count:
                # The checkpoint first: comparing waits for workers that may still train.
                self._worker.between_steps(over=True)
                self._worker.compare_ends()
                self.complete = True
                return
            epoch = self._member.cursor.epoch
            yield epoch
            self._leave_epoch(epoch)

    def _leave_epoch(self, epoch: int | None) -> None:
        """Ends the epoch whose loop body is over, unless the line has gone on from it already."""
        if not self._member.stop_reason and self._member.cursor.epoch == epoch:
            try:
                self._steps.leave_epoch()
            except RunOver:
                assert self._member.stop_reason  # `epochs` sees it and ends the loop.

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
            ValueError: a number is below 1.
            RuntimeError: `prepare` was not called, or `join` was.
            JoinRefused, CheckpointRefused, LineLost: as from `prepare`.
        """
        self._refuse_manual("shards")
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
        """Runs backward; after a step's last micro-batch `p.grad` is the mean over all workers.

        Call it once for each batch of the prepared loader. Until the last micro-batch of the step
        `p.grad` is None; after it, clip, log or unscale gradients as usual.

        ```python
        line.backward(loss)                     # a mean over samples
        line.backward(loss, weight=n_tokens)    # a mean over tokens
        ```

        Args:
            loss: mean loss of this micro-batch; a scalar.
            weight: number of terms that `loss` is the mean of; None: the number of samples.
            correct: number of these samples that the model got right, for `line.accuracy`. Pass it
                for every batch on every worker, or for none.
            scaler: the script's GradScaler. Pass the loss as it is, not `scaler.scale(loss)`: the
                gradients are scaled, the reported loss is not.

        Raises:
            LineHalted: a loss or gradient was not finite on some worker; no weights moved.
            RuntimeError: the prepared loader has yielded no batch for this call.
            ValueError: the loss is no scalar, the weight is negative or not finite, or `correct`
                is more than the batch's samples.
        """
        right = None if correct is None else int(correct)
        self._steps.backward(loss, weight, correct=right, scaler=scaler)

    def stop(self, reason: str) -> None:
        """Ends the run: all workers' loops end after the same step, the current or the next one.

        Any worker may call it.

        Args:
            reason: becomes `line.stopped` on all workers.
        """
        (self._manual or self._steps).stop_wanted = reason or "the script asked for it"

    def _epoch(self) -> Iterator[Any]:
        """The rest of the current epoch's batches, for `LineLoader`."""
        # A new loop after the end would wait for work that never comes.
        if self.complete or self._member.stop_reason:
            why = self._member.stop_reason or "every epoch that line.epochs was asked for is done"
            raise RunOver(
                f"the run is over: {why}. A loop `for epoch in line.epochs(n)` ends by itself",
                self._worker.config.address or "",
                self.step,
            )
        self._warn_of_range()
        if not self._iterated:
            self._iterated = True
            # Again, for schedulers that the script made after `prepare`.
            refuse_unprepared(self._worker.replica.optimizers, self._schedulers)
        yield from self._steps.batches(self._worker.between_steps)
        if self._member.stop_reason:
            self._worker.compare_ends()

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

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Leaves the line and ends the loading processes; a second call does nothing.

        It runs by itself when Python exits. Call it in a notebook, or before a second `Line`.

        Raises:
            LineHalted: the workers' final weights differ.
        """
        atexit.unregister(self._close_at_exit)
        if self._stepper is not None:
            self._stepper.pause()
        try:
            self._worker.finish()
        finally:
            self._release()

    def _close_at_exit(self) -> None:
        # A script with manual steps does not say when its work is done: it is taken to be.
        self._worker.note_exit(done=self.complete or bool(self.stopped) or self._manual is not None)
        try:
            self.close()
        except LineHalted as halt:
            # An exception in an exit handler does not change the exit code: only this does, and
            # nothing runs after it.
            sys.stdout.flush()
            sys.stderr.write(f"{halt}\n")
            sys.stderr.flush()
            os._exit(halt.exit_code)

    def _release(self) -> None:
        """Ends everything that this object started; the line last, once nothing can use it."""
        if self._manual is not None and self._worker.is_leaving_cleanly:
            self._worker.between_steps()
        if self._audit is not None:
            self._audit.close()
        if self._manual is not None:
            self._manual.close()
        if self._feeder is not None:
            self._feeder.close()
            self._feeder = None
        self._worker.leave()
