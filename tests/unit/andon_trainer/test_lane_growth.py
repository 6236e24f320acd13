"""What opens more connections of a lane looks at it when it carried something."""

from __future__ import annotations

import pytest

from andon.protocol.messages import LaneReport
from andon.tcp.kernel import LaneFlow
from andon.tcp.proof import LaneDirection
from andon_trainer.exchange.star import lane_growth
from andon_trainer.exchange.star.lane_growth import LaneGrowth
from integration.harness import wait_until


class Lanes:
    """A pair of lanes, and how often it was looked at."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        self.woken = self.looked_up = self.looked_down = 0

    @property
    def flow_up(self) -> LaneFlow | None:
        self.looked_up += 1
        return None

    @property
    def sent_bytes(self) -> int:
        self.woken += 1
        return self.sent

    @property
    def received_bytes(self) -> int:
        return self.received

    def connections(self, direction: LaneDirection) -> int:
        del direction
        return 1

    def add(self, direction: LaneDirection, index: int) -> None:
        raise AssertionError(f"{direction} {index}: nobody has asked for more")

    def use_up(self, count: int) -> None:
        assert count == 1

    def ask(self) -> LaneReport | None:
        self.looked_down += 1
        return None

    def await_wakings(self, count: int) -> None:
        most = self.woken + count
        wait_until(lambda: self.woken >= most)


def test_lanes_on_which_nothing_moved_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_EVERY_S", "_AT_REST_S"):
        monkeypatch.setattr(lane_growth, name, 0.002)
    lanes = Lanes()
    growth = LaneGrowth(lanes, lanes.ask, most=4, adaptive=True, start={})

    lanes.await_wakings(5)
    looked = [(lanes.looked_up, lanes.looked_down)]
    lanes.sent += 1
    lanes.await_wakings(5)
    looked.append((lanes.looked_up, lanes.looked_down))
    lanes.received += 1
    lanes.await_wakings(5)
    looked.append((lanes.looked_up, lanes.looked_down))
    growth.stop()

    assert looked == [(1, 1), (2, 1), (2, 2)]
