"""A worker says what its script does, from another thread, also after a call kept the lock."""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
import threading
import time
from queue import SimpleQueue

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from andon.protocol.records import PositionRange
from andon.protocol.slowness import Explanation, SlowPhase
from andon.v1 import coordinator_pb2 as pb
from andon_trainer.data.feed import Share
from andon_trainer.data.feeder import LoaderFeeder
from andon_trainer.exchange.control.control import ControlStream
from andon_trainer.exchange.control.explaining import Explainer
from andon_trainer.exchange.control.heartbeats import ScalarOutbox
from andon_trainer.exchange.path import Inbox


def test_a_question_is_answered_while_the_script_stands_still() -> None:
    stream = ControlStream("127.0.0.1:1", Inbox(), 1, outbox=ScalarOutbox())
    stream.explainer = Explainer(gpu=lambda: None)
    stream.show("BUSY", "upload")
    vars(stream)["_call"] = [pb.TrainResponse(explain=pb.Explain(number=3))]

    stream._read()
    said = stream._outgoing.get(timeout=10)  # The script's thread stands in this very line.
    stream.close()

    assert said is not None
    answer = said.explanation
    assert (answer.number, answer.phase, answer.detail) == (3, pb.SLOW_PHASE_SCRIPT, "upload")
    own = [line for line in answer.stacks[0].lines if line.own]
    assert own[0].function == "test_a_question_is_answered_while_the_script_stands_still"
    assert answer.facts.apart_s > 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: timers for one thread")
def test_the_line_of_a_call_that_kept_the_interpreters_lock_is_known_after_it() -> None:
    explainer, stop = Explainer(gpu=lambda: None), threading.Event()
    watching = threading.Thread(target=lambda: explainer.watch.run(stop))
    watching.start()
    assert explainer.watch.watches.wait(10)
    answers: SimpleQueue[Explanation] = SimpleQueue()

    # Unlike a sleep in C, this goes on after the signal that has the stack written.
    ctypes.PyDLL(None).system(b"sleep 0.9")
    called = sys._getframe().f_lineno - 1
    explainer.asked(1, str, answers.put)
    answer = answers.get(timeout=10)
    stop.set()
    watching.join()

    assert answer.phase is SlowPhase.SCRIPT
    assert answer.facts.held_s > 0.7
    assert answer.guilty is not None
    assert answer.guilty.line == called


def test_a_question_that_comes_while_another_is_answered_gets_that_answer() -> None:
    answers: SimpleQueue[Explanation] = SimpleQueue()

    def ask_again() -> None:
        explainer.asked(2, str, answers.put)

    explainer = Explainer(gpu=ask_again)

    explainer.asked(1, str, answers.put)

    assert answers.get(timeout=10).number == 2


class Slow(Dataset[torch.Tensor]):
    """One sample, which is there only once somebody has been told why it is not."""

    def __init__(self, method: str) -> None:
        context = multiprocessing.get_context(method)
        self.began, self.told = context.Event(), context.Event()

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        self.began.set()
        assert self.told.wait(60)
        return torch.zeros(1)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: files in memory")
def test_the_line_that_a_loading_process_is_in_is_the_one_that_the_worker_waits_for() -> None:
    explainer, dataset = Explainer(gpu=lambda: None), Slow("fork")
    loader = DataLoader(dataset, num_workers=1, multiprocessing_context="fork")
    feeder = LoaderFeeder(loader, seed=7)
    answers: SimpleQueue[Explanation] = SimpleQueue()

    def ask() -> None:
        assert dataset.began.wait(60)
        answer, until = explainer.explain(1, ""), time.monotonic() + 60
        while answer.loads is None and time.monotonic() < until:
            answer = explainer.explain(1, "")  # The script did not wait for its batch yet.
        answers.put(answer)
        dataset.told.set()

    feeder.open()
    asking = threading.Thread(target=ask)
    asking.start()
    (batch,) = feeder.batches(Share(0, (PositionRange(0, 1),)), lambda: iter(()))
    asking.join()
    feeder.close()

    answer = answers.get(timeout=10)
    assert len(batch.batch) == 1
    assert (answer.phase, answer.loads is not None) == (SlowPhase.DATA, True)
    assert answer.guilty is not None
    assert answer.guilty.function == "__getitem__"
