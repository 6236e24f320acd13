"""The script of benchmarks/suspicion.py: one layer under AdamW, and some work in each step."""

from __future__ import annotations

import os
import time

from one_layer import prepared
from torch.nn.functional import mse_loss

from andon.host.process import Process
from andon.protocol.capabilities import PROBE
from andon_trainer import Line
from andon_trainer.config import LineConfig
from andon_trainer.exchange.control import translation

PACE_S = float(os.environ["SUSPICION_PACE_S"])
WIDTH = int(os.environ["SUSPICION_WIDTH"])
_PROBE = 200_000
HELD_S = float(os.environ.get("SUSPICION_HELD_S", "0"))
"""How long a call keeps the interpreter's lock in every 50th step."""


def _as_on_another_host() -> None:
    """The coordinator can't look up this process."""
    vars(translation)["own_process"] = lambda: Process(b"", 0)


def _without_probes() -> None:
    """As a worker of an earlier version, which only the lease can lose."""
    able: property = vars(LineConfig)["capabilities"]

    def without(config: LineConfig) -> tuple[str, ...]:
        assert able.fget is not None
        return tuple(each for each in able.fget(config) if each != PROBE)

    setattr(LineConfig, "capabilities", property(without))  # noqa: B010 - a property has no setter


def _hold(seconds: float) -> None:
    """Keeps the interpreter's lock, as a long call into C does: nothing else of Python runs."""
    began = time.perf_counter()
    sum(range(_PROBE))
    sum(range(int(_PROBE * seconds / (time.perf_counter() - began))))


def main() -> None:
    """Trains until the run is ended."""
    _as_on_another_host()
    if os.environ.get("SUSPICION_LEASE_ALONE"):
        _without_probes()
    line = Line()
    model, optimizer, loader = prepared(line, WIDTH, 12)
    steps = 0
    for _ in line.epochs(10**6):
        for x, y in loader:
            optimizer.zero_grad()
            time.sleep(PACE_S)
            steps += 1
            if HELD_S and steps % 50 == 0 and line.rank == 1:
                _hold(HELD_S)
            line.backward(mse_loss(model(x).mean(1, keepdim=True), y))
            optimizer.step()


if __name__ == "__main__":
    main()
