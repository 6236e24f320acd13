"""Verifying: some steps are computed twice, and nothing is committed as long as results differ.

Theory of operation. A step is drawn before anybody computes it, so nobody can prepare for it. In
each of its rounds every worker computes grains of another one as well, and attests all that it
computed (`checks_of`). A complete round whose results agree becomes a record as any other one
(`proved`). If two workers differ in the sum of a node, the round is void, and the next attempt at
the step is an *inquest*: everybody computes the disputed grains anew (`settles`). So whoever is
wrong for good is wrong again, and whoever was wrong once contradicts itself.

An inquest is an attempt like every other one. It has a key of its own, its roster never changes, a
lost worker voids it, and a halt ends it. What was attested so far is kept in the counts of the
step's attempts, which a commit replaces: so nothing of it outlives the step that it is about. A
coordinator that starts again knows nothing of it, draws the same step, and finds the difference
again if there is one.

After a complete inquest the line halts, or the convicted worker is dropped: its round is never
committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from andon.protocol.arithmetic import is_one
from andon.protocol.attestations import COMPONENT_BYTES
from andon.protocol.capabilities import VERIFIES
from andon.protocol.encoding import Encoding
from andon.protocol.grains import Grains, Node
from andon.protocol.halts import HaltReason, shown
from andon.protocol.limits import clipped
from andon.protocol.shards import Ranges
from andon_coordinator.core import departures, mean_checking, verdicts
from andon_coordinator.core.defects import LineDefect
from andon_coordinator.core.effects import NoteDifference, NoteUnverified
from andon_coordinator.core.events import Ready
from andon_coordinator.core.given import Given
from andon_coordinator.core.mean_verdicts import sums_of
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.round import StepRound
from andon_coordinator.core.state import CoreState
from andon_coordinator.core.verdict_words import names_of, sides_of, verdict_of, where
from andon_coordinator.core.verdicts import Inquest, Judgement
from andon_coordinator.core.verification import (
    Proved,
    RoundChecks,
    deal,
    deal_to_newcomers,
    in_attested,
    in_mean_check,
    is_drawn,
)

__all__ = ["checks_of", "committed", "in_report", "proved", "settles"]

_ITEMISED_BYTES = 2**16
"""Hashes of components in a report of a drawn step: an audit names the parameter by them."""


# ------------------------------------------------------------------------ a round opens


def checks_of(
    core: CoreState, roster: Sequence[LineMember], grains: Grains | None, shares: Sequence[Ranges]
) -> RoundChecks | None:
    """What is computed again in the round that opens now; None: nothing."""
    attempts, settings = core.attempts, core.settings.verify
    if grains is None:
        return None
    if attempts.inquest is not None:
        inquest = _of_inquest(roster, attempts.inquest)
        disputed = [node for nodes in attempts.inquest.nodes.values() for node in nodes]
        return _with_sums(core, inquest, list(map(grains.of, shares)), grains.count, disputed)
    step = core.chain.step + 1
    attempts.verified = attempts.verified or is_drawn(settings.key, step, settings.fraction)
    newcomers = {rank for rank, each in enumerate(roster) if each.worker in core.unattested}
    if not attempts.verified and (attempts.attempt or not newcomers or len(roster) < 2):
        return None
    parts = list(map(grains.of, shares))
    owned = [[at for part in each for at in range(part.start, part.stop)] for each in parts]
    # What a worker can't verify equals nobody's.
    arithmetics = [each.arithmetic if _can_verify(each) else () for each in roster]
    if not attempts.verified:
        return deal_to_newcomers(owned, arithmetics, newcomers)
    _note_unverified(core, roster)
    verifies = deal(owned, arithmetics)
    most = max(map(len, verifies)) * COMPONENT_BYTES * _components(core)
    checks = RoundChecks(
        attests=tuple(map(_can_verify, roster)),
        verifies=verifies,
        itemised=most <= _ITEMISED_BYTES,
    )
    return _with_sums(core, checks, parts, grains.count)


def _with_sums(
    core: CoreState,
    checks: RoundChecks,
    parts: Sequence[Ranges],
    count: int,
    disputed: Sequence[Node] = (),
) -> RoundChecks:
    """Adds the nodes of which each worker makes the mean, if all can, and it has one value."""
    policy = core.settings.policy
    exact = (policy.answer_encoding or policy.encoding) is Encoding.FLOAT32
    if not exact or not all(checks.attests):
        return checks
    return replace(checks, sums=sums_of(parts, checks.verifies, count, disputed))


def _of_inquest(roster: Sequence[LineMember], inquest: Inquest) -> RoundChecks:
    asked = [inquest.grains.get(each.arithmetic, ()) for each in roster]
    able = tuple(map(_can_verify, roster))
    verifies = tuple(grains if can else () for grains, can in zip(asked, able, strict=True))
    return RoundChecks(attests=able, verifies=verifies, inquest=True, itemised=inquest.itemised)


def _can_verify(member: LineMember) -> bool:
    return VERIFIES in member.request.capabilities


def _note_unverified(core: CoreState, roster: Sequence[LineMember]) -> None:
    """Tells people, once, of workers that nobody of the same arithmetic stands beside."""
    alone = tuple(
        each.worker
        for each in roster
        if not any(
            is_one(each.arithmetic, other.arithmetic) for other in roster if other is not each
        )
    )
    if alone != core.unverified and (alone or core.unverified):
        core.unverified = alone
        if alone and len(roster) > 1:
            core.emit(NoteUnverified(alone))


# ---------------------------------------------------------------------- reports come in


def in_report(core: CoreState, worker: int, report: Ready, round_: StepRound) -> LineDefect | None:
    """What is wrong with what a worker attests; what nobody asked for is not looked at."""
    checks, rank = round_.checks, round_.rank_of[worker]
    if checks is None or round_.grains is None or not checks.attests[rank]:
        return None
    return in_mean_check(worker, report.mean_check, checks.sums) or in_attested(
        worker,
        report,
        round_.grains.of(round_.shares[rank]),
        checks.verifies[rank],
        count=round_.grains.count,
        components=_components(core) if checks.itemised else None,
    )


def _components(core: CoreState) -> int:
    return sum(len(block.components) for block in core.layout.blocks) if core.layout else 0


def settles(core: CoreState, round_: StepRound) -> bool:
    """Deals with a complete round that may not become a record; False: it may."""
    checks, inquest = round_.checks, core.attempts.inquest
    if checks is None or (round_.overflow and inquest is None):
        return False  # Where gradients overflowed no weight moves, and zeros were sent.
    given = {} if inquest is None else inquest.given
    _take(core, round_, given)
    disputed = verdicts.different_nodes(given.values())
    # Averages only where all sums agree: a wrong sum makes another mean as well, and an inquest
    # says whose it is.
    defect = _of_samples(round_, given)
    if defect is None and not disputed:
        defect, holders = mean_checking.in_means(core, round_), mean_checking.holders_of(round_)
        wrong = None if defect is not None else mean_checking.in_writing(round_, given, holders)
        if wrong is not None:
            core.attempts.inquest = None
            _convict(core, round_, wrong, mean_checking.told_of_writing(core, round_, wrong), given)
            return True
        defect = defect or mean_checking.in_averages(core, round_, holders)
    if defect is not None:
        core.attempts.inquest = None
        core.emit(verdict_of(round_, None, defect.message, given))
        core.stop_line(defect)
    elif inquest is not None and disputed:
        core.attempts.inquest = None
        _judge(core, round_, inquest)
    elif disputed:
        _open_inquest(core, round_, given)
    else:
        # If there was an inquest, whoever differed has got its weights anew, and agrees now.
        core.attempts.inquest = None
        return False
    return True


def _take(core: CoreState, round_: StepRound, given: dict[int, Given]) -> None:
    assert round_.checks is not None
    for rank, (worker, report) in enumerate(round_.in_rank_order):
        member = core.members.get(worker)
        assert member is not None
        if round_.checks.attests[rank]:
            process = member.request.incarnation
            one = given.setdefault(process, Given(worker, process, member.arithmetic))
            one.worker, one.source = worker, member.weights_from
            one.add(report.attested, report.apart)


def _open_inquest(core: CoreState, round_: StepRound, given: dict[int, Given]) -> None:
    assert round_.grains is not None
    inquest = verdicts.open_inquest(given, count=round_.grains.count, components=_components(core))
    found = verdicts.judge(inquest)
    core.attempts.inquest, core.attempts.verified = inquest, True
    core.verified.differences += 1
    core.emit(NoteDifference(round_.terms.step, str(found.node), found.differ))
    core.void_at_once(f"{names_of(found.differ)} computed different results of {found.node}")


# ---------------------------------------------------------------------------- verdicts


def _of_samples(round_: StepRound, given: Mapping[int, Given]) -> LineDefect | None:
    found = verdicts.different_samples(given.values())
    if found is None:
        return None
    node, workers, apart = found
    assert round_.grains is not None
    positions = round_.grains.positions(node.first)
    where = f"for {node} (positions {positions.start} to {positions.stop - 1})"
    if apart is not None and apart < len(positions):
        where = f"for position {positions.start + apart}"
    return LineDefect(
        reason=HaltReason.DATA_DIFFERS,
        message=f"{names_of(workers)} were given different samples {where} of epoch "
        f"{round_.terms.epoch}",
    )


def _judge(core: CoreState, round_: StepRound, inquest: Inquest) -> None:
    """Halts the line, or drops whom the inquest convicts; the verdict is saved first."""
    found = verdicts.judge(inquest)
    place, first_in = where(core.layout, found)
    what = f"{found.node} of step {round_.terms.step}"
    if not found.convicted:
        message = f"{sides_of(found)} computed different results of {what}{first_in}; {found.why}"
        core.emit(verdict_of(round_, None, message, inquest.given))
        core.stop_line(
            LineDefect(
                reason=HaltReason.WRONG_ARITHMETIC,
                message=clipped(message),
                place=place,
            )
        )
        return
    first = found.convicted[0]
    # Its place may have another process by now, which did nothing wrong.
    here = core.members.of_incarnation(first.incarnation) is not None
    who = f"{'' if here else 'a former process of '}worker {first.worker}"
    others = names_of(found.witnesses)
    message = f"{who} computed {what} wrong: {others} agree on another result{first_in}"
    _convict(core, round_, found, message, inquest.given)


def _convict(
    core: CoreState, round_: StepRound, found: Judgement, message: str, given: Mapping[int, Given]
) -> None:
    """Halts the line, or drops them; the verdict is saved first."""
    first = found.convicted[0]
    here = core.members.of_incarnation(first.incarnation) is not None
    place, _ = where(core.layout, found)
    for each in found.convicted:
        text = message if each is first else f"as worker {first.worker}, in the same inquest"
        core.emit(verdict_of(round_, each, text, given))
    core.verified.convicted += [each.worker for each in found.convicted]
    if _may_drop(core, found):
        _drop(core, found, message)
        return
    core.stop_line(
        LineDefect(
            reason=HaltReason.WRONG_ARITHMETIC,
            message=clipped(message),
            worker=first.worker if here else None,
            place=place,
            value=found.digest.hex() if found.seen is None else shown(found.seen.values[0]),
        )
    )


def _may_drop(core: CoreState, found: Judgement) -> bool:
    """Whether the line is to go on without them, and can."""
    if not core.settings.verify.drops:
        return False
    here = core.members.in_sync_count(core.chain.head)
    return here - len(found.convicted) >= core.needed


def _drop(core: CoreState, found: Judgement, why: str) -> None:
    core.void_at_once(why)
    for each in found.convicted:
        member = core.members.of_incarnation(each.incarnation)
        if member is not None:  # Else another process has its place.
            departures.drop(core, member, f"it computes wrong: {why}", f"dropped: {why}")


# ------------------------------------------------------------------------------ commits


def proved(core: CoreState, round_: StepRound) -> Proved | None:
    """What a round has shown that is about to become a record; None: nothing."""
    weights = _weights(round_)
    checks = None if round_.overflow else round_.checks
    if checks is None:
        return weights if weights.weights else None
    given: dict[int, Given] = {}
    _take(core, round_, given)
    grains, compared = verdicts.compared(given.values())
    core.unattested -= compared
    return replace(
        weights,
        attested=tuple(
            (worker, each)
            for rank, (worker, report) in enumerate(round_.in_rank_order)
            if checks.attests[rank]
            for each in report.attested
        ),
        averages=next((r.averages_digest for _, r in round_.in_rank_order if r.attested), b""),
        grains=grains,
        drawn=core.attempts.verified,
    )


def _weights(round_: StepRound) -> Proved:
    """The digest of the weights that the step started from; the plain one if anybody gave it."""
    given = [
        # Of equal ones the last, which has prefixes if any has.
        (not report.digest_base_hashed, report.digest, report.digest_prefixes)
        for _, report in round_.in_rank_order
        if report.digest and report.digest_head == round_.terms.parent
    ]
    plain, digest, prefixes = max(given, default=(True, b"", b""))
    return Proved(weights=digest, prefixes=prefixes, base_hashed=not plain)


def committed(core: CoreState, proved: Proved | None) -> None:
    """Counts what the record that is durable now has shown."""
    if proved is not None and proved.drawn and proved.grains:
        core.verified.steps += 1
        core.verified.grains += proved.grains
