"""A worker of a storm that must change no bit: trains the demo's GPT or a CNN with `same_bits`.

Usage: grain_worker.py SPEC.json. It stops at barriers, and logs each step that it has applied: the
SHA-256 of everything that is trained, the loss, what the script logs and draws, and each epoch's
evaluation. `steps`: it ends after so many; without them, once the file `finish` exists.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset

from andon_trainer import Line
from chaos.barrier import Barrier
from integration.scripts.grains import Cnn, data_of, digest_of

__all__: list[str] = []

_SAMPLES, _BATCH, _GRAIN = 110, 20, 3
_CONTEXT = 16


class Task:
    """A model, its samples, and the mean loss of a batch."""

    def __init__(self, kind: str) -> None:
        """`gpt` or `cnn`."""
        self._gpt = kind == "gpt"
        self.data: Dataset[Any]
        self.model: nn.Module
        if self._gpt:
            self.data, self.model = _demo()
        else:
            self.data, self.model = data_of("cnn", _SAMPLES), Cnn()

    def loss(self, model: nn.Module, batch: Any, reduction: str = "mean") -> torch.Tensor:
        """Cross-entropy."""
        x, y = batch
        scores = model(x)
        if self._gpt:
            scores, y = scores.flatten(0, 1), y.flatten()
        return F.cross_entropy(scores, y, reduction=reduction)


def _demo() -> tuple[Dataset[Any], nn.Module]:
    """The demo's GPT, small; it learns the demo's own source."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from examples import shakespeare

    shakespeare.CONTEXT, shakespeare.WIDTH, shakespeare.LAYERS = _CONTEXT, 32, 2
    text = Path(shakespeare.__file__).read_text("utf-8")
    letters = "".join(sorted(set(text)))
    data = Subset(shakespeare.Windows(text, letters), range(_SAMPLES))
    return data, shakespeare.GPT(len(letters))


class Stopping(torch.optim.AdamW):
    """Stops before it moves weights: the step is committed then."""

    stop: Any = None

    def step(self, closure: Any = None) -> Any:
        if self.stop is not None:
            self.stop()
        return super().step(closure)


class Worker:
    """One worker, from `prepare` to `close`."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._folder = Path(spec["folder"])
        self._finish = Path(spec["finish"])
        self._barrier = Barrier(self._folder)
        self._log = os.open(self._folder / "log.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._began = -1
        """The step of which it has had a grain."""
        self._line = line = Line(same_bits=True, total_steps=spec.get("steps"))
        torch.manual_seed(1)
        self._task = Task(spec["kind"])
        optimizer = Stopping(self._task.model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=3000.0, growth_interval=20, enabled=spec["kind"] == "cnn"
        )
        # Of a sampler that draws anew in each epoch, too.
        drawn = RandomSampler(range(_SAMPLES), replacement=True) if scaler.is_enabled() else None
        loader: Any = DataLoader(self._task.data, _BATCH, shuffle=not drawn, sampler=drawn)
        self._model, self._optimizer, self._scheduler, self._scaler, self._loader = line.prepare(
            self._task.model, optimizer, scheduler, scaler, loader, micro_batch_size=_GRAIN
        )
        optimizer.stop = lambda: self._barrier.pass_by("before-apply", line.step + 1)

    def run(self) -> None:
        """Trains."""
        for _ in self._line.epochs(10**6):
            for batch in self._loader:
                self._body(batch)
            if not self._line.stopped:
                mean = self._evaluate()
                best = self._line.best(mean)
                self._write("evaluated", step=self._line.step, mean=mean, best=best)
        self._line.close()

    def _body(self, batch: Any) -> None:
        line, scaler, optimizer = self._line, self._scaler, self._optimizer
        number = line.step + 1
        first, self._began = number != self._began, number
        self._barrier.pass_by("assigned" if first else "mid-compute", number)
        self._compute_for(len(batch[0]))
        optimizer.zero_grad()
        loss = self._task.loss(self._model, batch)
        self._barrier.pass_by("before-blocks", number)
        line.backward(loss)
        self._barrier.pass_by("after-blocks", number)
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        self._scheduler.step()
        if line.committed:
            line.log({"norm": norm, "lr": self._scheduler.get_last_lr()[0]})
            self._write(
                "applied",
                step=line.step,
                attends=False,
                digest=digest_of(self._model, optimizer),
                state=[self._scheduler.state_dict()["last_epoch"], self._scaler.state_dict()],
                loss=line.loss,
                norm=norm.item(),
                draw=torch.rand(()).item(),
            )
            self._barrier.pass_by("after-apply", line.step)
            if self._finish.exists():
                line.stop("finish")

    def _evaluate(self) -> float:
        """The mean loss in training mode, so that dropout draws."""
        with torch.no_grad():
            for batch in self._line.split(DataLoader(self._task.data, 16)):
                loss = self._task.loss(self._model, batch, "sum")
                self._line.tally(loss, len(batch[0]))
        mean = self._line.tallied()
        assert isinstance(mean, float)
        return mean

    def _compute_for(self, samples: int) -> None:
        """Takes as long as the test says now."""
        pace = self._folder / "pace"
        if pace.exists():
            time.sleep(float(pace.read_text()) * samples)

    def _write(self, event: str, **fields: Any) -> None:
        """One system call, so that a kill loses no complete line."""
        os.write(self._log, (json.dumps({"event": event, **fields}) + "\n").encode())


def main() -> None:
    """Trains as a spec says."""
    Worker(json.loads(Path(sys.argv[1]).read_text())).run()


if __name__ == "__main__":
    main()
