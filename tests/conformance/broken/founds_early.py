"""The first worker founds alone."""

from __future__ import annotations

from andon_coordinator.core.board import Board
from conformance.breaking import serve_with

if __name__ == "__main__":
    serve_with((Board, "expected", property(lambda board: 1)))
