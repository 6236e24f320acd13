"""The script of benchmarks/joining*.py: one layer under AdamW, and a pause for each sample."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from one_layer import prepared
from torch.nn.functional import mse_loss

from andon.protocol.capabilities import LEARNING
from andon_trainer import Line
from andon_trainer.exchange.control import giving, transfer
from andon_trainer.line import joining

BATCH = int(os.environ["JOINING_BATCH"])
PACE_S = float(os.environ["JOINING_PACE_S"])
"""Of a sample: time in which the processors are free, as with a GPU."""
WIDTH = int(os.environ["JOINING_WIDTH"])


def note_states(file: Path, host: int) -> None:
    """Notes of each state that comes or goes: which, when its first and last pieces did, and where.

    Args:
        file: gets a line of JSON for each.
        host: this worker's.
    """

    def noted(move: Callable[..., Any], role: str) -> Callable[..., Any]:
        def moved(ticket: Any, state: Any, progress: Any, *rest: Any) -> Any:
            asked, seen = time.time(), []

            def note(so_far: int, whole: int) -> None:
                seen.append((time.time(), so_far))
                progress(so_far, whole)

            try:
                return move(ticket, state, note, *rest)
            finally:
                if seen:
                    (began, first), (ended, last) = seen[0], seen[-1]
                    note_ = {"transfer": ticket.transfer_id, "role": role, "host": host}
                    note_ |= {"asked": asked, "began": began, "ended": ended}
                    with file.open("a") as out:
                        out.write(json.dumps({**note_, "bytes": last - first}) + "\n")

        return moved

    receives, sends = noted(transfer.receive_state, "to"), noted(transfer.send_state, "from")
    vars(transfer)["receive_state"] = receives
    vars(transfer)["send_state"] = vars(giving)["send_state"] = sends


def main() -> None:
    """Trains until the run is ended."""
    if states := os.environ.get("JOINING_STATES"):
        note_states(Path(states), int(os.environ["JOINING_HOST"]))
    if os.environ.get("JOINING_TRANSFER"):
        # As workers of an earlier version, which get the state while the others wait.
        able = tuple(each for each in joining._CAPABILITIES if each != LEARNING)
        vars(joining)["_CAPABILITIES"] = able
    if os.environ.get("JOINING_BYTES"):
        # As workers of an earlier version, whose state passes the service.
        vars(transfer)["_own_file"] = lambda _ticket: None
    line = Line()
    model, optimizer, loader = prepared(line, WIDTH, BATCH)
    noted = "JOINING_NOTES" not in os.environ
    for _ in line.epochs(10**6):
        for x, y in loader:
            if not noted:
                # Now it has the line's state.
                note = Path(os.environ["JOINING_NOTES"], f"begun-{os.getpid()}")
                note.write_text(str(time.time()))
                noted = True
            optimizer.zero_grad()
            time.sleep(PACE_S * len(x))
            line.backward(mse_loss(model(x).mean(1, keepdim=True), y))
            optimizer.step()


if __name__ == "__main__":
    main()
