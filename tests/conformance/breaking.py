"""Breaking: `andon serve` with something of its inside replaced."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from andon_cli.app import main

__all__ = ["serve_with"]


def serve_with(*changes: tuple[Any, str, Any]) -> NoReturn:
    """Serves by this process's arguments, once each (module or class, name) is the new value."""
    for place, name, value in changes:
        assert hasattr(place, name), f"{place} has no {name}: this server breaks nothing any more"
        setattr(place, name, value)
    sys.exit(main())
