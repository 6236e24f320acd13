"""Local steps: a worker makes several optimizer steps of its own between two exchanges.

Theory of operation. A round assigns a *window* of positions. This worker computes its share in as
many optimizer steps as the line says, each on its own gradients, and the gates are open meanwhile.
After the last one, inside that `optimizer.step()`, it exchanges the change of its weights
(`gradients.changes`), reports, and waits for the record. Then the outer optimizer moves the weights
of the window's start by the mean change, on every worker by the same bits.

What a worker computes belongs to the window's start until the record comes. Whenever this thread
waits for work, or leaves a wait by an exception, the models hold the line's weights, and the
window's are put away (`HeldState`). If the next assignment contains all positions that were
computed, they are taken out again: the kept change is sent as it was, or, if positions of a lost
worker were added, these are computed as further local steps after the others and one change is
sent for all. In any other case (the head moved, a halt casts doubt on what was computed) the window
is forgotten, and computed again from the line's weights.

The inner optimizer's state is this worker's own. The outer optimizer's is the line's: it is in
checkpoints, in what a newcomer gets, and in the digest that workers compare.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from andon.protocol.shards import Ranges, divide, merged, subtract
from andon_trainer.core.events import Assigned
from andon_trainer.core.keeping import Kept
from andon_trainer.core.reports import Timings
from andon_trainer.data.feed import Share
from andon_trainer.gradients.averaging import Averaged
from andon_trainer.gradients.changes import ChangeExchange, WindowStatistics
from andon_trainer.state.held_state import HeldState
from andon_trainer.steps.loop_checks import check_device, check_loop_body
from andon_trainer.steps.loop_steps import LoopParts, LoopSteps
from andon_trainer.steps.step_state import StepPhase, StepState

__all__ = ["LocalStepper", "OuterStep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStep:
    """What moves the line's weights at the end of a window."""

    optimizer: Optimizer
    moving: Callable[[], AbstractContextManager[None]]
    """Around its step: it is no optimizer that the script prepared."""
    max_grad_norm: float | None = None
    """The greatest norm of a local step's gradient."""


@dataclass(slots=True)
class _Window:
    """What this worker has computed of a window."""

    total: StepState
    """The sums over its local steps."""
    positions: Ranges = ()
    """The positions that went into its weights."""
    away: bool = False
    """Whether the models hold the line's weights, and not the window's."""
    stepped: set[int] = field(default_factory=set)
    """Ids of the optimizers that made the present local step."""
    closing: bool = False
    """Whether the present local step is the share's last."""
    exchanged: bool = False
    """Whether it was exchanged in the present round, whatever came of it."""

    def serves(self, assigned: Assigned, doubts: int) -> bool:
        """Whether all of it belongs to what `assigned` asks of this worker."""
        total = self.total
        kept = Kept(
            parent=total.assigned.parent,
            epoch=total.assigned.epoch,
            positions=self.positions,
            weight=total.weight,
            loss_sum=total.loss_sum,
            correct=total.correct,
            doubts=total.doubts,
        )
        return kept.serves(assigned, doubts)

    def add(self, state: StepState, positions: Ranges) -> None:
        """Adds a local step that moved the weights."""
        total = self.total
        self.positions = merged((*self.positions, *positions))
        total.weight += state.weight
        total.loss_sum += state.loss_sum
        total.micro_batches += state.micro_batches
        both = state.correct is not None and total.correct is not None
        total.correct = (total.correct or 0) + (state.correct or 0) if both else None


class LocalStepper(LoopSteps):
    """Windows of local steps, one exchange a window."""

    _averager: ChangeExchange
    _in_parts = True

    def __init__(
        self,
        parts: LoopParts,
        changes: ChangeExchange,
        outer: OuterStep,
        statistics: WindowStatistics | None,
    ) -> None:
        """Stands between windows."""
        super().__init__(parts, changes)
        self._outer = outer
        self._statistics = statistics
        self._held = HeldState(parts.replica, parts.device)
        self._window: _Window | None = None
        """The window that is not committed yet."""
        self._part: Ranges = ()
        """The positions of the present local step."""
        self._committed = False

    @property
    def committed(self) -> bool:
        """Whether the last `optimizer.step()` ended a window, and the line committed it."""
        return self._committed

    @property
    def moved(self) -> bool:
        """Whether the last `optimizer.step()` moved this worker's weights."""
        return self._state is not None and self._state.phase is StepPhase.COMMITTED

    def pause(self) -> None:
        """Puts a window that is not committed away, so that the models hold the line's weights."""
        window = self._window
        if window is not None and not window.away:
            self._held.swap()
            window.away = True

    def _forget(self) -> None:
        self.pause()
        self._window = None

    # ------------------------------------------------------------------ a window

    def _micro_batches(self, assigned: Assigned) -> Iterator[Any]:
        check_device(self._replica.modules, self._device)
        self._accumulated.drop()  # Of a local step that was left in the middle.
        self._averager.clock.begin()
        window = self._window = self._take_up(assigned)
        share = self._share_to_compute(window, assigned)
        self._member.show("COMPUTING")
        batches = self._feeder.batches(share, lambda: self._upcoming(assigned))
        parts = list(divide(share.ranges, share.parts)) if len(share) else []
        for number, part in enumerate(parts, 1):
            self._part, window.closing = part, number == len(parts)
            yield from self._local_step(window, part, batches)
            if self._window is not window or self._state is None:
                return  # Forgotten: the script left the epoch.
            if self._state.phase is StepPhase.VOID:
                return  # The next assignment says what is left.
        if self._window is window and not window.exchanged:
            self._finish(window)

    def _take_up(self, assigned: Assigned) -> _Window:
        """The window that an assignment begins, or goes on with."""
        window, doubts = self._window, self._member.doubts
        self._committed = False
        if window is not None and window.serves(assigned, doubts):
            assert window.away
            self._held.swap()
            window.away = window.exchanged = False
            window.total.assigned = assigned
            window.total.samples = sum(map(len, assigned.positions))
            return window
        if window is not None and window.total.assigned.parent == assigned.parent:
            self._held.rewind_generators()  # It is computed again, from the same weights.
        self._held.take()
        self._averager.renew()
        if self._statistics is not None:
            self._statistics.begin()
        total = StepState.begin(assigned, doubts, None)
        every = self._member.digest_every
        if every and self._member.step % every == 0:
            total.digest = self._replica.weights()
        return _Window(total)

    def _share_to_compute(self, window: _Window, assigned: Assigned) -> Share:
        """The positions that are left to compute, a local step's worth in each part."""
        if not window.positions:
            return self._share(assigned, assigned.epoch, assigned.positions)
        missing = subtract(assigned.positions, window.positions)
        return self._share(assigned, assigned.epoch, missing)

    def _local_step(
        self, window: _Window, part: Ranges, batches: Iterator[tuple[Any, int]]
    ) -> Iterator[Any]:
        """The loop's micro-batches of one local step."""
        left = sum(map(len, part))
        state = self._state = StepState.begin(window.total.assigned, window.total.doubts, None)
        window.stepped.clear()
        while left:
            began = time.perf_counter()
            batch, count = next(batches)
            self._loaded(window.total, began)
            left -= count
            state.waiting, state.last = count, not left
            before = self._unoptimized.versions()
            yield self._hand_over(state, batch)
            if state is not self._state:
                return  # The script left the epoch, and resumed this generator afterwards.
            self._unoptimized.check(before, state.phase, committed=self._committed)
            if state.phase is StepPhase.VOID:
                return
            check_loop_body(state)

    def _complete(self, state: StepState, scalar: torch.Tensor, *, whole: bool) -> None:
        # Whatever raises below (the script's own backward, a halt), the local step is then over.
        state.phase = StepPhase.VOID
        scalar.backward()  # type: ignore[no-untyped-call]  # torch's own signature
        self._averager.clock.done()
        scale = None if whole or not state.weight else 1.0 / state.weight
        if not self._averager.settle(scale, self._outer.max_grad_norm):
            self._accumulated.drop()
            return
        state.averaged = Averaged(state.weight, 1, Timings())
        state.phase = StepPhase.AVERAGED

    # ------------------------------------------------------------------ the optimizers

    def try_commit(self) -> bool:
        """Lets a local step move the weights, once its last micro-batch went backward."""
        self._refuse_early_step()
        state, window = self._state, self._window
        if state is not None and window is not None and state.phase is StepPhase.AVERAGED:
            state.phase = StepPhase.COMMITTED
            self._commits += 1
            window.add(state, self._part)
            self._averager.renew()
        return self.moved and state is not None and state.moves_weights

    def stepped(self, optimizer: Optimizer) -> None:
        """After the last local step of a share: exchanges, and waits for the commit."""
        window = self._window
        if window is None:
            return
        window.stepped.add(id(optimizer))
        # A script with several optimizers steps them one after another. One that is never stepped
        # holds nothing up: the window then ends when the loop asks for the next batch.
        if window.closing and len(window.stepped) == len(self._replica.optimizers):
            self._finish(window)

    def _finish(self, window: _Window) -> None:
        """Exchanges the change and commits it; in a void round it stays, to be sent again."""
        try:
            self._try_to_finish(window)
        except BaseException:
            self.pause()  # The script may look at the models, or the line may want their weights.
            raise

    def _try_to_finish(self, window: _Window) -> None:
        total, window.exchanged = window.total, True
        start = self._start()
        averaged = self._averager.exchange(total.weight, start, self._statistics)
        if averaged is None:
            self._clear_gradients()
            return
        total.averaged = averaged
        busy = self._averager.clock.read()
        self._member.report(total.report(averaged, busy, self.stop_wanted))
        commit = self._member.await_commit()
        if commit is None:
            self._clear_gradients()
            if self._statistics is not None:
                self._statistics.drop()
            return
        self._apply(start, moves=averaged.total_weight > 0)
        self._window, self._committed, self.last_commit = None, True, commit

    def _start(self) -> dict[int, torch.Tensor]:
        """The weights at the window's start, by the parameters' ids."""
        return self._held.start_of(dict(self._parameters()))

    def _parameters(self) -> Iterator[tuple[int, torch.Tensor]]:
        for group in self._outer.optimizer.param_groups:
            for part in group["params"]:
                yield id(part), part

    def _apply(self, start: dict[int, torch.Tensor], *, moves: bool) -> None:
        """Moves the line's weights by the mean change, which is in `p.grad`."""
        with torch.no_grad():
            for key, part in self._parameters():
                part.copy_(start[key])
        if moves:
            with self._outer.moving():
                self._outer.optimizer.step()
        self._clear_gradients()
        if self._statistics is not None:
            self._statistics.apply()

    def _clear_gradients(self) -> None:
        for _, part in self._parameters():
            part.grad = None
