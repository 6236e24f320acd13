"""Settings: one value each, from its flag, its environment variable, or its default.

The only place that reads argv and the environment.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from andon_cli.arguments import build_parser
from andon_server.errors import UsageError

__all__ = ["Settings", "read_settings"]

_Choice = TypeVar("_Choice", bound=str)
_ON = frozenset({"1", "true", "yes", "on"})
_OFF = frozenset({"", "0", "false", "no", "off"})


def read_settings(
    argv: Sequence[str] | None = None, environment: Mapping[str, str] | None = None
) -> Settings:
    """The settings of this process.

    Raises:
        SystemExit: argparse showed help or refused a flag.
    """
    flags = build_parser().parse_args(argv)
    return Settings(flags, os.environ if environment is None else environment)


class Settings:
    """Reads values by name: `metrics_port` is `--metrics-port`, else `ANDON_METRICS_PORT`."""

    def __init__(self, flags: argparse.Namespace, environment: Mapping[str, str]) -> None:
        """Takes flags that are None where not given."""
        self._flags = flags
        self._environment = environment

    @property
    def verb(self) -> str:
        """What `andon` is to do."""
        return str(self._flags.verb)

    @property
    def command(self) -> Sequence[str]:
        """The script of `andon run`, and its own arguments."""
        return tuple(self._flags.command)

    @property
    def hosts(self) -> Sequence[str]:
        """The hosts of `andon certs`."""
        return tuple(self._flags.hosts)

    def only_flags(self) -> Settings:
        """The same without the environment, for what is meant once and not for every command."""
        return Settings(self._flags, {})

    def text(self, name: str) -> str:
        """A text; empty if it is not given."""
        return self._find(name)[1]

    def path(self, name: str) -> Path | None:
        """A file or a folder; None if none is given."""
        text = self.text(name)
        return Path(text) if text else None

    def words(self, name: str) -> tuple[str, ...]:
        """Several words; none if it is not given."""
        given = getattr(self._flags, name, None)
        return tuple(self.text(name).split() if given is None else given)

    def choice(self, name: str, choices: Sequence[_Choice]) -> _Choice:
        """One of `choices`; the first if it is not given."""
        where, text = self._find(name)
        for choice in choices:
            if text in ("", choice):
                return choice
        raise UsageError(f"{where} must be {' or '.join(choices)}, not {text!r}")

    def switch(self, name: str) -> bool:
        """Whether something is on."""
        where, text = self._find(name)
        if text.lower() not in _ON | _OFF:
            raise UsageError(f"{where} must be 1 or 0, not {text!r}")
        return text.lower() in _ON

    def optional_whole(self, name: str, *, least: int = 0, most: int | None = None) -> int | None:
        """A whole number within its limits; None if it is not given."""
        where, text = self._find(name)
        if not text:
            return None
        try:
            number = int(text)
        except ValueError:
            raise UsageError(f"{where} must be a whole number, not {text!r}") from None
        if number < least or (most is not None and number > most):
            limit = f"at least {least}" if most is None else f"from {least} to {most}"
            raise UsageError(f"{where} must be {limit}, not {number}")
        return number

    def whole(self, name: str, default: int, *, least: int = 0, most: int | None = None) -> int:
        """A whole number within its limits."""
        number = self.optional_whole(name, least=least, most=most)
        return default if number is None else number

    def port(self, name: str, default: int) -> int:
        """A TCP port."""
        return self.whole(name, default, most=65535)

    def seconds(self, name: str, default: float, *, least: float) -> float:
        """A time in seconds."""
        number = self._number(name, unit="s", least=least)
        return default if number is None else number

    def optional_seconds(self, name: str) -> float | None:
        """A time above 0 in seconds; None if it is not given."""
        return self._number(name, unit="s")

    def factor(self, name: str) -> float | None:
        """A number above 0; None if it is not given."""
        return self._number(name)

    def address(self, name: str) -> str:
        """A host:port; empty if it is not given."""
        where, text = self._find(name)
        host, _, port = text.rpartition(":")
        if text and not (host and port.isdecimal() and 0 < int(port) <= 65535):
            raise UsageError(f"{where} must be HOST:PORT, such as 127.0.0.1:7070, not {text!r}")
        return text

    def refuse_flags(self, names: Sequence[str], why: str) -> None:
        """Refuses flags that were given though they can't be obeyed."""
        for name in names:
            if getattr(self._flags, name, None) is not None:
                raise UsageError(f"{_flag(name)} {why}")

    def refuse_other_flags(self, names: Container[str], why: str) -> None:
        """Refuses all flags that were given, except those of `names`."""
        others = [name for name in vars(self._flags) if name not in names]
        self.refuse_flags(others, why)

    def _number(self, name: str, *, unit: str = "", least: float | None = None) -> float | None:
        """A finite number of at least `least`, or above 0; None if it is not given."""
        where, text = self._find(name)
        if not text:
            return None
        try:
            number = float(text)
        except ValueError:
            kind = "a number of seconds" if unit else "a number"
            raise UsageError(f"{where} must be {kind}, not {text!r}") from None
        if not (math.isfinite(number) and (number > 0 if least is None else number >= least)):
            limit = "above 0" if least is None else f"at least {least}"
            raise UsageError(f"{where} must be {limit}{' ' + unit if unit else ''}, not {text}")
        return number

    def _find(self, name: str) -> tuple[str, str]:
        given = getattr(self._flags, name, None)
        if given is not None:
            return _flag(name), "1" if given is True else str(given)
        variable = f"ANDON_{name.upper()}"
        return variable, self._environment.get(variable, "").strip()


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
