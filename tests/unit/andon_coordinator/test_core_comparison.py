"""How workers compare: an error in a small block is found, and a drift of one or of all."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon_coordinator.core.comparison import Comparison, Finding, Reading, describe

WORKERS = 3
LAYOUT = Layout(
    tuple(Block(BlockKind.OTHER, f"b{at}", (Component(f"c{at}", (2,)),)) for at in range(4))
)
Change = Callable[[int, Reading], Reading]


class Watched:
    """A line whose workers have noise, and whose training itself moves all of them."""

    def __init__(self) -> None:
        self.comparison = Comparison(10.0)
        self._dice = random.Random(7)
        self.step = 0

    def run(self, steps: int, change: Change = lambda _, reading: reading) -> Finding | None:
        """Goes on until something stands out."""
        for at in range(steps):
            self.step += 1
            readings = [change(at, each) for each in self._readings()]
            norm = math.fsum(each.norm for each in readings) / WORKERS
            loss = math.fsum(each.loss for each in readings) / WORKERS
            self.comparison, found = self.comparison.after(self.step, readings, norm, loss)
            if found is not None:
                return found
        return None

    def _readings(self) -> list[Reading]:
        hard = self._noise(0.3)  # What all of them have in common.
        made = []
        for worker in range(WORKERS):
            blocks = [size * hard * self._noise(0.2) for size in (10.0, 1.0, 1.0, 0.1)]
            loss = (1.0 + 2.0 * math.exp(-self.step / 100)) * hard * self._noise(0.2)
            made.append(
                Reading(
                    worker=worker,
                    samples=16,
                    norm=math.hypot(*blocks),
                    loss=loss,
                    blocks=tuple(blocks),
                )
            )
        return made

    def _noise(self, spread: float) -> float:
        return math.exp(self._dice.gauss(0.0, spread))


@pytest.fixture(scope="module")
def usual() -> bytes:
    """What 200 usual steps leave, in which nothing stands out."""
    watched = Watched()
    assert watched.run(200) is None
    return watched.comparison.to_bytes()


@pytest.fixture
def watched(usual: bytes) -> Watched:
    made = Watched()
    made.comparison, made.step = Comparison.from_bytes(10.0, usual), 200
    return made


def of(worker: int, norm: float = 1.0, loss: float = 1.0) -> Change:
    """From the first step on the numbers of one worker are so many times as great."""

    def change(_: int, reading: Reading) -> Reading:
        if reading.worker != worker:
            return reading
        return replace(reading, norm=reading.norm * norm, loss=reading.loss * loss)

    return change


def rising(worker: int | None, loss: float = 0.0) -> Change:
    """Norms grow by 3 % of the first one in each step; None: those of all workers."""

    def change(at: int, reading: Reading) -> Reading:
        if worker not in (None, reading.worker):
            return reading
        return replace(
            reading, norm=reading.norm * (1 + 0.03 * at), loss=reading.loss * (1 + loss * at)
        )

    return change


def test_a_scale_error_is_found_in_a_block_that_hardly_counts_in_the_whole_norm(
    watched: Watched,
) -> None:
    def change(_: int, reading: Reading) -> Reading:
        blocks = (*reading.blocks[:3], reading.blocks[3] * 30)
        return replace(reading, blocks=blocks) if reading.worker == 1 else reading

    found = watched.run(1, change)

    assert found is not None
    assert (found.worker, found.lasts) == (1, False)
    assert "the norm of block b3 in its gradient" in describe(found, LAYOUT)


@pytest.mark.parametrize("change", [of(2, loss=1.7), of(2, norm=1.8), rising(2)])
def test_a_worker_that_drifts_is_found_within_a_hundred_steps(
    watched: Watched, change: Change
) -> None:
    found = watched.run(100, change)

    assert found is not None
    assert (found.worker, found.lasts) == (2, True)


def test_whose_loss_alone_stands_out_is_known_before_it_is_a_drift(watched: Watched) -> None:
    assert watched.run(1, of(2, loss=8.0)) is None
    assert watched.comparison.suspect == 2
    assert watched.run(1, lambda _, each: replace(each, loss=8.0 * each.loss)) is None
    assert watched.comparison.suspect is None


def test_a_drift_of_all_is_one_of_training_and_only_if_the_loss_is_above_its_usual(
    watched: Watched, usual: bytes
) -> None:
    found = watched.run(100, rising(None, loss=0.03))
    watched.comparison = Comparison.from_bytes(10.0, usual)

    assert found is not None
    assert (found.worker, found.lasts) == (None, True)
    assert watched.run(100, rising(None)) is None


def test_a_drift_that_was_accepted_is_usual_from_then_on(watched: Watched) -> None:
    assert watched.run(100, of(2, norm=1.8)) is not None
    assert watched.run(200, of(2, norm=1.8)) is None


def test_what_is_remembered_is_the_same_after_a_restart(usual: bytes) -> None:
    again = Comparison.from_bytes(10.0, usual)

    assert again.to_bytes() == usual
    assert again.step == 200
    assert len(usual) == 13 + WORKERS * (24 + 20 * 6) + 24 + 20 * 2
    assert Comparison.from_bytes(10.0, usual[:-1]).to_bytes() == Comparison(10.0).to_bytes()


def test_another_share_is_not_taken_for_a_drift(watched: Watched) -> None:
    def change(_: int, reading: Reading) -> Reading:
        if reading.worker != 2:
            return reading
        return replace(reading, samples=4, norm=reading.norm * 2, loss=reading.loss)

    assert watched.run(200, change) is None


def test_two_workers_are_not_compared() -> None:
    comparison, found = Comparison(10.0), None
    for step in range(1, 300):
        scale = 1.0 if step < 200 else 5.0
        pair = [Reading(worker=w, samples=1, norm=[1.0, scale][w], loss=1.0) for w in range(2)]
        comparison, found = comparison.after(step, pair, 1.0, 1.0)
        assert found is None
