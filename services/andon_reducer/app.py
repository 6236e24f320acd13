"""The reducer put together: core, transport and telemetry, as `andon.v1.Reducer` on a server."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from prometheus_client import CollectorRegistry

from andon.host.logs import LogEvent
from andon.host.telemetry import ExchangeDurations, RefusalCounter
from andon.protocol.messages import BlockFault
from andon.protocol.reasons import Reason
from andon.tcp.listening import TcpListener
from andon.wire.statuses import status_of
from andon_reducer.config import ReducerConfig
from andon_reducer.core.effects import CallRefusal, DataPath, FreeRound
from andon_reducer.core.rounds import Rounds
from andon_reducer.telemetry import ReducerTelemetry
from andon_reducer.transport.admission import CallRefused, SessionTokens
from andon_reducer.transport.announced import Announced
from andon_reducer.transport.arenas import Arenas
from andon_reducer.transport.reduce import ReduceServicer
from andon_reducer.transport.reduce_stream import Context
from andon_reducer.transport.relay import Relay
from andon_reducer.transport.state import StateServicer

__all__ = ["SERVICE_NAME", "ReducerApp", "build_reducer"]

SERVICE_NAME = "andon.v1.Reducer"

FaultReport = Callable[[BlockFault, tuple[tuple[int, int], ...]], None]

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class ReducerApp:
    """One reducer of one process; lives on the event loop on which it was built."""

    def __init__(
        self,
        reduce: ReduceServicer,
        states: StateServicer,
        telemetry: ReducerTelemetry,
        announced: Announced,
    ) -> None:
        """Built by `build_reducer`."""
        self.announced = announced
        """What coordinators tell this reducer."""
        self._reduce = reduce
        self._states = states
        self._telemetry = telemetry

    @property
    def paths(self) -> frozenset[DataPath]:
        """Those that bytes took in the last round; any thread may ask."""
        return self._telemetry.paths

    @property
    def inflight_bytes(self) -> int:
        """Bytes of contributions and averages held now."""
        return self._reduce.inflight_bytes

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serves the four calls on a server that is not started yet."""
        # Without (de)serialisers: generated code would copy the bulk several times.
        calls: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Reduce": grpc.stream_stream_rpc_method_handler(self._serve_reduce),
            "PutState": grpc.stream_stream_rpc_method_handler(self._serve_put_state),
            "GetState": grpc.unary_stream_rpc_method_handler(self._serve_get_state),
            "ReportLanes": grpc.unary_unary_rpc_method_handler(self._serve_report_lanes),
        }
        generic = grpc.method_handlers_generic_handler(SERVICE_NAME, calls)
        server.add_generic_rpc_handlers((generic,))

    def report_faults(self, run_id: str, report: FaultReport) -> None:
        """Calls `report` with each fault of the run `run_id`, before any worker hears of it.

        Beside the fault it gets ranks and the workers that sent as them, by their session tokens.
        """

        def freed(effect: FreeRound) -> None:
            if effect.run_id == run_id and effect.fault is not None:
                report(effect.fault, effect.senders)

        self._reduce.report_fault = freed

    async def close(self) -> None:
        """Ends all calls as UNAVAILABLE and the threads; call it before the server's `stop`."""
        # First, and without an await: from here on no transfer begins.
        self._states.close()
        await self._reduce.close()

    async def _serve_reduce(self, _: Any, context: Context) -> None:
        await self._guard(self._reduce.serve(context), context)

    async def _serve_put_state(self, _: Any, context: Context) -> None:
        await self._guard(self._states.put(context), context)

    async def _serve_get_state(self, request: bytes, context: Context) -> None:
        await self._guard(self._states.get(request, context), context)

    async def _serve_report_lanes(self, request: bytes, context: Context) -> bytes:
        return await self._guard(self._reduce.report(request), context)

    async def _guard(self, call: Awaitable[Answer], context: Context) -> Answer:
        """Ends a call that fails with the status of a refusal."""
        try:
            return await call
        except CallRefused as refused:
            refusal = refused.refusal
        except grpc.aio.InternalError:
            # gRPC raises this if a message can't be written: the peer is gone.
            refusal = CallRefusal(Reason.PEER_GONE, "the peer is gone")
        except Exception:
            _log.exception(LogEvent("call_failed", "a call failed"))
            refusal = CallRefusal(Reason.INTERNAL, "the reducer failed; its log says how")
        self._telemetry.refused(refusal.reason)
        await context.abort_with_status(status_of(refusal.reason, refusal.message))
        raise AssertionError("to abort a call raises")


def build_reducer(
    config: ReducerConfig,
    registry: CollectorRegistry,
    secret: bytes,
    refusals: RefusalCounter | None = None,
    exchanges: ExchangeDurations | None = None,
    listener: TcpListener | None = None,
) -> ReducerApp:
    """A reducer whose session tokens are made with `secret`; metrics go to `registry`.

    If another service of the process uses the same registry, `refusals` and `exchanges` are its
    metrics, and this one counts there. With a `listener`, which outlives it, it offers TCP lanes.
    """
    telemetry = ReducerTelemetry(registry, refusals, exchanges)
    announced = Announced(SessionTokens(secret))
    rounds = Rounds(
        window_bytes=config.window_bytes,
        max_payload_bytes=config.max_payload_bytes,
        chunk_elements=config.chunk_elements,
        max_held_bytes=config.limits.max_held_bytes,
        listener_bytes=config.listener_bytes,
    )
    reduce = ReduceServicer(
        rounds,
        telemetry,
        announced=announced,
        arenas=Arenas(config.shared_dir),
        config=config,
        listener=listener,
    )
    telemetry.follow(
        lambda: reduce.averaging_s, lambda: reduce.inflight_bytes, reduce.lane_connections
    )
    relay = Relay(config.limits.max_state_pieces, patience_s=config.state_patience_s)
    states = StateServicer(relay, telemetry, announced=announced, config=config)
    return ReducerApp(reduce, states, telemetry, announced)
