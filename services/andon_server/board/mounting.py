"""Mounting: the board on the HTTP port of a service, from its start to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from wsgiref.types import StartResponse, WSGIEnvironment

from andon.host.metrics import MetricsEndpoint
from andon_coordinator.app import Coordinator
from andon_server.board.app import BoardApp, on_loop
from andon_server.board.feed import BoardFeed
from andon_server.board.gate import BoardGate
from andon_server.board.history import RunHistory

__all__ = ["board_on", "starting"]

_STARTING = b'{"error": "the line is starting: ask again in a moment"}'


def starting(_environment: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
    """Answers in the place of the board until there is one: a page that asks again finds it."""
    status = HTTPStatus.SERVICE_UNAVAILABLE
    headers = [
        ("Content-Type", "application/json; charset=utf-8"),
        ("Content-Length", str(len(_STARTING))),
        ("Cache-Control", "no-store"),
        ("Retry-After", "1"),
    ]
    start_response(f"{status.value} {status.phrase}", headers)
    return [_STARTING]


@asynccontextmanager
async def board_on(
    endpoint: MetricsEndpoint,
    coordinator: Coordinator,
    feed: BoardFeed,
    gate: BoardGate,
    history: RunHistory,
    outputs: Path | None,
) -> AsyncIterator[None]:
    """Serves a line's board beside its metrics while entered; the feed observes the line, and
    `outputs` is as for `BoardApp`.
    """
    loop = asyncio.get_running_loop()
    board = BoardApp(feed, history, gate, coordinator, on_loop(loop), outputs)
    endpoint.mount(board)
    try:
        yield
    finally:
        # Viewers see how it ended: the last snapshot may be half a second old.
        feed.show(coordinator.status())
        await asyncio.to_thread(board.close)
