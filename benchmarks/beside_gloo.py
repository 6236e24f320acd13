"""Processes that measure Andon and Gloo in turns: started together, ended together.

Each gets what it has to do as JSON on its command line, and prints JSON. Every process computes
with one thread, and Gloo talks over loopback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["outputs_of"]


def outputs_of(
    script: str, specs: Sequence[object], *, patience_s: float = 1800, **environment: str
) -> list[Any]:
    """Runs a process of a script of this folder for each spec; returns what they print.

    Raises:
        RuntimeError: one failed; it has said why.
        subprocess.TimeoutExpired: it took longer than `patience_s`. All are killed in either case.
    """
    path = str(Path(__file__).with_name(script))
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    processes = [
        subprocess.Popen(
            [sys.executable, path, json.dumps(spec)],
            stdout=subprocess.PIPE,
            text=True,
            env=variables,
        )
        for spec in specs
    ]
    try:
        outputs = [process.communicate(timeout=patience_s)[0] for process in processes]
        if codes := [process.returncode for process in processes if process.returncode]:
            raise RuntimeError(f"{script} exited with code {codes[0]}: see its output")
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [json.loads(output) for output in outputs]
