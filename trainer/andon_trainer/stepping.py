"""Stepping: a step's life on this worker, from its assignment to its commit.

Theory of operation. The loader's loop, `backward` and `optimizer.step()` are three doors of one
room: the loop opens a step (`batches`), backward fills it and leaves the mean in `p.grad`, and
`optimizer.step()` asks whether it is committed (`try_commit`). A step that is void is dropped
where it stands; the loop then deals the same positions again under a new assignment.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from andon.records import Cursor, Key
from andon.shards import after, next_batch, share_of
from andon_trainer.accumulation import Accumulation
from andon_trainer.averaging import Averager
from andon_trainer.exchange.events import Assigned, Committed
from andon_trainer.exchange.reports import Departure, StepReport, Timings
from andon_trainer.feeder import Share, move_to
from andon_trainer.present import Phase, Present
from andon_trainer.replica import Replica

__all__ = ["Feed", "Seat", "Stepper"]

log = logging.getLogger(__name__)


class Seat(Protocol):
    """A worker's place: on a line (`Membership`) or alone (`SoloSeat`)."""

    @property
    def head(self) -> Key | None:
        """The key of the last record; None before there is one."""

    @property
    def cursor(self) -> Cursor:
        """The next position of the data."""

    @property
    def step(self) -> int:
        """Steps committed."""

    @property
    def assigned(self) -> Assigned | None:
        """The present round."""

    @property
    def stop_reason(self) -> str:
        """Why the run is over; empty if it is not."""

    @property
    def digest_every(self) -> int:
        """Compare digests of the weights every so many steps; 0 is never."""

    def next_round(self) -> Assigned:
        """Waits for work."""

    def report(self, report: StepReport) -> None:
        """Says that all averages are here."""

    def abandon(self, message: str) -> None:
        """Gives the present round up: everybody tries the step again."""

    def hold(self) -> bool:
        """Says that no exchange of the round is missing; False if it is void."""

    def await_commit(self) -> Committed | None:
        """Waits for the record; None if the round is void."""

    def tally(self, value: float, weight: float) -> tuple[float, float]:
        """The weighted mean over the roster, and the total weight."""

    def show(self, activity: str, detail: str = "") -> None:
        """What the others see this worker do."""

    def leave(self, departure: Departure) -> None:
        """Says good-bye."""


class Feed(Protocol):
    """Where samples come from: a `Feeder` over a DataLoader, or indices alone."""

    @property
    def dataset_size(self) -> int:
        """Positions in an epoch."""

    @property
    def batch_size(self) -> int:
        """Samples in one step of the whole line."""

    def open(self) -> None:
        """Starts the loading processes, before any channel exists."""

    def batches(
        self, share: Share, upcoming: Callable[[], Iterator[Share]]
    ) -> Iterator[tuple[Any, int]]:
        """The share's micro-batches, each with its number of samples."""

    def borrow(self, epoch: int, position: int) -> Any:
        """A batch of one sample, for a rank without samples."""

    def close(self) -> None:
        """Ends the loading processes."""


class Stepper:
    """The present step of this worker. Used by one thread."""

    def __init__(
        self,
        seat: Seat,
        averager: Averager,
        accumulation: Accumulation,
        feed: Feed,
        replica: Replica,
        device: torch.device,
    ) -> None:
        """Stands between steps."""
        self._seat = seat
        self._averager = averager
        self._accumulation = accumulation
        self._feed = feed
        self._device = device
        self._replica = replica
        self._present: Present | None = None
        self.stop_wanted = ""
        self.last_commit: Committed | None = None

    # ------------------------------------------------------------------ the loader's door

    def batches(self, between_steps: Callable[[], None]) -> Iterator[Any]:
        """This worker's micro-batches of the present epoch, on its device.

        `between_steps` is called whenever a step is over and before the next one is asked for.
        """
        epoch = self._seat.cursor.epoch
        while not self._seat.stop_reason and self._seat.cursor.epoch == epoch:
            between_steps()
            self._seat.show("IDLE")
            assigned = self._seat.next_round()
            if assigned.epoch != epoch:
                return  # newer weights were installed meanwhile; the next epoch takes this up
            yield from self._share(assigned)

    def _share(self, assigned: Assigned) -> Iterator[Any]:
        share = Share(assigned.epoch, assigned.positions)
        samples = sum(map(len, assigned.positions))
        if self._present is not None and self._present.phase is not Phase.COMMITTED:
            self._accumulation.drop()  # what an attempt that came to nothing left in p.grad
        present = Present(assigned, samples, borrowed=samples == 0)
        self._present = present
        every = self._seat.digest_every
        if every and self._seat.step % every == 0:
            present.digest = self._replica.digest()
        began, seen = time.perf_counter(), 0
        if present.borrowed:
            batches = iter([(self._feed.borrow(assigned.epoch, assigned.batch.start), 1)])
        else:
            batches = self._feed.batches(share, lambda: self._foresee(assigned))
        for batch, count in batches:
            present.data_s += time.perf_counter() - began
            seen += count
            present.waiting = count
            present.last = present.borrowed or seen == samples
            yield move_to(self._device, batch)
            if present.phase is Phase.VOID:
                return
            self._check_body(present)
            began = time.perf_counter()

    def _foresee(self, assigned: Assigned) -> Iterator[Share]:
        """The shares of the steps to come, if the roster stays."""
        size = self._feed.dataset_size
        cursor = after(Cursor(assigned.epoch, assigned.batch.start), assigned.batch, size)
        while True:
            batch = next_batch(cursor, self._feed.batch_size, size)
            part = share_of(batch, assigned.rank, assigned.world_size)
            yield Share(cursor.epoch, (part,))
            cursor = after(cursor, batch, size)

    def _check_body(self, present: Present) -> None:
        if present.waiting:
            raise RuntimeError(
                f"step {present.assigned.step}: the loop body ended without line.backward(loss): "
                "every sample must be counted, so call it for each batch (weight=0 counts none)"
            )
        if present.last and present.phase is Phase.AVERAGED:
            raise RuntimeError(
                f"step {present.assigned.step}: the gradients are averaged, and the loop body "
                "ended without optimizer.step(): call it each time; line.step counts the commits"
            )

    # ------------------------------------------------------------------ backward's door

    def backward(self, loss: torch.Tensor, weight: float | None) -> None:
        """Goes backward from a micro-batch's mean loss; the last one leaves the mean in `p.grad`.

        Raises:
            RuntimeError: there is no batch to go backward from.
            ValueError: the weight is negative or not finite, or the loss is no scalar.
            LineHalted: the line stopped, and this worker raises.
        """
        present = self._present
        if present is None or not present.waiting:
            raise RuntimeError(
                "line.backward(loss) is called once for each batch that the prepared loader "
                "yields: there is none now"
            )
        if loss.numel() != 1:
            raise ValueError(f"the loss must be a scalar, not of shape {tuple(loss.shape)}")
        given = float(present.waiting if weight is None else weight)
        if not (math.isfinite(given) and given >= 0):
            raise ValueError(f"weight must be finite and at least 0, not {given}")
        if present.borrowed:
            given = 0.0
        present.waiting = 0
        self._accumulation.give_back()
        value = float(loss.detach())
        if not math.isfinite(value) and not present.borrowed:
            present.phase = Phase.VOID
            self._accumulation.drop()
            self._averager.refuse_loss(value)
            return
        present.weight += given
        present.loss_sum += given * value if given else 0.0
        whole = present.last and present.micro_batches == 0
        present.micro_batches += 1
        scalar = loss.reshape(()) if whole else loss.reshape(()) * given
        if present.last:
            self._complete(present, scalar, whole=whole)
        else:
            scalar.backward()  # type: ignore[no-untyped-call]  # torch's own signature
            self._accumulation.hold()

    def _complete(self, present: Present, scalar: torch.Tensor, *, whole: bool) -> None:
        weight = present.weight
        scale = None if whole or not weight else 1.0 / weight
        present.phase = Phase.VOID  # until the averages are here
        averaged = self._averager.run(scalar, weight, scale)
        if averaged is None:
            self._accumulation.drop()
            return
        present.averaged = averaged
        present.phase = Phase.AVERAGED
        timings = averaged.timings
        self._seat.report(
            StepReport(
                key=present.assigned.key,
                loss_sum=present.loss_sum,
                weight=weight,
                samples=present.samples,
                timings=Timings(
                    compute_s=timings.compute_s,
                    exchange_s=timings.exchange_s,
                    wait_s=timings.wait_s,
                    data_s=present.data_s,
                ),
                digest=present.digest,
                digest_head=present.assigned.parent,
                stop_reason=self.stop_wanted,
                total_weight=averaged.total_weight,
                world_size=averaged.world_size,
            )
        )

    # ------------------------------------------------------------------ the optimizer's door

    @property
    def midway(self) -> bool:
        """Whether a step was begun that is neither committed nor void."""
        present = self._present
        return present is not None and present.phase in (Phase.ACCUMULATING, Phase.AVERAGED)

    @property
    def committed(self) -> bool:
        """Whether the last `optimizer.step()` was a commit."""
        return self._present is not None and self._present.phase is Phase.COMMITTED

    def try_commit(self) -> bool:
        """Waits for the present step's commit; whether the weights are to move.

        They do not if the step is not complete, or void, or if its total weight is 0.
        """
        present = self._present
        if present is not None and present.phase is Phase.AVERAGED:
            present.phase = Phase.VOID  # until the record is here
            commit = self._seat.await_commit()
            if commit is None:
                self._accumulation.drop()
                return False
            present.phase = Phase.COMMITTED
            self.last_commit = commit
        return self.committed and present is not None and self._moves(present)

    @staticmethod
    def _moves(present: Present) -> bool:
        return present.averaged is not None and present.averaged.total_weight > 0
