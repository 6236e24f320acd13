"""Stream: server-sent events for one viewer, made by the thread of its connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from andon.host.strict_json import strict_json
from andon_server.board.feed import BoardFeed, FeedItem, LineNow

__all__ = ["EventStream", "Viewers"]

_LOOK_EVERY_S = 0.2
"""A viewer gets at most 5 messages a second, however fast the steps are."""
_SIGN_OF_LIFE_S = 10.0
"""A comment is sent after so long without a message, so that a dead connection is noticed."""
_AGAIN_MS = 2000
"""How long browsers wait before they connect again."""


class Viewers:
    """Counts the open streams: there are never more than `most`."""

    def __init__(self, most: int) -> None:
        """Has room for `most`."""
        self.most = most
        self._count = 0
        self._changed = threading.Condition()

    def enter(self) -> bool:
        """Takes a place; False if there is none."""
        with self._changed:
            if self._count >= self.most:
                return False
            self._count += 1
            return True

    def leave(self) -> None:
        """Gives a place back."""
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait_until_gone(self, timeout_s: float) -> bool:
        """Waits until no stream is open; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count == 0, timeout_s)


class EventStream:
    """The body of one answer: the line now, and then what happens, until it is closed.

    It has a place among the viewers, and gives it back when it is closed.
    """

    def __init__(
        self,
        feed: BoardFeed,
        viewers: Viewers,
        closing: threading.Event,
        describe: Callable[[LineNow], str],
    ) -> None:
        """Has a place among `viewers` already; `describe` is a snapshot's JSON for this viewer."""
        self._feed = feed
        self._viewers = viewers
        self._closing = closing
        self._describe = describe
        self._open = True

    def __iter__(self) -> Iterator[bytes]:
        """Messages of the stream, as they become due."""
        # The number before the snapshot: what happens between the two is sent twice rather than
        # never, and pages drop what they have.
        seen, shown, sent_at = self._feed.newest, 0, time.monotonic()
        yield f"retry: {_AGAIN_MS}\n\n".encode()
        over = False
        while True:
            now, items = self._feed.now, self._feed.since(seen)
            if items is None:
                return  # Too slow: some of it is gone. The page connects again and asks for all.
            text = ""
            if now is not None and now.number != shown:
                shown = now.number
                text = message("state", self._describe(now))
            if items:
                seen = items[-1].number
                text += _messages(items)
            if not text and time.monotonic() - sent_at >= _SIGN_OF_LIFE_S:
                text = ": nothing new\n\n"
            if text:
                sent_at = time.monotonic()
                yield text.encode()
            if over:
                return
            # One more look after the end: the last snapshot says that the line is complete.
            over = self._closing.wait(_LOOK_EVERY_S)

    def close(self) -> None:
        """Gives the viewer's place back; the server calls it when the answer is over."""
        if self._open:
            self._open = False
            self._viewers.leave()


def message(event: str, data: str) -> str:
    """A message of a stream; `data` is one line."""
    return f"event: {event}\ndata: {data}\n\n"


def _messages(items: list[FeedItem]) -> str:
    points: list[Any] = [item.value for item in items if item.kind == "point"]
    scalars: list[Any] = [item.value for item in items if item.kind == "scalar"]
    text = "".join(
        message("event", strict_json(item.value)) for item in items if item.kind == "event"
    )
    if points or scalars:
        text += message("points", strict_json({"steps": points, "scalars": scalars}))
    return text
