"""Readings: numbers come from a GPU behind its work, and are waited for only when asked for."""

from __future__ import annotations

import pytest
import torch

from andon_trainer.averaging.readings import (
    DeviceReader,
    HostReader,
    LossReadings,
    PendingNumbers,
    make_reader,
)
from unit.andon_trainer.stand_in import DEVICE, Waits


class Event:
    """An event that notes what is done to it."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def record(self, _stream: object, /) -> None:
        self._log.append("record")

    def synchronize(self) -> None:
        self._log.append("wait")

    def elapsed_time(self, _end: object, /) -> float:
        raise AssertionError("nobody times readings")


def test_on_the_host_a_number_is_there_at_once_and_stays_as_it_was() -> None:
    tensor = torch.tensor([1.5, 2.5])

    reading = HostReader().begin(tensor)
    tensor.zero_()

    assert reading.here
    assert reading.numbers() == [1.5, 2.5]


def test_a_number_that_is_on_its_way_is_waited_for_once_and_only_when_asked_for() -> None:
    log: list[str] = []
    reading = PendingNumbers(torch.tensor(3.0), Event(log))

    before = reading.here, list(log)
    numbers = [reading.number(), reading.number()]

    assert before == (False, [])
    assert (numbers, log, reading.here) == ([3.0, 3.0], ["wait"], True)


def test_the_event_stands_behind_the_copy_on_the_stream_of_the_caller() -> None:
    copies_before: list[tuple[object, int]] = []

    class Recorded(Event):
        def record(self, stream: object, /) -> None:
            copies_before.append((stream, waits.copies))

    with Waits() as waits:
        reading = DeviceReader(lambda: Recorded([]), lambda device: f"of {device}").begin(
            torch.zeros((), device=DEVICE)
        )

    assert copies_before == [("of meta", 1)]
    assert (waits.reads, reading.here, reading.number()) == ([], False, 1.0)


def test_a_tensor_on_the_host_needs_no_event_even_if_the_model_is_on_a_gpu() -> None:
    log: list[str] = []

    reading = DeviceReader(lambda: Event(log), lambda _device: None).begin(torch.tensor(2.0))

    assert (reading.here, reading.number(), log) == (True, 2.0, [])


def test_only_gated_losses_are_looked_at_and_each_once() -> None:
    losses = LossReadings(Late([1.0, float("nan"), float("inf")]))

    losses.begin(torch.zeros(()), gated=True)
    losses.begin(torch.zeros(()), gated=False)
    losses.begin(torch.zeros(()), gated=True)

    assert losses.first_not_finite() == float("inf")
    assert losses.first_not_finite() is None


def test_losses_of_a_step_that_was_left_are_forgotten() -> None:
    losses = LossReadings(Late([float("nan")]))
    losses.begin(torch.zeros(()), gated=True)

    losses.clear()

    assert losses.first_not_finite() is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_cuda_reads_later(device: str) -> None:
    assert isinstance(make_reader(torch.device(device)), HostReader)


class Late:
    """A reader whose numbers are on their way."""

    def __init__(self, numbers: list[float]) -> None:
        self._numbers = iter(numbers)

    def begin(self, _tensor: torch.Tensor) -> PendingNumbers:
        return PendingNumbers(torch.tensor(next(self._numbers)), Event([]))
