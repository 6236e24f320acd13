"""A worker of a crew: it trains alone, on a line, and alone again; extra work may make it slow."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from crew import WorkerSpec
from extra_work import ExtraWork
from gpt import GPT, Letters
from hosts_network import link_bytes
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from andon_trainer import Line

_ENDLESS = 10**9


class Work:
    """The processor's time that the thread which trains spends on batches: bodies, and steps."""

    def __init__(self) -> None:
        """Nothing was done yet."""
        self._bodies_s = self._steps_s = 0.0
        self._bodies = self._steps = 0

    @contextmanager
    def body(self) -> Iterator[None]:
        """Around a loop body, up to its backward."""
        began = time.thread_time()
        yield
        self._bodies_s += time.thread_time() - began
        self._bodies += 1

    @contextmanager
    def step(self, line: Line, *, alone: bool) -> Iterator[None]:
        """Around an optimizer's step. One that commits has an exchange in it, and is left out."""
        began = time.thread_time()
        yield
        if alone or not line.committed:
            self._steps_s += time.thread_time() - began
            self._steps += 1

    @property
    def seconds(self) -> float:
        """Of all bodies, with as many steps."""
        step_s = self._steps_s / self._steps if self._steps else 0.0
        return self._bodies_s + self._bodies * step_s


class Numbered(Dataset[tuple[Tensor, Tensor, int]]):
    """Samples with their numbers; without shuffling, a number is a position of the run."""

    def __init__(self, letters: Letters) -> None:
        """Numbers the samples of `letters`."""
        self._letters = letters

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._letters)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        """A sample's letters, the letter after each, and its number."""
        x, y = self._letters[index]
        return x, y, index


def work(spec: WorkerSpec) -> dict[str, Any]:
    """Trains; returns what it did on the line, and its rates alone before and after."""
    extra = ExtraWork(_model(spec), _loss_of)
    before = _alone(spec, extra)
    seen = _on_the_line(spec, extra)
    after = _alone(spec, extra)
    rates, worked_alone = [before[0], after[0]], (before[1] + after[1]) / 2
    return {**seen, "rates": rates, "worked_alone": worked_alone}


def _rendezvous(said: str) -> str:
    """Says a line to the crew, and waits for its answer."""
    print(said, flush=True)
    return sys.stdin.readline()


def _on_the_line(spec: WorkerSpec, extra: ExtraWork) -> dict[str, Any]:
    """Trains on an epoch; returns the time of the first batch, and its windows.

    A window is the time of its commit, how many samples and micro-batches this worker had, how many
    bytes its host's link has carried so far, and what its training thread has worked so far.
    """
    line = Line(address=spec.address, run_id=spec.run_id)
    windows: list[tuple[float, int, int, int, float]] = []
    came: list[float] = []
    samples = batches = 0
    stands_s, each_s = spec.stall
    next_stall = time.monotonic() + each_s / 2

    def factor(position: int) -> float:
        # A worker's own positions tell it how far the line has come.
        came.append(time.monotonic())
        return spec.factors[position >= spec.samples // 2]

    done = Work()
    for count in _steps(spec, line, extra, factor, done):
        samples, batches = samples + count, batches + 1
        if each_s and time.monotonic() > next_stall:
            next_stall += each_s
            time.sleep(stands_s)
        if line.committed:
            carried = sum(link_bytes()) if spec.on_link else 0
            windows.append((time.monotonic(), samples, batches, carried, done.seconds))
            samples = batches = 0
    line.close()
    return {"began": came[0], "windows": windows}


def _alone(spec: WorkerSpec, extra: ExtraWork) -> tuple[list[float], float]:
    """Trains for two phases that all workers begin together.

    Returns:
        Samples a second of each; and how much processor time of the training thread a second of
        them has.
    """
    starts = [time.monotonic()] * 3
    done: list[list[tuple[float, int]]] = [[], []]
    total = 0
    line, batches = Line(), Work()
    worked: list[tuple[float, float]] = []

    def factor(_: int) -> float:
        return spec.factors[time.monotonic() >= starts[1]]

    steps = _steps(spec, line, extra, factor, batches, alone=True)
    next(steps)
    starts = [float(each) for each in _rendezvous("ready").split()]
    for count in steps:
        now = time.monotonic()
        if now >= starts[2]:
            break
        total += count
        worked.append((now, batches.seconds))
        # A step counts where it ended, and a phase's time runs from the end of its first step.
        done[now >= starts[1]].append((now, total))
    line.close()
    rates = [(last - first) / (end - start) for (start, first), *_, (end, last) in done]
    (start, first), *_, (end, last) = worked
    return rates, (last - first) / (end - start)


def _steps(
    spec: WorkerSpec,
    line: Line,
    extra: ExtraWork,
    factor: Callable[[int], float],
    done: Work,
    *,
    alone: bool = False,
) -> Iterator[int]:
    """Trains on an epoch; yields each micro-batch's number of samples after its step.

    `factor` takes a batch's first position: how much work its samples are. `done` counts batches of
    full size: a smaller one is borrowed, or an epoch's last.
    """
    model = _model(spec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    # Alone, the time ends the training, not the samples.
    samples, share = (_ENDLESS, 1) if alone else (spec.samples, spec.workers)
    data = Numbered(Letters(samples, spec.context))
    batch = spec.batch * share
    model, optimizer, loader = line.prepare(model, optimizer, DataLoader(data, batch_size=batch))
    for _ in line.epochs(1):
        for x, y, numbers in loader:
            counted = done if len(x) == spec.batch else None
            with counted.body() if counted else nullcontext():
                extra.do(factor(int(numbers[0])), x, y)
                optimizer.zero_grad()
                line.backward(_loss_of(model, x, y))
            with counted.step(line, alone=alone) if counted else nullcontext():
                optimizer.step()
            yield len(x)


def _loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _model(spec: WorkerSpec) -> GPT:
    return GPT(layers=spec.layers, width=spec.width, context=spec.context)


def main() -> None:
    """Trains for each spec that the crew says."""
    torch.set_num_threads(1)
    # What PyTorch loads at its first step is loaded before the processor's share is small.
    model = GPT(layers=1, width=8, context=8)
    optimizer = torch.optim.AdamW(model.parameters())
    letters = torch.zeros(1, 8, dtype=torch.int64)
    _loss_of(model, letters, letters).backward()  # type: ignore[no-untyped-call]  # torch's own
    optimizer.step()
    told = "warm"
    while given := _rendezvous(told):
        told = json.dumps(work(WorkerSpec.from_json(given)))


if __name__ == "__main__":
    main()
