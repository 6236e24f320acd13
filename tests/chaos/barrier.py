"""Barriers: a worker stops at a named point of a step, and says so in a file, until it may go on.

The test writes `stop`; the worker that passes the point takes it away, writes `reached-<point>`
and waits for `go`. A worker that was killed there leaves nothing behind that would stop the next.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

__all__ = ["POINTS", "Barrier", "order_stop"]

POINTS = (
    "assigned",
    "before-blocks",
    "mid-blocks",
    "after-blocks",
    "ready-sent",
    "before-apply",
    "after-apply",
)
"""The points of a step, in order: from the assignment in hand to the weights moved."""

_PATIENCE_S = 100.0
_POLL_S = 0.001


def order_stop(folder: Path, point: str, step: int = 0) -> None:
    """Makes the worker of a folder stop at `point` of the first step from `step` on."""
    assert point in POINTS
    (folder / f"reached-{point}").unlink(missing_ok=True)
    (folder / "go").unlink(missing_ok=True)
    _write(folder / "stop", {"point": point, "step": step})


class Barrier:
    """The worker's side."""

    def __init__(self, folder: Path) -> None:
        """Looks into its worker's folder."""
        self._folder = folder

    def pass_by(self, point: str, step: int) -> None:
        """Goes on at once, unless it is told to stop here.

        Raises:
            TimeoutError: nobody let it go on.
        """
        try:
            order = json.loads((self._folder / "stop").read_text())
        except FileNotFoundError:
            return
        if order["point"] != point or step < order["step"]:
            return
        (self._folder / "stop").unlink()
        _write(self._folder / f"reached-{point}", {"step": step})
        give_up_at = time.monotonic() + _PATIENCE_S
        while not (self._folder / "go").exists():
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"nobody let this worker go on from {point} of step {step}")
            time.sleep(_POLL_S)
        (self._folder / "go").unlink()


def _write(path: Path, value: dict[str, object]) -> None:
    """Writes a file that is there whole or not at all."""
    new = path.with_name(f".{path.name}")
    new.write_text(json.dumps(value))
    new.rename(path)
