"""A worker for tests of `andon audit`: a tiny model with dropout, and an evaluation an epoch.

Usage: audited.py SPEC.json OUT.json. `steps`; `wrong`: after this step one bit of one weight is
another one, without the line's knowledge; `AUDITED_DIES_AT`: it ends itself after that step.
`same_bits` and `dropout`: other ones than True and 0.1.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    dies_at = int(os.environ.get("AUDITED_DIES_AT", "0"))
    torch.set_num_threads(1)
    torch.manual_seed(1)
    line = Line(same_bits=spec.get("same_bits", True), total_steps=spec["steps"])
    dropout = nn.Dropout(spec.get("dropout", 0.1))
    model: Any = nn.Sequential(nn.Linear(4, 4), dropout, nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    samples = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(samples, (samples[:, 0] > 0).long())
    loader: Any = DataLoader(data, 4, shuffle=True)
    model, optimizer, loader = line.prepare(model, optimizer, loader, micro_batch_size=2)
    for _ in line.epochs(10**6):
        for inputs, classes in loader:
            optimizer.zero_grad()
            line.backward(F.cross_entropy(model(inputs), classes))
            optimizer.step()
            if line.committed and line.step == spec.get("wrong"):
                with torch.no_grad():
                    model[0].weight.view(torch.int32)[0, 0] ^= 1
            if dies_at and line.step == dies_at:
                raise SystemExit(7)
        if not line.same_bits:
            continue
        for inputs, classes in line.split(DataLoader(data, 50)):
            line.tally(F.cross_entropy(model(inputs), classes, reduction="sum"), len(inputs))
        mean: Any = line.tallied()
        if not line.stopped:
            line.best(mean)
    line.close()
    Path(sys.argv[2]).write_text(json.dumps({"step": line.step}))


if __name__ == "__main__":
    main()
