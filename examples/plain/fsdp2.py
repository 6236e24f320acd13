"""FSDP2, each rank with a shard of every parameter: torchrun --nproc-per-node 2 fsdp2.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import BACKEND, dataset, net, spoiled
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group(BACKEND)
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))

model = net()
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(dataset(), batch_size=32, sampler=DistributedSampler(dataset()))

for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(spoiled(x, rank, step)), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
if rank == 0:
    torch.save(whole, "model.pt")
dist.destroy_process_group()
