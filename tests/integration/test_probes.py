"""A worker answers probes, whatever its script does."""

from __future__ import annotations

from andon.v1 import coordinator_pb2 as pb
from andon_trainer.exchange.control.control import ControlStream
from andon_trainer.exchange.control.heartbeats import ScalarOutbox
from andon_trainer.exchange.path import Inbox


def test_a_probe_is_answered_by_the_thread_that_reads_it() -> None:
    stream = ControlStream("127.0.0.1:1", Inbox(), 1, outbox=ScalarOutbox())
    vars(stream)["_call"] = [pb.TrainResponse(probe=pb.Probe(number=each)) for each in (7, 8)]

    stream._read()
    stream.close()

    answers = list(stream._requests())
    assert [each.probe_answer.number for each in answers] == [7, 8]
