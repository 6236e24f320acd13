"""No message that can be read ends the line, its translation or its journal, or fills its memory.

Two workers keep every rule; a third says whatever can be said, in the name of anybody. After all of
it the coordinator starts again on what it wrote, and the two go on.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andon.protocol.halts import HaltAnswer
from andon.protocol.records import Key
from andon.protocol.run_settings import RunPlan
from andon.v1 import coordinator_pb2 as pb
from andon.wire import conversion, layouts
from andon_coordinator.core import events as on
from andon_coordinator.core.scalar_all_reduces import ScalarAllReduces
from scenarios.implausible import INTEGERS, changed
from scenarios.line_bench import LAYOUT
from scenarios.line_port import PLAN, RUN, Healthy, Port, held_bytes, let_work
from unit.andon.strategies import BOUNDED

MOST_HELD_BYTES = 2**19
"""Of a line of three; its layout and what a detector looks back on are most of it."""

PLANS = st.sampled_from(
    [PLAN, RunPlan(global_batch=3), RunPlan(global_batch=2**32 - 1, dataset_size=2**53 - 1)]
)


class Hostile:
    """Says what is drawn, on streams of its own or in a healthy worker's place."""

    def __init__(self, port: Port, data: st.DataObject) -> None:
        self._port = port
        self._data = data
        self._streams: list[int] = []

    def act(self) -> None:
        """Does one thing."""
        open_ones = [stream for stream in self._streams if stream in self._port.said]
        deeds = [self._join] + ([self._speak] * 5 + [self._end] if open_ones else [])
        self._streams = open_ones
        self._data.draw(st.sampled_from(deeds))()

    def _join(self) -> None:
        core = self._port.core
        join = pb.Join(
            run_id=RUN,
            incarnation=self._data.draw(st.integers(1, 4)),
            protocol_version=1,
            layout=layouts.layout_to_proto(LAYOUT),
            plan=conversion.plan_to_proto(self._port.plan),
            head=self._key(),
            held_key=self._key(),
            step=core.chain.step,
        )
        slot = self._data.draw(st.sampled_from([None, 0, 1, 2]))
        if slot is not None:
            join.launch_slot = slot
        changed(self._data, join, most=4)
        stream = self._port.join(pb.TrainRequest(join=join).SerializeToString())
        self._streams.append(stream)

    def _speak(self) -> None:
        """One message; maybe over and over, with a number in it that counts up."""
        message = self._data.draw(st.sampled_from(self._messages()))
        changed(self._data, getattr(message, message.WhichOneof("message")))
        stream = self._data.draw(st.sampled_from(self._streams))
        way = self._data.draw(st.sampled_from([1, -1]))
        for _ in range(self._data.draw(st.sampled_from([1, 1, 1, 1, 100]))):
            self._port.hear(stream, message.SerializeToString())
            if message.HasField("scalar_all_reduce"):
                message.scalar_all_reduce.sequence = (
                    message.scalar_all_reduce.sequence + way
                ) % 2**32

    def _end(self) -> None:
        stream = self._data.draw(st.sampled_from(self._streams))
        self._port.end(stream, gone=self._data.draw(st.booleans()))

    def _key(self) -> Any:
        """A key that means something now, or nothing at all; or none."""
        core = self._port.core
        round_, term = core.round, core.keys.term
        counted = self._data.draw(st.sampled_from(INTEGERS))
        return conversion.key_to_proto(
            self._data.draw(
                st.sampled_from(
                    [
                        None,
                        core.chain.head,
                        core.chain.head,
                        None if round_ is None else round_.key,
                        Key(term, counted),
                        Key(term + 2**32, counted),
                        Key(max(1, counted), 1),
                    ]
                )
            )
        )

    def _messages(self) -> list[pb.TrainRequest]:
        key, head = self._key(), self._key()
        transfers = list(self._port.core.transfers._active)
        return [
            pb.TrainRequest(request_work=pb.RequestWork(head=head)),
            pb.TrainRequest(
                step_ready=pb.StepReady(
                    key=key, loss_sum=2, weight=2, samples=2, total_weight=4, world_size=2
                )
            ),
            pb.TrainRequest(fault=pb.Fault(kind=pb.FAULT_KIND_STALE_ROUND, key=key, greatest=head)),
            pb.TrainRequest(fault=pb.Fault(kind=pb.FAULT_KIND_DATA_STREAM_LOST, key=key)),
            pb.TrainRequest(heartbeat=pb.Heartbeat(sequence=1)),
            pb.TrainRequest(
                heartbeat=pb.Heartbeat(
                    sequence=2,
                    scalars=[
                        pb.LoggedScalar(name="val", step=1, value=0.5),
                        pb.LoggedScalar(name="lr", value=math.nan),
                    ],
                )
            ),
            pb.TrainRequest(leave=pb.Leave(reason=pb.LEAVE_REASON_FAILED)),
            pb.TrainRequest(state_report=pb.StateReport(transfer_id=(*transfers, 1)[0], head=head)),
            pb.TrainRequest(scalar_all_reduce=pb.ScalarAllReduce(head=head, value=1, weight=1)),
        ]


@settings(BOUNDED, max_examples=BOUNDED.max_examples // 2)
@given(st.data())
def test_no_readable_message_ends_the_line_or_its_journal_or_fills_its_memory(
    data: st.DataObject,
) -> None:
    port = Port(plan=data.draw(PLANS))
    try:
        healthy = [Healthy(port, slot) for slot in range(2)]
        hostile = Hostile(port, data)
        steps = st.sampled_from([0, 0, 1])
        for _ in range(data.draw(st.integers(1, 12))):
            hostile.act()
            let_work(port, healthy, data.draw(steps))
            _clear(port, data)
        assert held_bytes(port.core) < MOST_HELD_BYTES

        port.start()

        let_work(port, healthy)
    finally:
        port.close()


def _clear(port: Port, data: st.DataObject) -> None:
    """A person answers a halt, as can be."""
    halt = port.core.halt
    if halt is not None:
        answer = data.draw(st.sampled_from([HaltAnswer.RETRY, HaltAnswer.SKIP]))
        port.tell(on.HaltCleared(halt.id, answer))
    port.now += data.draw(st.sampled_from([0.0, 0.0, 1.0, 40.0]))
    port.tell(on.TimePassed())


def test_healthy_workers_train_at_the_port() -> None:
    """The port is worth something: what keeps the rules gets its steps."""
    port = Port()
    healthy = [Healthy(port, slot) for slot in range(2)]

    let_work(port, healthy, steps=6)
    port.start()
    let_work(port, healthy, steps=2)

    assert port.core.chain.step == 8
    assert not port.core.halt
    port.close()


@pytest.mark.parametrize("way", [1, -1], ids=["up", "down"])
def test_what_a_line_holds_of_scalar_all_reduces_does_not_grow(way: int) -> None:
    scalar_all_reduces = ScalarAllReduces()

    for sequence in range(2**31, 2**31 + way * 2000, way):
        scalar_all_reduces.give(7, sequence, (1.0, 1.0, b""))
        scalar_all_reduces.give(1, sequence, (1.0, 1.0, b""))
        scalar_all_reduces.settle({1})

    assert held_bytes(scalar_all_reduces) < 4096
