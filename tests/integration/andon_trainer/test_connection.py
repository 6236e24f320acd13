"""A worker's connections to a real coordinator: when it waits, and when it gives up."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.run_settings import RunPlan
from andon.v1 import coordinator_pb2 as pb
from andon_trainer.config import LineConfig
from andon_trainer.core.reports import Joined, Joining
from andon_trainer.errors import JoinRefused
from andon_trainer.exchange.control.connection import Connection
from andon_trainer.exchange.path import Inbox
from integration.harness import Service
from integration.strangers import TRAIN, Stranger

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

LAYOUT = Layout((Block(BlockKind.OTHER, "b", (Component("w", (4,)),)),))
PLAN = RunPlan(global_batch=4, dataset_size=8)


class Said(logging.Handler):
    """Waits for a log message of the connection."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.told = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
        self.told.set()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path / "run", 2) as service:
        yield service


@pytest.fixture
def said() -> Iterator[Said]:
    said, logger = Said(), logging.getLogger("andon_trainer.exchange.control.connection")
    logger.addHandler(said)
    yield said
    logger.removeHandler(said)


def connection_to(service: Service, slot: int | None = 1) -> Connection:
    return Connection(LineConfig(address=service.address, launch_slot=slot), Inbox())


def join(service: Service, connection: Connection) -> Joined:
    return connection.connect(
        Joining(
            run_id=service.run_id,
            incarnation=connection.incarnation,
            layout=LAYOUT,
            plan=PLAN,
            node_id="here",
            launch_slot=connection.slot,
            device=("cpu", "none", 0, 1),
        )
    )


def test_a_dead_process_that_still_seems_to_hold_the_slot_is_waited_out(
    service: Service, said: Said
) -> None:
    connection = connection_to(service)
    join(service, connection)
    connection.close()
    service.await_status(lambda line: line.live == 0)
    dead = Stranger(service.address, service.run_id, LAYOUT, PLAN)
    with dead.call(TRAIN) as (messages, responses):
        messages.put(dead.join(launch_slot=1).SerializeToString())
        assert pb.TrainResponse.FromString(next(responses)).join_accepted.worker == 1
        again: list[Joined] = []
        rejoining = threading.Thread(target=lambda: again.append(join(service, connection)))
        rejoining.start()
        assert said.told.wait(30)
        responses.cancel()
        rejoining.join(30)
    connection.close()

    assert said.text == "waiting for slot 1 (another process on stranger holds slot 1)"
    assert [joined.worker for joined in again] == [1]


def test_a_worker_whose_slot_a_newcomer_got_is_given_another_unless_its_launcher_chose_it(
    service: Service,
) -> None:
    chosen_by_the_line = connection_to(service, None)
    assert join(service, chosen_by_the_line).worker == 0
    chosen_by_the_line.close()
    service.await_status(lambda line: line.live == 0)
    newcomer = connection_to(service, None)
    assert join(service, newcomer).worker == 0

    again = join(service, chosen_by_the_line)
    newcomer.close()
    chosen_by_the_line.close()

    assert again.worker == 1


def test_a_slot_that_another_process_holds_is_refused_at_once_to_a_newcomer(
    service: Service, said: Said
) -> None:
    first, second = connection_to(service), connection_to(service)
    join(service, first)

    with pytest.raises(JoinRefused, match="holds slot 1"):
        join(service, second)
    first.close()

    assert not said.told.is_set()
