"""A model without PyTorch: its gradients depend only on positions and weights, in float32.

Workers train it, and the judge trains it again from the journal. Both use this module, so the
weights of every committed step can be compared bit for bit. Nothing in it is PyTorch's or the
trainer's: local steps and the outer optimizer are implemented a second time here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.order import Order
from andon.protocol.records import Cursor, PositionRange
from andon.protocol.run_settings import RunPlan
from andon.protocol.shards import cursor_after, next_batch, shard_of
from chaos.schedules import Outer

__all__ = ["Floats", "LineState", "LocalWeights", "Mask", "Task", "digest_of", "weighted_mean"]

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class LineState:
    """What all workers hold after a record."""

    weights: Floats
    momentum: Floats | None = None
    """The outer optimizer's; None before its first step, or if it has none."""

    def pack(self) -> bytes:
        """The state as a newcomer receives it."""
        return self.weights.tobytes() + (b"" if self.momentum is None else self.momentum.tobytes())

    @property
    def digest(self) -> bytes:
        """SHA-256 of all of it."""
        return hashlib.sha256(self.pack()).digest()


@dataclass(frozen=True, kw_only=True)
class Task:
    """The training task: each sample pulls the weights towards its own point."""

    blocks: tuple[int, ...] = (7, 64, 1, 33)
    """Elements of each block."""
    batch: int = 12
    """The global batch."""
    dataset: int = 100
    """Samples in an epoch; the last batch of an epoch is short."""
    seed: int = 3
    """The seed of the samples' order."""
    rate: float = 0.05
    """The learning rate."""
    steps: int | None = None
    """Steps of the run; None: the run ends when the test says so."""
    _base: Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Draws the samples' points."""
        base = np.random.default_rng(7).standard_normal(sum(self.blocks), dtype=np.float32)
        object.__setattr__(self, "_base", base)

    @property
    def layout(self) -> Layout:
        """The layout; each block is one vector."""
        return Layout(
            tuple(
                Block(BlockKind.OTHER, f"b{i}", (Component(f"w{i}", (size,)),))
                for i, size in enumerate(self.blocks)
            )
        )

    @property
    def plan(self) -> RunPlan:
        """The run plan of a worker."""
        return RunPlan(
            global_batch=self.batch,
            dataset_size=self.dataset,
            seed=self.seed,
            total_steps=self.steps,
        )

    def initial(self, slot: int) -> Floats:
        """The initial weights of a slot's worker; they differ between slots."""
        return np.random.default_rng(100 + slot).standard_normal(sum(self.blocks), dtype=np.float32)

    def split(self, vector: Floats) -> list[Floats]:
        """Views of a vector's parts, one for each block."""
        return np.split(vector, np.cumsum(self.blocks)[:-1])

    def gradient(self, weights: Floats, epoch: int, ranges: Iterable[PositionRange]) -> Floats:
        """The mean gradient over positions, summed in their order in float32."""
        order = Order(self.seed, epoch, self.dataset)
        samples = [order[at] for part in ranges for at in range(part.start, part.stop)]
        total = np.zeros_like(weights)
        for sample in samples:
            scale, shift = np.float32(np.sin(sample)), np.float32(np.cos(sample))
            total += weights - (self._base * scale + shift)
        return total * np.float32(1.0 / len(samples)) if samples else total

    def moved(self, weights: Floats, mean: Floats, scale: float = 1.0) -> Floats:
        """The weights after one step of SGD, with the learning rate times `scale`."""
        return weights - np.float32(self.rate * scale) * mean

    def exchanged(self, fragment: int | None, fragments: int) -> Mask:
        """Which elements a round exchanges: every block that has the fragment's remainder."""
        chosen = [fragment in (None, block % fragments) for block in range(len(self.blocks))]
        return np.repeat(np.array(chosen), self.blocks)

    def outer_step(
        self,
        state: LineState,
        mean: Floats,
        outer: Outer,
        scale: float = 1.0,
        exchanged: Mask | None = None,
    ) -> LineState:
        """The state after the outer optimizer applied the mean of all changes, times `scale`.

        `exchanged`: the elements that move; None: all.
        """
        before, momentum, mean = state.weights, state.momentum, mean * np.float32(scale)
        if outer.momentum:
            factor = np.float32(outer.momentum)
            old = np.zeros_like(mean) if momentum is None else momentum
            momentum = old * factor + mean if momentum is not None else mean.copy()
            mean = mean + factor * momentum
            momentum = momentum if exchanged is None else np.where(exchanged, momentum, old)
        weights = before - np.float32(outer.rate) * mean
        if exchanged is not None:
            weights = np.where(exchanged, weights, before)
        return LineState(weights=weights, momentum=momentum)

    def undisturbed(self, bootstrap_worker: int, steps: int, workers: int) -> Floats:
        """The weights after `steps` steps of a line that never lost one of its `workers`."""
        weights, cursor = self.initial(bootstrap_worker), Cursor(0, 0)
        for _ in range(steps):
            batch = next_batch(cursor, self.batch, self.dataset)
            parts = [shard_of(batch, rank, workers) for rank in range(workers)]
            gradients = [
                (float(len(part)), self.gradient(weights, cursor.epoch, [part])) for part in parts
            ]
            weights = self.moved(weights, weighted_mean(gradients))
            cursor = cursor_after(cursor, batch, self.dataset)
        return weights


@dataclass
class LocalWeights:
    """A worker's own weights, which its local steps move away from the line's.

    What they moved lies in two piles, the due one and the one ahead; see docs/protocol-data.md.
    Without overlapped windows nothing is ever ahead.
    """

    now: Floats = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    due: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    left_over: bool = False
    """Whether there are changes of elements that were not exchanged."""
    _change: Floats | None = None
    """Of the due pile, once something may be ahead of it."""

    def begin(self, line: Floats) -> None:
        """Both piles are empty: the weights are the line's."""
        self.now, self._change, self.left_over = line, None, False
        self.due, self.ahead = [], []

    def step(self, task: Task, epoch: int, ranges: Sequence[PositionRange]) -> None:
        """A local step of the due pile."""
        before = self._moved(task, epoch, ranges)
        if self.ahead:
            assert self._change is not None
            self._change = self._change + (before - self.now)
        self.due += [at for part in ranges for at in range(part.start, part.stop)]

    def change(self, line: Floats) -> Floats:
        """What the due pile took away from the line's weights."""
        if not self.ahead:
            self._change = line - self.now
        assert self._change is not None
        return self._change

    def step_ahead(self, task: Task, epoch: int, ranges: Sequence[PositionRange]) -> None:
        """A local step of the pile ahead."""
        self._moved(task, epoch, ranges)
        self.ahead += [at for part in ranges for at in range(part.start, part.stop)]

    def rebase(
        self, old: Floats, new: Floats, exchanged: Mask | None = None, mix: float = 0.0
    ) -> None:
        """The due pile is in the line's new weights; the pile ahead becomes the due one.

        `exchanged`: the elements of the round's fragment; None: all.
        """
        after = new
        if not self.due:  # It abstained, and keeps all that it has.
            after = new + (self.now - old) if self.ahead or self.left_over else new
        elif self.ahead:
            after = new + ((self.now - old) + self.change(old))
        if self.due and (self.ahead or exchanged is not None):
            after = np.float32(mix) * self.now + np.float32(1.0 - mix) * after if mix else after
        self.now = after if exchanged is None else np.where(exchanged, after, self.now)
        self.left_over = exchanged is not None if self.due else self.left_over
        self.due, self.ahead, self._change = self.ahead, [], None

    def attend(self, old: Floats, new: Floats) -> None:
        """The line's new weights have nothing of this worker's: both piles stay on top of them."""
        self.now, self._change = new + (self.now - old), None

    def _moved(self, task: Task, epoch: int, ranges: Sequence[PositionRange]) -> Floats:
        before = self.now
        self.now = task.moved(before, task.gradient(before, epoch, ranges))
        return before


def weighted_mean(parts: Sequence[tuple[float, Floats]]) -> Floats:
    """The mean in rank order, as docs/protocol-data.md defines it: an independent implementation.

    Ranks without a weight give nothing.
    """
    parts = [part for part in parts if part[0]]
    if len(parts) == 1:
        return parts[0][1]
    total = sum(weight for weight, _ in parts)
    mean = parts[0][1] * np.float32(parts[0][0] / total)
    for weight, gradient in parts[1:]:
        mean = mean + gradient * np.float32(weight / total)
    return mean


def digest_of(weights: Floats) -> bytes:
    """SHA-256 of a vector's bytes."""
    return hashlib.sha256(weights.tobytes()).digest()
