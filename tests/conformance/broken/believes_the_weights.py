"""Does not compare the weights' digests of one head."""

from __future__ import annotations

from andon_coordinator.core import agreement
from conformance.breaking import serve_with

if __name__ == "__main__":
    serve_with((agreement, "divergence", lambda *_: None))
