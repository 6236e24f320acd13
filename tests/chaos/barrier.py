"""Barriers: a worker stops at a named point of a step until the test lets it continue.

The test writes the file `stop`. The worker that reaches the point removes it, writes
`reached-<point>` and waits for `go`. So a worker that is killed there leaves no `stop` for the
next.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

__all__ = ["POINTS", "RECEIVING", "Barrier", "order_stop"]

POINTS = (
    "assigned",
    "mid-compute",
    "before-blocks",
    "mid-blocks",
    "after-blocks",
    "ready-sent",
    "before-apply",
    "after-apply",
)
"""The points of a step, in order: from the received assignment to the updated weights."""

RECEIVING = "receiving"
"""A point outside of steps: the line's state is about to come."""

_PATIENCE_S = 100.0
_POLL_S = 0.001


def order_stop(folder: Path, point: str, step: int = 0) -> None:
    """Makes a folder's worker stop at `point`, in step `step` or the first one after it."""
    assert point in (*POINTS, RECEIVING)
    (folder / f"reached-{point}").unlink(missing_ok=True)
    (folder / "go").unlink(missing_ok=True)
    _write(folder / "stop", {"point": point, "step": step})


class Barrier:
    """The worker's side."""

    def __init__(self, folder: Path) -> None:
        """Uses the worker's folder."""
        self._folder = folder

    def pass_by(self, point: str, step: int) -> None:
        """Returns at once, unless the test ordered a stop here.

        Raises:
            TimeoutError: the test did not let it continue.
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
                raise TimeoutError(
                    f"the test did not let this worker continue from {point} of step {step}"
                )
            time.sleep(_POLL_S)
        (self._folder / "go").unlink()


def _write(path: Path, value: dict[str, object]) -> None:
    """Writes a file atomically."""
    new = path.with_name(f".{path.name}")
    new.write_text(json.dumps(value))
    new.rename(path)
