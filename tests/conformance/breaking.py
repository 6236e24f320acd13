"""Breaking: `andon serve` with some of its functions replaced."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from andon_cli.app import main

__all__ = ["serve_with"]


def serve_with(*changes: tuple[Any, str, Any]) -> NoReturn:
    """Replaces each (module or class, name), then serves with this process's arguments."""
    for place, name, value in changes:
        assert hasattr(place, name), f"{place} has no {name}: this server no longer breaks anything"
        setattr(place, name, value)
    sys.exit(main())
