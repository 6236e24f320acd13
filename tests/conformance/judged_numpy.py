"""A client for the judge: the trainer's own membership, with a model without PyTorch.

Usage: judged_numpy.py [DEFECT], with the line's variables in the environment. DEFECT is one of
`judged_defects.DEFECTS`; it makes one behaviour wrong.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from andon_trainer.errors import AndonError
from chaos.model import Task
from chaos.worker import Worker
from conformance.judged_defects import DEFECTS

__all__ = ["main"]

_TASK = Task(blocks=(7, 11, 1))


def main() -> int:
    """Trains until the run is over; returns the exit code."""
    if sys.argv[1:]:
        DEFECTS[sys.argv[1]].build()
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker(
            {
                "folder": folder,
                "slot": int(os.environ.get("RANK", "0")),
                "task": {name: value for name, value in asdict(_TASK).items() if name[0] != "_"},
                "finish": str(Path(folder) / "finish"),
            }
        )
        try:
            worker.run()
        except AndonError as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
