"""Same bits: what a line must be like, so that no bit of its weights depends on its workers.

The gradients of a step are added along the tree over the batch's grains, as
docs/protocol-same-bits.md says. Here is which settings can't go with that, and what is checked of
the workers' reports.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from andon.protocol.encoding import Encoding
from andon.protocol.grains import Grains, NodeLoss, cover, fold
from andon.protocol.run_settings import Policy, Topology
from andon.protocol.schedules import Schedule
from andon.protocol.shards import Ranges
from andon_coordinator.core.defects import LineDefect, in_loss, violation
from andon_coordinator.core.events import Ready
from andon_coordinator.core.settings import PacingSettings

__all__ = ["Obstacle", "along_tree", "in_nodes", "obstacle_in"]


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A setting with which bits depend on the workers."""

    setting: str
    """As a flag."""
    why: str
    remedy: str


def obstacle_in(policy: Policy, pacing: PacingSettings) -> Obstacle | None:
    """The first setting that can't go with equal bits; None if there is none."""
    if policy.topology is Topology.RING:
        return Obstacle("--topology ring", "adds gradients in another order", "use --topology star")
    if policy.encoding is not Encoding.FLOAT32:
        return Obstacle(
            f"--encoding {policy.encoding.label}",
            "rounds each worker's part",
            "use --encoding float32; averages may have another one (--answer-encoding)",
        )
    if pacing.schedule in (Schedule.CADENCE, Schedule.LOCAL):
        takes = "by the workers' speed" if pacing.schedule is Schedule.CADENCE else "by each worker"
        return Obstacle(
            f"--schedule {pacing.schedule.value}",
            f"takes steps {takes}",
            "use --schedule every-step; shares may be balanced (--shares)",
        )
    if pacing.interleaved:
        return Obstacle(
            f"--shares {'balanced-' if pacing.balanced else ''}interleaved",
            "divides grains",
            "use --shares equal or balanced",
        )
    if policy.max_grad_norm is not None:
        return Obstacle(
            "--max-grad-norm",
            "limits the gradient of a worker's share",
            "leave it out, and limit the averaged gradient in the script (clip_grad_norm_)",
        )
    if pacing.asks_for_noise:
        return Obstacle(
            "--max-anchor with --lr-scaling",
            "lets windows grow by the noise of workers' gradients",
            "leave one of them out",
        )
    if policy.trims:
        return Obstacle(
            "--mean trimmed", "leaves out parts of workers' shares", "leave one of them out"
        )
    if policy.own_gradient_norm:
        return Obstacle(
            "--worker-grad-norm",
            "compares gradients of workers' shares",
            "leave it out; --grad-norm-spike judges the averaged gradient",
        )
    return None


def in_nodes(worker: int, ready: Ready, share: Ranges, grains: Grains) -> LineDefect | None:
    """What is wrong with the nodes of one worker's report, whose share these positions are."""
    nodes = cover(grains.of(share), grains.count)
    reported = tuple(each.node for each in ready.node_losses)
    if reported != nodes:
        what = f"reported the losses of {_listed(reported)}, and its share has {_listed(nodes)}"
        return violation(worker, what)
    for each in ready.node_losses:
        defect = in_loss(worker, each.weight, each.loss_sum, str(each.node))
        if defect is not None:
            return defect
    return None


def along_tree(
    losses: Iterable[NodeLoss], grains: Grains, number: Callable[[NodeLoss], float]
) -> float:
    """The sum of a number of nodes that are the whole batch, in float64, along the tree."""
    return fold({each.node: number(each) for each in losses}, grains.root, operator.add)


def _listed(nodes: Iterable[object]) -> str:
    return ", ".join(map(str, nodes)) or "no grain"
