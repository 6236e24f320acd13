"""Options of a line that a script gives, for the service that rank 0 of its launch starts.

They are `andon_coordinator.config.LineOptions`, the one schema of what an operator may choose. The
worker knows no field of it: whoever gives options has made the object, and the worker turns it into
flags of the service that it starts. Elsewhere the line is somebody else's; then what a worker can
see of its policy must be what the script asks for.
"""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any, ClassVar, Protocol

from andon.protocol.run_settings import Policy

__all__ = ["LineSchema", "flags_of", "given_in", "unseen"]


class LineSchema(Protocol):
    """What the worker needs of `andon_coordinator.config.LineOptions`."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def contradiction(self) -> str:
        """What nothing would obey, and the remedy; empty if there is no such setting."""

    @property
    def policy(self) -> Policy:
        """The policy of a line with these options."""


def flags_of(options: LineSchema | None) -> list[str]:
    """The flags of `andon serve` for these options; those at their defaults have none."""
    if options is None:
        return []
    # Here: it loads Cyclopts, which a script without options does not need.
    from andon.host.settings import flag_of, flag_with

    return [flag_with(flag_of(name), value) for name, value in given_in(options).items()]


def unseen(options: LineSchema) -> list[str]:
    """Names of options that were given and that no policy shows, so that nobody can compare."""
    return [name for name in given_in(options) if not hasattr(Policy, name)]


def given_in(options: LineSchema) -> dict[str, Any]:
    """The options that are not at their defaults."""
    return {
        each.name: value
        for each in fields(options)
        if (value := getattr(options, each.name)) != each.default
    }
