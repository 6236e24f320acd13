"""The services grpc.reflection.v1 and v1alpha: what is served here, described for any client.

Theory of operation: grpcio-reflection speaks v1alpha. v1 has the same messages under another
package, so one servicer answers both. Its pool holds the files of what is served and nothing else
that the process happens to have loaded; the file of v1 is that of v1alpha, renamed.
"""

# ruff: noqa: N802 - the protocol names its methods

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha import reflection_pb2 as pb

from andon.protocol.reasons import Reason
from andon.v1 import coordinator_pb2, reducer_pb2, ring_pb2
from andon.wire.statuses import status_of

__all__ = ["reflect"]

_V1 = "grpc.reflection.v1"
_V1ALPHA = "grpc.reflection.v1alpha"
_FILE = "grpc/reflection/v1/reflection.proto"
_SERVICE = "ServerReflection"
_METHOD = "ServerReflectionInfo"
# A ring's service is each worker's own, and errors have details: whoever asks here finds both.
_KNOWN = (coordinator_pb2, reducer_pb2, ring_pb2, error_details_pb2, pb)


def reflect(server: grpc.aio.Server, services: Sequence[str], *modules: Any) -> Callable[[], None]:
    """Adds reflection, v1 and v1alpha, to a server that has not started.

    A client may keep its stream open for ever; what is returned ends them all.

    Args:
        server: serves it.
        services: full names of what else is served.
        modules: generated code that describes services beside Andon's own.
    """
    own = tuple(f"{package}.{_SERVICE}" for package in (_V1, _V1ALPHA))
    pool = descriptor_pool.DescriptorPool()
    files = [module.DESCRIPTOR for module in (*_KNOWN, *modules)]
    for file in files:
        _add(pool, file)
    pool.Add(_renamed())
    described = [name.full_name for file in files for name in file.services_by_name.values()]
    servicer = _Servicer((*services, *own), (*described, *own), pool)
    calls = {
        _METHOD: grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            request_deserializer=pb.ServerReflectionRequest.FromString,
            response_serializer=pb.ServerReflectionResponse.SerializeToString,
        )
    }
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(name, calls) for name in own)
    )
    return servicer.leaving.set


class _Servicer(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # it has no types
    """Finds methods, too, which a pool does not."""

    def __init__(self, services: Sequence[str], described: Sequence[str], pool: Any) -> None:
        """Lists `services`, and describes those that are only `described`, too."""
        super().__init__(services, pool=pool)
        self.leaving = asyncio.Event()
        """Set once all streams are to end."""
        self._methods = {
            f"{name}.{method.name}": name
            for name in described
            for method in pool.FindServiceByName(name).methods
        }

    async def ServerReflectionInfo(
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        """Answers each question."""
        async for asked in self._questions(request_iterator):
            async for answer in super().ServerReflectionInfo(self._one(asked), context):
                answer.original_request.CopyFrom(asked)
                yield answer
        if self.leaving.is_set():
            text = "the process is going away: ask again later"
            await context.abort_with_status(status_of(Reason.SERVICE_LEAVING, text))

    async def _questions(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """What is asked, until nothing more is, or the process goes away."""
        leaving = asyncio.create_task(self.leaving.wait())
        messages = aiter(requests)
        reading: asyncio.Future[Any] | None = None
        try:
            while not leaving.done():
                reading = asyncio.ensure_future(anext(messages, None))
                await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done() or (asked := reading.result()) is None:
                    return
                yield asked
        finally:
            for task in (leaving, reading):
                if task is not None:
                    task.cancel()

    async def _one(self, asked: Any) -> AsyncIterator[Any]:
        """The question, about its service if it is about a method."""
        service = self._methods.get(asked.file_containing_symbol)
        yield (
            asked if service is None else pb.ServerReflectionRequest(file_containing_symbol=service)
        )


def _add(pool: Any, file: Any) -> None:
    """Adds a file's description, after what it builds upon."""
    for dependency in file.dependencies:
        _add(pool, dependency)
    description = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(description)
    pool.Add(description)


def _renamed() -> descriptor_pb2.FileDescriptorProto:
    """The file of v1."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    file.name, file.package = _FILE, _V1
    file.ClearField("options")
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = _in_v1(field.type_name)
    for service in file.service:
        for method in service.method:
            method.input_type = _in_v1(method.input_type)
            method.output_type = _in_v1(method.output_type)
    return file


def _in_v1(name: str) -> str:
    return name.replace(f".{_V1ALPHA}.", f".{_V1}.")
