"""Real services end the stream of a peer that sends a golden message of the refused kind."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from andon.protocol import tokens
from andon.protocol.layout import Layout
from andon.protocol.limits import PROTOCOL_VERSION
from andon.protocol.messages import OpenRound
from andon.protocol.run_settings import RunPlan
from andon.testing import small_layout
from andon.v1 import coordinator_pb2 as pb
from andon.wire import conversion, layouts
from andon.wire.frames import frame_request
from integration import reducer_bench
from integration.reducer_bench import Reducer
from integration.served import PLAN, RUN, config_in, end_of, serving
from integration.strangers import REDUCE, Stranger

pytestmark = pytest.mark.integration

FOLDER = Path(__file__).resolve().parents[2] / "conformance"
INDEX: list[dict[str, Any]] = json.loads((FOLDER / "index.json").read_text("utf-8"))["vectors"]
TRAIN, REGISTER = "/andon.v1.Coordinator/Train", "/andon.v1.Coordinator/RegisterReducer"
BROKEN = {grpc.StatusCode.INVALID_ARGUMENT}
NOT_OFFERED = {"ReduceRequest.bad.operation-not-offered", "ReduceRequest.bad.mean-of-integers"}


def refused(kind: str) -> list[dict[str, Any]]:
    named = (each for each in INDEX if each["type"] == f"andon.v1.{kind}")
    return [each for each in named if each["verdict"] == "refuse"]


def data_of(vector: dict[str, Any]) -> bytes:
    file: str = vector["file"]
    return (FOLDER / file).read_bytes()


@pytest.fixture(scope="module")
def reducer() -> Iterator[Reducer]:
    with Reducer() as served:
        yield served


def test_c_wire_002_a_reducer_refuses_every_message_that_must_be_refused(reducer: Reducer) -> None:
    token = tokens.session_token(reducer_bench.SECRET, reducer_bench.RUN, 1)
    opening = frame_request(OpenRound(reducer_bench.RUN, 1, token))
    stranger = Stranger(
        f"127.0.0.1:{reducer.port}", reducer_bench.RUN, Layout(()), RunPlan(global_batch=1)
    )

    told = {
        vector["name"]: stranger.refused(REDUCE, opening, data_of(vector)).code.name
        for vector in refused("ReduceRequest")
    }

    assert len(told) > 50
    for name, code in told.items():
        assert code == ("FAILED_PRECONDITION" if name in NOT_OFFERED else "INVALID_ARGUMENT"), name


async def ends_with(address: str, method: str, messages: list[bytes]) -> grpc.StatusCode:
    """The end of a call that sends these messages over its own connection."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        call: Any = channel.stream_stream(method)()
        for message in messages:
            await call.write(message)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await end_of(call)
        code: grpc.StatusCode = await call.code()
        return code


async def test_c_wire_002_a_coordinator_refuses_every_message_that_must_be_refused(
    tmp_path: Path,
) -> None:
    join = pb.Join(
        run_id=RUN,
        incarnation=1,
        launch_slot=0,
        protocol_version=PROTOCOL_VERSION,
        layout=layouts.layout_to_proto(small_layout()),
        plan=conversion.plan_to_proto(PLAN),
    )
    joining = pb.TrainRequest(join=join).SerializeToString()

    async with serving(config_in(tmp_path)) as served:
        for vector in refused("TrainRequest"):
            data = data_of(vector)
            alone = data[:1] == joining[:1]  # a Join, which is the first message
            code = await ends_with(served.address, TRAIN, [data] if alone else [joining, data])
            assert code in BROKEN, vector["name"]
        for vector in refused("RegisterReducerRequest"):
            code = await ends_with(served.address, REGISTER, [data_of(vector)])
            assert code in BROKEN, vector["name"]
