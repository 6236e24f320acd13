"""What a command does if nobody reads its output any more, as in `andon history | head -1`."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.host.errors import ExitCode
from andon_server.runs import JOURNAL
from unit.andon_cli.books import Book
from unit.andon_cli.pipes import end_of


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with one run."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "7f3a"
    folder.mkdir(parents=True)
    book = Book(folder / JOURNAL)
    book.found()
    book.step(1, 2.0)
    book.close()


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--version"],
        ["run", "--help"],
        ["history"],
        ["history", "--format", "json"],
        ["show"],
        ["show", "7f3a", "1"],
        ["show", "--format", "json"],
        ["export", "7f3a"],
        ["export", "--format", "json"],
        ["certs", "alpha"],
        ["certs", "alpha", "--format", "json"],
    ],
)
@pytest.mark.usefixtures("run")
def test_every_command_that_asks_no_line_ends_quietly(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert end_of(argv, monkeypatch) == ExitCode.UNREAD

    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("verb", ["status", "top", "show"])
def test_an_error_that_nobody_reads_is_no_traceback_either(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert end_of([verb], monkeypatch, "stderr") == ExitCode.UNREAD
