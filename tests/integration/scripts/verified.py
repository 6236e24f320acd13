"""A worker for tests of verification: a small network, whose worker may compute or read wrong.

Usage: verified.py SPEC.json OUT.json. It writes the SHA-256 of the weights, or the halt that it
raised. `flips`, a slot and a step: a bit of one gradient is wrong in that worker's first grain of
that step. `reads`, a slot and an index: that worker's sample is another one. `ddp`: the process is
one of several of its host.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from andon_trainer import Line, LineHalted
from andon_trainer.errors import WorkerDropped

STEPS = 5


class Numbers(Dataset[torch.Tensor]):
    """48 samples, of which one may be wrong."""

    def __init__(self, wrong: int | None) -> None:
        self._numbers = torch.randn(48, 5, generator=torch.Generator().manual_seed(0))
        if wrong is not None:
            self._numbers[wrong, 2] += 2.0**-20

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._numbers[index]


def flipped(gradient: torch.Tensor) -> torch.Tensor:
    bits = gradient.clone()
    bits.view(torch.int32)[1, 1] ^= 1 << 12
    return bits


def train(line: Line, spec: dict[str, Any], model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inner = model
    if spec.get("ddp"):
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    slot, index = spec.get("reads", (None, None))
    loader: Any = DataLoader(Numbers(index if slot == spec["slot"] else None), 12)
    model, optimizer, loader = line.prepare(model, optimizer, loader, micro_batch_size=2)
    wrong = spec.get("flips") == [spec["slot"], 3]
    for _ in line.epochs(10**6):
        for x in loader:
            hook = None
            if wrong and line.step == 2:
                hook, wrong = inner[0].weight.register_hook(flipped), False
            optimizer.zero_grad()
            line.backward(F.mse_loss(model(x), x[:, :1]))
            optimizer.step()
            if hook is not None:
                hook.remove()


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    seen: dict[str, Any] = {}
    line = Line(same_bits=True, total_steps=STEPS)
    try:
        train(line, spec, model)
        line.close()
    except LineHalted as halt:
        seen = {"reason": halt.reason, "worker": halt.worker, "message": str(halt)}
        raise
    except WorkerDropped as dropped:
        seen = {"message": str(dropped)}
        raise
    finally:
        weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
        seen |= {"step": line.step, "weights": hashlib.sha256(weights).hexdigest()}
        Path(sys.argv[2]).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
