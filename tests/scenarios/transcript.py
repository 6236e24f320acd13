"""Transcripts: what happened, then every effect, as text that people can review.

A transcript is a text file. Lines that begin with `#` are prose. A line of `settings` comes first;
each command, which begins with `> `, is followed by all its effects, one a line.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from typing import Protocol

__all__ = ["Commands", "Options", "options_of", "play"]

Options = dict[str, str]


class Commands(Protocol):
    """What a transcript's commands do to the core under test."""

    def run(self, line: str) -> Iterator[str]:
        """Does one command; its effects, as text."""


def play(text: str, make: Callable[[Options], Commands]) -> str:
    """The transcript with its effects as they are now; `make` starts a core from the settings."""
    script: Commands | None = None
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("settings"):
            script = make(options_of(shlex.split(line)[1:]))
        if line.startswith("> "):
            assert script is not None, "settings come first"
            lines += [line, *script.run(line[2:])]
        elif line.startswith(("#", "settings")) or not line:
            lines.append(line)
    return "\n".join(lines) + "\n"


def options_of(words: list[str]) -> Options:
    """Words such as `slot=1` as a dict; a word without `=` has an empty value."""
    return dict(word.partition("=")[::2] for word in words)
