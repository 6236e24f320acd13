"""A worker without a model: it implements the whole protocol and exchanges made-up gradients."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import numpy as np
import numpy.typing as npt
from paths import PATHS, Way

from andon.host.process import own_process
from andon.protocol.capabilities import STANDING
from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.limits import PROTOCOL_VERSION
from andon.protocol.records import Key, RecordKind
from andon.protocol.run_settings import RunPlan
from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon.wire import conversion, layouts
from andon_trainer.config import LineConfig
from andon_trainer.core.events import (
    Assigned,
    AveragesComplete,
    Committed,
    Dismissed,
    Event,
    ExchangeFailed,
    Halted,
    Resumed,
    TransferAsked,
    Voided,
)
from andon_trainer.exchange.channels import open_channel
from andon_trainer.exchange.control.translation import accepted_from, event_from
from andon_trainer.exchange.local_socket import LocalSocket
from andon_trainer.exchange.path import Inbox, Traffic
from andon_trainer.exchange.route import Route, ring_address_of

__all__ = ["BLOCK_ELEMENTS", "ProtocolWorker", "block_sizes"]

BLOCK_ELEMENTS = 2**22
"""Elements of a block: 16 MiB of float32, about a transformer block with 512 features or more."""

Floats = npt.NDArray[np.float32]


def block_sizes(mib: float) -> list[int]:
    """The size of each block, in elements, of a model of `mib` MiB of float32."""
    elements = round(mib * 2**18)
    return [min(BLOCK_ELEMENTS, elements - at) for at in range(0, elements, BLOCK_ELEMENTS)]


class ProtocolWorker:
    """One worker of a run, from Join to the end; used by one thread.

    A subclass may observe messages from the coordinator in `heard`, and heartbeats in `beat`. It
    sends its first heartbeat at once, which says that it uses the coordinator's socket.
    """

    heartbeat_every_s = 1.0

    def __init__(  # noqa: PLR0913  # the parameters of a benchmark's worker
        self,
        address: str,
        run_id: str,
        slot: int,
        mib: float,
        global_batch: int,
        *,
        way: Way = PATHS["wire"],
        tls: Path | None = None,
        checked: bool = True,
    ) -> None:
        """Makes worker `slot` of run `run_id`, with a model of `mib` MiB, that exchanges by `way`.

        `tls` is the folder of its certificates; None: plaintext. If `checked`, chunks have
        checksums.
        """
        self._config = LineConfig(
            address=address,
            shared_dir=way.shared_dir,
            tls=tls,
            insecure=True,
            checksums=checked,
            tcp=way.tcp,
        )
        blocks = (
            Block(BlockKind.OTHER, f"b{i}", (Component(f"w{i}", (size,)),))
            for i, size in enumerate(block_sizes(mib))
        )
        self.layout = Layout(tuple(blocks))
        self.address, self.run_id, self.slot = address, run_id, slot
        self.steps = 0
        """The number of committed steps."""
        self.exchanging = False
        """Whether a round is running, as far as this worker knows."""
        self._plan = RunPlan(global_batch=global_batch, dataset_size=2**40)
        self._outgoing: queue.SimpleQueue[pb.TrainRequest | None] = queue.SimpleQueue()
        self._inbox = Inbox()
        self._socket: LocalSocket | None = None
        """What carries control messages in place of gRPC, once it has joined."""
        self._head: Key | None = None
        self._samples = 0
        self._next: Assigned | None = None
        """The next step's assignment, if it came with the last commit."""

    def __enter__(self) -> Self:
        """Joins the line."""
        self._channel = open_channel(self.address, self._config.tls)
        self._responses = CoordinatorStub(self._channel).Train(self._requests())
        own = own_process()
        join = pb.Join(
            run_id=self.run_id,
            launch_slot=self.slot,
            incarnation=self.slot + 1,
            protocol_version=PROTOCOL_VERSION,
            capabilities=self._config.capabilities,
            layout=layouts.layout_to_proto(self.layout),
            plan=conversion.plan_to_proto(self._plan),
            process=pb.ProcessPlace(host=own.host, id=own.id),
        )
        self._send(pb.TrainRequest(join=join))
        self._joined = accepted_from(next(self._responses))
        self._stands = STANDING in self._joined.capabilities
        self._route = Route(self.layout, self._inbox, self._config)
        self._route.take(self._joined)
        self._socket = self._connected()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the streams."""
        self._route.exchange.close()
        self._outgoing.put(None)
        self._channel.close()
        if self._socket is not None:
            self._socket.close()

    @property
    def traffic(self) -> Traffic:
        """What this worker sent and received so far, by the path it went."""
        return self._route.traffic

    @property
    def averages(self) -> Sequence[Floats]:
        """The means of the last step, one vector for each block."""
        return list(self._route.exchange.averages)

    def laid(self, gradients: Sequence[Floats]) -> list[Floats]:
        """The gradients where backward would put them: in the path's memory, if it provides any."""
        laid = []
        for block, gradient in enumerate(gradients):
            lent = self._route.exchange.lend(block)
            if lent is not None and lent[0] is not gradient:
                np.copyto(lent[0], gradient)
            laid.append(gradient if lent is None else lent[0])
        return laid

    def step(self, gradients: Sequence[Floats]) -> bool:
        """Runs one step: requests work, exchanges `gradients` and waits for the commit.

        The next step is asked for with the report of this one, as by a script that goes straight
        on.

        Returns:
            True if the step was committed; False if the run is over.
        """
        assigned, self._next = self._next, None
        if assigned is None:
            self._ask()
        else:
            self._contribute(assigned, gradients)
        while True:
            event = self._inbox.take()
            if isinstance(event, Dismissed):
                return False
            if isinstance(event, Committed):
                if self._committed(event):
                    return True
            else:
                self._take(event, gradients)

    def heard(self, response: pb.TrainResponse) -> None:
        """Observes a message from the coordinator, on a reading thread."""

    def beat(self, sequence: int) -> None:
        """Observes an outgoing heartbeat, on the heartbeat thread."""

    def _connected(self) -> LocalSocket | None:
        """The coordinator's socket, if it offers one, and this worker shares its folder."""
        name, folder = self._joined.control_socket, self._config.shared_dir
        if not name or folder is None:
            return None
        try:
            return LocalSocket(
                folder / name,
                lambda message: self._take_in(pb.TrainResponse.FromString(message)),
                lambda _why: None,
                peer="coordinator",
            )
        except OSError:  # It shares the folder with its reducer, and with no coordinator.
            return None

    def _send(self, message: pb.TrainRequest) -> None:
        if self._socket is None:
            self._outgoing.put(message)
        else:
            self._socket.send(message.SerializeToString, small=True)

    def _requests(self) -> Iterator[pb.TrainRequest]:
        while (message := self._outgoing.get()) is not None:
            yield message

    def _read(self) -> None:
        try:
            for response in self._responses:
                self._take_in(response)
        except grpc.RpcError:
            pass  # the service ended, as it does at the end of a benchmark
        self._inbox.put(Dismissed("the service ended"))

    def _take_in(self, response: pb.TrainResponse) -> None:
        self.heard(response)
        event = event_from(response)
        if event is not None:
            self._inbox.put(event)

    def _beat(self) -> None:
        for sequence in range(1, 2**31):
            self.beat(sequence)
            self._send(pb.TrainRequest(heartbeat=pb.Heartbeat(sequence=sequence)))
            time.sleep(self.heartbeat_every_s)

    def _committed(self, commit: Committed) -> bool:
        """Takes a record; returns whether it is that of the step."""
        self.exchanging = False
        self._head, self._next = commit.record.key, commit.next
        if commit.record.kind is RecordKind.STEP:
            self.steps += 1
            return True
        self._ask()
        return False

    def _take(self, event: Event | None, gradients: Sequence[Floats]) -> None:
        """Takes anything else that happens within a step."""
        match event:
            case Assigned() as assigned:
                self._contribute(assigned, gradients)
            case AveragesComplete() as complete:
                self._ready(complete)
            case TransferAsked() as asked:
                self._move(asked)
            case Halted() | Voided() | Resumed():
                self.exchanging = False
                self._route.exchange.end()
                # In a halt that has no effect, and to ask twice does no harm.
                self._ask()
            case ExchangeFailed() as failed:
                # It belongs to a void round; or the coordinator is about to send its decision.
                print(f"worker {self.slot}: {failed}", file=sys.stderr)

    def _contribute(self, assigned: Assigned, gradients: Sequence[Floats]) -> None:
        self._route.follow(self._joined, assigned, self.address)
        self.exchanging = True
        self._samples = sum(map(len, assigned.positions))
        self._route.exchange.begin(assigned, float(self._samples))
        for block, gradient in enumerate(gradients):
            self._route.exchange.submit(block, gradient)

    def _move(self, asked: TransferAsked) -> None:
        """Moves only the head, because there are no weights."""
        if not asked.sends:
            self._head = asked.head
        report = pb.StateReport(
            transfer_id=asked.transfer_id, head=conversion.key_to_proto(self._head)
        )
        self._send(pb.TrainRequest(state_report=report))
        self._ask()

    def _ask(self) -> None:
        if self._head is not None:  # there is no work before the run is bootstrapped
            work = pb.RequestWork(
                head=conversion.key_to_proto(self._head),
                ring_address=ring_address_of(self._route.exchange),
            )
            self._send(pb.TrainRequest(request_work=work))

    def _ready(self, event: AveragesComplete) -> None:
        ready = pb.StepReady(
            key=conversion.key_to_proto(event.key),
            loss_sum=float(self._samples),
            weight=float(self._samples),
            samples=self._samples,
            total_weight=event.total_weight,
            world_size=event.world_size,
        )
        if self._stands:
            ready.next.ring_address = ring_address_of(self._route.exchange)
            ready.next.SetInParent()
        self._send(pb.TrainRequest(step_ready=ready))
