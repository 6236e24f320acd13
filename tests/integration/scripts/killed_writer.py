"""A process that writes a checkpoint, and is killed by SIGKILL in the middle of the next one.

Usage: killed_writer.py RUN_DIR. It has written a file of the second checkpoint by then.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import torch
from torch import nn

from andon.host.manifest import CheckpointFacts, checkpoint_folder
from andon.protocol.records import Cursor, Key
from andon.protocol.run_settings import RunPlan
from andon_trainer.state.replica import Replica


def facts(step: int) -> CheckpointFacts:
    plan = RunPlan(global_batch=8)
    return CheckpointFacts(head=Key(1, step), step=step, cursor=Cursor(0, 8), digest="", plan=plan)


def main() -> None:
    run_dir = Path(sys.argv[1])
    model = nn.Linear(2000, 2000)
    replica = Replica([model], [torch.optim.SGD(model.parameters())])
    replica.save(checkpoint_folder(run_dir, 1), facts(1))
    cut = replica.cut(checkpoint_folder(run_dir, 2), facts(2), {})

    threading.Thread(target=cut.write, daemon=True).start()
    while not list(run_dir.glob("checkpoints/.*/model.safetensors")):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
