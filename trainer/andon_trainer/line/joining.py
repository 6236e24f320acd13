"""Joining: how a worker takes its place, with a loop over samples or for manual steps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from andon.protocol.capabilities import LEARNING, LIMITS, SAME_BITS, VERIFIES
from andon.protocol.grains import TREE_VERSION
from andon.protocol.schedules import (
    BALANCE_CAPABILITY,
    CADENCE_CAPABILITY,
    FRAGMENTS_CAPABILITY,
    LOCAL_CAPABILITY,
    OVERLAP_CAPABILITY,
    QUORUM_CAPABILITY,
)
from andon_trainer.averaging.attesting import can_attest
from andon_trainer.averaging.averager import GrainAverager, TrainedModels
from andon_trainer.averaging.changes import ChangeExchange, outer_optimizer
from andon_trainer.averaging.collectives import LineCollectives, SoloCollectives
from andon_trainer.averaging.grain_averaging import LineGrains, SoloGrains
from andon_trainer.averaging.line_averaging import LineAverager
from andon_trainer.averaging.solo_averaging import SoloAverager
from andon_trainer.averaging.solo_gate import SoloGate
from andon_trainer.data.feed import Feeder
from andon_trainer.hosts.averaging import FollowerAverager, LeaderAverager
from andon_trainer.hosts.grain_averaging import FollowerGrains, LeaderGrains
from andon_trainer.hosts.opening import refuse_stream
from andon_trainer.hosts.steps import HostGrains, HostProcesses
from andon_trainer.line.session import LineSession
from andon_trainer.model.guards import AccumulatedGradients
from andon_trainer.model.layout import ModelPlan, plan_model
from andon_trainer.model.wrappers import unwrapped
from andon_trainer.schedules.grain_steps import GrainStepper
from andon_trainer.schedules.line_weights import OuterStep
from andon_trainer.schedules.local_steps import LocalStepper
from andon_trainer.schedules.loop_steps import LoopParts, LoopSteps
from andon_trainer.schedules.manual import ManualStepper
from andon_trainer.schedules.stepper import Stepper
from andon_trainer.script.prepared import (
    place,
    refuse_modules,
    refuse_shared_parameters,
)

__all__ = ["join_by_hand", "join_with"]

_CAPABILITIES: tuple[str, ...] = (
    *(BALANCE_CAPABILITY, CADENCE_CAPABILITY, LOCAL_CAPABILITY, OVERLAP_CAPABILITY),
    *(FRAGMENTS_CAPABILITY, LEARNING, LIMITS, QUORUM_CAPABILITY, SAME_BITS),
)
"""What a loop over a loader can do. Manual steps can't: the line does not see their samples."""
_OF_HOSTS = (BALANCE_CAPABILITY, CADENCE_CAPABILITY)
"""What it can do in a host whose processes average by DistributedDataParallel."""


def join_with(session: LineSession, feeder: Feeder) -> None:
    """Joins with a loop over a feeder's samples."""
    # Loading processes are forked before any channel exists: a child that inherits one hangs.
    worker = session.worker
    if worker.host is not None:
        refuse_stream(feeder)
    feeder.open()
    session.feeder = feeder
    plan = plan_model(worker.replica.modules)
    assert session.audit is not None
    session.audit.open(plan)
    compares_data = worker.config.check_data and not worker.config.on_its_own
    run = worker.plan_run(
        feeder.batch_size,
        dataset_size=feeder.dataset_size,
        drop_last=feeder.drop_last,
        sparse=feeder.sparse,
        data_digest=feeder.digest(session.device) if compares_data else "",
        grain=session.grain,
        tree=TREE_VERSION if session.grain else 0,
    )
    able = _CAPABILITIES
    if worker.host is not None:
        able = (*_OF_HOSTS, SAME_BITS) if session.grain else _OF_HOSTS
    if session.grain and can_attest():
        able = *able, VERIFIES
    member = worker.join(plan, run, able)
    parts = LoopParts(
        member=member,
        accumulated=AccumulatedGradients(plan),
        feeder=feeder,
        replica=worker.replica,
        device=session.device,
        micro_batch_size=session.micro_batch_size,
        scaling=session.scaling,
        grain=session.grain,
    )
    session.stepper = session.gate.stepper = _stepper_for(session, plan, parts)
    session.worker.pause = session.stepper.pause


def _stepper_for(session: LineSession, plan: ModelPlan, parts: LoopParts) -> LoopSteps:
    """The loop of the line's schedule."""
    line, host, device = session.worker.membership, session.worker.host, session.device
    models = TrainedModels(
        plan=plan,
        device=device,
        modules=parts.replica.modules,
        scaling=None if parts.scaling is None else parts.scaling.loss_scale,
    )
    if parts.grain:
        return _grain_stepper_for(session, parts, models)
    if host is not None:
        of_host: LeaderAverager | FollowerAverager
        if line is not None:
            of_host = LeaderAverager(host, line, models)
        else:
            of_host = FollowerAverager(host, parts.member, models)
        return Stepper(parts, of_host, HostProcesses(host, parts, of_host))
    if line is None:
        return Stepper(parts, SoloAverager(parts.member, models))
    if not line.policy.local_steps:
        averager = LineAverager(line, models)
        return Stepper(parts, averager, gather=averager.gather)
    assert session.audit is not None
    outer = outer_optimizer(plan, line.policy.outer)
    # After joining: a state that came from another worker, or from a checkpoint, waits for it.
    parts.replica.use_outer(outer)
    return LocalStepper(
        parts,
        line,
        ChangeExchange(line, plan, device, models.modules),
        OuterStep(
            optimizer=outer,
            moving=session.audit.moving,
            max_grad_norm=line.policy.max_grad_norm,
            mix=line.policy.mix,
        ),
        line.policy.overlap_steps or None,
    )


def _grain_stepper_for(
    session: LineSession, parts: LoopParts, models: TrainedModels
) -> GrainStepper:
    """The loop of a line of grains."""
    line, host, processes = session.worker.membership, session.worker.host, None
    grains: GrainAverager
    if host is not None:
        of_host: LeaderGrains | FollowerGrains
        if line is not None:
            of_host = LeaderGrains(host, line, models)
        else:
            of_host = FollowerGrains(host, models)
        grains, processes = of_host, HostGrains(host, parts, of_host)
    elif line is None:
        grains = SoloGrains(parts.member, models)
    else:
        grains = LineGrains(line, models)
    arithmetic = session.worker.arithmetic
    assert arithmetic is not None, "a loop has grains under same_bits alone"
    return GrainStepper(parts, grains, session.worker.config.seed, arithmetic.check, processes)


def join_by_hand(session: LineSession, modules: Sequence[nn.Module]) -> None:
    """See `Line.join`."""
    for thing in modules:
        if not isinstance(thing, nn.Module):
            raise TypeError(
                f"line.join takes modules, not {type(thing).__name__}: give an optimizer or a "
                'scheduler to line.register("name", it)'
            )
    session.require_first()
    if session.worker.config.same_bits:
        raise ValueError(
            "same_bits is for line.prepare, whose loop has grains; with line.join the script "
            "averages what it likes: leave same_bits (ANDON_SAME_BITS) out, or call line.prepare"
        )
    refuse_modules(modules)
    models = [unwrapped(module) for module in modules]
    refuse_shared_parameters(models)
    session.prepared = True
    for model in models:
        place(model, session.device)
    worker = session.worker
    worker.replica.modules = models
    worker.begin()
    plan = plan_model(worker.replica.modules)
    # One position of the run is one step: the line assigns no samples.
    member = worker.join(plan, worker.plan_run(1))
    collectives: SoloCollectives | LineCollectives
    if worker.membership is None:
        gate = SoloGate(member, TrainedModels(plan=plan, device=session.device))
        collectives = SoloCollectives(gate)
    else:
        collectives = LineCollectives(worker.membership, plan, session.device)
    session.manual = ManualStepper(
        member,
        collectives,
        plan,
        worker.replica,
        view=lambda: (session.rank, session.world_size),
        between_steps=worker.between_steps,
    )
