"""Local steps: a worker makes several optimizer steps of its own between two exchanges.

Theory of operation. A round assigns a *window* of positions. This worker computes its share in as
many optimizer steps as the line says, each on its own gradients, and the gates are open meanwhile.
After the last one, inside that `optimizer.step()`, the change of its weights is exchanged
(`gradients.changes`) and reported, and the record is awaited. Then the outer optimizer moves the
line's weights by the mean change, on every worker by the same bits.

The line's weights are kept apart (`HeldState`); the models hold this worker's own. Which positions
are in these is known to the core (`core.computed`), in two piles: *due* is what the round's record
will cover and what is sent, *ahead* is what was computed while that travels, on a line with
overlapped windows. Without overlap nothing is ever ahead.

    change of the due pile     what is sent: line's weights - own weights, without what is ahead
    commit                     own weights = line's new weights + (own - line's old + change)

On a line of fragments a round exchanges a part of the blocks. In the others the own weights stay,
and what they have beyond the line's is *left over* until those blocks have their turn
(`own_weights`).

On a line with a quorum a round may go on without this worker. It computes its share to the end.
After each local step it takes a round that it has missed, in which it only attends
(`core.attending`), and after the last one the round that takes up its share. If more was missed,
loop bodies of borrowed samples follow. Nothing of the due pile is sent in rounds that it attends,
and that stays on top of what they make of the line's weights.

    commit of such a round     own weights = line's new weights + (own - line's old)

A void round leaves the models as they are. Under the next assignment the kept change is sent again
bit for bit. If positions of a lost worker were added, they are computed as further local steps from
where this worker is, and their change is added to the one that is sent. If the core drops the piles
(a halt casts doubt on them, the head moved, state moves to another worker), everything is what it
was when they began, and is computed again.

The inner optimizer's state is this worker's own. The outer optimizer's is the line's: it is in
checkpoints, in what a newcomer gets, and in the digest that workers compare.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from andon.protocol.shards import Ranges, subtract
from andon_trainer.averaging.averaging import Averaged
from andon_trainer.averaging.changes import ChangeExchange
from andon_trainer.core.computed import Computed
from andon_trainer.core.events import Assigned
from andon_trainer.core.reports import NO_DIGEST, Timings
from andon_trainer.data.feed import MicroBatch, Share
from andon_trainer.place.member import RunMember
from andon_trainer.schedules.adding_up import AddsUp
from andon_trainer.schedules.line_weights import LineWeights, OuterStep
from andon_trainer.schedules.local_round import LocalRound, PileSums
from andon_trainer.schedules.loop_checks import check_device
from andon_trainer.schedules.loop_steps import LoopParts
from andon_trainer.schedules.own_weights import OwnWeights, Part
from andon_trainer.schedules.processes import OneProcess
from andon_trainer.schedules.step_state import StepPhase, StepState
from andon_trainer.state.held_state import HeldState, InnerState

__all__ = ["LocalMember", "LocalStepper"]


class LocalMember(RunMember, Protocol):
    """A worker's place on a line of local steps."""

    on_drop: Callable[[], None]
    """Called when what was computed beyond the head must not count any more."""

    @property
    def computed(self) -> Computed:
        """The positions that are in this worker's weights, and in no record."""

    def drop_computed(self, why: str) -> None:
        """Forgets them, if there are any, and calls `on_drop`."""

    def stepped_locally(self) -> None:
        """Counts a local step."""

    def look(self) -> bool:
        """Takes what the line has sent, without waiting; False if the round is void."""

    def making_up(self) -> AbstractContextManager[Assigned | None]:
        """Between two local steps: a round that the others have made, while this worker is late.

        Within it that is the round which it works on. None: there is none.
        """

    def take_turn(self) -> Assigned | None:
        """Waits for the round that takes up the share of a late worker, which is computed.

        Returns:
            That round, or one of the others' before it, which may become void for what this worker
            has. None: it is not late, there is more to compute, or something else came; then
            `next_round` follows.
        """


class LocalStepper(AddsUp):
    """Windows of local steps, one exchange a window."""

    _averager: ChangeExchange
    _in_parts = True
    _holds_weights = False

    def __init__(
        self,
        parts: LoopParts,
        member: LocalMember,
        changes: ChangeExchange,
        outer: OuterStep,
        most_ahead: int | None = None,
    ) -> None:
        """Stands between windows.

        Args:
            parts: what every loop has.
            member: this worker's place.
            changes: exchanges what local steps change.
            outer: what moves the line's weights at a window's end.
            most_ahead: how many local steps are made while a change travels; None: as many as the
                line deals ahead.
        """
        super().__init__(parts, changes, OneProcess())
        self._local = member
        self._outer = outer
        self._most_ahead = most_ahead
        self._buffers = changes.buffers
        self._held = HeldState(parts.replica, parts.device)
        self._weights = LineWeights(member, parts.replica, self._held, changes, outer)
        self._inner_ahead: InnerState | None = None
        """The inner state when the pile ahead was begun."""
        self._due, self._ahead = PileSums(), PileSums()
        self._change: dict[int, torch.Tensor] | None = None
        """The change of the due pile, once something was computed ahead of it."""
        self._before: dict[int, torch.Tensor] | None = None
        """The weights before a local step whose change is to be added to `_change`."""
        self._touched = False
        """Whether the models may hold other weights than the line's."""
        self._half_made = False
        """Whether they have a local step that was not noted: the script left it in its middle."""
        self._round: LocalRound | None = None
        self._settled: StepState | None = None
        """The local step that was noted last."""
        self._stepped: set[int] = set()
        """Ids of the optimizers that made the present local step."""
        self._digest = NO_DIGEST
        """Of the head's weights, if the line compares them."""
        self._committed = False
        self._steps_given = 0
        """Of this worker's local steps, how many are in the last commit."""
        member.on_drop = self._go_back
        parts.replica.beneath = lambda: self._held.tree() if self._touched else None

    @property
    def committed(self) -> bool:
        """Whether the last `optimizer.step()` ended a window, and the line committed it."""
        return self._committed

    @property
    def local_steps(self) -> int:
        """See `LoopSteps`."""
        return self._steps_given

    @property
    def moved(self) -> bool:
        """Whether the last `optimizer.step()` moved this worker's weights."""
        state = self._state
        return state is not None and state.phase is StepPhase.COMMITTED and not state.borrowed

    def common_weights(self) -> AbstractContextManager[None]:
        """See `LoopSteps`."""
        if self.in_body:
            raise _in_between()
        # Entered again, or where nothing is beyond them, the models hold them already.
        if not self._touched or self._held.is_shown:
            return nullcontext()
        return self._held.shown()

    def pause(self) -> None:
        """Makes the weights the line's: the script ends, or leaves its epoch."""
        self._local.drop_computed("the script left its loop")
        if self._touched:
            self._go_back()
        else:
            self._buffers.put_away()  # The first local step's forward may have moved them.

    def _before_work(self) -> None:
        pass  # The core says when what was computed must go (DropComputed).

    def _forget(self) -> None:
        self._round = None
        self.pause()

    def _go_back(self) -> None:
        """What was computed beyond the head does not count any more."""
        self._held.restore()
        self._due, self._ahead = PileSums(), PileSums()
        self._change = self._before = self._inner_ahead = None
        self._touched = self._half_made = self._local.computed.left_over = False
        self._averager.renew()
        self._buffers.go_back()

    # ------------------------------------------------------------------ a window

    def _micro_batches(self, assigned: Assigned) -> Iterator[Any]:
        self._refuse_look()
        check_device(self._on_one_device, self._device)
        self._accumulated.drop()  # Of a local step that was left in the middle.
        self._averager.clock.begin()
        self._committed = False
        computed = self._local.computed
        wants_digest = _wants_digest(assigned)
        if computed.left_over and not computed and not self._half_made:
            # The window begins at this worker's own weights; the line's are held already.
            self._averager.renew()
            self._buffers.begin()
        elif not computed:
            # Nothing is computed beyond the head: the window begins at the line's weights.
            self._begin_window(wants_digest=wants_digest)
            wants_digest = False
        self._hold_digest(wanted=wants_digest)
        epoch, batch = assigned.epoch, assigned.batch
        due = self._shares.of(assigned, epoch, computed.missing(assigned), batch)
        ahead = self._shares.of(assigned, epoch, computed.missing_ahead(assigned), batch)
        most = ahead.parts if self._most_ahead is None else self._most_ahead - self._ahead.steps
        # The rest of it is due in the next round, and computed then.
        ahead, rest = self._shares.split(ahead, max(0, most))
        round_ = self._round = self._open(assigned, due, ahead)
        round_.left = rest.parts if len(rest) else 0
        self._member.talk.show("COMPUTING")
        batches, began = self._batches(due, ahead, rest, assigned), time.perf_counter()
        # Whether there is anything to compute is not known before: a stream may end here.
        first = next(batches, None) if round_.parts else None
        self._loaded(round_.state, began)
        if first is None:
            if self._ends_epoch(assigned):
                return
            self._end_parts(round_, 0)
        yield from self._local_steps(
            round_, itertools.chain(() if first is None else (first,), batches)
        )

    def _local_steps(self, round_: LocalRound, batches: Iterator[MicroBatch]) -> Iterator[Any]:
        """The loop's micro-batches of one round, and its exchange."""
        while round_.made < len(round_.parts):
            # A window is long: a loss or a halt must not be noticed at its end only.
            if round_.made and not self._local.look():
                return
            # The due pile is whole: its change leaves, and what follows is computed while it
            # travels.
            if round_.made == round_.due:
                self._send(round_)
            yield from self._local_step(round_, batches)
            if self._round is not round_ or self._state is None:
                return  # Forgotten: the script left the epoch.
            if self._state.phase is StepPhase.VOID:
                return  # The next assignment says what is left.
            self._settle(round_)
        if not round_.parts:
            yield from self._borrowed_step(round_)
        if self._round is round_ and not round_.over:
            self._finish(round_)

    def _hold_digest(self, *, wanted: bool) -> None:
        """A window has begun, and the digest of its start may be wanted only now."""
        if wanted and self._digest is NO_DIGEST:
            self._digest = self._weights.digest_of_held()

    def _begin_window(self, *, wants_digest: bool) -> None:
        """The models hold the line's weights: they are kept."""
        if self._touched:
            self._go_back()  # A local step was left half made.
        self._held.take()
        self._averager.renew()
        self._buffers.begin()
        self._digest = self._weights.digest_of_models(wanted=wants_digest)

    def _open(self, assigned: Assigned, due: Share, ahead: Share) -> LocalRound:
        parts = self._parts(due, self._local.computed.add)
        made_of_due = len(parts)
        parts += self._parts(ahead, self._local.computed.add_ahead)
        return LocalRound(self._reported(assigned), parts, made_of_due)

    def _reported(self, assigned: Assigned) -> StepState:
        """What is reported of a round, at its beginning."""
        samples = self._shares.samples_of(assigned)
        state = StepState.begin(assigned, self._member.position.doubts, None, samples)
        state.digest = self._digest
        return state

    def _parts(self, share: Share, computed: Callable[[Ranges], None]) -> list[Ranges]:
        """The positions of a share's local steps; those of a step without samples are done."""
        parts = self._shares.filled(share)
        computed(subtract(share.ranges, (each for part in parts for each in part)))
        return parts

    def _end_parts(self, round_: LocalRound, kept: int) -> None:
        """The stream ended: parts after the first `kept` have no sample, and are done."""
        for part in round_.parts[kept:]:
            self._local.computed.add(part)
        del round_.parts[kept:]
        round_.due = min(round_.due, kept)

    def _batches(
        self, due: Share, ahead: Share, rest: Share, assigned: Assigned
    ) -> Iterator[MicroBatch]:
        """The micro-batches of the first two; the loading processes go on with what follows."""

        def after(*shares: Share) -> Iterator[Share]:
            yield from filter(len, shares)
            yield from self._shares.upcoming(assigned)

        yield from self._feeder.batches(due, partial(after, ahead, rest))
        yield from self._feeder.batches(ahead, partial(after, rest))

    def _local_step(self, round_: LocalRound, batches: Iterator[MicroBatch]) -> Iterator[Any]:
        """The loop's micro-batches of one local step."""
        self._refuse_look()
        self._committed = False
        left = sum(map(len, round_.parts[round_.made]))
        state = self._state = StepState.begin(round_.state.assigned, round_.state.doubts, None)
        state.samples = left
        self._stepped.clear()
        self.plan_steps = self._plan_steps_of(round_)
        self._before = None  # Of a step that was never made, in a round that is void.
        if round_.made < round_.due and self._change is not None:
            # Something is ahead already, so the change of this step must be told from it.
            self._before = {key: part.detach().clone() for key, part in self._weights.parameters()}
        elif round_.made >= round_.due and not self._local.computed.ahead:
            self._inner_ahead = self._held.inner()
        while left > 0:
            began = time.perf_counter()
            micro_batch = next(batches)
            self._loaded(round_.state, began)
            left -= micro_batch.positions
            if left < 0:
                self._end_parts(round_, round_.made + 1)
            state.waiting, state.last = micro_batch.samples, left <= 0
            if not (yield from self._run_body(state, micro_batch.batch)):
                return

    def _plan_steps_of(self, round_: LocalRound) -> range | None:
        """What the present local step stands for; see `Shares.plan_steps`."""
        assigned, due = round_.state.assigned, round_.due - round_.made
        if due > 0:
            return self._shares.plan_steps(assigned.epoch, assigned.batch, self._due.steps, due)
        assert assigned.ahead_batch is not None, "the line says of what this is a part"
        made, left = self._ahead.steps, len(round_.parts) - round_.made + round_.left
        return self._shares.plan_steps(assigned.epoch, assigned.ahead_batch, made, left)

    def _borrowed_step(self, round_: LocalRound) -> Iterator[Any]:
        """Runs the loop body of a round in which there is nothing to compute.

        Scripts log, evaluate and stop where `line.committed` is true, so there is a loop body for
        each commit, on each worker. It gets borrowed samples, whose gradient moves nothing.
        """
        assigned = round_.state.assigned
        state = self._state = StepState.begin(assigned, round_.state.doubts, None)
        state.borrowed = state.last = True
        state.waiting = 1
        self._buffers.borrow()
        batch = self._feeder.borrow(assigned.epoch, assigned.batch.start)
        yield from self._run_body(state, batch)

    def _complete(self, state: StepState, scalar: torch.Tensor, *, whole: bool) -> None:
        # Whatever raises below (the script's own backward, a halt), the local step is then over.
        state.phase = StepPhase.VOID
        scalar.backward()  # type: ignore[no-untyped-call]  # torch's own signature
        self._averager.clock.done()
        if state.borrowed:
            self._accumulated.drop()
            self._buffers.give_back()
            state.averaged = Averaged(0.0, 1, Timings())
            state.phase = StepPhase.AVERAGED
            return
        scale = None if whole or not state.weight else state.unit / state.weight
        loss_scale = None if self._scaling is None else self._scaling.loss_scale
        if not self._averager.settle(scale, self._outer.max_grad_norm, loss_scale):
            self._accumulated.drop()
            return
        state.averaged = Averaged(state.weight, 1, Timings())
        state.phase = StepPhase.AVERAGED

    def _refuse_look(self) -> None:
        """Raises RuntimeError while the models hold the line's weights for the script."""
        if self._held.is_shown:
            raise _in_between()

    # ------------------------------------------------------------------ the optimizers

    @property
    def overflowed(self) -> bool:
        """Never by a commit: a local step that overflows is this worker's own."""
        return False

    def has_gradients(self) -> bool:
        """Whether `p.grad` is the mean of a local step, to be stepped by."""
        state = self._state
        if state is None or state.borrowed:
            return False
        ready = state.phase in (StepPhase.AVERAGED, StepPhase.COMMITTED)
        return ready and state.moves_weights

    def try_commit(self) -> bool:
        """Lets a local step move the weights, once its last micro-batch went backward."""
        self._refuse_early_step()
        self._refuse_look()  # What is moved now would be lost, and its samples would count.
        state = self._state
        if state is not None and state.phase is StepPhase.AVERAGED:
            state.phase = StepPhase.COMMITTED
            if state.borrowed:
                if self._round is not None and not self._round.over:
                    self._finish(self._round)
                return False
            self._commits += 1
            self._moves += 1
            self._touched = self._half_made = True
            if self._scaling is not None:
                self._scaling.loss_scale.committed(overflow=self._averager.overflowed)
        return self.moved and state is not None and state.moves_weights

    def stepped(self, optimizer: Optimizer) -> None:
        """After the last local step of a round: exchanges, and waits for the commit."""
        round_, state = self._round, self._state
        if round_ is None or state is None or state.borrowed or not state.last:
            return
        self._stepped.add(id(optimizer))
        # A script with several optimizers steps them one after another. One that is never stepped
        # holds nothing up: the local step then ends when the loop asks for the next batch.
        if len(self._stepped) < len(self._replica.optimizers):
            return
        is_last = round_.is_last
        self._settle(round_)
        if not is_last:
            self._make_up(round_)
            return
        self._finish(round_)
        while not self._committed and self._take_turn():
            pass

    def _take_turn(self) -> bool:
        """Takes up the round that commits what this worker was late with, or one before it.

        Returns:
            False if this worker is not late, or the loop has to ask for work first.
        """
        assigned = self._local.take_turn()
        if assigned is not None:
            self._hold_digest(wanted=_wants_digest(assigned))
            self._finish(LocalRound(self._reported(assigned), [], 0))
        return assigned is not None

    def _make_up(self, round_: LocalRound) -> None:
        """Takes one of the rounds that the others have made since they went on without this worker.

        One in a loop body: scripts log and evaluate where `line.committed` is true. What would be
        taken after the share is computed would need a loop body of borrowed samples.
        """
        with self._local.making_up() as missed:
            if missed is None:
                return
            self._finish(LocalRound(self._reported(missed), [], 0))
        if self._committed:
            self._round = round_
            self._member.talk.show("COMPUTING")

    def _settle(self, round_: LocalRound) -> None:
        """Notes that the present local step is made; does nothing if that was noted."""
        state = self._state
        if state is None or not self.moved or state is self._settled:
            return
        # Noted once: `stepped` comes here, and the loop after it.
        self._settled, self._half_made = state, False
        self._local.stepped_locally()
        # Before `made` moves on to the next step.
        part, due = round_.parts[round_.made], round_.made < round_.due
        round_.made += 1
        if due:
            self._local.computed.add(part)
            self._due.add(state)
            self._averager.renew()
        else:
            self._local.computed.add_ahead(part)
            self._ahead.add(state)
        if self._before is not None and self._change is not None:
            for key, part_now in self._weights.parameters():
                self._change[key] += self._before[key].float() - part_now.detach().float()
        self._before = None

    # ------------------------------------------------------------------ the exchange

    def _send(self, round_: LocalRound) -> None:
        """Begins the exchange of the due pile's change; does nothing the second time."""
        if round_.sent:
            return
        round_.sent = True
        fragment = round_.state.assigned.fragment
        if round_.state.assigned.attends:
            self._buffers.attend()
            # What is heard is an exchange of these blocks, too.
            round_.void = not self._averager.send(0.0, {}, fragment)
            return
        if self._change is None:
            start = self._weights.now()
            with torch.no_grad():
                self._change = {
                    key: start[key].float() - part.detach().float()
                    for key, part in self._weights.parameters()
                }
            # Before anything is computed ahead: what forward makes of buffers then is the next
            # window's.
            self._buffers.end_window()
        round_.void = not self._averager.send(self._due.weight, self._change, fragment)

    def _finish(self, round_: LocalRound) -> None:
        """Exchanges, reports and commits; in a void round everything stays, to be sent again."""
        self._send(round_)
        # Before the wait, which may raise: a round is finished once.
        round_.over = True
        if not self._local.computed.ahead:
            self._change = None  # Nothing is ahead of it: it is all that was changed.
        if round_.void:
            return
        state = round_.state
        attends = state.assigned.attends
        given = PileSums() if attends else self._due
        state.weight, state.loss_sum, state.correct = given.weight, given.loss_sum, given.correct
        state.samples = 0 if attends else state.samples
        averaged = self._averager.receive(given.weight)
        commit = None
        if averaged is not None:
            state.averaged = averaged
            self._note_end(state)
            busy = self._averager.clock.read()
            self._member.report(state.report(averaged, busy, self.stop_wanted))
            commit = self._member.await_commit()
        if averaged is None or commit is None:
            self._weights.clear_gradients()
            self._buffers.drop()
            return
        self._commits += 1
        self._averager.committed()
        self._steps_given = given.steps
        self._apply(state.assigned, moves=averaged.total_weight > 0)
        self._round, self._committed = None, True
        self.last_commit = commit

    def _apply(self, assigned: Assigned, *, moves: bool) -> None:
        """Moves the line's weights by the mean change, which is in `p.grad`.

        What this worker has beyond what it sent is on top of them afterwards.
        """
        # As `WorkerState` has left it: of a round that it attends, this worker sent nothing.
        owes = assigned.attends and bool(self._local.computed)
        weights = self._weights
        start, exchanged = weights.now(), [*weights.parameters(assigned.fragment)]
        own = self._own_beyond(start, exchanged, assigned)
        self._averager.scale(assigned.change_scale)
        others = weights.rest(exchanged)
        weights.move(start, exchanged, moves=moves)
        self._buffers.apply()
        if not owes:
            # As `Computed.committed` has done with the positions.
            self._due, self._ahead = self._ahead, PileSums()
        self._averager.renew()
        ahead, self._touched = self._change is not None or owes, own is not None
        self._change = None
        if own is None:
            # Now, since the next window begins with what the models hold: the line's weights.
            self._digest = self._weights.digest_of_models()
            return
        # The exchanged blocks are the line's now, before anything is laid on them. The inner state
        # is that of the window's end, and not the present one; what is owed keeps its own.
        inner = self._held.began if owes else self._inner_ahead
        self._held.take(inner, but={key for key, _ in others})
        self._inner_ahead = None
        self._digest = (
            self._weights.digest_of_held(wanted=False)
            if others
            else self._weights.digest_of_models()
        )
        if ahead:
            self._buffers.begin_ahead()
        own.lay_on(exchanged)

    def _own_beyond(
        self, start: dict[int, torch.Tensor], exchanged: list[Part], assigned: Assigned
    ) -> OwnWeights | None:
        """What this worker keeps of its own at a commit; None: its weights become the line's."""
        computed, fragment = self._local.computed, assigned.fragment
        gave = self._due.weight > 0 and not assigned.attends
        # A rank that abstained has sent nothing: whatever it has is still left over.
        if gave:
            computed.left_over = fragment is not None
        owes = assigned.attends and bool(computed)
        if self._change is None and not computed.left_over and not owes:
            return None
        if not gave:
            return OwnWeights(exchanged, start, {})
        # What it keeps of these blocks is a part of the change that it sends next.
        return OwnWeights(exchanged, start, self._change, self._outer.mix)


def _wants_digest(assigned: Assigned) -> bool:
    """Whether a round has this worker's weights compared."""
    return assigned.wants_digest and not assigned.attends


def _in_between() -> RuntimeError:
    return RuntimeError(
        "line.common_weights() is for between two batches, since the models hold the line's "
        "weights for a while: enter it after optimizer.step(), and leave it before the next batch"
    )
