"""The storm's training script for torchft: its train_ddp.py, with our model and a ledger.

Process group, transport, time-outs and the loop are those of train_ddp.py in torchft's repository.
What that file leaves to the user is done as it advises: the place in the data is saved at each
step, and model, optimizer and manager now and then, in case every replica goes down.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
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
from torch.utils.data import DataLoader
from torchft import (  # type: ignore[import-not-found]  # it has an environment of its own
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)
from torchft.checkpointing.pg_transport import (  # type: ignore[import-not-found]  # as above
    PGTransport,
)

SNAPSHOT_SAMPLES = 3200


class Replica:
    """Model, optimizer and manager of a replica group of one process."""

    def __init__(self, settings: Settings, group: int) -> None:
        """Goes on from the checkpoint, if there is one: a group that lives has a newer state."""
        self._checkpoint = Path(settings.folder) / "checkpoint.pt"
        self._saved_at, self._every_s = time.monotonic(), settings.checkpoint_s
        self.commit = ""
        """The last commit that the model has; it travels with the weights."""
        gloo = ProcessGroupGloo(timeout=timedelta(seconds=5))
        self.manager = Manager(
            pg=gloo,
            min_replica_size=1,
            load_state_dict=self._load,
            state_dict=self._state,
            replica_id=f"train_ddp_{group}",
            timeout=timedelta(seconds=30),
            checkpoint_transport=PGTransport(gloo, timeout=timedelta(seconds=10), device="cpu"),
        )
        self.plain, inner = build()
        self.model = DistributedDataParallel(self.manager, self.plain)
        self.optimizer = Optimizer(self.manager, inner)
        if self._checkpoint.exists():
            saved = torch.load(self._checkpoint)
            self._load(saved["user"])
            self.manager.load_state_dict(saved["manager"])

    def save_now_and_then(self) -> None:
        """Writes a checkpoint if it is time."""
        if time.monotonic() - self._saved_at < self._every_s:
            return
        unfinished = self._checkpoint.with_suffix(f".{os.getpid()}")
        torch.save({"user": self._state(), "manager": self.manager.state_dict()}, unfinished)
        unfinished.replace(self._checkpoint)
        self._saved_at = time.monotonic()

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optim": self.optimizer.state_dict(),
            "commit": self.commit,
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optim"])
        self.commit = state["commit"]


def main() -> None:
    """Trains until the harness says at which step to stop."""
    settings = Settings(**json.loads(sys.argv[1]))
    group = int(os.environ["REPLICA_GROUP_ID"])
    ledger = Ledger(settings, group)
    replica = Replica(settings, group)
    manager, optimizer = replica.manager, replica.optimizer
    place = Path(settings.folder) / f"place-{group}"
    batches = int(place.read_text()) if place.exists() else 0
    text = Text()
    sampler = DistributedSampler(
        text, group, int(os.environ["NUM_REPLICA_GROUPS"]), 0, 1, shuffle=False
    )
    rest = list(sampler)[batches * settings.share :]
    for x, y, positions in DataLoader(text, batch_size=settings.share, sampler=rest):
        optimizer.zero_grad()
        loss = loss_of(replica.model, x, y)
        pretend(settings, len(x))
        # Backward would wait here as well. Only now it is known for which commit it is.
        manager.wait_quorum()
        step = manager.current_step()
        name = f"{manager._quorum_id}.{step}"  # nothing public tells it
        takes_part = manager.is_participating()
        ledger.computes(positions.tolist(), name if takes_part else "")
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch does not say
        optimizer.step()
        batches += 1
        _replace(place, str(batches))
        if manager.current_step() > step:
            ledger.kept(step + 1, name, replica.commit)
            replica.commit = name
            _look_after(settings, replica)
        stop = step_to_stop_at(settings)
        if stop is not None and manager.current_step() >= stop:
            break
    ledger.end(replica.plain, manager.current_step(), replica.commit)
    manager.shutdown()


def _look_after(settings: Settings, replica: Replica) -> None:
    """One group, the same for all, keeps checkpoints and snapshots."""
    if replica.manager.participating_rank() != 0:
        return
    replica.save_now_and_then()
    committed = replica.manager.batches_committed() * settings.share
    if committed % SNAPSHOT_SAMPLES < settings.batch:
        write_snapshot(settings, replica.plain, committed)


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".new")
    unfinished.write_text(text)
    unfinished.replace(path)


if __name__ == "__main__":
    main()
