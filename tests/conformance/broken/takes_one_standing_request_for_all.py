"""One member that asks for the next step with its report is enough to open it."""

from __future__ import annotations

from andon_coordinator.core import standing
from conformance.breaking import serve_with

if __name__ == "__main__":
    serve_with((standing, "suffices", lambda core: bool(core.standing)))
