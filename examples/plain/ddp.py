"""DistributedDataParallel: torchrun --nproc-per-node 2 ddp.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import BACKEND, dataset, net, spoiled
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group(BACKEND)
rank = dist.get_rank()

model = DistributedDataParallel(net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = DistributedSampler(dataset())
loader = DataLoader(dataset(), batch_size=32, sampler=sampler)

step = 0
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(spoiled(x, rank, step)), y)
        loss.backward()
        optimizer.step()
        step += 1
    dist.all_reduce(loss := loss.detach() / dist.get_world_size())
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.6f}")
if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
