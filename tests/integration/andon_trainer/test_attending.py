"""Sessions over real gRPC: ranks attend, hear the one end of their session, and are shown."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import pytest

from andon.host.worker_tokens import make_worker_token
from andon.protocol.peer_calls import Call, CallKind, PendingCall
from andon.protocol.records import Key
from andon.protocol.sessions import RankFault, RankReport, SessionEnd
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import session_pb2
from andon_cli.client import LineClient
from andon_cli.commands.status import status_lines
from andon_coordinator.transport.reader import JournalReader
from andon_trainer.config import LineConfig
from andon_trainer.errors import AndonError, CallTimedOut, JoinRefused, SessionEnded
from andon_trainer.launchers import LaunchStore
from andon_trainer.peers.attending import Attending, AttendSettings, attend
from andon_trainer.peers.serving import end_services, locate_session
from integration.harness import SCRIPTS, Service, clean_environment
from integration.nursery import Child, nursery
from integration.served import Served, config_in, refused, run, serving, until
from unit.andon.certificates import certify

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

TOKEN = b"a-token-of-the-tests"


def settings(served: Served, rank: int, size: int, **fields: Any) -> AttendSettings:
    given = {"node_id": f"host-{rank}", "watch_exit": False, **fields}
    return AttendSettings(address=served.address, rank=rank, world_size=size, **given)


async def session(served: Served, size: int, **fields: Any) -> list[Attending]:
    ranks = (asyncio.to_thread(attend, settings(served, n, size, **fields)) for n in range(size))
    return list(await asyncio.gather(*ranks))


async def leave(ranks: Sequence[Attending]) -> None:
    await asyncio.gather(*(asyncio.to_thread(rank.leave, done=True) for rank in ranks))


async def all_over(ranks: Sequence[Attending]) -> list[SessionEnded]:
    await until(lambda: all(rank.over is not None for rank in ranks))
    return [SessionEnded(rank.over) for rank in ranks if rank.over is not None]


def test_ranks_that_attend_get_pair_tokens_and_leave_in_order(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            can = {"capabilities": ("crc32c.v1",), "lanes": ":7100"}
            ranks = await session(served, 3, **can)

            formed = [rank.formed for rank in ranks]
            assert len({each.key for each in formed}) == 1
            assert [peer.address for peer in formed[0].peers] == ["127.0.0.1:7100"] * 3
            assert formed[0].capabilities == {"crc32c.v1"}
            tokens = set()
            for one in range(3):
                assert not formed[one].peers[one].token_to
                for other in {0, 1, 2} - {one}:
                    tokens.add(formed[one].peers[other].token_to)
                    assert formed[one].peers[other].token_to == formed[other].peers[one].token_from
            assert len(tokens) == 6

            await leave(ranks)
            assert [rank.over for rank in ranks] == [None] * 3
            status = (await served.stub.GetStatus(pb.GetStatusRequest())).status
            assert status.state == pb.LINE_STATE_COMPLETE
            assert served.metric("andon_sessions_ended_total", cause="in_order") == 1
            # The next one of the same processes has the next key.
            again = await session(served, 3)
            assert again[0].formed.key > formed[0].key
            await leave(again)

    run(story())


def test_a_fault_ends_the_session_of_all_and_counts_as_a_halt(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            ranks = await session(served, 2)
            heard: list[SessionEnd] = []
            ranks[0].watch(lambda over: heard.append(over.end))

            ranks[1].fault(
                RankFault(
                    end=SessionEnd.NON_FINITE,
                    culprit=1,
                    message="",
                    parameter="head.weight",
                    element=(3, 1),
                    value="nan",
                )
            )

            errors = await all_over(ranks)
            assert {error.exit_code for error in errors} == {3}
            assert "rank 1 on host-1 gave nan in head.weight[3, 1]" in str(errors[0])
            # Whoever watches is told after `over` is there to read.
            await until(lambda: bool(heard))
            assert heard == [SessionEnd.NON_FINITE]
            halts = served.metric("andon_jidoka_halts_total", reason="non_finite_gradient")
            await leave(ranks)
            assert halts == 1
        with JournalReader(tmp_path / "journal.sqlite") as journal:
            [halt] = journal.halts()
            kinds = [event.kind.value for event in journal.run_events()]
        assert (halt.evidence.worker, halt.evidence.parameter) == (1, "head.weight")
        assert not halt.is_open
        assert kinds[-2:] == ["session_over", "halted"]
        # It holds nobody back: the next coordinator is of the next term, and not halted.
        async with serving(config_in(tmp_path)) as served:
            after = await session(served, 2)
            assert after[0].formed.key.term > ranks[0].formed.key.term
            await leave(after)

    run(story())


def test_an_operator_ends_a_session(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            ranks = await session(served, 2)

            async with LineClient(served.address) as client:
                halt = await client.halt("the loss is odd", "kim")

            errors = await all_over(ranks)
            assert (halt.id, errors[1].exit_code) == (1, 3)
            assert "kim pulled the cord: the loss is odd" in str(errors[1])
            _, refusal = await refused(served.stub.PullCord(pb.PullCordRequest()))
            assert refusal.reason == "OPERATOR_REFUSED"
            _, refusal = await refused(served.stub.Drain(pb.DrainRequest()))
            assert refusal.reason == "OPERATOR_REFUSED"
            await leave(ranks)

    run(story())


def test_people_see_a_pending_call_and_who_is_missing(tmp_path: Path) -> None:
    call = Call(kind=CallKind.ALL_REDUCE, dtype="float32", count=100, reduction="sum")

    def report() -> RankReport:
        pending = PendingCall(
            group_name="default", group=7, sequence=17, call=call, open_s=3.5, missing=(1,)
        )
        return RankReport(steps=4, bytes=12_500_000, pending=pending, numbers=(("loss", 4, 2.5),))

    async def story() -> None:
        async with serving(config_in(tmp_path, liveness_s=2.0)) as served:
            first = asyncio.create_task(asyncio.to_thread(attend, settings(served, 0, 2)))
            async with LineClient(served.address) as client:
                await until(lambda: bool(served.coordinator.status().waiting_for))
                await until(lambda: served.coordinator.status().live == 1)
                waiting = "\n".join(status_lines(await client.status()))
                second = await asyncio.to_thread(attend, settings(served, 1, 2))
                ranks = [await first, second]
                ranks[0].report_from(report)
                await until(lambda: served.coordinator.status().step == 4)
                shown = status_lines(await client.status())
            assert "waiting for rank 1 of 2" in waiting
            assert "session" in shown[0]
            [row] = [line for line in shown if line.startswith("0 ")]
            assert "12.5 MB" in row
            assert "call 17 of group default: all_reduce(sum) of 100 float32" in row
            assert row.endswith("without 1")
            logged = served.registry.get_sample_value("andon_logged_value", {"name": "loss"})
            assert logged == 2.5
            assert served.metric("andon_rank_call_open_seconds", rank="0") == 3.5
            await leave(ranks)

    run(story())


def test_all_that_a_script_logged_is_sent_before_it_leaves(tmp_path: Path) -> None:
    logged = tuple(("loss", step, 1.0) for step in range(150))

    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            [rank] = await session(served, 1)
            rank.report_from(lambda: RankReport(numbers=logged))
            await leave([rank])
        with JournalReader(tmp_path / "journal.sqlite") as journal:
            assert len(journal.scalar_curve("loss")) == 150

    run(story())


def test_a_rank_whose_reports_fail_says_so(tmp_path: Path) -> None:
    def report() -> RankReport:
        raise KeyError("group 7")

    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            ranks = await session(served, 2)

            ranks[1].report_from(report)

            errors = await all_over(ranks)
            assert "rank 1 on host-1 failed: its reports failed: KeyError" in str(errors[0])
            await leave(ranks)

    run(story())


def test_who_did_not_attend_is_named(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            with pytest.raises(CallTimedOut, match="ranks 1, 2 did not come"):
                await asyncio.to_thread(attend, settings(served, 0, 3, form_within_s=2.0))

    run(story())


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"world_size": 3}, "world_differs"),
        ({"token": b"another-token-of-the-tests"}, "token"),
        ({"run_id": "99aa"}, "wrong_run"),
        ({"rank": 5}, "invalid_message"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_not_be_a_rank_is_refused(
    tmp_path: Path, field: dict[str, Any], reason: str
) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path, token=TOKEN)) as served:
            given = {"rank": 1, "world_size": 2, "token": TOKEN, **field}
            waits = asyncio.create_task(
                asyncio.to_thread(attend, settings(served, 0, 2, token=TOKEN))
            )
            await until(lambda: served.coordinator.status().live == 1)

            with pytest.raises(JoinRefused) as caught:
                await asyncio.to_thread(
                    attend, AttendSettings(address=served.address, watch_exit=False, **given)
                )

            assert caught.value.reason == reason
            other = await asyncio.to_thread(attend, settings(served, 1, 2, token=TOKEN))
            await leave([await waits, other])

    run(story())


def test_another_version_and_a_foreign_message_are_refused(tmp_path: Path) -> None:
    async def answer(served: Served, message: session_pb2.AttendRequest) -> str:
        call = served.stub.Attend(iter([message]))
        _, refusal = await refused(call.read())
        return str(refusal.reason)

    async def story() -> None:
        async with serving(config_in(tmp_path)) as served:
            old = session_pb2.Attend(rank=0, world_size=1, incarnation=1, protocol_version=2)
            end = session_pb2.EndAttendance(done=True)

            assert await answer(served, session_pb2.AttendRequest(attend=old)) == "VERSION"
            first = session_pb2.AttendRequest(end=end)
            assert await answer(served, first) == "INVALID_MESSAGE"

    run(story())


def test_a_run_is_for_lines_or_for_sessions(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(config_in(tmp_path / "sessions")) as served:
            [rank] = await session(served, 1)
            code, refusal = await refused(served.worker(0).join())
            assert (code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "OTHER_USE")
            await leave([rank])
        async with serving(config_in(tmp_path / "line")) as served:
            await served.workers(2)
            with pytest.raises(JoinRefused) as caught:
                await session(served, 1)
            assert caught.value.reason == "other_use"

    run(story())


def test_a_rank_attends_over_tls_with_a_token_of_its_own(tmp_path: Path) -> None:
    certs = certify(tmp_path / "ca", tmp_path / "host", "127.0.0.1")
    token = tmp_path / "token"
    token.write_bytes(TOKEN)
    token.chmod(0o600)
    own = make_worker_token(TOKEN, "alpha")

    with Service(tmp_path / "run", 1, "--token-file", str(token), certs=certs) as service:
        given = AttendSettings(
            address=service.address, rank=0, world_size=1, tls=certs, token=own, watch_exit=False
        )
        attend(given).leave(done=True)
        with pytest.raises(JoinRefused) as caught:
            attend(replace(given, tls=None))
        assert caught.value.reason == "tls"
        with pytest.raises(JoinRefused) as caught:
            attend(replace(given, token=b""))
        assert caught.value.reason == "token"
    with pytest.raises(JoinRefused) as caught:
        attend(AttendSettings(address="10.0.0.9:7070", rank=0, world_size=1))
    assert caught.value.reason == "insecure"


def test_rank_0_serves_where_there_is_no_address(tmp_path: Path) -> None:
    published: Queue[str] = Queue()

    def take_part(rank: int) -> Key:
        launch = LaunchStore(
            host="", port=0, rank=rank, world_size=2, hosted_by_agent=False, one_host=True
        )
        config = LineConfig(run_dir=tmp_path / "run")
        located = locate_session(config, launch, publish=published.put, look_up=published.get)
        attending = attend(
            AttendSettings(
                address=located.address,
                run_id=located.run_id,
                rank=rank,
                world_size=2,
                watch_exit=False,
            )
        )
        attending.leave(done=True)
        return attending.formed.key

    with ThreadPoolExecutor(2) as pool:
        first = list(pool.map(take_part, range(2)))
        # The groups of a script that is not done yet find the same service.
        second = list(pool.map(take_part, range(2)))
    end_services()

    assert first[0] == first[1] < second[0] == second[1]
    assert first[0].term == second[0].term


# Real processes


def ranks_of(service: Service, folder: Path, modes: Sequence[str]) -> list[Child]:
    size, environment = str(len(modes)), clean_environment()
    children = []
    for rank, mode in enumerate(modes):
        command = [str(SCRIPTS / "rank.py"), service.address, str(rank), size, mode]
        output = folder / f"rank-{rank}-{len(list(folder.iterdir()))}.out"
        children.append(nursery("service").start(command, environment, output, output))
    service.await_status(lambda status: status.session.formed == 1)
    return children


def ended(child: Child) -> tuple[int, str]:
    code = child.wait(20.0)
    said = [line for line in child.output.read_text().splitlines() if line.startswith("over: ")]
    return code, said[0].removeprefix("over: ") if said else ""


def test_a_frozen_rank_is_named_and_hears_of_its_own_loss(tmp_path: Path) -> None:
    with Service(tmp_path / "run", 2, "--liveness", "2") as service:
        first, frozen = ranks_of(service, tmp_path, ("wait",) * 2)
        frozen.send_signal(signal.SIGSTOP)
        code, said = ended(first)
        frozen.send_signal(signal.SIGCONT)
        assert code == 5
        assert "rank 1" in said
        assert "frozen" in said
        # Or it finds its connection closed.
        assert frozen.wait(20.0) == 5


def test_a_rank_that_holds_the_interpreters_lock_for_longer_than_a_lease_is_not_lost(
    tmp_path: Path,
) -> None:
    with Service(tmp_path / "run", 2, "--liveness", "2") as service:
        held, other = ranks_of(service, tmp_path, ("hold", "wait"))

        assert held.wait(20.0) == 0
        assert "left None" in held.output.read_text()
        assert "over: " not in other.output.read_text()
        other.send_signal(signal.SIGKILL)


def test_errors_of_sessions_are_runtime_errors_too() -> None:
    assert issubclass(SessionEnded, RuntimeError)
    assert issubclass(CallTimedOut, AndonError)
