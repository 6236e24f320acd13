"""A command whose output nobody reads any more, as in `andon history | head -1`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest

from andon_cli.app import main

__all__ = ["end_of"]


@contextmanager
def closed_pipe() -> Iterator[IO[str]]:
    """A pipe that nobody reads, buffered by lines as a terminal is."""
    reader, writer = os.pipe()
    os.close(reader)
    file = os.fdopen(writer, "w", buffering=1)
    yield file
    # What could not be written must not fail once more when the file is closed.
    os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
    file.close()


def end_of(argv: list[str], monkeypatch: pytest.MonkeyPatch, stream: str = "stdout") -> int:
    """The exit code of a command, of which nobody reads one of the two streams."""
    # Not in a fixture: pytest sets the streams anew before it calls a test.
    with closed_pipe() as file, monkeypatch.context() as patch:
        patch.setattr(sys, stream, file)
        return main(argv)
