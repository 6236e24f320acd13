"""Heartbeats carry what a script logged, and the last ones leave before Leave."""

from __future__ import annotations

import sys
import threading

from andon.protocol.scalars import Scalar
from andon.v1 import coordinator_pb2 as pb
from andon_trainer.exchange.control.heartbeats import Heartbeats, ProcessMeter, ScalarOutbox

VAL = Scalar("val", 3, 0.25)


class Stream:
    """The heartbeats of one stream, and what was sent."""

    def __init__(self, outbox: ScalarOutbox, number: int = 1) -> None:
        self.sent: list[pb.Heartbeat] = []
        self.came = threading.Event()
        self.beats = Heartbeats(self._send, number, outbox, None)

    def _send(self, request: pb.TrainRequest) -> None:
        self.sent.append(request.heartbeat)
        self.came.set()

    @property
    def carried(self) -> list[list[tuple[str, int, float]]]:
        return [[(each.name, each.step, each.value) for each in beat.scalars] for beat in self.sent]


def test_what_was_logged_before_leaving_is_sent_though_nothing_was_answered() -> None:
    outbox = ScalarOutbox()
    stream = Stream(outbox)
    stream.beats.begin()
    outbox.put([VAL])

    stream.beats.flush()
    outbox.put([Scalar("lr", 4, 0.5)])
    stream.beats.flush()
    stream.beats.flush()  # Nothing is left: nothing is sent.

    assert stream.carried == [[("val", 3, 0.25)], [("lr", 4, 0.5)]]
    assert [beat.sequence for beat in stream.sent] == [1, 2]


def test_a_heartbeat_says_what_the_worker_does() -> None:
    outbox = ScalarOutbox()
    stream = Stream(outbox)
    stream.beats.begin()
    stream.beats.show("BUSY", "upload")
    outbox.put([VAL])

    stream.beats.flush()

    (beat,) = stream.sent
    assert (beat.activity, beat.detail) == (pb.ACTIVITY_BUSY, "upload")


def test_how_busy_a_process_is_and_its_memory_are_measured_twice_a_second_at_most() -> None:
    meter = ProcessMeter(10.0, 1.0)

    early, first, soon, second = (
        meter.read(at, used_s)
        for at, used_s in ((10.1, 1.1), (12.0, 4.0), (12.4, 9.0), (13.0, 4.5))
    )

    assert early == (None, None)
    assert soon == first
    assert [cores for cores, _memory in (first, second)] == [1.5, 0.5]
    if sys.platform == "linux":
        assert first[1] is not None
        assert 2**20 < first[1] < 2**40


def test_a_scalar_does_not_wait_for_the_next_heartbeat_of_the_lease() -> None:
    outbox = ScalarOutbox()
    stream = Stream(outbox)
    stream.beats.begin()
    thread = threading.Thread(target=lambda: stream.beats.run(3600.0))
    thread.start()
    try:
        outbox.put([VAL])

        assert stream.came.wait(60)
        assert stream.carried == [[("val", 3, 0.25)]]
        stream.came.clear()
        outbox.put([Scalar("val", 4, 0.5)])
        stream.beats.answered(pb.HeartbeatAnswer(sequence=1))
        assert stream.came.wait(60)
        assert stream.carried[1:] == [[("val", 4, 0.5)]]
    finally:
        stream.beats.stop()
        thread.join()


def test_a_stream_that_has_not_joined_sends_no_scalars() -> None:
    outbox = ScalarOutbox()
    first, second = Stream(outbox, 1), Stream(outbox, 2)
    first.beats.begin()
    outbox.put([VAL])

    second.beats.flush()
    assert second.sent == []
    second.beats.begin()
    first.beats.flush()
    assert first.sent == []
    second.beats.flush()

    assert second.carried == [[("val", 3, 0.25)]]
