"""Treats a reported key with a greater term as its own."""

from __future__ import annotations

from andon_coordinator.core.chain import Keys
from conformance.breaking import serve_with

if __name__ == "__main__":
    serve_with((Keys, "covers", lambda keys, key: True))
