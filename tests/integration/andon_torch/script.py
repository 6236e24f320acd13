"""A plain script, as people have it: DistributedDataParallel under torchrun.

`script.py FOLDER`: in the first attempt rank 1 makes a NaN. Attempts and losses go into the folder.
Nothing is destroyed: Python ends the group.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FOLDER = Path(sys.argv[1])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

dist.init_process_group("andon")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    inputs = torch.ones(2, 4) * (rank + 1)
    if ATTEMPT == 0 and step == 2 and rank == 1:
        inputs[0, 3] = float("nan")
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with (FOLDER / f"{ATTEMPT}-{rank}").open("a") as file:
        file.write(f"{loss.item()}\n")
