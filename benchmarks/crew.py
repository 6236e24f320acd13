"""A crew: worker processes that train the same model on a line and each alone, under equal shares.

Alone they show what they could do at the same time if they exchanged nothing: the yardstick for
what they do on a line. The machine's speed drifts, so they are alone just before and just after.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cpu_share import CpuShare

__all__ = ["Crew", "Hand", "Load", "Seen", "Window", "WorkerSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the line trains."""

    workers: int
    layers: int
    width: int
    context: int
    batch: int
    """A worker's part of a batch, if the parts are equal."""
    samples: int
    """Of the whole line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec(Load):
    """What a worker process is told before each line."""

    factors: tuple[float, float]
    """This worker's work a sample, in the first and in the second half of the samples."""
    stall: tuple[float, float]
    """On a line it stands still for so many seconds, each so many seconds; 0, 0: never."""
    on_link: bool
    """Whether the worker counts the bytes over its host's link."""
    address: str
    """The line's."""
    run_id: str

    @classmethod
    def from_json(cls, text: str) -> WorkerSpec:
        """Reads what the crew wrote."""
        fields = json.loads(text)
        both = {name: tuple(fields[name]) for name in ("factors", "stall")}
        return cls(**{**fields, **both})


@dataclass(frozen=True, slots=True, kw_only=True)
class Hand:
    """One worker of a crew: its part of the processors, its speed and its host."""

    share: CpuShare
    factors: tuple[float, float] = (1.0, 1.0)
    """Its work a sample, in the first and in the second half of the samples."""
    stall: tuple[float, float] = (0.0, 0.0)
    """On a line it stands still for so many seconds, each so many seconds; 0, 0: never."""
    inside: tuple[str, ...] = ()
    """The command prefix that runs a command on its host; empty: this machine itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One of the line's windows; the tuples have a number for each worker."""

    ended_s: float
    """When it was committed everywhere, since the first batch."""
    samples: tuple[int, ...]
    micro_batches: tuple[int, ...]
    carried: tuple[int, ...]
    """Bytes that the worker's link has carried so far; 0 without a link."""
    worked_s: tuple[float, ...]
    """Processor time that its training thread has spent on batches so far, without the exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a crew did."""

    windows: list[Window]
    rates: tuple[float, float]
    """Samples a second of all workers together, each alone, in the two phases: the mean of before
    and after the line."""
    worked_alone: tuple[float, ...]
    """Processor time that each training thread spends on batches in a second in which it is alone.
    """
    moves: tuple[float, ...]
    """The part of its time in which each does not stand still."""

    def ideal_s(self, samples: int) -> float:
        """How long `samples` would have taken without an exchange, half of them in each phase."""
        return samples / 2 / self.rates[0] + samples / 2 / self.rates[1]

    def computing(self, first: Window | None = None, last: Window | None = None) -> float:
        """How much processor time went into batches, over what would have if each were alone.

        From the commit of a `first` window, or the first batch, to that of a `last` one. Both are
        processor time, so a machine whose speed drifts, by which `ideal_s` is right or wrong,
        changes neither.
        """
        last = last or self.windows[-1]
        alone = sum(part * moves for part, moves in zip(self.worked_alone, self.moves, strict=True))
        before, began_s = (0.0, 0.0) if first is None else (sum(first.worked_s), first.ended_s)
        return (sum(last.worked_s) - before) / (alone * (last.ended_s - began_s))


class Crew:
    """Workers that train on one line after another; their processes start once."""

    def __init__(self, hands: Sequence[Hand]) -> None:
        """Takes the workers' parameters; starts nothing yet."""
        self._hands = hands
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Crew:
        """Starts the processes, and gives each its part of the processors once it is warm."""
        script = str(Path(__file__).with_name("crew_worker.py"))
        for hand in self._hands:
            self._processes.append(
                subprocess.Popen(
                    [*hand.inside, sys.executable, script],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "ANDON_INSECURE": "1"},
                )
            )
        try:
            for hand, process in zip(self._hands, self._processes, strict=True):
                _hear(process)
                # From here: a worker on another host does not see the control groups.
                hand.share.enter(process.pid)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.communicate()

    def work(self, load: Load, address: str, run_id: str, phase_s: float) -> Seen:
        """Trains alone, on a line, and alone again, in the same processes.

        Alone, all workers train at once, in two phases of `phase_s` each: first as fast as in the
        first half of the samples, then as in the second.
        """
        for hand, process in zip(self._hands, self._processes, strict=True):
            spec = WorkerSpec(
                **asdict(load),
                factors=hand.factors,
                stall=hand.stall,
                on_link=bool(hand.inside),
                address=address,
                run_id=run_id,
            )
            _say(process, json.dumps(asdict(spec)))
        for _ in ("before", "after"):
            for process in self._processes:
                _hear(process)
            now = time.monotonic()
            for process in self._processes:
                _say(process, f"{now} {now + phase_s} {now + 2 * phase_s}")
        told = [json.loads(_hear(process)) for process in self._processes]
        return _seen(told, [_moves(hand.stall) for hand in self._hands])


def _hear(process: subprocess.Popen[str]) -> str:
    """The next line that a worker says."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a worker failed: see its output")
    return line


def _say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _moves(stall: tuple[float, float]) -> float:
    """The part of its time in which a worker with these stalls does not stand still."""
    stands_s, each_s = stall
    return 1 - stands_s / each_s if each_s else 1.0


def _seen(workers: Sequence[Mapping[str, Any]], moves: Sequence[float]) -> Seen:
    began = min(each["began"] for each in workers)
    windows = []
    for window in zip(*(each["windows"] for each in workers), strict=True):
        times, samples, batches, carried, worked_s = zip(*window, strict=True)
        windows.append(
            Window(
                ended_s=round(max(times) - began, 3),
                samples=samples,
                micro_batches=batches,
                carried=carried,
                worked_s=worked_s,
            )
        )
    # Of each worker: two phases before the line and two after it.
    rates = [
        [[rate * part for rate in phase] for phase in each["rates"]]
        for each, part in zip(workers, moves, strict=True)
    ]
    before, after = zip(*rates, strict=True)
    means = [
        (sum(first) + sum(second)) / 2
        for first, second in zip(zip(*before, strict=True), zip(*after, strict=True), strict=True)
    ]
    return Seen(
        windows=windows,
        rates=(means[0], means[1]),
        worked_alone=tuple(each["worked_alone"] for each in workers),
        moves=tuple(moves),
    )
