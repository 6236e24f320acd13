"""Takes any proof on a lane's port for a right one, if it names an offer."""

from __future__ import annotations

from andon.tcp import listening
from conformance.breaking import serve_with

if __name__ == "__main__":
    serve_with((listening, "is_claim", lambda *_: True))
