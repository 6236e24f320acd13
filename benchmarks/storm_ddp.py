"""The storm's training script for DistributedDataParallel: it goes on from its last checkpoint.

After the page "Fault-tolerant Distributed Training with torchrun" of PyTorch's tutorials. A
checkpoint holds the optimizer and the step besides the weights, so that no sample is lost.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from pathlib import Path

import torch
import torch.distributed as dist
from storm_task import (
    Ledger,
    Settings,
    Text,
    build,
    loss_of,
    pretend,
    step_to_stop_at,
    write_snapshot,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

SNAPSHOT_STEPS = 50


def main() -> None:
    """Trains until the harness says at which step to stop."""
    settings = Settings(**json.loads(sys.argv[1]))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ledger = Ledger(settings, rank)
    plain, optimizer = build()
    checkpoint = Path(settings.folder) / "checkpoint.pt"
    step, commit = 0, ""
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        plain.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, commit = saved["step"], saved["commit"]
    model = DistributedDataParallel(plain)
    life = [uuid.uuid4().hex]  # names the commits of the processes from here to the next restart
    dist.broadcast_object_list(life)
    text = Text()
    whole: DistributedSampler[int] = DistributedSampler(text, shuffle=False)
    sampler = list(whole)[step * settings.share :]
    saved_at = time.monotonic()
    for x, y, positions in DataLoader(text, batch_size=settings.share, sampler=sampler):
        name = f"{life[0]}.{step}"
        ledger.computes(positions.tolist(), name)
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        pretend(settings, len(x))
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch does not say
        optimizer.step()
        step += 1
        ledger.kept(step, name, commit)
        commit = name
        if rank == 0 and step % SNAPSHOT_STEPS == 0:
            write_snapshot(settings, plain, step * settings.batch)
        if rank == 0 and time.monotonic() - saved_at >= settings.checkpoint_s:
            state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
            unfinished = checkpoint.with_suffix(".new")
            torch.save({**state, "step": step, "commit": commit}, unfinished)
            unfinished.replace(checkpoint)
            saved_at = time.monotonic()
        if step == step_to_stop_at(settings):
            break
    ledger.end(plain, step, commit)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
