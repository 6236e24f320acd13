"""Settings: what the fields of a settings schema are declared with.

A schema is a frozen dataclass, and each of its fields is one setting. Everything else is derived:

    max_workers: Workers | None = None
    '''Refuse more than N workers.'''

is `--max-workers N`, the variable ANDON_MAX_WORKERS and the key `max-workers` of andon.toml; its
docstring is the help; its type says what is accepted. Schemas contain other schemas, whose flags
are flat. `andon_cli.settings` reads them; nothing here parses anything.
"""

from __future__ import annotations

import enum
import ipaddress
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, get_args, get_type_hints

from cyclopts import Group, Parameter, Token

from andon.host.connections import connections_of
from andon.host.errors import UsageError
from andon.host.notice_place import notice_place
from andon.host.shared_dir import shared_dir_of
from andon.protocol.limits import MAX_WORKERS
from andon.protocol.records import Key

__all__ = [
    "EVERYDAY",
    "FLAG_ONLY",
    "LIMITS",
    "VARIABLE_ONLY",
    "Address",
    "CommandSettings",
    "Connections",
    "Count",
    "Factor",
    "FieldPath",
    "File",
    "Folder",
    "GivenSettings",
    "NoticePlace",
    "Place",
    "Port",
    "Seconds",
    "SharedDir",
    "TcpPort",
    "Verb",
    "Whole",
    "Within",
    "Workers",
    "at_port",
    "check",
    "flag_of",
    "flag_with",
    "seconds",
    "text_of",
    "whole",
]

EVERYDAY = Group("Common flags", sort_key=1)
"""The group of `--help`; every other group is shown by `--help-all`."""

FieldPath = tuple[str, ...]
"""Names of fields, from the schema down to the setting."""

Schema = TypeVar("Schema")

LIMITS = Group("Limits", help="How much of a service its clients may take.", sort_key=9)

FLAG_ONLY = Parameter(show_env_var=False)
"""For what is meant for one command: it comes from no variable and no file."""

VARIABLE_ONLY = Parameter(show=False)
"""For what nobody may read over a shoulder: it comes from its variable and nothing else."""

_PLACE = re.compile(r"(?:\w[\w.-]{0,252}|\[[0-9a-fA-F:.]{2,45}\])(?::(?P<port>\d{1,5}))?", re.ASCII)
"""A host that can be dialled, by name or address, and perhaps a port."""


@dataclass(frozen=True, slots=True)
class Within:
    """Checks that a number is finite and within its limits; `above` excludes the limit itself."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    unit: str = ""

    def __call__(self, type_: Any, value: float | None) -> None:
        """Checks one value.

        Raises:
            ValueError: the value is beyond a limit. The text continues the name of the setting.
        """
        if value is None:
            return
        too_low = (self.least is not None and value < self.least) or (
            self.above is not None and value <= self.above
        )
        too_high = self.most is not None and value > self.most
        if too_low or too_high or not math.isfinite(value):
            raise ValueError(f"must be {self._limits()}, not {value}")

    def _limits(self) -> str:
        if self.most is not None:
            return f"from {self.least} to {self.most}{self.unit}"
        if self.above is not None:
            return f"above {self.above}{self.unit}"
        return f"at least {self.least}{self.unit}"


def check(schema: Any) -> None:
    """Checks every field of a schema, for one that no command line was read into.

    Raises:
        ValueError: a value is beyond its limits; the text names the flag.
    """
    schema_type: Any = type(schema)
    for name, validators, flag in _checks(schema_type):
        for validator in validators:
            try:
                validator(None, getattr(schema, name))
            except ValueError as error:
                raise ValueError(f"{flag} {error}") from None


@cache
def _checks(schema: type) -> list[tuple[str, tuple[Any, ...], str]]:
    """The fields that have validators, those, and the flag to name."""
    found = []
    hints = get_type_hints(schema, include_extras=True)
    for each in fields(schema):
        parameters = [part for part in _parts(hints[each.name]) if isinstance(part, Parameter)]
        # Cyclopts has made tuples of both, whatever its annotations say.
        validators = tuple(each for part in parameters for each in _tuple(part.validator))
        names = [name for part in parameters for name in _tuple(part.name)]
        if validators:
            found.append((each.name, validators, names[0] if names else flag_of(each.name)))
    return found


def _tuple(value: Any) -> tuple[Any, ...]:
    return value or ()


def _parts(hint: Any) -> Iterator[Any]:
    """What a type is annotated with, through `| None` as well."""
    for part in (*getattr(hint, "__metadata__", ()), *get_args(hint)):
        yield part
        yield from _parts(part)


def flag_of(field_name: str) -> str:
    """The flag of a field: `liveness_s` is `--liveness`. Units are the program's affair."""
    return "--" + field_name.removesuffix("_s").replace("_", "-").lower()


def text_of(value: Any) -> str:
    """A setting's value as a flag, a variable or a file has it."""
    match value:
        case None:
            return "off"
        case Key():
            return f"{value.term}:{value.round}"
        case enum.Enum():
            return value.name.lower()
        case tuple():
            return " ".join(value)
        case _:
            return str(value)


def flag_with(flag: str, value: Any) -> str:
    """A flag that yields a value: `--steps=9`, or `--overlap` alone for True."""
    return flag if value is True else f"{flag}={text_of(value)}"


def whole(least: int = 0, most: int | None = None, *, metavar: str = "N") -> Parameter:
    """How a whole number within limits is declared."""
    return Parameter(validator=Within(least, most), metavar=metavar)


def seconds(least: float) -> Parameter:
    """How a time of at least so many seconds is declared."""
    return Parameter(validator=Within(least, unit=" s"), metavar="SECONDS")


def _check_address(type_: Any, text: str) -> None:
    host, _, port = text.rpartition(":")
    if text and not (host and port.isdecimal() and 0 < int(port) <= 65535):
        raise ValueError(f"must be HOST:PORT, such as 127.0.0.1:7070, not {text!r}")


def _check_place(_type: Any, text: str) -> None:
    """Accepts what others can dial: a host, perhaps with a port."""
    if not text:
        return
    found = _PLACE.fullmatch(text)
    if not (_is_ipv6(text) or (found and 0 < int(found["port"] or 1) <= 65535)):
        raise ValueError(f"must be HOST or HOST:PORT, such as alpha or alpha:7070, not {text!r}")
    if text.strip("[]") in ("0.0.0.0", "::") or text.startswith(("0.0.0.0:", "[::]:")):
        raise ValueError(f"must be a name that others can dial, and {text} means every address")


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def at_port(place: str, port: int) -> str:
    """A `Place` as host:port; `port` counts if the place names none."""
    if _is_ipv6(place):
        return f"[{place}]:{port}"  # Its colons are no port's.
    _, colon, given = place.rpartition(":")
    return place if colon and given.isdecimal() else f"{place}:{port}"


def _shared_dir(_type: Any, tokens: tuple[Token, ...]) -> Path | None:
    return shared_dir_of(tokens[0].value)


def _tcp_port(_type: Any, tokens: tuple[Token, ...]) -> int | None:
    text = tokens[0].value
    if text.lower() == "off":
        return None
    if not (text.isascii() and text.isdecimal() and int(text) <= 65535):
        raise ValueError(f"must be a port from 0 to 65535, or off, not {text!r}")
    return int(text)


def _connections(_type: Any, tokens: tuple[Token, ...]) -> int | None:
    return connections_of(tokens[0].value)


def _check_notice_place(_type: Any, text: str) -> None:
    notice_place(text)


Whole = Annotated[int, whole()]
Count = Annotated[int, whole(1)]
Workers = Annotated[int, whole(1, MAX_WORKERS)]
Port = Annotated[int, whole(0, 65535, metavar="PORT")]
Factor = Annotated[float, Parameter(validator=Within(above=0), metavar="FACTOR")]
Seconds = Annotated[float, Parameter(validator=Within(above=0, unit=" s"), metavar="SECONDS")]
Address = Annotated[str, Parameter(validator=_check_address, metavar="HOST:PORT")]
Place = Annotated[str, Parameter(validator=_check_place, metavar="HOST[:PORT]")]
File = Annotated[Path, Parameter(metavar="FILE")]
NoticePlace = Annotated[str, Parameter(validator=_check_notice_place, metavar="FILE_OR_URL")]
Folder = Annotated[Path, Parameter(metavar="DIR")]
TcpPort = Annotated[int | None, Parameter(metavar="PORT", converter=_tcp_port, n_tokens=1)]
Connections = Annotated[int | None, Parameter(metavar="COUNT", converter=_connections, n_tokens=1)]
SharedDir = Annotated[Path | None, Parameter(metavar="DIR", converter=_shared_dir, n_tokens=1)]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSettings:
    """What every command has."""

    config: Annotated[File | None, Parameter(group=EVERYDAY)] = None
    """Read settings from this file. Default: andon.toml in the current folder, if it exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """One command of `andon`. Modules are named, not imported: most calls need one of them."""

    summary: str
    """What it does, in half a sentence."""
    epilog: str
    """Examples, and what it promises; shown below the flags."""
    schema: str
    """Its settings, as `package.module:Class`."""
    run: str
    """Runs it, as `package.module:function`; the exit code, or a coroutine of it."""
    read: str = ""
    """Makes the argument of `run` of what was given and of the words behind the flags; empty: the
    settings are the argument."""
    words: str = ""
    """What follows the flags, such as `script.py [args ...]`; empty: nothing does."""
    interleaved: bool = False
    """Whether flags may follow those words; else they belong to the first of them."""
    shown: tuple[str, ...] = ()
    """Groups of flags that `--help` shows; empty: all. `--help-all` shows the others too."""


@dataclass(frozen=True, slots=True)
class GivenSettings(Generic[Schema]):
    """A schema as it was read, and where its values came from."""

    settings: Schema
    sources: Mapping[FieldPath, str]
    """The flag, variable or key that gave a value, by the path of the field in the schema."""

    def refuse_flags(self, chosen: Callable[[FieldPath], bool], why: str) -> None:
        """Refuses flags that nothing would obey.

        The environment and the file may say more than one command needs, since all commands of a
        folder share them.

        Raises:
            UsageError: a flag of a chosen field was given.
        """
        for path, source in self.sources.items():
            if source.startswith("-") and chosen(path):
                raise UsageError(f"{source} {why}")
