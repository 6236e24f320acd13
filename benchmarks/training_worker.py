"""A worker of the training benchmark: one GPT on the line, others under DDP, and one alone."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, Batch, Letters
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from training import WARM_UP, WorkerSpec

from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon_trainer import Line


class Timer:
    """Times steps that all workers start together."""

    def __init__(self) -> None:
        """Starts without measurements."""
        self.seconds: dict[str, list[float]] = {
            side: [] for side in ("ours_s", "ddp_s", "nccl_s", "solo_s")
        }

    def time(self, side: str, step: Callable[[], Any], *, together: bool = True) -> Any:
        """Runs a step, records its time and returns its result. Without `together`, no barrier."""
        if together:
            dist.barrier()
        began = time.perf_counter()
        result = step()
        self.seconds[side].append(time.perf_counter() - began)
        return result


def work(spec: WorkerSpec) -> dict[str, Any]:
    """Trains them alternately; returns the seconds and losses of each."""
    torch.set_num_threads(1)
    if spec.device != "cpu":
        torch.cuda.set_device(spec.device)
    dist.init_process_group(
        "gloo", f"file://{spec.rendezvous}", rank=spec.rank, world_size=spec.workers
    )
    timer = Timer()
    line, ours = _on_the_line(spec)
    # The bootstrap worker sends its weights to the others when it requests work. No worker may wait
    # at a barrier before that, or the line could never start.
    first = timer.time("ours_s", lambda: next(ours), together=False)
    theirs = DistributedDataParallel(_model(spec), gradient_as_bucket_view=True)
    optimizer = _adam(theirs)
    nccl = _under_nccl(spec) if spec.nccl else None
    mine = _model(spec)
    alone = mine, _adam(mine)
    hidden, ours_loss, ddp_loss = [], [], []
    for index in range(WARM_UP + spec.steps):
        batch, loss = timer.time("ours_s", lambda: next(ours)) if index else first
        ours_loss.append(_mean(loss))
        ddp_step = partial(_step, theirs, optimizer, batch, torch.Tensor.backward)
        loss = timer.time("ddp_s", ddp_step)
        ddp_loss.append(_mean(loss))
        if nccl is not None:
            timer.time("nccl_s", partial(_step, *nccl, batch, torch.Tensor.backward))
        timer.time("solo_s", partial(_step, *alone, batch, torch.Tensor.backward))
        hidden.append(_hidden(spec) if spec.rank == 0 else 0.0)
    dist.barrier()  # nobody leaves the line during another worker's step
    line.close()
    dist.destroy_process_group()
    return {
        **{side: each[WARM_UP:] for side, each in timer.seconds.items()},
        "ours_loss": ours_loss,
        "ddp_loss": ddp_loss,
        "hidden": hidden[WARM_UP:],
        "parameters": sum(parameter.numel() for parameter in theirs.parameters()),
    }


def _on_the_line(spec: WorkerSpec) -> tuple[Line, Iterator[tuple[Batch, float]]]:
    """A line, and its steps: each yields its batch and its loss."""
    line = Line(address=spec.address, run_id=spec.run_id, device=spec.device)
    dataset = Letters(spec.workers * spec.samples * (WARM_UP + spec.steps + 1), spec.context)
    model = _model(spec)
    model, optimizer, loader = line.prepare(
        model,
        _adam(model),
        DataLoader(
            dataset, batch_size=spec.workers * spec.samples, pin_memory=spec.device != "cpu"
        ),
    )

    def steps() -> Iterator[tuple[Batch, float]]:
        for batch in loader:
            yield batch, _step(model, optimizer, batch, line.backward)

    return line, steps()


def _model(spec: WorkerSpec) -> GPT:
    return GPT(layers=spec.layers, width=spec.width, context=spec.context).to(spec.device)


def _under_nccl(spec: WorkerSpec) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose gradients NCCL averages, from one GPU to another."""
    group = dist.new_group(backend="nccl")
    model = DistributedDataParallel(_model(spec), gradient_as_bucket_view=True, process_group=group)
    return model, _adam(model)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    backward: Callable[[Tensor], None],
) -> float:
    x, y = batch
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    backward(loss)
    optimizer.step()
    return loss.item()


def _mean(loss: float) -> float:
    """The mean over all ranks. All shares have the same size."""
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _hidden(spec: WorkerSpec) -> float:
    """The part of the last step's exchange that ran during backward, as the line reports it."""
    with grpc.insecure_channel(spec.address) as channel:
        answer = CoordinatorStub(channel).GetStatus(pb.GetStatusRequest(run_id=spec.run_id))
    return answer.status.hidden_ratio


if __name__ == "__main__":
    print(json.dumps(work(WorkerSpec(**json.loads(sys.argv[1])))))
