"""The storm's training script for Andon: what a user of `andon run` writes, and a ledger."""

from __future__ import annotations

import json
import os
import sys

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

from andon_trainer import Line

SNAPSHOT_STEPS = 50


def main() -> None:
    """Trains until the harness says at which step to stop."""
    settings = Settings(**json.loads(sys.argv[1]))
    ledger = Ledger(settings, int(os.environ["RANK"]))
    line = Line()
    model, optimizer = build()
    loader = DataLoader(Text(), batch_size=settings.batch)
    model, optimizer, loader = line.prepare(model, optimizer, loader)
    for _ in line.epochs(1):
        for x, y, positions in loader:
            ledger.computes(positions.tolist())
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            pretend(settings, len(x))
            line.backward(loss)
            optimizer.step()
            if not line.committed:
                continue
            ledger.kept(line.step)
            if line.is_main and line.step % SNAPSHOT_STEPS == 0:
                write_snapshot(settings, model, line.step * settings.batch)
            if line.step == step_to_stop_at(settings):
                line.stop("the time is up")
    ledger.end(model, line.step)
    line.close()


if __name__ == "__main__":
    main()
