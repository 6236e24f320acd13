"""The service: `andon.v1.Reducer` on a server, bytes in and bytes out."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

import grpc

from andon.protocol.reasons import Reason
from andon_reducer.core.effects import Refusal
from andon_reducer.core.observer import Observer
from andon_reducer.transport.reduce import Exchanger
from andon_reducer.transport.state import StateExchanger
from andon_reducer.transport.status import Refused, abort
from andon_reducer.transport.stream import Context

__all__ = ["SERVICE_NAME", "ReducerService"]

SERVICE_NAME = "andon.v1.Reducer"

_Answer = TypeVar("_Answer")
_log = logging.getLogger(__name__)


class ReducerService:
    """The three calls of a reducer. Each ends well, or with the status of a refusal."""

    def __init__(self, exchanger: Exchanger, states: StateExchanger, observer: Observer) -> None:
        """Serves gradients by `exchanger` and state by `states`."""
        self._exchanger = exchanger
        self._states = states
        self._observer = observer

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the calls, without (de)serialisers: bulk is not parsed by generated code."""
        calls: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Reduce": grpc.stream_stream_rpc_method_handler(self._reduce),
            "PutState": grpc.stream_stream_rpc_method_handler(self._put_state),
            "GetState": grpc.unary_stream_rpc_method_handler(self._get_state),
        }
        generic = grpc.method_handlers_generic_handler(SERVICE_NAME, calls)
        server.add_generic_rpc_handlers((generic,))

    async def _reduce(self, _: Any, context: Context) -> None:
        await self._guarded(self._exchanger.serve(context), context)

    async def _put_state(self, _: Any, context: Context) -> None:
        await self._guarded(self._states.put(context), context)

    async def _get_state(self, request: bytes, context: Context) -> None:
        await self._guarded(self._states.get(request, context), context)

    async def _guarded(self, call: Awaitable[_Answer], context: Context) -> _Answer:
        try:
            return await call
        except Refused as refused:
            refusal = refused.refusal
        except grpc.aio.InternalError:
            # So gRPC says that what was to be written can't be: the peer is gone.
            refusal = Refusal(Reason.PEER_GONE, "the peer is gone")
        except Exception:
            _log.exception("a call failed")
            refusal = Refusal(Reason.INTERNAL, "the reducer failed; its log says how")
        self._observer.refused(refusal.reason)
        return await abort(context, refusal)
