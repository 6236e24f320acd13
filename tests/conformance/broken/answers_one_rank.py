"""An average goes to the first rank alone."""

from __future__ import annotations

from andon_reducer.core.exchange import Chunk, Exchange
from conformance.breaking import serve_with

recipients = Exchange.recipients


def first(exchange: Exchange, chunk: Chunk) -> tuple[int, ...]:
    return recipients(exchange, chunk)[:1]


if __name__ == "__main__":
    serve_with((Exchange, "recipients", first))
