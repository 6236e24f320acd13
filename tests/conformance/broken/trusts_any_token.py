"""Does not check session tokens."""

from __future__ import annotations

from andon.protocol import tokens
from conformance.breaking import serve_with

if __name__ == "__main__":
    serve_with((tokens, "session_serial", lambda *_: (0, 0)))
