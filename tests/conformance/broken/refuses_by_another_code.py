"""Refuses a Join with another model with the wrong status code."""

from __future__ import annotations

from andon.protocol.reasons import Reason
from conformance.breaking import serve_with

if __name__ == "__main__":
    Reason.LAYOUT_DIFFERS.code = "INVALID_ARGUMENT"
    serve_with()
