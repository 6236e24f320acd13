"""Mounting: the board on the HTTP port of a service, from its start to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from andon.host.metrics import MetricsEndpoint
from andon_coordinator.app import Coordinator
from andon_server.board.app import BoardApp, on_loop
from andon_server.board.feed import BoardFeed
from andon_server.board.gate import BoardGate
from andon_server.board.history import RunHistory

__all__ = ["board_on"]


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
