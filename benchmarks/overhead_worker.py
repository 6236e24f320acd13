"""A side of the overhead benchmark: one model, trained plainly or with `Line` solo, in blocks."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from gpt import GPT, Letters
from overhead import Side
from resnet import ResNet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from andon_trainer import Line

_SAMPLES = 4096


def work(side: Side) -> None:
    """Says `ready`, then trains as many steps as each line of the input says, and answers.

    `time 8` is answered by the seconds of 8 steps, from a batch that is asked for to weights that
    have moved, and by those of the processor; `waits 8` by how often they wait for the GPU, as
    PyTorch counts it.
    """
    if side.threads:
        torch.set_num_threads(side.threads)
    torch.manual_seed(1)
    model, data = _MODELS[side.model]()
    model.to(side.device)
    loader = DataLoader(data, side.batch, shuffle=True, pin_memory=side.device != "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    train = _with_line if side.line else _plain
    steps = train(model, loader, optimizer, side.device)
    print("ready", flush=True)
    for line in sys.stdin:
        what, number = line.split()
        measure = {"time": _seconds, "waits": _waits}[what]
        print(*measure(steps, int(number), side.device), flush=True)


def _seconds(steps: Iterator[None], number: int, device: str) -> tuple[float, float]:
    """How long so many steps take, and the processor time of this process meanwhile."""
    began, worked = time.perf_counter(), time.process_time()
    for _ in range(number):
        next(steps)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began, time.process_time() - worked


def _waits(steps: Iterator[None], number: int, _device: str) -> tuple[int]:
    """How often so many steps wait for the GPU."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(number):
            next(steps)
    torch.cuda.set_sync_debug_mode("default")
    return (sum("synchronizing CUDA operation" in str(each.message) for each in seen),)


def _plain(
    model: nn.Module, loader: DataLoader[Any], optimizer: torch.optim.Optimizer, device: str
) -> Iterator[None]:
    """The script as it was."""
    for _epoch in count():
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = _loss(model, x, y)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
            optimizer.step()
            yield


def _with_line(
    model: nn.Module, loader: Any, optimizer: torch.optim.Optimizer, device: str
) -> Iterator[None]:
    """The script with its lines changed."""
    line = Line(device=device)
    model, loader, optimizer = line.prepare(model, loader, optimizer)
    for _epoch in line.epochs(10**9):
        for x, y in loader:
            optimizer.zero_grad()
            loss = _loss(model, x, y)
            line.backward(loss)
            optimizer.step()
            yield


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def _mlp() -> tuple[nn.Module, Dataset[Any]]:
    """A network so small that its steps take a millisecond or two."""
    model = nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    return model, _labelled(torch.randn(_SAMPLES, 784))


def _resnet() -> tuple[nn.Module, Dataset[Any]]:
    return ResNet(), _labelled(torch.randn(_SAMPLES, 3, 32, 32))


def _gpt() -> tuple[nn.Module, Dataset[Any]]:
    return GPT(layers=4, width=256, context=64), Letters(_SAMPLES, context=64)


def _labelled(x: Tensor) -> Dataset[Any]:
    return TensorDataset(x, torch.randint(0, 10, (len(x),)))


_MODELS = {"mlp": _mlp, "gpt": _gpt, "resnet": _resnet}

if __name__ == "__main__":
    work(Side(**json.loads(sys.argv[1])))
