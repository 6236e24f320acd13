"""Comparison: how each worker's numbers stand to the others' of the same steps, remembered.

Theory of operation. For each worker, and each *channel* (the norm of its gradient, its loss, the
norm of each block of its gradient), a value of a step is the logarithm of its number over the
median of the others' numbers. What training itself does to all of them cancels out. Of each channel
there is remembered, in five float32 numbers:

- a level: the usual value. It moves by 1/512 of what a value is beside it, cut at 2.5 spreads, so
  that neither a spike nor a drift of a hundred steps takes it along;
- a spread: the standard deviation, from the differences of successive values, which a drift leaves
  alone (the moving range of W. Shewhart's charts);
- a sum (E. S. Page, "Continuous Inspection Schemes", Biometrika 41, 1954) of what values are
  above the level, in spreads, or in quarters of the number if these are greater; of each, cut at 2,
  1 is taken away, and the sum is never below 0.

A *block* stands out in one step if its number is `factor` times the usual, and 6 spreads above it:
so a scale error is found in a block whose part of the whole norm is small. A worker's loss stands
out likewise at 1.25 times; that matters only where the line's loss is a spike. A worker *drifts*
once a sum is above `SUM_LIMIT`: after 21 steps at the earliest. The line's own norm and loss have
sums as well, against their own past: a drift of the norm while the loss's sum is above 5 is one of
training itself.

False alarms of a drift: for independent values that lie as often above the level as below, in
whatever width, at most exp(-0.6 * 20), one in 160,000 steps a channel; where the spread is what it
is taken for, and the values are normal, less than one in 10^15. Both are Lundberg's bound.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from andon.protocol.layout import Layout
from andon_coordinator.core.readings import medians_of_others

__all__ = ["MOST_GROUPS", "SEEDED", "SUM_LIMIT", "Comparison", "Finding", "Reading", "describe"]

MOST_GROUPS = 32
"""Blocks of a model with more are compared in so many groups of neighbours at most."""
MOST_BY_BLOCK = 64
"""With more workers in a step their blocks are not compared: that bounds what the journal keeps."""
LEAST_COMPARED = 3
"""With fewer workers nobody can say which of them is usual."""
SEEDED = 64
"""A channel is judged for drifts after so many values."""
SEEDED_FOR_BLOCKS = 16
"""Likewise for spikes of a block."""
SUM_LIMIT = 20.0
"""A sum above this is a drift."""
_HOLDS_LEVEL = 5.0
"""A sum above this holds the level: what may be a drift must not become usual meanwhile."""
_LEVEL_OVER = 512
_SPREAD_OVER = 64
_FIRST_SPREAD = 0.5
_LEAST_SPREAD = 0.02
_SLACK = math.log(1.25)
_CUT = 2.5
_SPREADS = 6.0
_FROM_DIFFERENCES = 0.8862
"""The square root of pi, halved: the standard deviation over the mean of absolute differences."""
_SHARE_MOVED = 0.25
_SHARE_STAYS_MOVED = 8
_WIDTH = 5
_NORM, _LOSS, _FIRST_GROUP = range(3)
_LINE = 2**32 - 1
_HEAD, _EACH = struct.Struct("<BQI"), struct.Struct("<IIdd")
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one worker contributed to a step."""

    worker: int
    samples: int
    norm: float
    """Of its own gradient."""
    loss: float
    """The mean over its samples."""
    blocks: Sequence[float] = ()
    """The norm of each block; empty: it did not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What stands out in a step."""

    worker: int | None
    """None: training itself."""
    channel: int
    times: float
    """How many times the others' median it is; of training itself, how many times the usual."""
    usual: float
    """The usual ratio."""
    lasts: bool
    """Whether it is a drift, and no spike."""


@dataclass(slots=True)
class _Tracked:
    """What is remembered of one worker: its share over the mean, and its channels."""

    share: float = 0.0
    """The logarithm of its samples over the mean of all."""
    moved: float = 0.0
    """For how many steps in a row it was another."""
    channels: array[float] = field(default_factory=lambda: array("f"))
    """Of each: values seen, level, spread, sum, and the last value."""

    def copy(self) -> _Tracked:
        return _Tracked(self.share, self.moved, array("f", self.channels))

    def level(self, channel: int) -> float:
        return self._of(channel)[1]

    def sum(self, channel: int) -> float:
        return self._of(channel)[3]

    def reset(self, channel: int) -> None:
        """What it is from here on is usual."""
        self.channels[_WIDTH * channel : _WIDTH * (channel + 1)] = array("f", bytes(4 * _WIDTH))

    def stands_out(self, channel: int, value: float, factor: float) -> bool:
        seen, level, spread, _, _ = self._of(channel)
        least = max(math.log(factor), _SPREADS * spread)
        return seen >= SEEDED_FOR_BLOCKS and value - level > least

    def note(self, channel: int, value: float, first_level: float = 0.0) -> None:
        """Notes a value; the sum says then whether there is a drift."""
        seen, level, spread, total, last = self._of(channel)
        if seen == 0:
            level, spread = first_level, _FIRST_SPREAD
        beside = value - level
        if seen >= SEEDED:
            unit = max(spread, _SLACK)
            total = max(0.0, total + max(-2.0, min(2.0, beside / unit)) - 1.0)
        cut = _CUT * spread
        if total <= _HOLDS_LEVEL:
            level += max(-cut, min(cut, beside)) / min(seen + 1, _LEVEL_OVER)
        if seen > 0:
            moved = min(_FROM_DIFFERENCES * abs(value - last), _CUT * spread)
            spread += (moved - spread) / min(seen + 1, _SPREAD_OVER)
            spread = max(spread, _LEAST_SPREAD)
        at = _WIDTH * channel
        self.channels[at : at + _WIDTH] = array(
            "f", (min(seen + 1, _LEVEL_OVER), level, spread, total, value)
        )

    def _of(self, channel: int) -> tuple[float, float, float, float, float]:
        at = _WIDTH * channel
        if len(self.channels) < at + _WIDTH:
            self.channels.extend([0.0] * (at + _WIDTH - len(self.channels)))
        seen, level, spread, total, last = self.channels[at : at + _WIDTH]
        return seen, level, spread, total, last


class Comparison:
    """What is remembered of a line's workers, and of the line; it is never changed but copied."""

    def __init__(self, factor: float | None, step: int = 0) -> None:
        """Remembers nothing yet.

        Args:
            factor: how many times the usual a block's norm may be in one step; None: nothing is
                compared.
            step: the last step that it has seen.
        """
        self.factor = factor
        self.step = step
        self.suspect: int | None = None
        """Whose loss alone stood out in that step: it explains a spike of the line's."""
        self._tracked: dict[int, _Tracked] = {}

    @classmethod
    def from_bytes(cls, factor: float | None, kept: bytes) -> Self:
        """What `to_bytes` wrote; whatever else it is gives one that remembers nothing."""
        try:
            version, step, count = _HEAD.unpack_from(kept)
            made, at = cls(factor, step), _HEAD.size
            for _ in range(count if version == _VERSION else 0):
                worker, channels, share, moved = _EACH.unpack_from(kept, at)
                at += _EACH.size
                numbers = struct.unpack_from(f"<{_WIDTH * channels}f", kept, at)
                at += 4 * _WIDTH * channels
                if not all(map(math.isfinite, numbers)):
                    return cls(factor)
                made._tracked[worker] = _Tracked(share, moved, array("f", numbers))
        except struct.error:
            return cls(factor)
        return made

    def to_bytes(self) -> bytes:
        """The same after a restart: 13 bytes, and 24 and 20 a channel for each worker."""
        parts = [_HEAD.pack(_VERSION, self.step, len(self._tracked))]
        for worker, each in sorted(self._tracked.items()):
            count = len(each.channels) // _WIDTH
            parts.append(_EACH.pack(worker, count, each.share, each.moved))
            parts.append(struct.pack(f"<{len(each.channels)}f", *each.channels))
        return b"".join(parts)

    def forget(self, worker: int) -> None:
        """A worker was sent away: its slot's next one is another."""
        self._tracked.pop(worker, None)

    def after(
        self, step: int, readings: Sequence[Reading], norm: float | None, loss: float
    ) -> tuple[Comparison, Finding | None]:
        """What is remembered if a step becomes a record, and what stands out in it.

        Args:
            step: the step.
            readings: of each worker with a weight.
            norm: that of the averaged gradient; None: unknown.
            loss: the line's.
        """
        assert self.factor is not None
        made = Comparison(self.factor, step)
        made._tracked = {worker: each.copy() for worker, each in self._tracked.items()}
        found = made._note_workers(readings) if len(readings) >= LEAST_COMPARED else None
        of_all = made._note_line(norm, loss)
        if found is None:
            return made, of_all
        return made, found

    def _note_workers(self, readings: Sequence[Reading]) -> Finding | None:
        found: list[tuple[float, Finding]] = []
        suspects: list[int] = []
        values = _ratios(readings)
        mean = sum(each.samples for each in readings) / len(readings)
        for at, reading in enumerate(readings):
            tracked = self._tracked.setdefault(reading.worker, _Tracked())
            if not _keeps_share(tracked, math.log(max(reading.samples, 1) / max(mean, 1))):
                continue
            for channel, logs in enumerate(values):
                value = logs[at]
                if value is not None:
                    self._note_channel(reading.worker, channel, value, found, suspects)
        self.suspect = suspects[0] if len(suspects) == 1 else None
        # The largest, and of equal ones the first: in rank order.
        return max(found, key=lambda each: each[0])[1] if found else None

    def _note_channel(
        self,
        worker: int,
        channel: int,
        value: float,
        found: list[tuple[float, Finding]],
        suspects: list[int],
    ) -> None:
        assert self.factor is not None
        tracked = self._tracked[worker]
        beside = value - tracked.level(channel)
        spike = channel >= _FIRST_GROUP and tracked.stands_out(channel, value, self.factor)
        usual = math.exp(tracked.level(channel))
        if channel == _LOSS and tracked.stands_out(channel, value, math.exp(_SLACK)):
            suspects.append(worker)
        tracked.note(channel, value)
        drift = tracked.sum(channel) > SUM_LIMIT
        if not (spike or drift):
            return
        finding = Finding(
            worker=worker, channel=channel, times=math.exp(value), usual=usual, lasts=drift
        )
        if drift:
            # Whoever goes on all the same has accepted it.
            tracked.reset(channel)
        # Of spikes in one step the greatest, and a drift before any.
        found.append((math.inf if drift else beside, finding))

    def _note_line(self, norm: float | None, loss: float) -> Finding | None:
        if norm is None or not norm > 0 or not loss > 0:
            return None
        tracked = self._tracked.setdefault(_LINE, _Tracked())
        of_norm, of_loss = math.log(norm), math.log(loss)
        tracked.note(_NORM, of_norm, first_level=of_norm)
        tracked.note(_LOSS, of_loss, first_level=of_loss)
        if not (tracked.sum(_NORM) > SUM_LIMIT and tracked.sum(_LOSS) > _HOLDS_LEVEL):
            return None
        times = math.exp(of_norm - tracked.level(_NORM))
        tracked.reset(_NORM)
        return Finding(worker=None, channel=_NORM, times=times, usual=1.0, lasts=True)


def describe(finding: Finding, layout: Layout | None) -> str:
    """A finding, in words."""
    if finding.worker is None:
        return (
            f"the gradient's norm has drifted to {finding.times:.3g} times its usual, and the loss "
            "is above its own: all workers alike, so look at the learning rate"
        )
    what = {_NORM: "the norm of its gradient", _LOSS: "its loss"}.get(finding.channel)
    if what is None:
        what = f"the norm of {_blocks_of(finding.channel - _FIRST_GROUP, layout)} in its gradient"
    how = "drifts from" if finding.lasts else "stands out from"
    return (
        f"worker {finding.worker} {how} the others: {what} is {finding.times:.3g} times the median "
        f"of theirs, and usually {finding.usual:.3g} times: look at its data, its device and its "
        "memory"
    )


def _blocks_of(group: int, layout: Layout | None) -> str:
    if layout is None:
        return f"group {group} of blocks"
    size = _group_size(len(layout.blocks))
    blocks = layout.blocks[group * size : (group + 1) * size]
    return " and ".join(f"block {each.name}" for each in (blocks[0], *blocks[1:][-1:]))


def _group_size(blocks: int) -> int:
    return max(1, math.ceil(blocks / MOST_GROUPS))


def _ratios(readings: Sequence[Reading]) -> list[list[float | None]]:
    """Of each channel, each worker's logarithm beside the median of the others'."""
    channels: list[list[float]] = [[r.norm for r in readings], [r.loss for r in readings]]
    count = len(readings[0].blocks)
    if (
        count
        and len(readings) <= MOST_BY_BLOCK
        and all(len(each.blocks) == count for each in readings)
    ):
        size = _group_size(count)
        channels += [
            [math.hypot(*each.blocks[first : first + size]) for each in readings]
            for first in range(0, count, size)
        ]
    return [_beside_others(numbers) for numbers in channels]


def _beside_others(numbers: Sequence[float]) -> list[float | None]:
    """None where a number has no logarithm, or too few others have one."""
    logs = [math.log(each) if each > 0 else None for each in numbers]
    known = [each for each in logs if each is not None]
    if len(known) < LEAST_COMPARED:
        return [None] * len(logs)
    others = iter(medians_of_others(known))
    return [None if each is None else each - next(others) for each in logs]


def _keeps_share(tracked: _Tracked, share: float) -> bool:
    """Whether a worker's part of the step is its usual one: a gradient of fewer is noisier."""
    if not tracked.channels:
        tracked.share = share
    if abs(share - tracked.share) <= _SHARE_MOVED:
        tracked.moved = 0.0
        return True
    tracked.moved += 1
    if tracked.moved >= _SHARE_STAYS_MOVED:
        tracked.share, tracked.moved = share, 0.0
        tracked.channels = array("f")
    return False
