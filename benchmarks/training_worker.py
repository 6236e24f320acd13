"""A worker of the training benchmark: one GPT on the line, one under Gloo's DDP, one alone."""

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
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from training import WARM_UP, WorkerSpec

from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon_trainer import Line

LETTERS = 256
HEADS = 8

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A causal transformer block."""

    def __init__(self, width: int) -> None:
        """Makes a block for vectors of `width` features."""
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, letters, width) to the same shape."""
        batch, letters, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, letters, 3, HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).reshape(batch, letters, width))
        thought: Tensor = self.mlp(x)
        return x + thought


class GPT(nn.Module):
    """A GPT with about 12 * layers * width^2 parameters."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Initializes the same weights in every process."""
        torch.manual_seed(1)
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, spec.width)
        self.position = nn.Embedding(spec.context, spec.width)
        self.blocks = nn.ModuleList(Block(spec.width) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(spec.width)
        self.head = nn.Linear(spec.width, LETTERS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps letters (batch, length) to logits (batch, length, alphabet)."""
        x = self.embedding(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Letters(Dataset[Batch]):
    """Learnable, made-up text; each sample is a function of its index."""

    def __init__(self, size: int, context: int) -> None:
        """Makes `size` samples of `context` letters."""
        self._size = size
        self._context = context

    def __len__(self) -> int:
        """The number of samples."""
        return self._size

    def __getitem__(self, index: int) -> Batch:
        """The letters of a sample, and the letter after each."""
        places = torch.arange(self._context + 1)
        text = (places * (index % 7 + 1) + index) % LETTERS
        return text[:-1], text[1:]


class Timer:
    """Times steps that all workers start together."""

    def __init__(self) -> None:
        """Starts without measurements."""
        self.seconds: dict[str, list[float]] = {"ours_s": [], "ddp_s": [], "solo_s": []}

    def time(self, side: str, step: Callable[[], Any], *, together: bool = True) -> Any:
        """Runs a step, records its time and returns its result. Without `together`, no barrier."""
        if together:
            dist.barrier()
        began = time.perf_counter()
        result = step()
        self.seconds[side].append(time.perf_counter() - began)
        return result


def work(spec: WorkerSpec) -> dict[str, Any]:
    """Trains the three alternately; returns the seconds and losses of each."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{spec.rendezvous}", rank=spec.rank, world_size=spec.workers
    )
    timer = Timer()
    line, ours = _on_the_line(spec)
    # The bootstrap worker sends its weights to the others when it requests work. No worker may wait
    # at a barrier before that, or the line could never start.
    first = timer.time("ours_s", lambda: next(ours), together=False)
    theirs = DistributedDataParallel(GPT(spec), gradient_as_bucket_view=True)
    optimizer = _adam(theirs)
    _, alone = _on_the_line(spec, alone=True)
    hidden, ours_loss, ddp_loss = [], [], []
    for index in range(WARM_UP + spec.steps):
        batch, loss = timer.time("ours_s", lambda: next(ours)) if index else first
        ours_loss.append(_mean(loss))
        ddp_step = partial(_step, theirs, optimizer, batch, torch.Tensor.backward)
        loss = timer.time("ddp_s", ddp_step)
        ddp_loss.append(_mean(loss))
        timer.time("solo_s", lambda: next(alone))
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


def _on_the_line(
    spec: WorkerSpec, *, alone: bool = False
) -> tuple[Line, Iterator[tuple[Batch, float]]]:
    """A line, or a process alone, and its steps: each yields its batch and its loss."""
    line = Line() if alone else Line(address=spec.address, run_id=spec.run_id)
    workers = 1 if alone else spec.workers
    dataset = Letters(workers * spec.samples * (WARM_UP + spec.steps + 1), spec.context)
    model = GPT(spec)
    model, optimizer, loader = line.prepare(
        model, _adam(model), DataLoader(dataset, batch_size=workers * spec.samples)
    )

    def steps() -> Iterator[tuple[Batch, float]]:
        for batch in loader:
            yield batch, _step(model, optimizer, batch, line.backward)

    return line, steps()


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
