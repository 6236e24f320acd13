"""Spiking: carries out what `spikes` decides about a spike in a complete round.

LIMIT lets the round become a record, whose StepCommitted says by how much every worker scales the
averaged gradient. SKIP and DROP void it: nobody's weights moved.
"""

from __future__ import annotations

from dataclasses import replace

from andon.protocol.capabilities import LIMITS
from andon_coordinator.core import departures, operators
from andon_coordinator.core.defects import LineDefect
from andon_coordinator.core.effects import SaveSpike
from andon_coordinator.core.round import StepRound
from andon_coordinator.core.spikes import Spike, SpikeAction
from andon_coordinator.core.state import CoreState

__all__ = ["judge"]


def judge(core: CoreState, round_: StepRound) -> LineDefect | None:
    """The spike in a complete round for which the line must halt; None: there is none.

    What else is to be done about a spike is done. After LIMIT the round has a scale below 1, and
    becomes a record; after SKIP and DROP it is void.
    """
    defect = core.detectors.judge(round_)
    if defect is None or core.spikes.policy is SpikeAction.HALT:
        return defect
    decision = core.spikes.decide(
        _spike_of(core, round_, defect),
        can_limit=_can_limit(core, round_),
        can_drop=core.members.in_sync_count(core.chain.head) - 1 >= core.needed,
    )
    if decision.action is SpikeAction.HALT:
        return replace(defect, message=decision.what)
    core.emit(SaveSpike(decision))
    why = f"{decision.action.value}: {decision.what}"
    match decision.action:
        case SpikeAction.LIMIT:
            round_.gradient_scale = decision.scale
        case SpikeAction.SKIP:
            core.void_at_once(why)
            operators.skip_by_itself(core, round_, why)
        case SpikeAction.DROP:
            core.void_at_once(why)
            member = core.members.get(decision.worker or 0)
            assert member is not None
            departures.drop(core, member, f"its gradients stand out: {why}", f"dropped: {why}")
    return None


def _spike_of(core: CoreState, round_: StepRound, defect: LineDefect) -> Spike:
    return Spike(
        step=round_.terms.step,
        what=defect.message,
        worker=defect.worker,
        norm=round_.gradient_norm,
        usual=core.detectors.usual_norm(round_),
    )


def _can_limit(core: CoreState, round_: StepRound) -> bool:
    """Whether everybody who applies the record scales the gradient, learners included.

    Changes of weights are not scaled: on local steps each worker limits its own gradients.
    """
    if core.settings.policy.local_steps:
        return False
    members = [core.members.get(worker) for worker in round_.roster]
    others = core.members.following()
    return all(
        each is not None and LIMITS in each.request.capabilities for each in (*members, *others)
    )
