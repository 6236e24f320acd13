"""Accelerate: torchrun --nproc-per-node 2 accelerate_loop.py, or accelerate launch --cpu."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from task import BACKEND, dataset, net, spoiled
from torch.utils.data import DataLoader

dist.init_process_group(BACKEND)  # first: on CPUs Accelerate itself knows no backend but its own
accelerator = Accelerator(cpu=True)
loader = DataLoader(dataset(), batch_size=32)
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(spoiled(x, accelerator.process_index, step)), y)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
accelerator.end_training()  # destroys the process group, too
