"""A step's loss is the unweighted mean of its workers' losses."""

from __future__ import annotations

from andon_coordinator.core.round import StepRound
from conformance.breaking import serve_with


def plain(round_: StepRound) -> float:
    losses = [each.loss_sum / each.weight for _, each in round_.in_rank_order if each.weight > 0]
    return sum(losses) / len(losses) if losses else 0.0


if __name__ == "__main__":
    serve_with((StepRound, "loss", property(plain)))
