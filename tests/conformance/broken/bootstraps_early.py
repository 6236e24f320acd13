"""The first worker bootstraps the line before the others have joined."""

from __future__ import annotations

from andon_coordinator.core.state import CoreState
from conformance.breaking import serve_with

if __name__ == "__main__":
    serve_with((CoreState, "expected", property(lambda core: 1)))
