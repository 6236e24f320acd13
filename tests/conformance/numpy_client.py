"""A client for the judge: the trainer's own place on the line, and a model without PyTorch."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from andon_trainer.errors import AndonError
from chaos.model import Task
from chaos.worker import Worker

__all__ = ["main"]


def main() -> int:
    """Trains until the line says that the run is over; the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        task = {
            name: value for name, value in asdict(Task(blocks=(7, 11, 1))).items() if name[0] != "_"
        }
        spec = {
            "folder": folder,
            "slot": int(os.environ.get("RANK", "0")),
            "task": task,
            "finish": str(Path(folder) / "finish"),
        }
        worker = Worker(spec)
        try:
            worker.run()
        except AndonError as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
