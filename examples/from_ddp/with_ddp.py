"""A script for DistributedDataParallel: torchrun --nproc-per-node 2 with_ddp.py."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
device = torch.device("cuda" if cuda else "cpu", int(os.environ["LOCAL_RANK"]) if cuda else 0)

torch.manual_seed(0)
x = torch.randn(1024, 20)
dataset = TensorDataset(x, x[:, :4].argmax(1))
net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
model = DistributedDataParallel(net.to(device), device_ids=[device] if cuda else None)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)

for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    dist.all_reduce(loss := loss.detach() / dist.get_world_size())
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "model.pt")
        print(f"epoch {epoch}: loss {loss.item():.6f}")
dist.destroy_process_group()
