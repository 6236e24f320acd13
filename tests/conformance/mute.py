"""A coordinator that answers GetStatus and nothing else.

Usage: mute.py PORT. As a program it ends, with exit code 7, once somebody joins.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from andon.v1 import coordinator_pb2 as pb

__all__ = ["EXIT_CODE", "LAST_WORDS", "mute_service"]

EXIT_CODE = 7
LAST_WORDS = "somebody joined: what now?"

Train = Callable[[Any, Any], Awaitable[None]]


async def be_silent(requests: Any, context: Any) -> None:
    """Waits forever."""
    await asyncio.Event().wait()


async def _end(requests: Any, context: Any) -> None:
    sys.stderr.write(f"{LAST_WORDS}\n")
    sys.stderr.flush()
    os._exit(EXIT_CODE)


async def _status(request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
    forming = pb.LINE_STATE_FORMING
    return pb.GetStatusResponse(
        status=pb.LineStatus(run_id="mute", state=forming, expect_workers=2)
    )


def mute_service(train: Train = be_silent) -> Any:
    """The service; `train` serves its Train calls."""
    calls: dict[str, Any] = {
        "Train": grpc.stream_stream_rpc_method_handler(train),
        "GetStatus": grpc.unary_unary_rpc_method_handler(
            _status,
            pb.GetStatusRequest.FromString,
            pb.GetStatusResponse.SerializeToString,
        ),
    }
    return grpc.method_handlers_generic_handler("andon.v1.Coordinator", calls)


async def _serve(port: int) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((mute_service(_end),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
