"""Runs one row: by plain PyTorch on given batches, or on the line.

Usage: row.py SPEC.json OUT.json. The spec has the row's name, and `steps` for the plain run: the
epoch, the workers' positions, and whether it was a later attempt. Slot 1 of a line kills itself in
the middle of backward at step `kill`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from andon_trainer import Line
from integration.rows.register import ROWS
from integration.rows.row import Parts, PlainLine, Row


def train_plainly(row: Row, parts: Parts, spec: dict[str, Any]) -> int:
    line = PlainLine()
    for epoch, shares, retried in spec["steps"]:
        if row.plain is not None:
            row.plain(parts, [row.union(parts, epoch, share) for share in shares], retried)
        else:
            row.body(parts, row.union(parts, epoch, [*chain(*shares)]), line)
        line.step += 1
    return line.step


def die_in_backward(model: torch.nn.Module, line: Line, step: int) -> None:
    """At this step the process is gone once about half of the gradients are computed."""
    trained = [part for part in model.parameters() if part.requires_grad]

    def gone(gradient: torch.Tensor) -> torch.Tensor:
        if line.step + 1 == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return gradient

    for part in trained[: len(trained) // 2 + 1]:
        part.register_hook(gone)  # type: ignore[no-untyped-call]  # torch's own signature


def train_on_the_line(row: Row, parts: Parts, spec: dict[str, Any]) -> int:
    def joined(model: torch.nn.Module, line: Line) -> None:
        if spec.get("kill") and spec["slot"] == 1:
            die_in_backward(model, line, spec["kill"])

    if row.fit is not None:
        return row.fit(parts, row.steps, joined)
    line = Line(seed=0, total_steps=row.steps)
    given = [parts.model, parts.optimizer, parts.loader, *parts.others]
    model, optimizer, loader, *others = line.prepare(*given, micro_batch_size=row.micro_batch_size)
    parts = Parts(model, optimizer, loader, others)
    joined(model, line)
    for _epoch in line.epochs(10**6):
        for batch in loader:
            with row.surrounded(line):
                row.body(parts, batch, line)
    return line.step


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    row = ROWS[spec["row"]]
    parts = row.make()
    steps = (train_plainly if "steps" in spec else train_on_the_line)(row, parts, spec)
    save_file(dict(parts.model.state_dict()), out.with_suffix(".safetensors"))
    out.write_text(json.dumps({"step": steps}))


if __name__ == "__main__":
    main()
