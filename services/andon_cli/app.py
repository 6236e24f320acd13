"""The `andon` command: reads its settings, runs one command, and ends with its exit code."""

# What a command needs is imported when it is run: `andon status` needs no server, `andon serve` no
# screen, and `andon health`, which containers run every few seconds, next to nothing.

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from andon.host.errors import CommandError, ExitCode, UsageError
from andon.host.settings import Verb
from andon_cli.settings import read_schema, split_words
from andon_cli.verbs import VERBS, imported

__all__ = ["main", "read_config"]

_HELP = ("-h", "--help", "--help-all")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the `andon` command and returns its exit code."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal or a locale that lacks a character gets its code instead of a traceback.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _answer(list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:  # `andon status | head -1`: nobody reads any more
        code = ExitCode.UNREAD
    return _flushed(code)


def _open_closed_streams() -> None:
    """Opens the null device in the place of each standard stream that was closed.

    Else Python has none there, and its number is given to the next file or socket, in which a child
    then writes.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free: those below are open by now.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # noqa: FBT003 (its own)
        mode = "r" if name == "stdin" else "w"
        setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (it stays open)


def read_config(argv: Sequence[str], environment: Mapping[str, str]) -> Any:
    """What a command line asks for: the argument of the function that does it.

    Raises:
        UsageError: there is no such command, a value can't be read, or two contradict each other.
    """
    name, *tokens = argv or ("",)
    if name not in VERBS:
        raise _no_command(name)
    return _config(name, VERBS[name], tokens, environment)


def _answer(argv: list[str]) -> int:
    """Runs one command; its exit code.

    Raises:
        BrokenPipeError: nobody reads what it prints.
    """
    name, tokens = (argv[0], argv[1:]) if argv else ("", [])
    try:
        if name not in VERBS:
            return _without_verb(name, tokens)
        verb = VERBS[name]
        own = split_words(imported(verb.schema), tokens)[0] if verb.words else tokens
        if asked := next((token for token in own if token in _HELP), None):
            from andon_cli.help import help_text

            print(help_text(name, verb, everything=asked == "--help-all"))
            return ExitCode.COMPLETE
        answer = imported(verb.run)(_config(name, verb, tokens, os.environ))
        return _awaited(answer) if isinstance(answer, Coroutine) else int(answer)
    except CommandError as error:
        print(f"andon: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _without_verb(name: str, tokens: list[str]) -> int:
    """Answers `andon --help` and the like, or runs the command of another package."""
    if name in _HELP:
        from andon_cli.help import overview_text

        print(overview_text())
        return ExitCode.COMPLETE
    if name == "--version":
        from andon import __version__

        print(f"andon {__version__}")
        return ExitCode.COMPLETE
    from importlib.metadata import entry_points

    for each in entry_points(group="andon.commands", name=name):
        command: Callable[[Sequence[str]], int] = each.load()
        return command(tokens)
    raise _no_command(name)


def _config(name: str, verb: Verb, tokens: list[str], environment: Mapping[str, str]) -> Any:
    schema = imported(verb.schema)
    words: list[str] = []
    if verb.words:
        tokens, words = split_words(schema, tokens, interleaved=verb.interleaved)
    given = read_schema(schema, tokens, environment, name)
    return imported(verb.read)(given, words) if verb.read else given.settings


def _no_command(name: str) -> UsageError:
    if name == "conformance":
        return UsageError(
            "the conformance suite is not installed: pip install 'andon[conformance]'"
        )
    known = ", ".join(VERBS)
    if not name:
        return UsageError(f"say what to do: andon COMMAND, one of {known}; see andon --help")
    return UsageError(f"there is no command {name!r}: it is one of {known}")


def _awaited(answer: Coroutine[Any, Any, int]) -> int:
    import asyncio

    return asyncio.run(answer)


def _flushed(code: int) -> int:
    """The exit code of a command that ended with `code`, once all that it printed is written."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # What is buffered must not fail once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return code or ExitCode.UNREAD
        print(f"andon: the output can't be written: {error.strerror}", file=sys.stderr)
        return code or ExitCode.FAILED
    return code
