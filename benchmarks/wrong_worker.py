"""A worker of `wrong_arithmetic.py`: trains a small model, and computes wrong where its plan says.

    python benchmarks/wrong_worker.py SPEC.json OUT.json

It writes what it did wrong in which step, and a digest of its weights after each step. What is
wrong is put in from outside: nothing of Andon knows of it.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from wrong_plan import GRAINS, MICRO, Fault, flip, read_plan

from andon_trainer import Line
from andon_trainer.averaging import node_sums, tap
from andon_trainer.averaging.staging import HostStaging
from andon_trainer.core.effects import AwaitAnswer
from andon_trainer.place.driver import Driver

__all__: list[str] = []

_CHANCES = {"forward": 0.35, "backward": 0.35, "addition": 0.5}
"""How often what happens again and again happens; where there is one chance a step, always."""


class Wrong:
    """Computes wrong in the steps of the plan, until the line has halted for it."""

    def __init__(self, faults: list[Fault], slot: int | None) -> None:
        """`slot`: this worker's; None: it is alone, and right."""
        self._faults = {each.step: each for each in faults if each.slot == slot}
        self._step = 0
        self._fault: Fault | None = None
        self._draw = random.Random(0)
        self._skip = 0
        """Chances that a fault that happens once leaves out."""
        self._undo: Callable[[], None] | None = None
        self.did: dict[int, int] = {}
        """How often it was wrong, by step."""

    def enter(self, step: int) -> None:
        """The loop body of a step follows."""
        if step == self._step:
            return
        self._step, self._fault = step, self._faults.get(step)
        if self._fault is not None:
            self._draw = random.Random(self._fault.seed)
            self._skip = self._draw.randrange(2) if self._fault.place in _CHANCES else 0

    def halted(self) -> None:
        """The line has halted: from now on this step is computed right."""
        self._fault = None
        if self._undo is not None:
            self._undo()
            self._undo = None

    def spoil(self, place: str, numbers: torch.Tensor) -> None:
        """A chance to be wrong in these numbers, float32 in host memory, in place."""
        fault = self._fault
        if fault is None or fault.place != place or not numbers.numel():
            return
        if fault.often:
            if self._draw.random() > _CHANCES.get(place, 1.0):
                return
        elif self._skip or self.did.get(fault.step):
            self._skip -= 1
            return
        self.did[fault.step] = self.did.get(fault.step, 0) + 1
        flat = numbers.detach().reshape(-1).numpy()
        before = flat.copy()
        flip(flat, self._draw, exponent=fault.exponent)
        with torch.no_grad():
            numbers.copy_(torch.from_numpy(flat).view_as(numbers))
        if place == "optimizer":
            self._undo = lambda: _restore(numbers, torch.from_numpy(before))


def _restore(numbers: torch.Tensor, before: torch.Tensor) -> None:
    with torch.no_grad():
        numbers.copy_(before.view_as(numbers))


class _Spoiled(torch.autograd.Function):
    """What passes through, forward and backward, with the faults of both."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, wrong: Wrong) -> torch.Tensor:
        context.wrong = wrong
        out = values.clone()
        wrong.spoil("forward", out)
        return out

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        gradient = gradients[0].clone()
        context.wrong.spoil("backward", gradient)
        return gradient, None


class Net(nn.Module):
    """Two layers, with dropout between them."""

    def __init__(self, wrong: Wrong) -> None:
        """`wrong` has its chances between the layers."""
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self._wrong = wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = _Spoiled.apply(self.first(x), self._wrong)  # type: ignore[no-untyped-call]  # torch's own
        out: torch.Tensor = self.last(F.dropout(torch.tanh(hidden), 0.1))
        return out


def _put_in(wrong: Wrong) -> None:
    """Puts chances to be wrong where a worker adds, sends, and takes averages."""
    add, put, begin, show = (
        node_sums._added,
        tap.put_average,
        HostStaging.begin,
        Driver._show_halt,
    )

    def added(left: Any, right: Any) -> Any:
        parts = add(left, right)
        there = [each for each in parts if each is not None]
        if there:  # Nothing is, of running statistics that the model does not have.
            wrong.spoil("addition", there[0])
        return parts

    def put_average(*arguments: Any) -> list[torch.Tensor]:
        targets = put(*arguments)
        wrong.spoil("write-back", targets[0])
        return targets

    def staged(self: HostStaging, block: int, *arguments: Any) -> None:
        begin(self, block, *arguments)
        wrong.spoil("sending", self.collect(block))

    def shown(self: Driver, effect: Any) -> None:
        if isinstance(effect, AwaitAnswer):
            wrong.halted()
        show(self, effect)

    node_sums._added = added
    for place, name, wrapped in (
        (tap, "put_average", put_average),
        (HostStaging, "begin", staged),
        (Driver, "_show_halt", shown),
    ):
        setattr(place, name, wrapped)


def _data() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(4 * GRAINS * MICRO, 6, generator=draw)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def main() -> None:
    """Trains as many steps as it is told."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    wrong = Wrong(read_plan(Path(spec["plan"])), spec["slot"])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(1)
    _put_in(wrong)
    line = Line(
        same_bits=True,
        total_steps=spec["steps"],
        on_halt="wait",
        metrics_bind="off",
        check_data=False,
    )
    model: Any = Net(wrong)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    loader: Any = DataLoader(_data(), GRAINS * MICRO, shuffle=True)
    model, optimizer, loader = line.prepare(model, optimizer, loader, micro_batch_size=MICRO)
    weights: dict[int, str] = {}
    for _ in line.epochs(10**6):
        for x, y in loader:
            wrong.enter(line.step + 1)
            optimizer.zero_grad()
            line.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            if line.committed:
                weights[line.step] = _digest(model)
                wrong.spoil("optimizer", model.last.weight)
    worker = line._session.member.position.worker
    line.close()
    Path(sys.argv[2]).write_text(
        json.dumps({"worker": worker, "did": wrong.did, "weights": weights})
    )


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
