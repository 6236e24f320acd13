"""Ray Train: python ray_train.py starts two workers, on this host or on Ray's cluster."""

import tempfile
from pathlib import Path

import ray
import ray.train
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from task import BACKEND, dataset, net, spoiled
from torch.utils.data import DataLoader


def train(config: dict[str, str]) -> None:
    """One worker."""
    rank = dist.get_rank()
    model = prepare_model(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = prepare_data_loader(DataLoader(dataset(), batch_size=32, shuffle=True))
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(spoiled(x, rank, step)), y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), config["out"])


with tempfile.TemporaryDirectory() as folder:
    ray.init(num_cpus=2, include_dashboard=False)
    TorchTrainer(
        train,
        train_loop_config={"out": str(Path("model.pt").absolute())},
        torch_config=TorchConfig(backend=BACKEND),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder),
    ).fit()
    ray.shutdown()
