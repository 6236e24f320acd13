"""A worker for tests of equal bits: a small GPT with dropout, or a CNN with BatchNorm.

Usage: grains.py SPEC.json OUT.json. It writes the SHA-256 of the trained state and the losses of
all steps. `kill`, a slot and a step: that process ends itself in the middle of its share; and
`dies_evaluating`, a slot and an epoch: in the middle of the evaluation after it. `ddp`: the process
is one of several of its host.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line

VOCABULARY, WIDTH, LENGTH = 32, 16, 8


class Gpt(nn.Module):
    """One layer of a transformer with a frozen part, and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.layer.norm1.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        out: torch.Tensor = self.head(self.layer(self.tokens(tokens), mask, is_causal=True))
        return out


class Cnn(nn.Module):
    """Convolutions in channels_last, with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
            *(nn.Conv2d(6, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1)),
        )
        self.head = nn.Linear(8, 4)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in its stubs

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(images).mean((2, 3)))
        return out


def data_of(kind: str, samples: int = 45) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    if kind == "gpt":
        return TensorDataset(torch.randint(0, VOCABULARY, (samples, LENGTH), generator=draw))
    images = torch.randn(samples, 3, 8, 8, generator=draw)
    return TensorDataset(images, images.mean((2, 3)).argmax(1))


def loss_of(kind: str, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int | None]:
    """A mean over tokens of which some are left out, or over samples."""
    if kind == "gpt":
        (tokens,) = batch
        targets = tokens.roll(-1, 1).masked_fill(tokens % 3 == 0, -100)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        return loss, int((targets != -100).sum())
    images, classes = batch
    return F.cross_entropy(model(images), classes), None


def evaluate(line: Line, kind: str, model: nn.Module, *, dies: bool) -> float:
    """The mean loss, in training mode, so that dropout draws: 8 batches, the last one short.

    If it `dies`, it has computed one of them.
    """
    for number, batch in enumerate(line.split(DataLoader(data_of(kind), 6))):
        if number and dies:
            os.kill(os.getpid(), signal.SIGKILL)
        loss, weight = loss_of(kind, model, batch)
        n = len(batch[0]) if weight is None else weight
        line.tally({"loss": loss.detach() * n}, n)
    means: Any = line.tallied()
    return float(means["loss"])


def take(line: Line, spec: dict[str, Any], seen: dict[str, Any], batch: Any) -> None:
    """Notes what a loop body has; may be killed."""
    step = line.step + 1
    if [spec["slot"], step] == spec.get("kill") and step in (each[0] for each in seen["grains"]):
        time.sleep(0.3)  # The others have sent what they have of the step.
        os.kill(os.getpid(), signal.SIGKILL)
    content = hashlib.sha256(batch[0].numpy().tobytes()).hexdigest()
    seen["grains"].append([step, len(batch[0]), content])


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of all weights, buffers and optimizer states."""
    digest = hashlib.sha256()
    model = getattr(model, "module", model)
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.contiguous().numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        for name, value in sorted(state.items()):
            digest.update(name.encode() + torch.as_tensor(value).contiguous().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(1)
    kind: str = spec["kind"]
    line = Line(same_bits=True, total_steps=spec["steps"])
    model: Any = Gpt() if kind == "gpt" else Cnn()
    if spec.get("ddp"):
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=3000.0, enabled=kind == "cnn")
    loader: Any = DataLoader(data_of(kind), 20, shuffle=True)
    model, optimizer, scaler, loader = line.prepare(
        model, optimizer, scaler, loader, micro_batch_size=3
    )
    seen: dict[str, Any] = {"grains": [], "losses": {}, "draws": {}, "evaluations": {}}
    for epoch in line.epochs(10**6):
        for batch in loader:
            take(line, spec, seen, batch)
            optimizer.zero_grad()
            line.backward(*loss_of(kind, model, batch))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            if line.committed:
                seen["losses"][line.step] = line.loss
                draws = [torch.rand(()).item(), random.random(), np.random.random()]
                seen["draws"][line.step] = draws
        if not line.stopped:
            dies = [spec["slot"], epoch] == spec.get("dies_evaluating")
            mean = evaluate(line, kind, model, dies=dies)
            seen["evaluations"][epoch] = [mean, line.best(mean)]
    line.close()
    Path(sys.argv[2]).write_text(json.dumps({"digest": digest_of(model, optimizer), **seen}))


if __name__ == "__main__":
    main()
