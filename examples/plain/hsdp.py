"""HSDP: Gloo shards inside a host, and another backend averages between hosts.

torchrun --nproc-per-node 2 hsdp.py: two hosts of one rank each, or set SHARD=2 and take four ranks.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import BACKEND, dataset, net, spoiled
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
shard = int(os.environ.get("SHARD", "1"))
mesh = init_device_mesh(
    "cpu",
    (dist.get_world_size() // shard, shard),
    mesh_dim_names=("replicate", "shard"),
    backend_override={"replicate": BACKEND},
)

model = net()
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(dataset(), batch_size=32, sampler=DistributedSampler(dataset()))

for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(spoiled(x, rank, step)), y)
    loss.backward()
    optimizer.step()

whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
if rank == 0:
    torch.save(whole, "model.pt")
dist.destroy_process_group()
