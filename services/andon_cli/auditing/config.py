"""Settings of `andon audit`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from andon.host.errors import UsageError
from andon.host.settings import FLAG_ONLY, CommandSettings, Count, Factor, Folder, GivenSettings
from andon_cli.questions import Form

__all__ = ["AuditConfig", "AuditSettings", "audit_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings(CommandSettings):
    """Settings of `andon audit`."""

    steps: Annotated[str, FLAG_ONLY, Parameter(metavar="A:B")] = ""
    """Recompute steps A to B; either may be left out. Default: all."""
    out: Annotated[Folder | None, FLAG_ONLY] = None
    """Keep the audit's own files there. Default: the folder audit of the run's folder."""
    own_checkpoint_every: Annotated[Count, FLAG_ONLY] = 500
    """It writes a checkpoint of its own every N steps, to go on from if it is interrupted."""
    tolerance: Annotated[Factor, FLAG_ONLY] = 1e-3
    """Without same_bits: losses may differ by this part of them."""
    anew: Annotated[bool, FLAG_ONLY] = False
    """Begin anew, also if an earlier audit was interrupted."""
    format: Form = "table"
    """How to show what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """What `andon audit` recomputes."""

    settings: AuditSettings
    """How."""
    run: str
    """The run under runs/, its folder or its journal."""
    command: tuple[str, ...] = ()
    """The script's command; empty: the one that `andon run` has kept."""
    first: int | None = None
    """The first step to recompute; None: the run's first."""
    last: int | None = None
    """The last one; None: the run's last."""


def audit_config(given: GivenSettings[AuditSettings], words: Sequence[str]) -> AuditConfig:
    """What `andon audit` is to recompute.

    Raises:
        UsageError: no run is named, or the steps are none.
    """
    if not words:
        raise UsageError("name a run: andon audit RUN [-- COMMAND]; `andon history` lists them")
    first, last = _range(given.settings.steps)
    return AuditConfig(
        settings=given.settings, run=words[0], command=tuple(words[1:]), first=first, last=last
    )


def _range(text: str) -> tuple[int | None, int | None]:
    if not text:
        return None, None
    found = re.fullmatch(r"(\d{0,18}):(\d{0,18})", text)
    first, last = (int(each) if each else None for each in found.groups()) if found else (0, 0)
    if first == 0 or last == 0 or (first or 1) > (last or first or 1):
        raise UsageError(f"--steps are numbers of steps, as in 300:320 or 300:, not {text!r}")
    return first, last
