"""A rank of the benchmark of DistributedDataParallel: three copies of a GPT, trained in turns."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ddp_step import SIDES, WARM_UP, StepSpec
from gpt import GPT, Letters
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def work(spec: StepSpec) -> dict[str, Any]:
    """Trains the copies in turns; returns the seconds of each, and whether two of them agree."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{spec.rendezvous}", rank=spec.rank, world_size=spec.ranks
    )
    groups = [dist.new_group(backend=spec.backend), dist.new_group(backend="gloo")]
    models: list[nn.Module] = [
        DistributedDataParallel(_model(spec), gradient_as_bucket_view=True, process_group=group)
        for group in groups
    ]
    models.append(_model(spec))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-4) for model in models]
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    steps = WARM_UP + spec.steps
    dataset = Letters(spec.ranks * spec.samples * steps, spec.context)
    for x, y in DataLoader(dataset, spec.samples, sampler=DistributedSampler(dataset)):
        for side, model, optimizer in zip(SIDES, models, optimizers, strict=True):
            dist.barrier()
            began = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seconds[side].append(time.perf_counter() - began)
    dist.barrier()  # nobody leaves during another rank's step
    equal = all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    dist.destroy_process_group()
    return {
        **{side: each[WARM_UP:] for side, each in seconds.items()},
        "parameters": sum(parameter.numel() for parameter in models[-1].parameters()),
        "weights_equal": equal,
    }


def _model(spec: StepSpec) -> GPT:
    return GPT(layers=spec.layers, width=spec.width, context=spec.context)


if __name__ == "__main__":
    print(json.dumps(work(StepSpec(**json.loads(sys.argv[1])))))
