"""The seat and the feed: where a worker's steps come from, and where its samples do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from andon.protocol.records import Cursor, Key
from andon_trainer.core.events import Assigned, Committed, TransferAsked
from andon_trainer.core.reports import Departure, Digest, StepReport
from andon_trainer.feeder import Share

__all__ = ["Feed", "Seat"]


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
    def doubts(self) -> int:
        """How often what this worker computed became worthless for another try."""

    @property
    def installed_from(self) -> TransferAsked | None:
        """The transfer that brought the state which was installed last; None: its own."""

    @property
    def digest_every(self) -> int:
        """Compare digests of the weights every so many steps; 0 is never."""

    def next_round(self) -> Assigned:
        """Waits for work."""

    def leave_epoch(self) -> None:
        """Ends the present epoch, for everybody: the script left its batches."""

    def report(self, report: StepReport) -> None:
        """Says that all averages are here."""

    def abandon(self, message: str) -> None:
        """Gives the present round up: everybody tries the step again."""

    def stop_line(self, kind: str, message: str) -> None:
        """Halts the line between two steps; returns once a person has answered."""

    def hold(self) -> bool:
        """Says that no exchange of the round is missing; False if it is void."""

    def await_commit(self) -> Committed | None:
        """Waits for the record; None if the round is void."""

    def scalar_all_reduce(self, value: float, weight: float) -> tuple[float, float, int]:
        """The weighted mean over the roster, the total weight, and how many workers gave one."""

    def compare(self, digest: Digest) -> None:
        """Has the weights that the loop ended with compared with all others'."""

    def wrote(self, step: int, folder: str) -> None:
        """Says that a checkpoint was written."""

    def show(self, activity: str, detail: str = "") -> None:
        """What the others see this worker do."""

    def leave(self, departure: Departure) -> None:
        """Says good-bye."""


class Feed(Protocol):
    """Where samples come from: a `Feeder` over a DataLoader, or indices alone."""

    @property
    def dataset_size(self) -> int:
        """Samples in the training set."""

    @property
    def epoch_size(self) -> int:
        """Positions that an epoch deals out."""

    @property
    def batch_size(self) -> int:
        """Samples in one step of the whole line."""

    @property
    def drop_last(self) -> bool:
        """Whether an epoch ends with its last whole batch."""

    def open(self) -> None:
        """Starts the loading processes, before any channel exists."""

    def digest(self, device: torch.device) -> str:
        """SHA-256 of what the dataset is, hexadecimal; empty if that can't be told."""

    def batches(
        self, share: Share, upcoming: Callable[[], Iterator[Share]]
    ) -> Iterator[tuple[Any, int]]:
        """The share's micro-batches, each with its number of samples."""

    def borrow(self, epoch: int, position: int) -> Any:
        """A batch for a rank with nothing to compute."""

    def close(self) -> None:
        """Ends the loading processes."""
