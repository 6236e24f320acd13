"""A Join of another model is refused by another status than the text has."""

from __future__ import annotations

import grpc

from andon_coordinator.core.effects import RefusalReason
from andon_coordinator.transport.errors import JOIN_REFUSALS
from conformance.breaking import serve_with

if __name__ == "__main__":
    JOIN_REFUSALS[RefusalReason.LAYOUT_DIFFERS] = grpc.StatusCode.INVALID_ARGUMENT
    serve_with()
