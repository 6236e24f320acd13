"""Preparing: how a script's objects come onto the line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from andon_trainer.averaging.loss_scale import LossScale
from andon_trainer.data.stream_feeder import feeder_for
from andon_trainer.hosts.opening import group_of, switch_off
from andon_trainer.line.joining import join_with
from andon_trainer.line.loop import TrainingLoop
from andon_trainer.line.session import LineSession
from andon_trainer.script.gates import Audit, gate_optimizer, gate_scheduler, refuse_unprepared
from andon_trainer.script.grain_checks import refuse_other_grains, refuse_without_grain
from andon_trainer.script.prepared import (
    Prepared,
    place,
    refuse_optimizers,
)
from andon_trainer.script.scaling import ScalerGate, refuse_scaler
from andon_trainer.script.script_checks import warn_of_unsaved_tensors

__all__ = ["prepare"]


def prepare(
    session: LineSession, loop: TrainingLoop, objects: Sequence[Any], micro_batch_size: int | None
) -> Any:
    """See `Line.prepare`."""
    session.require_first()
    given = Prepared.sort(objects)
    refuse_optimizers(given.models, given.optimizers)
    warn_of_unsaved_tensors(given.optimizers)
    grain = 0
    if session.worker.config.same_bits:
        grain = refuse_without_grain(micro_batch_size)
        refuse_other_grains(objects)
        assert session.worker.arithmetic is not None
        session.worker.arithmetic.takes(objects)
    session.scaling = _scaling_of(session, given)
    feeder = (
        None
        if given.loader is None
        else feeder_for(given.loader, session.worker.config.seed, micro_batch_size, grain)
    )
    # Whoever was refused up to here may call again: a notebook's cell that was put right.
    session.prepared = True
    session.micro_batch_size, session.grain = micro_batch_size, grain
    session.worker.host = group_of(given.wrapped, session.worker.config)
    session.undo.append(switch_off(given.wrapped))
    # Moved before anything looks at the parameters: `to` may replace them.
    for model in given.models:
        place(model, session.device)
    session.audit = Audit(given.models, given.optimizers)
    replica = session.worker.replica
    replica.modules = given.models
    replica.optimizers = given.optimizers
    for index, scheduler in enumerate(given.schedulers):
        replica.register(f"scheduler.{index}", scheduler)
    if session.scaling is not None and session.scaling.loss_scale.enabled:
        # One that is switched off has no state: a run goes on from checkpoints without one.
        replica.register("andon.scaler", session.scaling.loss_scale)
    session.worker.begin()
    loader: Any = None
    if given.loader is not None and feeder is not None:
        join_with(session, feeder)
        loader = loop.loader_of(feeder, given.loader.batch_size, given.loader)
    # Gated after joining: loading a checkpoint must not meet the gates.
    for optimizer in given.optimizers:
        gate = gate_optimizer(optimizer, session.gate, session.audit, session.scaling)
        session.undo.append(gate)
    if session.scaling is not None:
        session.scaling.open(session.gate)
        session.undo.append(session.scaling.close)
    for scheduler in given.schedulers:
        session.undo.append(gate_scheduler(scheduler, session.gate))
    session.schedulers = given.schedulers
    session.undo.append(refuse_unprepared(given.optimizers, given.schedulers))
    results = tuple(loader if thing is given.loader else thing for thing in objects)
    return results[0] if len(results) == 1 else results


def _scaling_of(session: LineSession, given: Prepared) -> ScalerGate | None:
    """The gate of the script's scaler; None if it has none."""
    if given.scaler is None:
        return None
    refuse_scaler(given.scaler, given.models)
    most = session.worker.config.max_overflows
    return ScalerGate(LossScale(given.scaler, session.device, most))
