"""A rank that is killed in the middle of calls over lanes: the others know at once who it was."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from andon.protocol.peer_calls import CallKind
from andon.protocol.sessions import SessionEnd
from andon.tcp.listening import TcpListener
from andon_trainer.core.peer_plan import Places
from andon_trainer.core.peer_work import Work
from andon_trainer.errors import SessionEnded
from andon_trainer.peers.collective import OpenCall, PeerGroup
from andon_trainer.peers.session import Peers
from andon_trainer.peers.testing import FakeSession, RankSeat, formed_for
from integration.test_peers import AT_ONCE_S
from unit.andon_trainer.call_cases import collective

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

_RANK = """
import sys
sys.path[:0] = {paths!r}
from andon.tcp.listening import TcpListener
from andon_trainer.core.peer_plan import Places
from andon_trainer.peers.session import Peers
from andon_trainer.peers.testing import FakeSession, RankSeat, formed_for
from andon.protocol.peer_calls import CallKind
from unit.andon_trainer.call_cases import collective

listener = TcpListener("127.0.0.1")
sys.stdout.write(f"{{listener.port}}\\n")
sys.stdout.flush()
addresses = sys.stdin.readline().split()
session = FakeSession()
session.fault = lambda rank, fault: None  # Only the coordinator ends a session.
peers = Peers(RankSeat(session, {rank}, formed_for({rank}, addresses)), listener)
group = peers.group("default", range(len(addresses)))
places = Places(tuple((rank,) for rank in range(len(addresses))))
case = collective(CallKind.ALL_REDUCE, places, [400_000])
while True:
    group.begin(case.works[{rank}]).wait(30)
"""


def call_on(group: PeerGroup, call: OpenCall, work: Work) -> None:
    """Makes one call after the other."""
    while True:
        call.wait(30)
        call = group.begin(work)


def test_the_others_raise_at_once_and_accuse_the_rank_that_was_killed() -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK.format(paths=sys.path, rank=rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 2)
    ]
    listener, session = TcpListener("127.0.0.1"), FakeSession()
    try:
        addresses = [f"127.0.0.1:{listener.port}"]
        for process in processes:
            assert process.stdout is not None
            addresses.append(f"127.0.0.1:{process.stdout.readline().strip()}")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(" ".join(addresses) + "\n")
            process.stdin.flush()
        peers = Peers(RankSeat(session, 0, formed_for(0, addresses)), listener)
        group = peers.group("default", range(3))
        work = collective(CallKind.ALL_REDUCE, Places(((0,), (1,), (2,))), [400_000]).works[0]
        for _ in range(5):
            group.begin(work).wait(30)

        call = group.begin(work)
        processes[1].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(SessionEnded) as caught:
            call_on(group, call, work)

        assert time.monotonic() - killed < AT_ONCE_S
        assert caught.value.over.end is SessionEnd.UNREACHABLE
        assert caught.value.over.culprit == 2
        peers.close()
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()
        listener.close()
