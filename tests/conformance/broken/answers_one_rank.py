"""Sends an average only to the first rank."""

from __future__ import annotations

from andon_reducer.core.exchange import IncompleteChunk
from conformance.breaking import serve_with

recipients = IncompleteChunk.recipients


def first(chunk: IncompleteChunk) -> tuple[int, ...]:
    return recipients(chunk)[:1]


if __name__ == "__main__":
    serve_with((IncompleteChunk, "recipients", first))
