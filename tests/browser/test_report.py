"""The page of a run, in a browser: it can be read with any width, scheme and reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon_cli.commands.report import write_report
from andon_coordinator.core.run_events import RunEventKind
from andon_server.runs import JOURNAL
from browser.conftest import Opens
from unit.andon_cli.books import Book

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]


@pytest.mark.parametrize(("width", "scheme"), [(1360, "light"), (390, "dark")])
def test_the_page_of_a_run_has_no_barrier_and_fits(
    tmp_path: Path, look: Opens, width: int, scheme: str
) -> None:
    book = Book(tmp_path / JOURNAL, at=1e9)
    book.found()
    book.note(1, RunEventKind.JOINED, 1, "on a host with a long name: " + "alpha" * 40)
    for step in range(1, 20):
        book.step(step, 3.0 / step)
    book.log(0, 4, val=0.25)
    book.close()

    sight = look(write_report(tmp_path).as_uri(), width=width, scheme=scheme)

    assert sight.page.locator("svg").count() == 4
    assert sight.barriers() == []
    assert sight.overhang() == 0
