"""Does not compare the total weights that the workers report."""

from __future__ import annotations

from andon_coordinator.core import agreement
from conformance.breaking import serve_with

if __name__ == "__main__":
    serve_with((agreement, "_weights_differ", lambda round_: None))
