"""Spiking: carries out what `spikes` decides about a spike in a complete round.

LIMIT lets the round become a record, whose StepCommitted says by how much every worker scales the
averaged gradient. SKIP, BACK and DROP void it: nobody's weights moved.
"""

from __future__ import annotations

from dataclasses import replace

from andon.protocol.capabilities import LIMITS
from andon.protocol.halts import HaltReason, describe_value
from andon_coordinator.core import departures, going_back, operators
from andon_coordinator.core.comparison import Comparison, Finding, Reading, describe
from andon_coordinator.core.defects import LineDefect
from andon_coordinator.core.effects import SaveSpike
from andon_coordinator.core.round import StepRound
from andon_coordinator.core.settings import History, LineSettings
from andon_coordinator.core.spikes import Spike, SpikeAction
from andon_coordinator.core.state import CoreState

__all__ = ["comparison_after", "judge"]


def judge(core: CoreState, round_: StepRound) -> LineDefect | None:
    """The spike in a complete round for which the line must halt; None: there is none.

    What else is to be done about a spike is done. After LIMIT the round has a scale below 1, and
    becomes a record; after SKIP, BACK and DROP it is void.
    """
    defect, lasts = _found(core, round_)
    if defect is None or core.spikes.policy is SpikeAction.HALT:
        return defect
    spike = _spike_of(core, round_, defect, lasts=lasts)
    checkpoint = going_back.checkpoint_before(core, core.spikes.began(spike))
    decision = core.spikes.decide(
        spike,
        can_limit=_can_limit(core, round_),
        can_drop=core.members.in_sync_count(core.chain.head) - 1 >= core.needed,
        can_back=checkpoint is not None,
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
        case SpikeAction.BACK:
            assert checkpoint is not None
            core.void_at_once(why)
            going_back.begin(core, round_, checkpoint, defect, why)
        case SpikeAction.DROP:
            core.void_at_once(why)
            core.comparison.forget(decision.worker or 0)
            member = core.members.get(decision.worker or 0)
            assert member is not None
            departures.drop(core, member, f"its gradients stand out: {why}", f"dropped: {why}")
    return None


def comparison_after(settings: LineSettings, history: History) -> Comparison:
    """What is remembered of how workers compare, as the journal has it."""
    comparison = Comparison.from_bytes(settings.comparison_factor, history.comparison)
    for made in history.spikes:
        if made.action is SpikeAction.DROP and made.step > comparison.step:
            comparison.forget(made.worker or 0)
    return comparison


def _found(core: CoreState, round_: StepRound) -> tuple[LineDefect | None, bool]:
    """What stands out in a complete round, and whether it is a drift."""
    finding = _compare(core, round_)
    defect = core.detectors.judge_most(round_)
    if defect is not None:
        return defect, False
    defect = core.detectors.judge(round_)
    if defect is not None and defect.reason is HaltReason.LOSS_SPIKE and finding is None:
        return _of_one(round_, defect), False
    if finding is None or core.detectors.accepts(round_) or (defect and defect.worker is not None):
        return defect, False
    if finding.worker is None and defect is not None:
        return defect, False
    # One worker's explains what its gradient has done to the average.
    drifted = LineDefect(
        reason=HaltReason.GRADIENT_NORM_SPIKE,
        message=describe(finding, core.layout),
        worker=finding.worker,
        value=describe_value(finding.times),
    )
    return drifted, finding.lasts


def _of_one(round_: StepRound, defect: LineDefect) -> LineDefect:
    """A spike of the loss; if one worker's loss alone stands out, it is that worker's."""
    suspect = None if round_.comparison is None else round_.comparison.suspect
    if suspect is None:
        return defect
    what = f"{defect.message}, and of all losses worker {suspect}'s alone stands out"
    return replace(defect, worker=suspect, message=f"{what}: look at its data")


def _compare(core: CoreState, round_: StepRound) -> Finding | None:
    """Compares the workers of a complete round, and notes what is remembered if it counts."""
    if core.comparison.factor is None or round_.weight == 0 or round_.overflow:
        return None
    blocks = len(core.layout.blocks) if core.layout is not None else 0
    readings = [
        Reading(
            worker=worker,
            samples=ready.samples,
            norm=ready.own_gradient_norm,
            loss=ready.loss_sum / ready.weight,
            blocks=ready.block_norms if len(ready.block_norms) == blocks else (),
        )
        for worker, ready in round_.in_rank_order
        if ready.weight > 0 and ready.own_gradient_norm is not None
    ]
    round_.comparison, finding = core.comparison.after(
        round_.terms.step, readings, round_.gradient_norm, round_.loss
    )
    return finding


def _spike_of(core: CoreState, round_: StepRound, defect: LineDefect, *, lasts: bool) -> Spike:
    return Spike(
        step=round_.terms.step,
        what=defect.message,
        worker=defect.worker,
        lasts=lasts,
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
