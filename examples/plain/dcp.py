"""torch.distributed.checkpoint: torchrun --nproc-per-node 2 --max-restarts 3 dcp.py goes on.

Saves each third step of FSDP2 in `checkpoints/`, and begins at the newest one that is whole.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from task import BACKEND, dataset, net, spoiled
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

STEPS, EVERY = 8, 3
FOLDER = Path("checkpoints")

dist.init_process_group(BACKEND)
rank = dist.get_rank()
model = net()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def state() -> dict[str, object]:
    """What a checkpoint has."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


# The file `.metadata` is written last.
whole = [int(each.parent.name) for each in FOLDER.glob("*/.metadata")]
begin = max(whole, default=0)
if begin:
    loaded = state()
    dcp.load(loaded, checkpoint_id=FOLDER / str(begin))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    if rank == 0:
        print(f"goes on after step {begin}")

loader = DataLoader(dataset(), batch_size=16, sampler=DistributedSampler(dataset()))
for step, (x, y) in enumerate(loader, 1):
    if step <= begin:
        continue
    if step > STEPS:
        break
    optimizer.zero_grad()
    loss = F.cross_entropy(model(spoiled(x, rank, step)), y)
    loss.backward()
    optimizer.step()
    if step % EVERY == 0:
        dcp.save(state(), checkpoint_id=FOLDER / str(step))

weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
if rank == 0:
    torch.save(weights, "model.pt")
dist.destroy_process_group()
