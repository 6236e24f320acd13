"""Preparing: how a script's objects, or its modules for manual steps, come onto the line."""

from __future__ import annotations

from typing import Any

from torch import nn

from andon.protocol.schedules import (
    BALANCE_CAPABILITY,
    CADENCE_CAPABILITY,
    LOCAL_CAPABILITY,
    OVERLAP_CAPABILITY,
)
from andon_trainer.averaging.changes import ChangeExchange, outer_optimizer
from andon_trainer.averaging.collectives import LineCollectives, SoloCollectives
from andon_trainer.averaging.line_averaging import LineAverager
from andon_trainer.averaging.loss_scale import LossScale
from andon_trainer.averaging.solo_averaging import SoloAverager
from andon_trainer.data.feed import Feeder
from andon_trainer.data.stream_feeder import feeder_for
from andon_trainer.errors import ANOTHER_RUN
from andon_trainer.hosts.averaging import FollowerAverager, LeaderAverager
from andon_trainer.hosts.member import FollowerMember, LeaderMember
from andon_trainer.hosts.opening import group_of, refuse_stream, switch_off
from andon_trainer.hosts.steps import HostStepper
from andon_trainer.line.loop import TrainingLoop
from andon_trainer.line.manual import ManualSteps
from andon_trainer.model.guards import AccumulatedGradients
from andon_trainer.model.layout import ModelPlan, plan_model
from andon_trainer.model.wrappers import unwrapped
from andon_trainer.place.membership import Membership
from andon_trainer.place.solo import SoloMember
from andon_trainer.schedules.local_steps import LocalStepper, OuterStep
from andon_trainer.schedules.loop_steps import LoopParts, LoopSteps
from andon_trainer.schedules.manual import ManualStepper
from andon_trainer.schedules.stepper import Stepper, StepperGate
from andon_trainer.script.gates import Audit, gate_optimizer, gate_scheduler, refuse_unprepared
from andon_trainer.script.prepared import (
    Prepared,
    place,
    refuse_modules,
    refuse_optimizers,
    refuse_shared_parameters,
)
from andon_trainer.script.scaling import ScalerGate, refuse_scaler
from andon_trainer.script.script_checks import warn_of_unsaved_tensors
from andon_trainer.state.checkpoint_files import Stateful

__all__ = ["Preparing"]

_CAPABILITIES = (BALANCE_CAPABILITY, CADENCE_CAPABILITY, LOCAL_CAPABILITY, OVERLAP_CAPABILITY)
"""What a loop over a loader can do. Manual steps can't: the line does not see their samples."""
_OF_HOSTS = (BALANCE_CAPABILITY, CADENCE_CAPABILITY)
"""What it can do in a host whose processes average by DistributedDataParallel."""


class Preparing(TrainingLoop, ManualSteps):
    """What `Line` does once, before the first step: it takes a script's objects, and joins."""

    _gate: StepperGate
    _scaling: ScalerGate | None = None

    def prepare(self, *objects: Any, micro_batch_size: int | None = None) -> Any:
        """Joins the line with models, optimizers, schedulers, a scaler and a training loader.

        Models are moved to `line.device` and get rank 0's weights. Optimizers and schedulers stay
        the same objects; their `step()` acts only when the line commits a step. So does a
        GradScaler, which scales what `line.backward` is given; its state is kept. The loader is
        replaced by one that yields this worker's samples. Without a loader the worker joins when
        `line.shards` is first called. A model that is wrapped in DistributedDataParallel makes the
        processes of its group one worker.

        ```python
        model, optimizer, loader = line.prepare(model, optimizer, loader, micro_batch_size=8)
        ```

        Args:
            objects: in any order, at most one scaler and one loader. The loader's `batch_size` is
                that of a whole step, over all workers.
            micro_batch_size: the most samples in one forward; the loop body then runs several
                times in a step, and gradients are accumulated. None: all of a worker's share.

        Returns:
            The objects in the same order; the object itself if there is only one.

        Raises:
            RuntimeError: `prepare` or `join` was called before.
            TypeError: an object is none of these, or a model is wrapped in DataParallel, or in
                DistributedDataParallel under `andon run`.
            ValueError: an optimizer trains a parameter of no prepared model or can't work with
                averaged gradients, or the loader's sampler can't be followed.
            JoinRefused: the line does not accept this worker.
            CheckpointRefused: the run can't be resumed from its checkpoint.
            LineLost: no coordinator answers.
        """
        self._require_first()
        given = Prepared.sort(objects)
        refuse_optimizers(given.models, given.optimizers)
        warn_of_unsaved_tensors(given.optimizers)
        self._scaling = self._scaling_of(given)
        feeder = (
            None if given.loader is None else feeder_for(given.loader, self.seed, micro_batch_size)
        )
        # Whoever was refused up to here may call again: a notebook's cell that was put right.
        self._prepared = True
        self._micro_batch_size = micro_batch_size
        self._worker.host = group_of(given.wrapped, self._worker.config)
        self._undo.append(switch_off(given.wrapped))
        # Moved before anything looks at the parameters: `to` may replace them.
        for model in given.models:
            place(model, self.device)
        self._audit = Audit(given.models, given.optimizers)
        replica = self._worker.replica
        replica.modules = given.models
        replica.optimizers = given.optimizers
        for index, scheduler in enumerate(given.schedulers):
            replica.register(f"scheduler.{index}", scheduler)
        if self._scaling is not None and self._scaling.loss_scale.enabled:
            # One that is switched off has no state: a run goes on from checkpoints without one.
            replica.register("andon.scaler", self._scaling.loss_scale)
        self._worker.begin()
        loader: Any = None
        if given.loader is not None and feeder is not None:
            self._join(feeder)
            loader = self._loader_of(feeder, given.loader.batch_size, given.loader)
        # Gated after joining: loading a checkpoint must not meet the gates.
        for optimizer in given.optimizers:
            gate = gate_optimizer(optimizer, self._gate, self._audit, self._scaling)
            self._undo.append(gate)
        if self._scaling is not None:
            self._scaling.open(self._gate)
            self._undo.append(self._scaling.close)
        for scheduler in given.schedulers:
            self._undo.append(gate_scheduler(scheduler, self._gate))
        self._schedulers = given.schedulers
        self._undo.append(refuse_unprepared(given.optimizers, given.schedulers))
        results = tuple(loader if thing is given.loader else thing for thing in objects)
        return results[0] if len(results) == 1 else results

    def _scaling_of(self, given: Prepared) -> ScalerGate | None:
        """The gate of the script's scaler; None if it has none."""
        if given.scaler is None:
            return None
        refuse_scaler(given.scaler, given.models)
        most = self._worker.config.max_overflows
        return ScalerGate(LossScale(given.scaler, self.device, most))

    def register(self, name: str, thing: Stateful) -> None:
        """Adds `thing`'s state to checkpoints and to what a new worker receives.

        Use it for an EMA, or anything else with `state_dict()` and
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
        worker = self._worker
        if worker.host is not None:
            refuse_stream(feeder)
        feeder.open()
        self._feeder = feeder
        plan = plan_model(worker.replica.modules)
        assert self._audit is not None
        self._audit.open(plan)
        compares_data = worker.config.check_data and not worker.config.on_its_own
        run = worker.plan_run(
            feeder.batch_size,
            dataset_size=feeder.dataset_size,
            drop_last=feeder.drop_last,
            sparse=feeder.sparse,
            data_digest=feeder.digest(self.device) if compares_data else "",
        )
        member = worker.join(plan, run, _CAPABILITIES if worker.host is None else _OF_HOSTS)
        parts = LoopParts(
            member=member,
            accumulated=AccumulatedGradients(plan),
            feeder=feeder,
            replica=worker.replica,
            device=self.device,
            micro_batch_size=self._micro_batch_size,
            scaling=self._scaling,
        )
        self._stepper = self._gate.stepper = self._stepper_for(member, plan, parts)

    def _stepper_for(
        self, member: SoloMember | Membership | FollowerMember, plan: ModelPlan, parts: LoopParts
    ) -> LoopSteps:
        """The loop of the line's schedule."""
        scale = None if parts.scaling is None else parts.scaling.loss_scale
        host, modules = self._worker.host, parts.replica.modules
        if host is not None:
            averager: LeaderAverager | FollowerAverager
            if isinstance(member, LeaderMember):
                averager = LeaderAverager(host, member, plan, self.device, modules, scale)
            else:
                averager = FollowerAverager(host, member, plan, self.device, modules, scale)
            return HostStepper(host, parts, averager)
        assert not isinstance(member, FollowerMember)
        if isinstance(member, SoloMember):
            alone = SoloAverager(member, plan, self.device, loss_scale=scale, modules=modules)
            return Stepper(parts, alone)
        if not member.policy.local_steps:
            return Stepper(parts, LineAverager(member, plan, self.device, modules, scale))
        assert self._audit is not None
        outer = outer_optimizer(plan, member.policy.outer)
        # After joining: a state that came from another worker, or from a checkpoint, waits for it.
        parts.replica.use_outer(outer)
        return LocalStepper(
            parts,
            member,
            ChangeExchange(member, plan, self.device, modules),
            OuterStep(
                optimizer=outer,
                moving=self._audit.moving,
                max_grad_norm=member.policy.max_grad_norm,
            ),
        )

    def _join_for_manual_steps(self, modules: tuple[nn.Module, ...]) -> None:
        self._require_first()
        refuse_modules(modules)
        models = [unwrapped(module) for module in modules]
        refuse_shared_parameters(models)
        self._prepared = True
        for model in models:
            place(model, self.device)
        worker = self._worker
        worker.replica.modules = models
        worker.begin()
        plan = plan_model(worker.replica.modules)
        # One position of the run is one step: the line assigns no samples.
        member = worker.join(plan, worker.plan_run(1))
        assert not isinstance(member, FollowerMember)
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
                "line.prepare or line.join was called already: give it everything in one call; in "
                "a notebook make a new Line in the cell that prepares. For another run "
                f"{ANOTHER_RUN}"
            )
