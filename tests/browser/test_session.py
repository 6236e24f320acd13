"""The board's page in a browser, watching a session of ranks."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from andon.protocol.peer_calls import Call, CallKind, PendingCall
from andon.protocol.sessions import RankFault, RankReport, SessionEnd
from andon_trainer.peers.attending import Attending, AttendSettings, attend
from browser.conftest import Opens
from browser.test_board import see
from integration.harness import Service

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

BARRIER = PendingCall(
    group_name="default", group=1, sequence=7, call=Call(kind=CallKind.BARRIER),
    open_s=8.0, missing=(1,),
)  # fmt: skip


def attended(service: Service, rank: int) -> Attending:
    return attend(
        AttendSettings(
            address=service.address, rank=rank, world_size=2, node_id=f"host-{rank}",
            backend="cpu", watch_exit=False,
        )
    )  # fmt: skip


def reports(pending: PendingCall | None) -> RankReport:
    numbers = (("loss", 3, 1.5), ("loss", 4, 1.25), ("lr", 4, 0.1))
    return RankReport(
        steps=4, exchange_s=0.5, bytes=1_604_000, calls=9, pending=pending, numbers=numbers
    )


def test_a_session_is_shown_from_its_forming_to_its_end_with_its_ranks_calls_and_culprit(
    tmp_path: Path, look: Opens
) -> None:
    with (
        Service(tmp_path / "runs" / "7f3a", 2, "--run-id", "7f3a") as service,
        ThreadPoolExecutor(2) as threads,
    ):
        first = threads.submit(attended, service, 0)
        service.await_waiting_for("rank 1 of 2")
        sight = look(service.board_url)
        page = sight.page
        see(sight, "Forming")
        page.locator("#light-why", has_text="It waits for rank 1 of 2.").wait_for()
        ranks = [threads.submit(attended, service, 1).result(30), first.result(30)][::-1]
        ranks[0].report_from(lambda: reports(BARRIER))
        ranks[1].report_from(lambda: reports(None))

        see(sight, "Running")
        row = page.locator("#workers tbody tr").first
        row.locator(".pending", has_text="call 7 of group default: barrier").wait_for()
        row.locator(".pending", has_text="waits for rank 1").wait_for()
        page.locator("#light-why", has_text="Rank 0 has waited for rank 1 for ").wait_for()
        page.locator("#charts .tall .legend li", has_text="loss").wait_for()
        titles = page.locator("#charts h3:visible")
        page.locator("#charts h3", has_text="lr").wait_for()
        assert titles.all_inner_texts() == ["Loss", "lr"]
        assert row.locator(".place").inner_text().split("\n")[0] == "host-0"
        assert row.locator(".given").inner_text().replace("\u202f", " ") == "1.6 MB"
        assert page.locator("#workers-title").inner_text() == "Ranks"
        # What only lines have.
        hidden = ("#drain", "#steps", "section.place", "#evidence")
        assert not any(page.locator(each).is_visible() for each in hidden)
        assert page.locator("#halt-button").is_visible()
        assert "epoch" not in page.locator("#way").inner_text()
        page.set_viewport_size({"width": 320, "height": 640})
        assert sight.overhang() == 0

        ranks[1].fault(
            RankFault(
                end=SessionEnd.NON_FINITE, culprit=1, message="", parameter="head.weight",
                element=(3, 1), value="nan",
            )
        )  # fmt: skip

        see(sight, "Over")
        facts = page.locator("#evidence .facts")
        facts.get_by_text("head.weight[3, 1]").wait_for()
        why = page.locator("#light-why").inner_text()
        assert why.startswith("Rank 1 on host-1 gave nan in head.weight[3, 1]")
        assert page.locator("#workers tbody tr[data-light=red] th").inner_text().strip() == "1"
        assert page.locator("#evidence button").count() == 0
        assert not page.locator("#halt-button").is_visible()
        assert page.title().startswith("OVER at step 4")
        page.locator("#feed li[data-kind=session_over]", has_text="rank 1").wait_for()
        page.locator("#feed li[data-kind=joined]", has_text=re.compile("rank 0")).wait_for()
        # Its page among the runs has no more of a line than that.
        page.goto(f"{service.board_url}#/runs/7f3a")
        page.locator("#view-run .past li", has_text="it ended the session").wait_for()
        page.locator("#view-run h3", has_text="lr").wait_for()
        assert page.locator("#view-run h3:visible").all_inner_texts() == ["Loss", "lr"]
        for rank in ranks:
            rank.leave(done=False)
        page.goto(service.board_url)
        see(sight, "Over")
        assert sight.barriers() == []
